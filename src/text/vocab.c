#include "text/vocab.h"

#include <stdlib.h>
#include <string.h>

#include "text/tok.h"

static bg_status no_memory(bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "vocabulary: out of memory");
}

static bg_status load_texts(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    const bg_kv *kv = bg_gguf_find(g, "tokenizer.ggml.tokens");
    if (!kv) return bg_fail(err, BG_FORMAT, "tokenizer.ggml.tokens: missing");
    if (kv->n == 0 || !kv->strs || kv->n >= INT32_MAX / 2)
        return bg_fail(
            err, BG_FORMAT,
            "tokenizer.ggml.tokens: %llu elements; an array of 1 to %d strings is needed",
            (unsigned long long)kv->n, INT32_MAX / 2);
    v->n = (int32_t)kv->n;
    v->text.at = malloc(((size_t)v->n + 1) * sizeof *v->text.at);
    v->bytes.at = malloc(((size_t)v->n + 1) * sizeof *v->bytes.at);
    if (!v->text.at || !v->bytes.at) return no_memory(err);
    bg_buf b = {0};
    for (int32_t i = 0; i < v->n && b.len < UINT32_MAX; i++) {
        v->text.at[i] = (uint32_t)b.len;
        if (kv->strs[i].n)
            bg_buf_add(&b, kv->strs[i].p, kv->strs[i].n);
        else
            bg_buf_printf(&b, "[EMPTY_%d]", i);
    }
    const bool fits = b.len < UINT32_MAX;
    v->text.at[v->n] = (uint32_t)b.len;
    const bool failed = b.failed;
    v->text.p = bg_buf_take(&b);
    if (failed || !v->text.p) return no_memory(err);
    if (!fits) return bg_fail(err, BG_FORMAT, "tokenizer.ggml.tokens: over 4 GiB of text");
    if (!bg_map_init(&v->by_text, (size_t)v->n)) return no_memory(err);
    for (int32_t i = 0; i < v->n; i++) {
        const int32_t other = bg_map_add(&v->by_text, &v->text, i);
        if (other >= 0)
            return bg_fail(err, BG_FORMAT, "tokenizer.ggml.tokens[%d] is the same text as [%d]", i,
                           other);
    }
    return BG_OK;
}

static bg_status load_kinds(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    const bg_kv *kv = bg_gguf_find(g, "tokenizer.ggml.token_type");
    v->kind = malloc((size_t)v->n);
    v->flags = calloc((size_t)v->n, 1);
    if (!v->kind || !v->flags) return no_memory(err);
    memset(v->kind, BG_TOKEN_NORMAL, (size_t)v->n);
    if (!kv) return BG_OK;
    if (kv->type != BG_KV_ARR || kv->n < (uint64_t)v->n)
        return bg_fail(err, BG_FORMAT,
                       "tokenizer.ggml.token_type: not an array of at least %d integers", v->n);
    for (int32_t i = 0; i < v->n; i++) {
        int64_t t;
        if (!bg_kv_int(kv, (uint64_t)i, &t))
            return bg_fail(err, BG_FORMAT, "tokenizer.ggml.token_type[%d]: not an integer", i);
        /* Types that nobody has defined stand for no text, as unused ones do. */
        v->kind[i] = t >= BG_TOKEN_NORMAL && t <= BG_TOKEN_BYTE ? (uint8_t)t : BG_TOKEN_UNUSED;
        if (t == BG_TOKEN_CONTROL || t == BG_TOKEN_UNKNOWN) v->flags[i] = BG_TOKEN_TRUSTED_ONLY;
    }
    return BG_OK;
}

static bool equals(bg_str s, const char *text)
{
    return s.n == strlen(text) && memcmp(s.p, text, s.n) == 0;
}

static bg_status load_model(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    bg_str model, pre;
    bg_status st = bg_gguf_get_str(g, "tokenizer.ggml.model", &model, err);
    if (!st) st = bg_gguf_get_str(g, "tokenizer.ggml.pre", &pre, err);
    if (st) return st;
    if (model.n == 0) return bg_fail(err, BG_FORMAT, "tokenizer.ggml.model: missing");
    v->spm = equals(model, "llama");
    if (!v->spm && !equals(model, "gpt2"))
        return bg_fail(err, BG_FORMAT,
                       "tokenizer.ggml.model \"%.*s\": not supported; llama and gpt2 are",
                       (int)(model.n < 60 ? model.n : 60), model.p);
    if (v->spm) return BG_OK;
    v->pre = pre.n ? bg_pre_find(pre.p, pre.n) : bg_pre_find("default", 7);
    if (!v->pre)
        return bg_fail(err, BG_FORMAT, "tokenizer.ggml.pre \"%.*s\": unknown pre-tokeniser",
                       (int)(pre.n < 60 ? pre.n : 60), pre.p);
    return BG_OK;
}

