/* Byte-level BPE ("gpt2"). Inside, a symbol is a token id: GGUF spells tokens and merges in an
 * alphabet of 256 printable characters, one for each byte, but once loaded only ids are compared.
 */
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/tok.h"

#define BLOCK "\xe2\x96\x81" /* U+2581, the visible space */

static bool is_text_token(const bg_vocab *v, int32_t id)
{
    return id >= 0 && !(v->flags[id] & BG_TOKEN_TRUSTED_ONLY);
}

static int32_t find_text_token(const bg_vocab *v, const char *p, size_t n)
{
    const int32_t id = bg_map_find(&v->by_text, &v->text, p, n);
    return is_text_token(v, id) ? id : -1;
}

static uint32_t pair_priority(const void *ctx, const bg_symbol *left, const bg_symbol *right,
                              int32_t *id)
{
    const bg_vocab *v = ctx;
    if (left->id < 0 || right->id < 0) return BG_MERGE_NEVER;
    const bg_pair_slot *s = bg_pairs_find(&v->merges, left->id, right->id);
    if (!s) return BG_MERGE_NEVER;
    *id = s->id;
    return s->rank;
}

static bg_status no_memory(size_t n, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "tokenising a word of %zu bytes: out of memory", n);
}

static bg_status word(void *ctx, const char *p, size_t n, bg_error *err)
{
    bg_tok *t = ctx;
    const bg_vocab *v = t->v;
    if (v->pre->ignore_merges) {
        const int32_t id = bg_map_find(&v->by_bytes, &v->bytes, p, n);
        if (id >= 0) return bg_ids_add(t->ids, id) ? BG_OK : no_memory(n, err);
    }
    bg_merger *m = &t->merger;
    if (!bg_merger_reserve(m, n)) return no_memory(n, err);
    m->n = 0;
    if (v->pre->raw) {
        for (size_t i = 0; i < n;) {
            const size_t len = bg_char_bytes(p + i, n - i);
            m->sym[m->n++] =
                (bg_symbol){(uint32_t)i, (uint32_t)len, find_text_token(v, p + i, len)};
            i += len;
        }
    } else {
        for (size_t i = 0; i < n; i++)
            m->sym[m->n++] = (bg_symbol){(uint32_t)i, 1, v->byte_id[(unsigned char)p[i]]};
    }
    if (!bg_merger_run(m, pair_priority, v)) return no_memory(n, err);
    for (uint32_t i = 0; i < m->n; i++) {
        const bg_symbol s = m->sym[i];
        if (s.id >= 0) {
            bg_ids_add(t->ids, s.id);
            continue;
        }
        /* A character without a token; a byte that has none either is left out, as upstream does.
         */
        for (uint32_t j = 0; v->pre->raw && j < s.n; j++) {
            const int32_t id = v->byte_id[(unsigned char)p[s.at + j]];
            if (id >= 0) bg_ids_add(t->ids, id);
        }
    }
    return t->ids->failed ? no_memory(n, err) : BG_OK;
}

bg_status bg_bpe_text(bg_tok *t, const char *p, size_t n, bg_error *err)
{
    const bool valid = bg_utf8_valid(p, n);
    if (!valid || t->v->pre->blocks) {
        bg_buf *b = &t->text;
        bg_buf_clear(b);
        for (size_t i = 0; i < n;) {
            uint32_t cp;
            const size_t len = bg_utf8_next(p + i, n - i, &cp);
            if (cp == BG_UTF8_BAD) /* one U+FFFD a byte: what llama.cpp does */
                for (size_t j = 0; j < len; j++)
                    bg_buf_add(b, "\xef\xbf\xbd", 3);
            else if (cp == ' ' && t->v->pre->blocks)
                bg_buf_add(b, BLOCK, 3);
            else
                bg_buf_add(b, p + i, len);
            i += len;
        }
        if (b->failed) return no_memory(n, err);
        p = b->data;
        n = b->len;
    }
    return bg_pretok_split(t->v->pretok, t->pretok, p, n, word, t, err);
}

/* ---- loading -------------------------------------------------------------------------------- */

/* The alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 on. */
static void make_alphabet(uint32_t cp_of[256])
{
    uint32_t next = 0x100;
    for (uint32_t b = 0; b < 256; b++) {
        const bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);
        cp_of[b] = itself ? b : next++;
    }
}

/* Appends the bytes that a token's text spells. False: it has characters outside the alphabet. */
static bool spell(const uint8_t *byte_of, const bool *in_alphabet, bg_str t, bg_buf *out)
{
    bool all = true;
    for (size_t i = 0; i < t.n;) {
        uint32_t cp;
        i += bg_utf8_next(t.p + i, t.n - i, &cp);
        if (cp < 0x200 && in_alphabet[cp]) {
            bg_buf_char(out, (char)byte_of[cp]);
        } else {
            bg_buf_add(out, "\xef\xbf\xbd", 3);
            all = false;
        }
    }
    return all;
}

