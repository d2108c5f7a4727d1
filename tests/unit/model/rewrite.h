/* tests/unit/model/rewrite.h - a GGUF file again with some things changed. */
#ifndef TESTS_MODEL_REWRITE_H
#define TESTS_MODEL_REWRITE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/rng.h"
#include "gguf/gguf.h"

typedef struct edit {
    const char *key; /* NULL ends a list */
    enum { DROP, AS_U32, AS_F32, AS_BOOL, AS_STR, AS_U32S } kind;
    double number;
    const char *str;
    const uint32_t *list; /* AS_U32S: number of them in `number` */
} edit;

#define DEL(key)                 \
    {                            \
        key, DROP, 0, NULL, NULL \
    }
#define INT(key, v)                \
    {                              \
        key, AS_U32, v, NULL, NULL \
    }
#define NUM(key, v)                \
    {                              \
        key, AS_F32, v, NULL, NULL \
    }
#define FLAG(key, v)                \
    {                               \
        key, AS_BOOL, v, NULL, NULL \
    }
#define TEXT(key, s)            \
    {                           \
        key, AS_STR, 0, s, NULL \
    }
#define LIST(key, n, v)          \
    {                            \
        key, AS_U32S, n, NULL, v \
    }
#define EDITS_END                 \
    {                             \
        NULL, DROP, 0, NULL, NULL \
    }

/* A tensor made of others. */
typedef struct made {
    char name[64];
    uint32_t type;
    int64_t ne[3];
    enum { FUSED_EXPERTS, K_B, V_B } how;
    const bg_tensor *a, *b;
    int64_t nope, v; /* of kv_b's rows by head */
} made;

typedef struct rewrite {
    const edit *edits;
    uint64_t shuffle;        /* 0: tensors keep their order */
    const char *drop_tensor; /* NULL: none */
    const char *rename, *to; /* of one tensor */
    bool fuse_qkv;           /* q, k, v become attn_qkv (all of one type) */
    bool fuse_experts;       /* ffn_gate_exps and ffn_up_exps become ffn_gate_up_exps */
    int split_kv_b;          /* > 0: attn_kv_b of heads with so many keys' rows becomes two */
    bool add_biases;         /* random ones, to every matrix of a layer that has none */
    struct {
        char name[64];
        int64_t n;
    } extra[64]; /* the added ones; they stand at the end */
    int n_extra;
    made made[96]; /* after those */
    int n_made;
    int64_t n_kept;
    const bg_gguf *g;
    const bg_tensor **order; /* for fused: the q tensor stands for all three */
} rewrite;

static void put_kv(bg_gguf_writer *w, const bg_kv *kv)
{
    char key[256];
    int64_t i = 0;
    double f = 0;
    bool b = false;
    bg_str s = {0};
    snprintf(key, sizeof key, "%.*s", (int)kv->key.n, kv->key.p);
    switch (kv->type) {
    case BG_KV_ARR:
        bg_gguf_put_array(w, key, kv->elem_type,
                          kv->elem_type == BG_KV_STR ? (const void *)kv->strs : kv->raw, kv->n);
        break;
    case BG_KV_STR:
        bg_kv_str(kv, 0, &s);
        bg_gguf_put_str(w, key, s.p, s.n);
        break;
    case BG_KV_BOOL:
        bg_kv_bool(kv, 0, &b);
        bg_gguf_put_bool(w, key, b);
        break;
    case BG_KV_F32:
    case BG_KV_F64:
        bg_kv_float(kv, 0, &f);
        bg_gguf_put_f32(w, key, (float)f);
        break;
    default:
        bg_kv_int(kv, 0, &i);
        bg_gguf_put_u32(w, key, (uint32_t)i);
        break;
    }
}

static void put_edit(bg_gguf_writer *w, const edit *e)
{
    switch (e->kind) {
    case DROP:
        break;
    case AS_U32:
        bg_gguf_put_u32(w, e->key, (uint32_t)e->number);
        break;
    case AS_F32:
        bg_gguf_put_f32(w, e->key, (float)e->number);
        break;
    case AS_BOOL:
        bg_gguf_put_bool(w, e->key, e->number != 0);
        break;
    case AS_STR:
        bg_gguf_put_str(w, e->key, e->str, strlen(e->str));
        break;
    case AS_U32S:
        bg_gguf_put_array(w, e->key, BG_KV_U32, e->list, (uint64_t)e->number);
        break;
    }
}

