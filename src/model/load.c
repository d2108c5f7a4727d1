/* model/load.c - a rank's share of the weights, from the mapped file onto its backend.
 *
 * A fused linear is put together in the order q, k, v; gate, up; q_a, kv_a: each part is looked up
 * by name, so the order in which a file lists its tensors never matters. */
#include "model/load.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void bg_load_progress(bg_loader *ld, uint64_t bytes)
{
    const uint64_t total = ld->m->s.weight_bytes;
    ld->done = ld->done + bytes < total ? ld->done + bytes : total;
    if (ld->config->progress) ld->config->progress(ld->config->ctx, ld->done, total);
}

bg_status bg_load_floats(const bg_loader *ld, const bg_tensor *t, int64_t at, int64_t n,
                         float dummy, float **out, bg_error *err)
{
    const int64_t len = t->ne[0] * t->ne[1];
    float *all = malloc((size_t)(len > n ? len : n) * sizeof *all + 1);
    *out = NULL;
    if (!all) return bg_fail(err, BG_NOMEM, "tensor %s: out of memory", t->cname);
    if (ld->config->backend->dummy)
        for (int64_t i = 0; i < len; i++)
            all[i] = dummy;
    else
        bg_dequant_row(t->type, t->data, all, len);
    memmove(all, all + at, (size_t)n * sizeof *all);
    *out = all;
    return BG_OK;
}

const bg_tensor *bg_load_find(const bg_loader *ld, bg_role r, int layer)
{
    return r != N_ROLES && ld->may & ROLE(r) ? bg_role_tensor(ld->g, r, layer) : NULL;
}

bg_status bg_load_vec(bg_loader *ld, bg_vec *v, bg_role r, int layer, bg_error *err)
{
    const bg_tensor *t = bg_load_find(ld, r, layer);
    float *host = NULL;
    if (!t) return BG_OK; /* optional, and v stays empty */
    const bg_range own = bg_shard_range(&ld->m->s, &ld->m->d, bg_role_get(r)->in);
    if (!own.n) return BG_OK;
    bg_status st = bg_load_floats(ld, t, own.at, own.n, 1, &host, err);
    if (!st) st = ld->m->b->ops->vec_new(ld->m->b, v, t->cname, host, own.n, err);
    if (!st) bg_load_progress(ld, t->bytes);
    free(host);
    return st;
}

/* ---- linears ------------------------------------------------------------------------------------
 */

void bg_part_start(bg_builder *b, const char *fmt, ...)
{
    va_list ap;
    *b = (bg_builder){0};
    va_start(ap, fmt);
    vsnprintf(b->name, sizeof b->name, fmt, ap);
    va_end(ap);
}

bg_status bg_part_add(const bg_loader *ld, bg_builder *b, const bg_tensor *t, int64_t row0,
                      int64_t n_rows, bg_range cols, const bg_tensor *bias, bg_error *err)
{
    const int i = b->spec.n_parts++;
    b->tensors[i] = t;
    b->spec.parts[i] = (bg_linear_part){
        .name = t->cname,
        .type = t->type,
        .data = t->data,
        .k_total = t->ne[0],
        .n_total = t->ne[1],
        .row0 = row0,
        .n_rows = n_rows,
        .col0 = cols.at,
        .n_cols = cols.n,
    };
    bg_status st = BG_OK;
    if (bias && n_rows) st = bg_load_floats(ld, bias, row0, n_rows, 0, &b->bias[i], err);
    b->spec.parts[i].bias = b->bias[i];
    return st;
}

bg_status bg_part_add_role(bg_loader *ld, bg_builder *b, bg_role r, bg_role bias_role, int layer,
                           bg_error *err)
{
    const bg_role_info *info = bg_role_get(r);
    const bg_desc *d = &ld->m->d;
    const bg_shard *s = &ld->m->s;
    const bg_range rows = bg_shard_range(s, d, info->out), cols = bg_shard_range(s, d, info->in);
    const bg_tensor *bias = bg_load_find(ld, bias_role, layer);
    /* Partial sums of all ranks are added: the bias belongs to one of them. */
    if (info->out == DIM_MODEL && s->rank > 0) bias = NULL;
    return bg_part_add(ld, b, bg_load_find(ld, r, layer), rows.at, rows.n, cols, bias, err);
}