static bg_status add_merge(bg_vocab *v, bg_str m, uint64_t i, bg_buf *both, bg_error *err)
{
    const char *space = m.n > 1 ? memchr(m.p + 1, ' ', m.n - 1) : NULL;
    const int shown = (int)(m.n < 60 ? m.n : 60);
    if (!space)
        return bg_fail(err, BG_FORMAT, "tokenizer.ggml.merges[%llu] \"%.*s\": not \"left right\"",
                       (unsigned long long)i, shown, m.p);
    const size_t n_left = (size_t)(space - m.p), n_right = m.n - n_left - 1;
    const int32_t left = bg_map_find(&v->by_text, &v->text, m.p, n_left);
    const int32_t right = bg_map_find(&v->by_text, &v->text, space + 1, n_right);
    bg_buf_clear(both);
    bg_buf_add(both, m.p, n_left);
    bg_buf_add(both, space + 1, n_right);
    if (both->failed) return bg_fail(err, BG_NOMEM, "tokenizer.ggml.merges: out of memory");
    const int32_t id = bg_map_find(&v->by_text, &v->text, both->data, both->len);
    if (left < 0 || right < 0 || id < 0)
        return bg_fail(err, BG_FORMAT, "tokenizer.ggml.merges[%llu] \"%.*s\": %s is no token",
                       (unsigned long long)i, shown, m.p,
                       left < 0    ? "the left part"
                       : right < 0 ? "the right part"
                                   : "the result");
    /* Ordinary text must never become a control token, so no merge may make one. */
    if (is_text_token(v, left) && is_text_token(v, right) && is_text_token(v, id))
        bg_pairs_add(&v->merges, left, right, (uint32_t)i, id);
    return BG_OK;
}

static bg_status load_merges(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    const bg_kv *kv = bg_gguf_find(g, "tokenizer.ggml.merges");
    if (!kv && strcmp(v->pre->name, "kimi-k2") != 0)
        return bg_fail(err, BG_FORMAT, "tokenizer.ggml.merges: missing");
    if (kv && (!kv->strs || kv->n >= INT32_MAX))
        return bg_fail(err, BG_FORMAT,
                       "tokenizer.ggml.merges: not an array of strings, or too long");
    const uint64_t n = kv ? kv->n : 0;
    if (!bg_pairs_init(&v->merges, (size_t)n))
        return bg_fail(err, BG_NOMEM, "tokenizer.ggml.merges: out of memory");
    bg_status st = BG_OK;
    bg_buf both = {0};
    for (uint64_t i = 0; i < n && !st; i++)
        st = add_merge(v, kv->strs[i], i, &both, err);
    bg_buf_release(&both);
    return st;
}

/* Fills bytes of the normal tokens (byte alphabet or plain), byte_id and by_bytes. */
static bg_status load_bytes(bg_vocab *v, bg_buf *bytes, bg_error *err)
{
    uint32_t cp_of[256];
    uint8_t byte_of[0x200];
    bool in_alphabet[0x200] = {false};
    make_alphabet(cp_of);
    for (unsigned b = 0; b < 256; b++) {
        byte_of[cp_of[b]] = (uint8_t)b;
        in_alphabet[cp_of[b]] = true;
        char name[8];
        const size_t n = v->pre->raw ? (size_t)snprintf(name, sizeof name, "<0x%02X>", b)
                                     : bg_utf8_put(name, cp_of[b]);
        v->byte_id[b] = find_text_token(v, name, n);
    }
    if (v->pre->ignore_merges && !bg_map_init(&v->by_bytes, (size_t)v->n))
        return bg_fail(err, BG_NOMEM, "vocabulary: out of memory");
    bool *spelled = calloc((size_t)v->n, sizeof *spelled);
    if (!spelled) return bg_fail(err, BG_NOMEM, "vocabulary: out of memory");
    for (int32_t id = 0; id < v->n; id++) {
        v->bytes.at[id] = (uint32_t)bytes->len;
        const bg_str text = bg_arena_get(&v->text, id);
        if (v->kind[id] == BG_TOKEN_NORMAL && !v->pre->raw)
            spelled[id] = spell(byte_of, in_alphabet, text, bytes);
        else
            bg_vocab_plain_bytes(v, id, bytes);
    }
    bg_status st = bg_vocab_take_bytes(v, bytes, err);
    for (int32_t id = 0; !st && v->pre->ignore_merges && id < v->n; id++)
        if (spelled[id] && is_text_token(v, id)) bg_map_add(&v->by_bytes, &v->bytes, id);
    free(spelled);
    return st;
}

bg_status bg_bpe_load(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    bg_buf bytes = {0};
    bg_status st = load_bytes(v, &bytes, err);
    bg_buf_release(&bytes);
    if (!st) st = load_merges(v, g, err);
    if (!st) st = bg_pretok_new(&v->pretok, v->pre, err);
    return st;
}
