/* Fabricated vocabularies that work: every text can be encoded and comes back.
 *
 * Byte-level BPE: the 256 bytes under their printable names, merges (letters after a space, digit
 * pairs, some common runs and characters beyond ASCII, then letter pairs, triples and quads), the
 * special tokens last. SPM: special tokens, 256 byte tokens, runs and letter groups, single
 * characters. The special tokens have the real models' names. */
#include "mkmodel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/hash.h"
#include "base/utf8.h"

enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER = 4, UNUSED = 5, BYTE = 6 }; /* token types */

/* ---- the list of tokens ---------------------------------------------------------------------- */

typedef struct vocab {
    int size, n; /* wanted in all, there now */
    int end;     /* where letter groups must stop, to leave room for what comes last */
    bg_str *tokens;
    int32_t *types;
    float *scores;
    bg_str *merges;
    int n_merges;
    uint32_t *slots; /* token + 1 by hash */
    uint32_t mask;
} vocab;

static bool vocab_init(vocab *v, int size)
{
    *v = (vocab){.size = size, .mask = 1023};
    while (v->mask < 2 * (uint32_t)size)
        v->mask = 2 * v->mask + 1;
    v->tokens = calloc((size_t)size, sizeof *v->tokens);
    v->types = calloc((size_t)size, sizeof *v->types);
    v->scores = calloc((size_t)size, sizeof *v->scores);
    v->merges = calloc((size_t)size, sizeof *v->merges);
    v->slots = calloc((size_t)v->mask + 1, sizeof *v->slots);
    return v->tokens && v->types && v->scores && v->merges && v->slots;
}

static void vocab_release(vocab *v)
{
    for (int i = 0; v->tokens && i < v->n; i++)
        free((void *)v->tokens[i].p);
    for (int i = 0; i < v->n_merges; i++)
        free((void *)v->merges[i].p);
    free(v->tokens);
    free(v->types);
    free(v->scores);
    free(v->merges);
    free(v->slots);
}

static bg_str text(const char *s)
{
    return (bg_str){s, strlen(s)};
}

/* Copies a then sep then b; .p is NULL when out of memory. */
static bg_str join(bg_str a, const char *sep, bg_str b)
{
    const size_t n = a.n + strlen(sep) + b.n;
    char *p = malloc(n + 1);
    if (!p) return (bg_str){0};
    memcpy(p, a.p, a.n);
    memcpy(p + a.n, sep, strlen(sep));
    memcpy(p + n - b.n, b.p, b.n);
    p[n] = 0;
    return (bg_str){p, n};
}

/* The slot of s: holding it, or empty. */
static uint32_t slot_of(const vocab *v, bg_str s)
{
    uint32_t at = (uint32_t)bg_hash64(s.p, s.n, 0) & v->mask;
    for (; v->slots[at]; at = (at + 1) & v->mask) {
        const bg_str *t = &v->tokens[v->slots[at] - 1];
        if (t->n == s.n && memcmp(t->p, s.p, s.n) == 0) break;
    }
    return at;
}

static int find(const vocab *v, const char *s)
{
    return (int)v->slots[slot_of(v, text(s))] - 1;
}

/* Adds a then b as one token unless it is there. False: no room below `end`. */
static bool add(vocab *v, bg_str a, bg_str b, int32_t type, int end)
{
    if (v->n >= end) return false;
    bg_str s = join(a, "", b);
    if (!s.p) return false;
    const uint32_t at = slot_of(v, s);
    if (v->slots[at]) {
        free((void *)s.p);
        return true;
    }
    v->tokens[v->n] = s;
    v->types[v->n] = type;
    v->slots[at] = (uint32_t)++v->n;
    return true;
}

static bool add_text(vocab *v, const char *s, int32_t type)
{
    return add(v, text(s), text(""), type, v->size);
}

/* ---- what the tokens are made of ---------------------------------------------------------------
 */

static const char letters[] = "etaoinshrdlcumwfgypbvkjxqz";
static const char characters[] = "éüñçßøåабвеиноprст日本語中文的一是한국어עבגدرسहिन्ประเ€“”…😀👍";
static const char *const runs[] = {"\n\n", "\n\n\n", "\r\n",  "  ",  "    ", "        ",
                                   "\t\t", "()",     "//",    "::",  "==",   "...",
                                   "--",   "():",    "http",  "ing", " the", " de",
                                   "The",  "HTTP",   "don't", "'s",  "'t",   "'re"};

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

/* Adds the token a b; for BPE also the merge. False: full. */
typedef bool add_pair(vocab *v, bg_str a, bg_str b);

/* Pair k of letters: common letters first. */
static void letter_pair(int k, char out[2])
{
    for (int sum = 0; sum <= 50; sum++) {
        for (int i = sum > 25 ? sum - 25 : 0; i <= sum && i <= 25; i++) {
            if (k-- > 0) continue;
            out[0] = letters[i];
            out[1] = letters[sum - i];
            return;
        }
    }
}

