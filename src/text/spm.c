/* SentencePiece-style BPE by score ("llama"): neighbours merge when their texts together are a
 * token, the highest score first.
 *
 * No merge can cross a border between two characters that stand side by side in no token. `glue`
 * holds the pairs that do (hashed: a false yes costs time, never a token), and text is cut wherever
 * it does not stick: the pieces are mostly words, whose merges fit the cache. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "text/tok.h"

#define BLOCK "\xe2\x96\x81" /* U+2581, the visible space */

enum { GLUE_BITS = 1 << 20 };

static uint32_t char_key(const char *p, size_t n)
{
    uint32_t k = 0;
    for (size_t i = 0; i < n; i++)
        k = k << 8 | (unsigned char)p[i];
    return k;
}

static uint32_t glue_bit(uint32_t left, uint32_t right)
{
    const uint64_t h = ((uint64_t)left << 32 | right) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(h >> 44) & (GLUE_BITS - 1);
}

static bool sticks(const bg_vocab *v, uint32_t left, uint32_t right)
{
    const uint32_t b = glue_bit(left, right);
    return v->glue[b / 64] >> b % 64 & 1;
}

/* Order-preserving: a higher score is a lower number. Scores are not NaN, so never BG_MERGE_NEVER.
 */
static uint32_t priority_of(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 is 0 */
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

static int32_t find_text_token(const bg_vocab *v, const char *p, size_t n)
{
    if (n > v->max_text) return -1;
    const int32_t id = bg_map_find(&v->by_text, &v->text, p, n);
    return id >= 0 && !(v->flags[id] & BG_TOKEN_TRUSTED_ONLY) ? id : -1;
}

typedef struct word_ctx {
    const bg_vocab *v;
    const char *p;
} word_ctx;

static uint32_t pair_priority(const void *ctx, const bg_symbol *left, const bg_symbol *right,
                              int32_t *id)
{
    const word_ctx *w = ctx;
    *id = find_text_token(w->v, w->p + left->at, (size_t)left->n + right->n);
    return *id < 0 ? BG_MERGE_NEVER : priority_of(w->v->score[*id]);
}

static bg_status put_symbol(bg_tok *t, const char *p, bg_symbol s, bg_error *err)
{
    const bg_vocab *v = t->v;
    if (s.id < 0) s.id = find_text_token(v, p, s.n);
    bool bytes = s.id < 0;
    for (uint32_t i = 0; i < s.n && bytes; i++)
        bytes = v->byte_id[(unsigned char)p[i]] >= 0;
    if (bytes) {
        for (uint32_t i = 0; i < s.n; i++)
            bg_ids_add(t->ids, v->byte_id[(unsigned char)p[i]]);
        return BG_OK;
    }
    if (s.id < 0) s.id = v->unk;
    if (s.id < 0)
        return bg_fail(
            err, BG_ARG,
            "the vocabulary has no token for \"%.*s\", nor for its bytes, nor an unknown "
            "token",
            (int)s.n, p);
    bg_ids_add(t->ids, s.id);
    return BG_OK;
}

static bg_status no_memory(size_t n, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "tokenising %zu bytes: out of memory", n);
}

/* Merges what lies in the merger's symbols, which are characters of the bytes at p. */
static bg_status put_word(bg_tok *t, const char *p, bg_error *err)
{
    bg_merger *m = &t->merger;
    const word_ctx w = {t->v, p};
    if (!bg_merger_run(m, pair_priority, &w)) return no_memory(m->n, err);
    bg_status st = BG_OK;
    for (uint32_t i = 0; i < m->n && !st; i++)
        st = put_symbol(t, p + m->sym[i].at, m->sym[i], err);
    return st;
}