static const bg_tensor *sibling(const bg_gguf *g, const bg_tensor *q, char letter)
{
    char name[128];
    snprintf(name, sizeof name, "%s", q->cname);
    strstr(name, "attn_q.")[5] = letter;
    return bg_gguf_find_tensor(g, name);
}

static void add_made(rewrite *r, const bg_tensor *t, const char *old, const char *now, int how)
{
    made *m = &r->made[r->n_made++];
    const char *at = strstr(t->cname, old);
    *m = (made){.type = t->type, .how = how, .a = t, .nope = r->split_kv_b};
    snprintf(m->name, sizeof m->name, "%.*s%s%s", (int)(at - t->cname), t->cname, now,
             at + strlen(old));
    memcpy(m->ne, t->ne, sizeof m->ne);
}

/* Whether t is dropped for what is made of it. */
static bool replaced(const bg_gguf *g, rewrite *r, const bg_tensor *t)
{
    int64_t heads = 0;
    if (r->fuse_experts && strstr(t->cname, "ffn_up_exps.weight")) return true;
    if (r->fuse_experts && strstr(t->cname, "ffn_gate_exps.weight")) {
        char up[64];
        add_made(r, t, "ffn_gate_exps", "ffn_gate_up_exps", FUSED_EXPERTS);
        snprintf(up, sizeof up, "%.*sffn_up_exps.weight",
                 (int)(strstr(t->cname, "ffn_gate") - t->cname), t->cname);
        r->made[r->n_made - 1].b = bg_gguf_find_tensor(g, up);
        r->made[r->n_made - 1].ne[1] *= 2;
        return true;
    }
    if (!r->split_kv_b || !strstr(t->cname, "attn_kv_b")) return false;
    for (int64_t i = 0; i < bg_gguf_n_kv(g); i++) {
        const bg_kv *kv = bg_gguf_kv(g, i);
        if (kv->key.n == 30 && memcmp(kv->key.p, "deepseek2.attention.head_count", 30) == 0)
            bg_kv_int(kv, 0, &heads);
    }
    add_made(r, t, "attn_kv_b", "attn_k_b", K_B);
    made *k = &r->made[r->n_made - 1];
    k->type = BG_F32;
    k->v = t->ne[1] / heads - k->nope;
    memcpy(k->ne, (int64_t[3]){k->nope, t->ne[0], heads}, sizeof k->ne);
    add_made(r, t, "attn_kv_b", "attn_v_b", V_B);
    made *v = &r->made[r->n_made - 1];
    v->v = k->v;
    memcpy(v->ne, (int64_t[3]){t->ne[0], v->v, heads}, sizeof v->ne);
    return true;
}

static bg_status emit_made(const made *m, bg_gguf_emit *emit, void *sink, bg_error *err)
{
    const size_t row = bg_qtype_row_bytes(m->a->type, m->a->ne[0]);
    const char *a = m->a->data, *b = m->b ? m->b->data : NULL;
    bg_status st = BG_OK;
    for (int64_t i = 0; !st && i < m->ne[2]; i++) {
        if (m->how == FUSED_EXPERTS) {
            const size_t half = row * (size_t)m->a->ne[1];
            st = emit(sink, a + (size_t)i * half, half, err);
            if (!st) st = emit(sink, b + (size_t)i * half, half, err);
        } else if (m->how == V_B) {
            st = emit(sink, a + row * (size_t)(i * (m->nope + m->v) + m->nope), row * (size_t)m->v,
                      err);
        } else {
            const int64_t kl = m->ne[1];
            float *in = malloc((size_t)kl * 4), *out = malloc((size_t)(kl * m->nope) * 4);
            for (int64_t k = 0; k < m->nope; k++) {
                bg_dequant_row(m->a->type, a + row * (size_t)(i * (m->nope + m->v) + k), in, kl);
                for (int64_t c = 0; c < kl; c++)
                    out[c * m->nope + k] = in[c];
            }
            st = emit(sink, out, (size_t)(kl * m->nope) * 4, err);
            free(in);
            free(out);
        }
    }
    return st;
}