/* Letter groups, short ones first: pairs, triples, quads, also after a space, until full. */
static void add_groups(vocab *v, const char *space, add_pair *put)
{
    enum { PAIRS = 26 * 26 };
    static const bg_str none = {"", 0};
    char pairs[PAIRS][2], spaced[16];
    for (int i = 0; i < PAIRS; i++)
        letter_pair(i, pairs[i]);
    for (int i = 0; i < PAIRS; i++)
        if (!put(v, (bg_str){pairs[i], 1}, (bg_str){pairs[i] + 1, 1})) return;
    for (int i = 0; i < PAIRS; i++)
        if (!put(v, text(space), (bg_str){pairs[i], 2})) return;
    for (int i = 0; i < PAIRS; i++) {
        snprintf(spaced, sizeof spaced, "%s%.2s", space, pairs[i]);
        for (int k = 0; k < 26; k++) {
            bg_str letter = {letters + k, 1};
            if (!put(v, (bg_str){pairs[i], 2}, letter)) return;
            if (!put(v, text(spaced), letter)) return;
        }
    }
    for (int i = 0; i < PAIRS; i++)
        for (int k = 0; k < PAIRS; k++)
            if (!put(v, (bg_str){pairs[i], 2}, (bg_str){pairs[k], 2})) return;
    /* More than half a million tokens: numbers. */
    for (int i = 0; v->n < v->end; i++) {
        snprintf(spaced, sizeof spaced, "%07d", i % 10000000);
        if (!put(v, text(spaced), none)) return;
    }
}

/* ---- tokenizers ------------------------------------------------------------------------------ */

enum { MAX_SPECIAL = 16 };

typedef struct tokenizer {
    const char *name, *pre;           /* pre NULL: SPM */
    const char *special[MAX_SPECIAL]; /* BPE: the last tokens; SPM: the first */
    const char *users[4], *last[6];   /* SPM: user-defined tokens, and control tokens at the end */
    int n_reserved, n_unused;         /* BPE: <|reserved_special_token_N|>, [PADN] in large ones */
    const char *bos, *eos, *eot, *unk, *pad;
    bool add_bos, space_prefix;
    const char *chat;
} tokenizer;

static const char chatml[] =
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
static const char gemma_chat[] =
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% set role = 'model' "
    "%}"
    "{% else %}{% set role = m['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + "
    "m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>model\\n' }}{% endif %}";

static const tokenizer tokenizers[] = {
    {.name = "llama3",
     .pre = "llama-bpe",
     .n_reserved = 251,
     .add_bos = true,
     .chat = chatml,
     .special = {"<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>",
                 "<|eot_id|>"},
     .bos = "<|begin_of_text|>",
     .eos = "<|im_end|>",
     .eot = "<|eot_id|>"},
    {.name = "gpt2",
     .pre = "gpt-2",
     .chat = chatml,
     .special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
     .bos = "<|endoftext|>",
     .eos = "<|im_end|>"},
    {.name = "smollm",
     .pre = "smollm",
     .chat = chatml,
     .special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
     .bos = "<|im_start|>",
     .eos = "<|im_end|>"},
    {.name = "qwen2",
     .pre = "qwen2",
     .n_unused = 288,
     .chat = chatml,
     .special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"},
     .bos = "<|endoftext|>",
     .eos = "<|im_end|>",
     .pad = "<|endoftext|>"},
    {.name = "glm4",
     .pre = "glm4",
     .n_unused = 32,
     .chat = chatml,
     .special = {"<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|system|>", "<|user|>",
                 "<|assistant|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"},
     .bos = "[gMASK]",
     .eos = "<|endoftext|>",
     .eot = "<|user|>",
     .pad = "<|endoftext|>"},
    {.name = "gptoss",
     .pre = "gpt-4o",
     .chat = chatml,
     .special = {"<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
                 "<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|im_start|>", "<|im_end|>"},
     .bos = "<|startoftext|>",
     .eos = "<|return|>",
     .pad = "<|endoftext|>"},
    {.name = "dsv3",
     .pre = "deepseek-v3",
     .add_bos = true,
     .chat = chatml,
     .special = {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>",
                 "<｜Assistant｜>", "<|im_start|>", "<|im_end|>"},
     .bos = "<｜begin▁of▁sentence｜>",
     .eos = "<｜end▁of▁sentence｜>"},
    {.name = "gemma",
     .special = {"<pad>", "<eos>", "<bos>", "<unk>"},
     .chat = gemma_chat,
     .users = {"<b>", "\n\n\n\n", "[multimodal]"},
     .last = {"<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>"},
     .bos = "<bos>",
     .eos = "<eos>",
     .eot = "<end_of_turn>",
     .unk = "<unk>",
     .pad = "<pad>",
     .add_bos = true},
    {.name = "spm",
     .special = {"<unk>", "<s>", "</s>"},
     .users = {"<tool>"},
     .chat = chatml,
     .last = {"[INST]", "[/INST]", "<|endoftext|>", "<|im_start|>", "<|im_end|>"},
     .bos = "<s>",
     .eos = "</s>",
     .unk = "<unk>",
     .add_bos = true,
     .space_prefix = true},
};

