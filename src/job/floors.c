#include "job/floors.h"

#include <math.h>
#include <string.h>

const char *bg_kind_name(int kind)
{
    static const char *const names[BG_N_KINDS] = {
        [BG_KIND_EMBEDDING] = "embedding",  [BG_KIND_ATTENTION] = "attention",
        [BG_KIND_INDEXER] = "indexer",      [BG_KIND_FFN] = "dense FFN",
        [BG_KIND_ROUTER] = "router",        [BG_KIND_EXPERTS] = "experts",
        [BG_KIND_SHARED] = "shared expert", [BG_KIND_HEAD] = "output",
        [BG_KIND_OTHER] = "norms",          [BG_KIND_SKIPPED] = "not used"};
    return kind >= 0 && kind < BG_N_KINDS ? names[kind] : NULL;
}

static bool begins(const char *s, const char *with)
{
    return strncmp(s, with, strlen(with)) == 0;
}

/* By the names that GGUF files give. */
static bg_kind kind_of_name(const char *name)
{
    if (begins(name, "token_embd.")) return BG_KIND_EMBEDDING;
    if (begins(name, "output.")) return BG_KIND_HEAD;
    if (begins(name, "indexer.")) return BG_KIND_INDEXER;
    if (begins(name, "ffn_gate_inp") || begins(name, "exp_probs_b")) return BG_KIND_ROUTER;
    if (strstr(name, "norm") || begins(name, "rope_")) return BG_KIND_OTHER;
    if (strstr(name, "_exps.")) return BG_KIND_EXPERTS;
    if (strstr(name, "_shexp.")) return BG_KIND_SHARED;
    if (begins(name, "ffn_")) return BG_KIND_FFN;
    return begins(name, "attn_") ? BG_KIND_ATTENTION : BG_KIND_OTHER;
}

static const char *after_layer(const char *name)
{
    if (!begins(name, "blk.")) return name;
    const char *dot = strchr(name + 4, '.');
    return dot ? dot + 1 : name;
}

static bool is_table(const bg_tensor *t)
{
    return strcmp(t->cname, "token_embd.weight") == 0;
}

bg_kind bg_tensor_kind(const bg_tensor *t)
{
    return kind_of_name(after_layer(t->cname));
}

static void add(bg_kind_sums *sums, bg_kind kind, int64_t rows, int64_t cols, int64_t n,
                uint32_t type, bool whole)
{
    const uint64_t bytes = (uint64_t)(rows * n) * bg_qtype_row_bytes(type, cols);
    sums->params[kind] += (uint64_t)(rows * cols * n);
    sums->bytes[kind] += bytes;
    if (kind == BG_KIND_EMBEDDING || kind == BG_KIND_EXPERTS || kind == BG_KIND_SKIPPED) return;
    *(whole ? &sums->replicated : &sums->sharded) += bytes;
}

static bool is_whole(const bg_tensor *t, const bg_part *p)
{
    return p->rows == t->ne[1] && p->cols == t->ne[0] && p->n == t->ne[2] * t->ne[3];
}

void bg_kinds_sum(bg_kind_sums *sums, const bg_text_model *m, const bg_shard *s)
{
    const bg_desc *d = &m->desc;
    bg_shard next = *s; /* what two ranks have whole was not dealt out to one of them */
    bg_error err = {0};
    *sums = (bg_kind_sums){0};
    bg_shard_plan(&next, d, m->gguf, (s->rank + 1) % s->tp, s->tp, &err);
    for (int64_t i = 0; i < bg_gguf_n_tensors(m->gguf); i++) {
        const bg_tensor *t = bg_gguf_tensor(m->gguf, i);
        const int64_t n = t->ne[2] * t->ne[3];
        bg_part part, others;
        if (!bg_shard_part(s, d, m->gguf, t, &part)) {
            add(sums, BG_KIND_SKIPPED, t->ne[1], t->ne[0], n, t->type, true);
            continue;
        }
        const bool whole = is_whole(t, &part) && bg_shard_part(&next, d, m->gguf, t, &others) &&
                           is_whole(t, &others);
        add(sums, bg_tensor_kind(t), part.rows, part.cols, part.n, t->type, whole);
        if (is_table(t) && d->tied)
            add(sums, BG_KIND_HEAD, s->n_vocab, t->ne[0], 1, t->type, s->tp == 1);
    }
}

/* ---- floors ---------------------------------------------------------------------------------- */

/* Kinds that every token is multiplied with. */
static const bg_kind always[] = {BG_KIND_ATTENTION, BG_KIND_FFN, BG_KIND_ROUTER, BG_KIND_SHARED,
                                 BG_KIND_HEAD};
enum { N_ALWAYS = sizeof always / sizeof *always };

double bg_active_params(const bg_desc *d, const bg_kind_sums *sums)
{
    double n = 0;
    for (int i = 0; i < N_ALWAYS; i++)
        n += (double)sums->params[always[i]];
    if (d->n_experts) n += (double)sums->params[BG_KIND_EXPERTS] * d->n_used / (double)d->n_experts;
    return n;
}

/* Keys that a layer's attention reads. */
static double keys_read(const bg_desc *d, int layer, int ctx)
{
    int n = ctx;
    if (d->index_heads && n > d->index_top_k) n = d->index_top_k;
    if (bg_layer_windowed(d, layer) && n > d->window) n = d->window;
    return n;
}

bg_floor bg_floor_of(const bg_desc *d, const bg_shard *s, const bg_kind_sums *sums,
                     bg_cache_type cache, const bg_roof *roof, int batch, int ctx)
{
    bg_floor f = {0};
    bg_desc plain = *d; /* without an indexer */
    bg_desc_limit(&plain, 1);
    const bool indexed = d->index_heads && ctx > d->index_top_k;
    const double own = (double)bg_kv_bytes_per_token(&plain, s, cache);
    const double of_index = (double)bg_kv_bytes_per_token(d, s, cache) - own;
    double macs = bg_active_params(d, sums); /* of one token */
    const double head = d->kv_rank ? 2.0 * d->kv_rank + d->n_rot : (double)d->head_dim + d->v_dim;
    for (int l = 0; l < d->n_layers; l++) {
        const double keys = keys_read(d, l, ctx);
        macs += keys * head * s->n_heads;
        f.kv_bytes += keys * own / d->n_layers;
        if (indexed && bg_layer_indexed(d, l)) macs += (double)ctx * d->index_heads * d->index_dim;
    }
    for (int i = 0; i < N_ALWAYS; i++)
        f.weight_bytes += (double)sums->bytes[always[i]];
    f.weight_bytes += (double)sums->bytes[BG_KIND_OTHER];
    if (indexed) {
        f.weight_bytes += (double)sums->bytes[BG_KIND_INDEXER];
        f.kv_bytes += of_index * ctx;
        macs += (double)sums->params[BG_KIND_INDEXER];
    }
    if (d->n_experts) {
        const double e = d->n_experts;
        f.experts = e * (1 - pow(1 - d->n_used / e, batch));
        f.weight_bytes += (double)sums->bytes[BG_KIND_EXPERTS] * f.experts / e;
    }
    f.kv_bytes *= batch;
    f.flops = 2 * macs * batch;
    const double read = (f.weight_bytes + f.kv_bytes) / roof->bytes, math = f.flops / roof->flops;
    f.seconds = read > math ? read : math;
    return f;
}