bg_status bg_part_finish(bg_loader *ld, bg_builder *b, bg_linear **l, bg_error *err)
{
    int64_t rows = 0;
    uint64_t bytes = 0;
    bg_status st = BG_OK;
    b->spec.name = b->name;
    for (int i = 0; i < b->spec.n_parts; i++) {
        const bg_linear_part *p = &b->spec.parts[i];
        rows += p->n_rows;
        bytes += (uint64_t)p->n_rows * bg_qtype_row_bytes(p->type, p->n_cols);
    }
    if (rows) st = ld->m->b->ops->linear_new(ld->m->b, l, &b->spec, err);
    if (st) bg_wrap(err, "%s", b->name);
    for (int i = 0; i < b->spec.n_parts; i++)
        bg_gguf_drop_pages(ld->g, b->tensors[i]->data, b->tensors[i]->bytes);
    if (!st) bg_load_progress(ld, bytes);
    return st;
}

void bg_part_release(bg_builder *b)
{
    for (int i = 0; i < 4; i++)
        free(b->bias[i]);
}

static bg_status load_qkv(bg_loader *ld, bg_layer *layer, int l, bg_error *err)
{
    bg_status st = BG_OK;
    bg_builder b;
    bg_part_start(&b, "blk.%d.attn_qkv", l);
    const bg_desc *d = &ld->m->d;
    const bg_tensor *fused = bg_load_find(ld, ROLE_QKV, l);
    if (fused) {
        const bg_dim dims[3] = {DIM_Q, DIM_K, DIM_V};
        const bg_tensor *bias = bg_load_find(ld, ROLE_QKV_B, l);
        int64_t at = 0;
        for (int i = 0; !st && i < 3; i++) {
            const bg_range rows = bg_shard_range(&ld->m->s, d, dims[i]);
            st = bg_part_add(ld, &b, fused, at + rows.at, rows.n, (bg_range){0, d->d_model}, bias,
                             err);
            at += bg_dim_size(d, dims[i]);
        }
    } else {
        st = bg_part_add_role(ld, &b, ROLE_Q, ROLE_Q_B, l, err);
        if (!st) st = bg_part_add_role(ld, &b, ROLE_K, ROLE_K_B, l, err);
        if (!st) st = bg_part_add_role(ld, &b, ROLE_V, ROLE_V_B, l, err);
    }
    if (!st) st = bg_part_finish(ld, &b, &layer->qkv, err);
    bg_part_release(&b);
    return st;
}

static bg_status load_gate_up(bg_loader *ld, bg_layer *layer, int l, bg_error *err)
{
    bg_builder b;
    bg_part_start(&b, "blk.%d.ffn_gate_up", l);
    b.spec.glu = true;
    const bg_tensor *fused = bg_load_find(ld, ROLE_GATE_UP, l);
    const bg_range in = {0, ld->m->d.d_model};
    const int64_t at = ld->m->s.ff0, n = ld->m->s.n_ff;
    bg_status st = fused ? bg_part_add(ld, &b, fused, at, n, in, NULL, err)
                         : bg_part_add_role(ld, &b, ROLE_GATE, ROLE_GATE_B, l, err);
    if (!st)
        st = fused ? bg_part_add(ld, &b, fused, ld->m->d.d_ff + at, n, in, NULL, err)
                   : bg_part_add_role(ld, &b, ROLE_UP, ROLE_UP_B, l, err);
    if (!st) st = bg_part_finish(ld, &b, &layer->gate_up, err);
    bg_part_release(&b);
    return st;
}

bg_status bg_load_linear(bg_loader *ld, bg_linear **out, const char *name, bg_role r, bg_role bias,
                         int l, bg_error *err)
{
    bg_builder b;
    bg_part_start(&b, "blk.%d.%s", l, name);
    bg_status st = bg_part_add_role(ld, &b, r, bias, l, err);
    if (!st) st = bg_part_finish(ld, &b, out, err);
    bg_part_release(&b);
    return st;
}

static bg_status load_head(bg_loader *ld, bg_error *err)
{
    bg_model *m = ld->m;
    bg_builder b;
    bg_part_start(&b, "output");
    const bg_tensor *t = bg_role_tensor(ld->g, m->d.tied ? ROLE_TOKEN_EMBD : ROLE_OUTPUT, 0);
    const bg_tensor *bias =
        m->d.arch->may & ROLE(ROLE_OUTPUT_B) ? bg_role_tensor(ld->g, ROLE_OUTPUT_B, 0) : NULL;
    bg_status st =
        bg_part_add(ld, &b, t, m->s.vocab0, m->s.n_vocab, (bg_range){0, m->d.d_model}, bias, err);
    if (!st) st = bg_part_finish(ld, &b, &m->head, err);
    bg_part_release(&b);
    if (st) return st;
    m->rank_rows = malloc((size_t)m->s.tp * sizeof *m->rank_rows);
    if (!m->rank_rows) return bg_fail(err, BG_NOMEM, "model: out of memory");
    for (int r = 0; r < m->s.tp; r++)
        m->rank_rows[r] = bg_vocab_range(&m->d, r, m->s.tp).n;
    return BG_OK;
}