const char *tok_name(int i)
{
    return i < COUNT(tokenizers) ? tokenizers[i].name : NULL;
}

static int count(const char *const *list, int max)
{
    int n = 0;
    while (n < max && list[n])
        n++;
    return n;
}

/* ---- byte-level BPE -------------------------------------------------------------------------- */

/* The printable character that stands for byte c in token texts. */
static bg_str byte_char(int c, char out[4])
{
    int shift = 0;
    bool printable = false;
    for (int i = 0; i <= c; i++) {
        printable = (i > 32 && i < 127) || (i > 160 && i != 173);
        if (!printable && i < c) shift++;
    }
    return (bg_str){out, bg_utf8_put(out, (uint32_t)(printable ? c : 256 + shift))};
}

static bool add_merge(vocab *v, bg_str a, bg_str b)
{
    const int before = v->n;
    if (!add(v, a, b, NORMAL, v->end)) return false;
    if (v->n == before || b.n == 0) return true;
    v->merges[v->n_merges] = join(a, " ", b);
    if (!v->merges[v->n_merges].p) return false;
    v->n_merges++;
    return true;
}

/* A word, built from the left one byte at a time. */
static void add_word(vocab *v, const char *word, size_t n)
{
    char buf[64 * 2], one[4];
    size_t len = 0;
    for (size_t i = 0; i < n && len + 4 < sizeof buf; i++) {
        bg_str c = byte_char((unsigned char)word[i], one);
        if (len) add_merge(v, (bg_str){buf, len}, c);
        memcpy(buf + len, c.p, c.n);
        len += c.n;
    }
}

static void bpe_tokens(vocab *v, const tokenizer *t)
{
    static const char *const spaced[] = {" и", " а", " н", " 日"};
    char c[4], d[4], sp[4];
    for (int i = 0; i < 256; i++)
        add(v, byte_char(i, c), text(""), NORMAL, v->end);
    const bg_str space = byte_char(' ', sp);
    for (int i = 0; i < 26; i++)
        add_merge(v, space, (bg_str){letters + i, 1});
    for (int i = 0; i < 100; i++)
        add_merge(v, byte_char('0' + i / 10, c), byte_char('0' + i % 10, d));
    for (size_t i = 0, n; i < sizeof characters - 1; i += n) {
        uint32_t cp;
        n = bg_utf8_next(characters + i, sizeof characters - 1 - i, &cp);
        add_word(v, characters + i, n);
    }
    for (int i = 0; i < COUNT(spaced); i++)
        add_word(v, spaced[i], strlen(spaced[i]));
    for (int i = 0; i < COUNT(runs); i++)
        add_word(v, runs[i], strlen(runs[i]));
    char space_text[8];
    snprintf(space_text, sizeof space_text, "%.*s", (int)space.n, space.p);
    add_groups(v, space_text, add_merge);
    for (int i = 0; i < MAX_SPECIAL && t->special[i]; i++)
        add_text(v, t->special[i], CONTROL);
    for (int i = 0; i < t->n_reserved; i++) {
        char name[48];
        snprintf(name, sizeof name, "<|reserved_special_token_%d|>", i);
        add_text(v, name, CONTROL);
    }
    for (int i = 0; v->n < v->size; i++) {
        char name[24];
        snprintf(name, sizeof name, "[PAD%d]", i);
        if (!add_text(v, name, UNUSED)) break;
    }
}

/* ---- SPM ------------------------------------------------------------------------------------- */

#define SPM_SPACE "\xE2\x96\x81" /* U+2581 stands for a space */

static bool add_piece(vocab *v, bg_str a, bg_str b)
{
    return add(v, a, b, NORMAL, v->end);
}

static void add_with_spaces(vocab *v, const char *s)
{
    bg_buf b = {0};
    for (; *s; s++)
        *s == ' ' ? bg_buf_str(&b, SPM_SPACE) : bg_buf_char(&b, *s);
    if (b.data) add_piece(v, text(b.data), text(""));
    bg_buf_release(&b);
}