/* Which white space beside a token is dropped is in no key; these names say it. */
static bg_status load_strip(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    bg_str name;
    bg_status st = bg_gguf_get_str(g, "general.name", &name, err);
    if (st) return st;
    char lower[256];
    size_t n = name.n < sizeof lower - 1 ? name.n : sizeof lower - 1;
    for (size_t i = 0; i < n; i++)
        lower[i] = name.p[i] >= 'A' && name.p[i] <= 'Z' ? (char)(name.p[i] + 32) : name.p[i];
    lower[n] = '\0';
    if (strstr(lower, "phi-3") || strstr(lower, "phi3")) {
        for (int32_t i = 0; i < v->n; i++) {
            const bg_str t = bg_arena_get(&v->text, i);
            if ((v->kind[i] == BG_TOKEN_USER || v->flags[i] & BG_TOKEN_TRUSTED_ONLY) &&
                !equals(t, "<unk>") && !equals(t, "<s>") && !equals(t, "<|endoftext|>"))
                v->flags[i] |= BG_TOKEN_RSTRIP;
        }
    }
    const char *mask = NULL;
    if (v->pre &&
        (strcmp(v->pre->name, "jina-v2-de") == 0 || strcmp(v->pre->name, "jina-v2-es") == 0 ||
         strcmp(v->pre->name, "jina-v2-code") == 0))
        mask = "<mask>";
    if (strstr(lower, "modern-bert")) mask = "[MASK]";
    const int32_t id = mask ? bg_vocab_find(v, mask, strlen(mask)) : -1;
    if (id >= 0) v->flags[id] |= BG_TOKEN_LSTRIP;
    return BG_OK;
}

bg_status bg_vocab_new(bg_vocab **vocab, const bg_gguf *g, bg_error *err)
{
    *vocab = NULL;
    bg_vocab *v = calloc(1, sizeof *v);
    if (!v) return no_memory(err);
    bg_status st = load_model(v, g, err);
    if (!st) st = load_texts(v, g, err);
    if (!st) st = load_kinds(v, g, err);
    if (!st) st = bg_vocab_set_special(v, g, err);
    if (!st) st = load_strip(v, g, err);
    if (!st) st = v->spm ? bg_spm_load(v, g, err) : bg_bpe_load(v, g, err);
    if (!st) st = bg_special_new(&v->special, v, err);
    if (st) {
        bg_vocab_free(v);
        return st;
    }
    *vocab = v;
    return BG_OK;
}

void bg_vocab_free(bg_vocab *v)
{
    if (!v) return;
    free(v->text.p);
    free(v->text.at);
    free(v->bytes.p);
    free(v->bytes.at);
    free(v->kind);
    free(v->flags);
    bg_map_release(&v->by_text);
    free(v->eog);
    bg_special_free(v->special);
    free(v->score);
    free(v->glue);
    bg_pretok_free(v->pretok);
    bg_pairs_release(&v->merges);
    bg_map_release(&v->by_bytes);
    free(v);
}

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

void bg_vocab_plain_bytes(const bg_vocab *v, int32_t id, bg_buf *out)
{
    const bg_str t = bg_arena_get(&v->text, id);
    switch (v->kind[id]) {
    case BG_TOKEN_BYTE:
        if (t.n == 6 && memcmp(t.p, "<0x", 3) == 0 && hex(t.p[3]) >= 0 && hex(t.p[4]) >= 0 &&
            t.p[5] == '>')
            bg_buf_char(out, (char)(16 * hex(t.p[3]) + hex(t.p[4])));
        else
            bg_buf_add(out, t.p, t.n);
        return;
    case BG_TOKEN_NORMAL: /* U+2581 is a space */
        for (size_t i = 0; i < t.n; i++) {
            if (t.n - i >= 3 && memcmp(t.p + i, "\xe2\x96\x81", 3) == 0) {
                bg_buf_char(out, ' ');
                i += 2;
            } else {
                bg_buf_char(out, t.p[i]);
            }
        }
        return;
    case BG_TOKEN_UNUSED:
        return;
    default:
        bg_buf_add(out, t.p, t.n);
    }
}

bg_status bg_vocab_take_bytes(bg_vocab *v, bg_buf *bytes, bg_error *err)
{
    bg_buf_char(bytes, '\0'); /* so that there is memory to point into */
    if (bytes->failed) return no_memory(err);
    if (bytes->len > UINT32_MAX)
        return bg_fail(err, BG_FORMAT, "tokenizer.ggml.tokens: over 4 GiB of text");
    v->bytes.at[v->n] = (uint32_t)bytes->len - 1;
    v->bytes.p = bg_buf_take(bytes);
    return BG_OK;
}

int32_t bg_vocab_size(const bg_vocab *v)
{
    return v->n;
}

int32_t bg_vocab_bos(const bg_vocab *v)
{
    return v->bos;
}

int32_t bg_vocab_eos(const bg_vocab *v)
{
    return v->eos;
}

int32_t bg_vocab_find(const bg_vocab *v, const char *text, size_t n)
{
    return bg_map_find(&v->by_text, &v->text, text, n);
}

const int32_t *bg_vocab_eog(const bg_vocab *v, size_t *n)
{
    *n = v->n_eog;
    return v->eog;
}

bool bg_vocab_add_bos(const bg_vocab *v)
{
    return v->add_bos;
}

bool bg_vocab_add_eos(const bg_vocab *v)
{
    return v->add_eos;
}

bg_token_kind bg_vocab_kind(const bg_vocab *v, int32_t id)
{
    return id < 0 || id >= v->n ? BG_TOKEN_UNUSED : (bg_token_kind)v->kind[id];
}

bg_str bg_vocab_text(const bg_vocab *v, int32_t id)
{
    return id < 0 || id >= v->n ? (bg_str){"", 0} : bg_arena_get(&v->text, id);
}

bg_str bg_token_bytes(const bg_vocab *v, int32_t id, bool special)
{
    if (id < 0 || id >= v->n) return (bg_str){"", 0};
    const bool hidden = v->kind[id] == BG_TOKEN_CONTROL || v->kind[id] == BG_TOKEN_UNKNOWN;
    return hidden && !special ? (bg_str){"", 0} : bg_arena_get(&v->bytes, id);
}