/* ---- the rest ------------------------------------------------------------------------------- */

/* Asks for the file's pages of a layer (n_layers: of the head) before they are needed, so that the
 * storage always has something to do. */
static void read_ahead(const bg_loader *ld, int l)
{
    static const bg_role roles[] = {
        ROLE_QKV,          ROLE_Q,         ROLE_K,          ROLE_V,        ROLE_Q_A,
        ROLE_KV_A,         ROLE_INDEX_Q,   ROLE_INDEX_K,    ROLE_Q_B_LORA, ROLE_K_B_MLA,
        ROLE_V_B_MLA,      ROLE_KV_B,      ROLE_O,          ROLE_GATE,     ROLE_UP,
        ROLE_GATE_UP,      ROLE_DOWN,      ROLE_GATE_SHEXP, ROLE_UP_SHEXP, ROLE_DOWN_SHEXP,
        ROLE_GATE_UP_EXPS, ROLE_GATE_EXPS, ROLE_UP_EXPS,    ROLE_DOWN_EXPS};
    if (ld->config->backend->dummy || !ld->m->b->ops->load_end) return;
    const bg_tensor *head =
        l < ld->m->d.n_layers || ld->m->d.tied ? NULL : bg_role_tensor(ld->g, ROLE_OUTPUT, 0);
    if (head) bg_gguf_will_need(ld->g, head->data, head->bytes);
    if (l >= ld->m->d.n_layers) return;
    const uint64_t may = bg_roles_of(&ld->m->d, ld->g, l).may;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        const bg_tensor *t = may & ROLE(roles[i]) ? bg_role_tensor(ld->g, roles[i], l) : NULL;
        if (t) bg_gguf_will_need(ld->g, t->data, t->bytes);
    }
}

static bg_status load_layer(bg_loader *ld, int l, bg_error *err)
{
    bg_layer *layer = &ld->m->layers[l];
    const struct {
        bg_role role;
        bg_vec *v;
    } vecs[] = {
        {ROLE_ATTN_NORM, &layer->attn_norm},
        {ROLE_POST_ATTN_NORM, &layer->post_attn_norm},
        {ROLE_FFN_NORM, &layer->ffn_norm},
        {ROLE_FFN_NORM_2, &layer->ffn_norm},
        {ROLE_POST_FFN_NORM, &layer->post_ffn_norm},
        {ROLE_Q_NORM, &layer->q_norm},
        {ROLE_K_NORM, &layer->k_norm},
        {ROLE_SINKS, &layer->sinks},
    };
    bg_status st = BG_OK;
    ld->may = bg_roles_of(&ld->m->d, ld->g, l).may;
    for (size_t i = 0; !st && i < sizeof vecs / sizeof *vecs; i++)
        st = bg_load_vec(ld, vecs[i].v, vecs[i].role, l, err);
    if (!st) st = ld->m->d.kv_rank ? bg_mla_load(ld, layer, l, err) : load_qkv(ld, layer, l, err);
    if (!st) st = bg_load_linear(ld, &layer->o, "attn_output", ROLE_O, ROLE_O_B, l, err);
    if (bg_layer_moe(&ld->m->d, l)) {
        if (!st) st = bg_experts_load(ld, layer, l, err);
    } else {
        if (!st) st = load_gate_up(ld, layer, l, err);
        if (!st) st = bg_load_linear(ld, &layer->down, "ffn_down", ROLE_DOWN, ROLE_DOWN_B, l, err);
    }
    return st;
}