/* The single characters: printable ASCII, those beyond, and the space. Counts only if v is NULL. */
static int spm_characters(vocab *v)
{
    int n = 0;
    for (int c = 33; c < 127; c++, n++) {
        char one[2] = {(char)c, 0};
        if (v) add_text(v, one, NORMAL);
    }
    for (size_t i = 0, len; i < sizeof characters - 1; i += len) {
        uint32_t cp;
        char one[8];
        len = bg_utf8_next(characters + i, sizeof characters - 1 - i, &cp);
        if (cp < 128 || memmem(characters, i, characters + i, len)) continue; /* there already */
        snprintf(one, sizeof one, "%.*s", (int)len, characters + i);
        if (v) add_text(v, one, NORMAL);
        n++;
    }
    if (v) add_text(v, SPM_SPACE, NORMAL);
    return n + 1;
}

static void spm_tokens(vocab *v, const tokenizer *t)
{
    char name[16];
    for (int i = 0; i < MAX_SPECIAL && t->special[i]; i++)
        add_text(v, t->special[i],
                 t->unk && strcmp(t->special[i], t->unk) == 0 ? UNKNOWN : CONTROL);
    for (int i = 0; i < COUNT(t->users) && t->users[i]; i++)
        add_text(v, t->users[i], USER);
    for (int i = 0; i < 256; i++) {
        snprintf(name, sizeof name, "<0x%02X>", i);
        add_text(v, name, BYTE);
    }
    for (int i = 0; i < COUNT(runs); i++)
        add_with_spaces(v, runs[i]);
    for (int i = 0; i < 26; i++) {
        snprintf(name, sizeof name, " %c", letters[i]);
        add_with_spaces(v, name);
    }
    add_groups(v, SPM_SPACE, add_piece);
    spm_characters(v);
    for (int i = 0; i < COUNT(t->last) && t->last[i]; i++)
        add_text(v, t->last[i], CONTROL);
    /* The lower the id, the better: a piece and its parts are then all used somewhere. */
    for (int i = 0; i < v->n; i++)
        v->scores[i] = v->types[i] == NORMAL ? -(float)i : 0;
}

/* ---- into the file --------------------------------------------------------------------------- */

static void put_text(bg_gguf_writer *w, const char *key, const char *s)
{
    bg_gguf_put_str(w, key, s, strlen(s));
}

static void put_id(bg_gguf_writer *w, const vocab *v, const char *what, const char *token)
{
    char key[64];
    if (!token) return;
    snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", what);
    bg_gguf_put_u32(w, key, (uint32_t)find(v, token));
}

static void put_tokens(bg_gguf_writer *w, const tokenizer *t, const vocab *v)
{
    const uint64_t n = (uint64_t)v->n;
    put_text(w, "tokenizer.ggml.model", t->pre ? "gpt2" : "llama");
    put_text(w, "tokenizer.ggml.pre", t->pre ? t->pre : "default");
    bg_gguf_put_array(w, "tokenizer.ggml.tokens", BG_KV_STR, v->tokens, n);
    bg_gguf_put_array(w, "tokenizer.ggml.token_type", BG_KV_I32, v->types, n);
    if (t->pre) {
        bg_gguf_put_array(w, "tokenizer.ggml.merges", BG_KV_STR, v->merges, (uint64_t)v->n_merges);
    } else {
        bg_gguf_put_array(w, "tokenizer.ggml.scores", BG_KV_F32, v->scores, n);
        bg_gguf_put_bool(w, "tokenizer.ggml.add_space_prefix", t->space_prefix);
    }
    put_id(w, v, "bos", t->bos);
    put_id(w, v, "eos", t->eos);
    put_id(w, v, "eot", t->eot);
    put_id(w, v, "unknown", t->unk);
    put_id(w, v, "padding", t->pad);
    bg_gguf_put_bool(w, "tokenizer.ggml.add_bos_token", t->add_bos);
    put_text(w, "tokenizer.chat_template", t->chat);
}

const char *put_vocab(bg_gguf_writer *w, const char *tok, int size)
{
    const tokenizer *t = NULL;
    for (int i = 0; i < COUNT(tokenizers); i++)
        if (strcmp(tokenizers[i].name, tok) == 0) t = &tokenizers[i];
    if (!t) return "no such tokenizer";
    vocab v;
    const char *wrong = NULL;
    const int n_special = count(t->special, MAX_SPECIAL) + t->n_reserved;
    const int n_last = t->pre ? n_special + (size < 2048 ? 0 : t->n_unused)
                              : count(t->last, COUNT(t->last)) + spm_characters(NULL);
    if (!vocab_init(&v, size)) {
        wrong = "out of memory";
        goto out;
    }
    v.end = size - n_last;
    if (v.end < 320) {
        wrong = "the vocabulary is too small for this tokenizer's bytes and special tokens";
        goto out;
    }
    if (t->pre)
        bpe_tokens(&v, t);
    else
        spm_tokens(&v, t);
    if (v.n != size)
        wrong = "out of memory";
    else
        put_tokens(w, t, &v);
out:
    vocab_release(&v);
    return wrong;
}