bg_status bg_spm_text(bg_tok *t, const char *p, size_t n, bool space, bg_error *err)
{
    bg_buf *b = &t->text;
    bg_buf_clear(b);
    if (space) bg_buf_add(b, BLOCK, 3);
    for (size_t i = 0; i < n;) {
        const char *q = memchr(p + i, ' ', n - i);
        const size_t end = q ? (size_t)(q - p) : n;
        bg_buf_add(b, p + i, end - i);
        if (q) bg_buf_add(b, BLOCK, 3);
        i = end + (q != NULL);
    }
    if (b->failed) return no_memory(n, err);
    bg_merger *m = &t->merger;
    bg_status st = BG_OK;
    for (size_t from = 0; from < b->len && !st;) {
        size_t at = from;
        uint32_t last = 0;
        m->n = 0;
        while (at < b->len) {
            const size_t len = bg_char_bytes(b->data + at, b->len - at);
            const uint32_t key = char_key(b->data + at, len);
            if (at > from && !sticks(t->v, last, key)) break;
            if (!bg_merger_grow(m)) return no_memory(n, err);
            m->sym[m->n++] = (bg_symbol){(uint32_t)(at - from), (uint32_t)len, -1};
            last = key;
            at += len;
        }
        st = put_word(t, b->data + from, err);
        from = at;
    }
    if (!st && t->ids->failed) st = no_memory(n, err);
    return st;
}

/* ---- loading -------------------------------------------------------------------------------- */

static void add_glue(bg_vocab *v, bg_str t)
{
    uint32_t last = 0;
    for (size_t i = 0; i < t.n;) {
        const size_t len = bg_char_bytes(t.p + i, t.n - i);
        const uint32_t key = char_key(t.p + i, len);
        if (i > 0) v->glue[glue_bit(last, key) / 64] |= UINT64_C(1) << glue_bit(last, key) % 64;
        last = key;
        i += len;
    }
}

static bg_status load_scores(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    const bg_kv *kv = bg_gguf_find(g, "tokenizer.ggml.scores");
    v->score = calloc((size_t)v->n, sizeof *v->score);
    if (!v->score) return bg_fail(err, BG_NOMEM, "vocabulary: out of memory");
    if (!kv) return BG_OK;
    if (kv->type != BG_KV_ARR || kv->n < (uint64_t)v->n)
        return bg_fail(err, BG_FORMAT, "tokenizer.ggml.scores: not an array of at least %d values",
                       v->n);
    for (int32_t i = 0; i < v->n; i++) {
        double s;
        if (!bg_kv_float(kv, (uint64_t)i, &s) || isnan(s))
            return bg_fail(err, BG_FORMAT, "tokenizer.ggml.scores[%d]: not a number", i);
        v->score[i] = (float)s;
    }
    return BG_OK;
}

bg_status bg_spm_load(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    bg_status st = load_scores(v, g, err);
    if (st) return st;
    v->glue = calloc(GLUE_BITS / 64, sizeof *v->glue);
    if (!v->glue) return bg_fail(err, BG_NOMEM, "vocabulary: out of memory");
    bg_buf bytes = {0};
    for (int32_t id = 0; id < v->n; id++) {
        const bg_str t = bg_arena_get(&v->text, id);
        v->bytes.at[id] = (uint32_t)bytes.len;
        bg_vocab_plain_bytes(v, id, &bytes);
        if (v->flags[id] & BG_TOKEN_TRUSTED_ONLY) continue;
        add_glue(v, t);
        if (t.n > v->max_text) v->max_text = (uint32_t)t.n;
    }
    st = bg_vocab_take_bytes(v, &bytes, err);
    bg_buf_release(&bytes);
    for (unsigned b = 0; b < 256; b++) {
        char name[8];
        const size_t n = (size_t)snprintf(name, sizeof name, "<0x%02X>", b);
        const char one = (char)b;
        v->byte_id[b] = find_text_token(v, name, n);
        if (v->byte_id[b] < 0) v->byte_id[b] = find_text_token(v, &one, 1);
    }
    return st;
}