static bg_status load_rope(bg_loader *ld, bg_error *err)
{
    bg_model *m = ld->m;
    const bg_desc *d = &m->d;
    const uint64_t roles = d->arch->need | d->arch->may;
    bg_role role = N_ROLES;
    if (roles & ROLE(ROLE_ROPE_FREQS) && bg_role_tensor(ld->g, ROLE_ROPE_FREQS, 0))
        role = ROLE_ROPE_FREQS;
    else if (d->rope_scaling.longrope) /* one choice for the whole run: cached keys depend on it */
        role = ld->config->backend->max_ctx > d->rope_scaling.n_orig ? ROLE_ROPE_LONG
                                                                     : ROLE_ROPE_SHORT;
    const bg_tensor *t = role == N_ROLES ? NULL : bg_role_tensor(ld->g, role, 0);
    float *factors = NULL;
    bg_status st = BG_OK;
    if (role != N_ROLES && !t)
        st = bg_fail(err, BG_FORMAT, "tensor %s is missing; rope.scaling.type longrope needs it",
                     bg_role_get(role)->name);
    if (!st && t) st = bg_load_floats(ld, t, 0, t->ne[0], 1, &factors, err);
    for (int i = 0; !st && i < d->n_rot / 2; i++)
        if (factors && !(factors[i] > 0))
            st = bg_fail(err, BG_FORMAT, "tensor %s: factor %d is %g", t->cname, i, factors[i]);
    for (int w = 0; !st && w < 2; w++) {
        m->freq[w] = malloc((size_t)d->n_rot / 2 * sizeof *m->freq[w]);
        if (!m->freq[w]) {
            st = bg_fail(err, BG_NOMEM, "model: out of memory");
            break;
        }
        m->rope[w] = (bg_rope){.freq = m->freq[w], .n_rot = d->n_rot, .neox = d->rope_neox};
        bg_rope_table(d, w == 1, factors, m->freq[w], &m->rope[w].mscale);
    }
    free(factors);
    return st;
}

static bg_status load_all(bg_loader *ld, bg_error *err)
{
    bg_model *m = ld->m;
    const bg_ops *ops = m->b->ops;
    const bg_model_config *c = ld->config;
    const bg_tensor *embedding = bg_role_tensor(ld->g, ROLE_TOKEN_EMBD, 0);
    bg_load_progress(ld, 0);
    ld->may = m->d.arch->need | m->d.arch->may;
    bg_status st = load_rope(ld, err);
    read_ahead(ld, 0);
    if (!st) st = ops->embedding_new(m->b, &m->embedding, embedding, err);
    if (!st) bg_load_progress(ld, embedding->bytes);
    for (int l = 0; !st && l < m->d.n_layers; l++) {
        read_ahead(ld, l + 1);
        st = load_layer(ld, l, err);
    }
    if (!st) st = bg_load_vec(ld, &m->output_norm, ROLE_OUTPUT_NORM, 0, err);
    if (!st) st = load_head(ld, err);
    if (!st && ops->load_end) st = ops->load_end(m->b, &m->load_times, err);
    if (!st) st = bg_buffers_new(m, c->backend, err);
    int n_index = 0;
    for (int l = 0; m->d.index_heads && l < m->d.n_layers; l++)
        n_index += bg_layer_indexed(&m->d, l);
    const bg_cache_spec cache = {
        .n_layers = m->d.n_layers,
        .n_blocks = c->n_blocks,
        .block_tokens = c->block_tokens,
        .n_kv_heads = m->s.n_kv_heads,
        .k_dim = m->d.kv_rank ? m->d.kv_rank + m->d.n_rot : m->d.head_dim,
        .v_dim = m->d.kv_rank ? m->d.kv_rank : m->d.v_dim,
        .type = c->cache_type,
        .latent = m->d.kv_rank,
        .n_index = n_index,
        .index_dim = n_index ? m->d.index_dim : 0,
        .index_top_k = n_index ? m->d.index_top_k : 0,
    };
    if (!st) st = ops->cache_new(m->b, &cache, err);
    if (!st) bg_load_progress(ld, m->s.weight_bytes);
    return st;
}

bg_status bg_model_load(bg_model **m, const bg_gguf *g, const bg_desc *d, bg_backend *b,
                        const bg_model_config *config, bg_error *err)
{
    bg_status st = BG_OK;
    *m = NULL;
    bg_model *n = calloc(1, sizeof *n);
    if (!n) return bg_fail(err, BG_NOMEM, "model: out of memory");
    n->d = *d;
    bg_desc_limit(&n->d, config->backend->max_ctx);
    n->b = b;
    n->layers = calloc((size_t)d->n_layers, sizeof *n->layers);
    if (!n->layers) {
        st = bg_fail(err, BG_NOMEM, "model: out of memory");
        goto out;
    }
    st = bg_shard_plan(&n->s, &n->d, g, config->rank, config->tp, err);
    if (st) goto out;
    bg_loader ld = {.g = g, .config = config, .m = n};
    st = load_all(&ld, err);
    if (st) goto out;
    *m = n;
    n = NULL;
out:
    bg_model_free(n);
    return st;
}

/* What the backend made from the weights ends with the backend. */
void bg_model_free(bg_model *m)
{
    if (!m) return;
    free(m->layers);
    free(m->rank_rows);
    free(m->freq[0]);
    free(m->freq[1]);
    free(m);
}

const bg_load_times *bg_model_load_times(const bg_model *m)
{
    return &m->load_times;
}