static bg_status produce(void *ctx, int64_t i, size_t bytes, bg_gguf_emit *emit, void *sink,
                         bg_error *err)
{
    const rewrite *r = ctx;
    if (i >= r->n_kept + r->n_extra)
        return emit_made(&r->made[i - r->n_kept - r->n_extra], emit, sink, err);
    const bg_tensor *t = r->order[i];
    if (!t) {
        float v[4096];
        for (size_t k = 0; k < bytes / 4; k++)
            v[k] = (float)(bg_mix64((uint64_t)i << 32 | k) % 2001) * 1e-3f - 1;
        return emit(sink, v, bytes, err);
    }
    bg_status st = emit(sink, t->data, t->bytes, err);
    if (r->fuse_qkv && strstr(t->cname, "attn_q."))
        for (int k = 0; !st && k < 2; k++) {
            const bg_tensor *s = sibling(r->g, t, "kv"[k]);
            st = emit(sink, s->data, s->bytes, err);
        }
    return st;
}

static void add_bias(const bg_gguf *g, rewrite *r, const bg_tensor *t)
{
    char name[64];
    if (t->n_dims < 2 || strncmp(t->cname, "blk.", 4) != 0 || r->n_extra == 64) return;
    snprintf(name, sizeof name, "%.40s", t->cname);
    char *end = strstr(name, ".weight");
    if (!end) return;
    memcpy(end, ".bias", 6);
    if (bg_gguf_find_tensor(g, name)) return;
    memcpy(r->extra[r->n_extra].name, name, sizeof name);
    r->extra[r->n_extra++].n = t->ne[1];
}

/* Writes g, changed, into a new temporary file; path has room for 64 bytes. */
static bg_status rewrite_file(const bg_gguf *g, rewrite *r, char *path, bg_error *err)
{
    int64_t n = 0;
    bg_gguf_writer *w = bg_gguf_writer_new(0);
    r->g = g;
    r->order = calloc((size_t)bg_gguf_n_tensors(g) + 64, sizeof *r->order);
    snprintf(path, 64, "%s/batchgen-test-XXXXXX", P_tmpdir);
    const int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    for (int64_t i = 0; i < bg_gguf_n_kv(g); i++) {
        const bg_kv *kv = bg_gguf_kv(g, i);
        bool edited = strncmp(kv->key.p, "split.", 6) == 0;
        for (const edit *e = r->edits; e && e->key; e++)
            edited = edited ||
                     (strlen(e->key) == kv->key.n && memcmp(e->key, kv->key.p, kv->key.n) == 0);
        if (!edited) put_kv(w, kv);
    }
    for (const edit *e = r->edits; e && e->key; e++)
        put_edit(w, e);
    for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
        const bg_tensor *t = bg_gguf_tensor(g, i);
        if (r->drop_tensor && strcmp(t->cname, r->drop_tensor) == 0) continue;
        if (r->fuse_qkv && (strstr(t->cname, "attn_k.") || strstr(t->cname, "attn_v."))) continue;
        if (replaced(g, r, t)) continue;
        r->order[n++] = t;
    }
    r->n_kept = n;
    for (int64_t i = n - 1; r->shuffle && i > 0; i--) {
        const int64_t j = (int64_t)(bg_mix64(r->shuffle + (uint64_t)i) % (uint64_t)(i + 1));
        const bg_tensor *t = r->order[i];
        r->order[i] = r->order[j];
        r->order[j] = t;
    }
    for (int64_t i = 0; i < n; i++) {
        const bg_tensor *t = r->order[i];
        if (r->add_biases) add_bias(g, r, t);
        int64_t ne[4] = {t->ne[0], t->ne[1], t->ne[2], t->ne[3]};
        char name[128];
        snprintf(name, sizeof name, "%s", t->cname);
        if (r->rename && strcmp(name, r->rename) == 0) snprintf(name, sizeof name, "%s", r->to);
        char *q = r->fuse_qkv ? strstr(name, "attn_q.") : NULL;
        if (q) {
            const int dim = t->n_dims - 1; /* rows of a matrix, values of a bias */
            ne[dim] += sibling(g, t, 'k')->ne[dim] + sibling(g, t, 'v')->ne[dim];
            memmove(q + 8, q + 6, strlen(q + 6) + 1);
            memcpy(q + 5, "qkv", 3);
        }
        bg_gguf_put_tensor(w, name, t->type, t->n_dims, ne);
    }
    for (int i = 0; i < r->n_extra; i++)
        bg_gguf_put_tensor(w, r->extra[i].name, BG_F32, 1, &r->extra[i].n);
    for (int i = 0; i < r->n_made; i++)
        bg_gguf_put_tensor(w, r->made[i].name, r->made[i].type, 3, r->made[i].ne);
    const bg_status st = bg_gguf_write(w, path, produce, r, err);
    bg_gguf_writer_free(w);
    free(r->order);
    return st;
}

#endif
