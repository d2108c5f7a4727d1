/* model/hparams.c - hyper-parameters from a file's metadata, checked. Every number comes from a
 * stranger: it is used only after its range is known, so that products below fit int64 easily. */
#include "model/arch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_D_MODEL = 1 << 18,
    MAX_HEADS = 1 << 12,
    MAX_HEAD_DIM = 1 << 12,
    MAX_D_FF = 1 << 21,
    MAX_VOCAB = 1 << 24,
    MAX_CTX = 1 << 30,
};

static const bg_kv *find(const bg_desc *d, const bg_gguf *g, const char *key, char *full,
                         size_t size)
{
    snprintf(full, size, "%s.%s", d->arch_name, key);
    return bg_gguf_find(g, full);
}

bg_status bg_hparam_int(const bg_desc *d, const bg_gguf *g, const char *key, int64_t def,
                        int64_t lo, int64_t hi, int *v, bg_error *err)
{
    char full[128];
    const bg_kv *kv = find(d, g, key, full, sizeof full);
    int64_t value = def;
    if (!kv) {
        if (def < lo) return bg_fail(err, BG_FORMAT, "%s is missing", full);
    } else if (kv->n < 1 || !bg_kv_int(kv, 0, &value)) {
        return bg_fail(err, BG_FORMAT, "%s is not an integer", full);
    } else if (value < lo || value > hi) {
        return bg_fail(err, BG_FORMAT, "%s is %lld, only %lld..%lld is possible", full,
                       (long long)value, (long long)lo, (long long)hi);
    }
    for (uint64_t i = 1; kv && i < kv->n; i++) {
        int64_t other;
        if (!bg_kv_int(kv, i, &other))
            return bg_fail(err, BG_FORMAT, "%s is not an array of integers", full);
        if (other != value)
            return bg_fail(err, BG_ARG,
                           "%s differs between layers (%lld, then %lld), which is not supported",
                           full, (long long)value, (long long)other);
    }
    if (kv && kv->type == BG_KV_ARR && d->n_layers && kv->n < (uint64_t)d->n_layers)
        return bg_fail(err, BG_FORMAT, "%s has %llu values for %d layers", full,
                       (unsigned long long)kv->n, d->n_layers);
    *v = (int)value;
    return BG_OK;
}

bg_status bg_hparam_float(const bg_desc *d, const bg_gguf *g, const char *key, double def,
                          double lo, double hi, float *v, bg_error *err)
{
    char full[128];
    const bg_kv *kv = find(d, g, key, full, sizeof full);
    double value = def;
    if (!kv) {
        if (def < lo) return bg_fail(err, BG_FORMAT, "%s is missing", full);
    } else if (kv->n != 1 || !bg_kv_float(kv, 0, &value)) {
        return bg_fail(err, BG_FORMAT, "%s is not a number", full);
    } else if (!(value >= lo && value <= hi)) { /* NaN too */
        return bg_fail(err, BG_FORMAT, "%s is %g, only %g..%g is possible", full, value, lo, hi);
    }
    *v = (float)value;
    return BG_OK;
}

bg_status bg_hparam_bool(const bg_desc *d, const bg_gguf *g, const char *key, bool def, bool *v,
                         bg_error *err)
{
    char full[128];
    snprintf(full, sizeof full, "%s.%s", d->arch_name, key);
    return bg_gguf_get_bool(g, full, def, v, err);
}

bool bg_layer_windowed(const bg_desc *d, int layer)
{
    return d->window && d->window_layers[layer / 64] >> (layer % 64) & 1;
}

bool bg_layer_moe(const bg_desc *d, int layer)
{
    return d->n_experts && layer >= d->n_dense;
}

bool bg_layer_indexed(const bg_desc *d, int layer)
{
    return d->index_layers[layer / 64] >> (layer % 64) & 1;
}

void bg_desc_limit(bg_desc *d, int max_ctx)
{
    if (max_ctx <= d->index_top_k) d->index_heads = 0;
}

static void set_layer(uint64_t *set, int layer)
{
    set[layer / 64] |= UINT64_C(1) << (layer % 64);
}

bg_status bg_hparam_layers(const bg_desc *d, const bg_gguf *g, const char *key, uint64_t *set,
                           bool *found, bg_error *err)
{
    char full[128];
    const bg_kv *kv = find(d, g, key, full, sizeof full);
    *found = kv && kv->type == BG_KV_ARR;
    if (!*found) return BG_OK;
    if (kv->n < (uint64_t)d->n_layers)
        return bg_fail(err, BG_FORMAT, "%s has %llu values for %d layers", full,
                       (unsigned long long)kv->n, d->n_layers);
    for (int l = 0; l < d->n_layers; l++) {
        int64_t on;
        if (!bg_kv_int(kv, (uint64_t)l, &on))
            return bg_fail(err, BG_FORMAT, "%s is not an array of integers or booleans", full);
        if (on) set_layer(set, l);
    }
    return BG_OK;
}

bg_status bg_hparam_windows(bg_desc *d, const bg_gguf *g, int default_period, bg_error *err)
{
    bool by_layer = false;
    memset(d->window_layers, 0, sizeof d->window_layers);
    d->window_period = 0;
    bg_status st = bg_hparam_layers(d, g, "attention.sliding_window_pattern", d->window_layers,
                                    &by_layer, err);
    if (st || by_layer) return st;
    st = bg_hparam_int(d, g, "attention.sliding_window_pattern", default_period, 0, BG_MAX_LAYERS,
                       &d->window_period, err);
    for (int l = 0; !st && l < d->n_layers; l++)
        if (d->window_period == 0 || l % d->window_period < d->window_period - 1)
            set_layer(d->window_layers, l);
    return st;
}

static bg_status read_heads(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    if (d->n_heads % d->n_kv_heads)
        return bg_fail(err, BG_FORMAT, "%d query heads are no multiple of %d KV heads", d->n_heads,
                       d->n_kv_heads);
    /* A default that is no whole number counts as a missing key. */
    const int by_width = d->d_model % d->n_heads ? -1 : d->d_model / d->n_heads;
    bg_status st =
        bg_hparam_int(d, g, "attention.key_length", by_width, 2, MAX_HEAD_DIM, &d->head_dim, err);
    if (!st)
        st = bg_hparam_int(d, g, "attention.value_length", by_width, 1, MAX_HEAD_DIM, &d->v_dim,
                           err);
    if (!st)
        st = bg_hparam_int(d, g, "rope.dimension_count", d->head_dim, 2, d->head_dim, &d->n_rot,
                           err);
    if (!st && d->n_rot % 2)
        st = bg_fail(err, BG_FORMAT, "%s.rope.dimension_count is %d, which is odd", d->arch_name,
                     d->n_rot);
    return st;
}

static bg_status read_shape(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    int blocks = 0;
    bg_status st = bg_hparam_int(d, g, "block_count", -1, 1, BG_MAX_LAYERS, &blocks, err);
    if (!st) st = bg_hparam_int(d, g, "nextn_predict_layers", 0, 0, blocks - 1, &d->n_mtp, err);
    if (st) return st;
    d->n_layers = blocks - d->n_mtp; /* blocks that predict further tokens stand at the end */

    st = bg_hparam_int(d, g, "context_length", -1, 1, MAX_CTX, &d->n_ctx_train, err);
    if (!st) st = bg_hparam_int(d, g, "embedding_length", -1, 1, MAX_D_MODEL, &d->d_model, err);
    if (!st) st = bg_experts_read(d, g, err);
    const bool dense = !d->n_experts || d->n_dense;
    if (!st)
        st = bg_hparam_int(d, g, "feed_forward_length", dense ? -1 : 0, dense, MAX_D_FF, &d->d_ff,
                           err);
    if (!st) st = bg_hparam_int(d, g, "attention.head_count", -1, 1, MAX_HEADS, &d->n_heads, err);
    if (!st)
        st = bg_hparam_int(d, g, "attention.head_count_kv", d->n_heads, 1, d->n_heads,
                           &d->n_kv_heads, err);
    if (!st) st = d->arch->mla ? bg_mla_read(d, g, err) : read_heads(d, g, err);
    return st;
}

static bg_status read_rope(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bg_rope_scaling *s = &d->rope_scaling;
    char key[128];
    bg_str type = {0};
    float attn_factor = 1;
    *s = (bg_rope_scaling){.attn_factor = 1, .factor = 1, .log_mul = -1, .mul = 1};
    d->rope_scale = d->rope_scale_swa = 1;
    bg_status st = bg_hparam_float(d, g, "rope.freq_base", 10000, 1, 1e15, &d->rope_base, err);
    d->rope_base_swa = d->rope_base;
    snprintf(key, sizeof key, "%s.rope.scaling.type", d->arch_name);
    if (!st) st = bg_gguf_get_str(g, key, &type, err);
    if (st) return st;
#define IS(word) (type.n == strlen(word) && memcmp(type.p, word, type.n) == 0)
    const bool none = IS("none");
    s->yarn = IS("yarn");
    s->longrope = IS("longrope");
    if (type.n && !none && !s->yarn && !s->longrope && !IS("linear"))
        return bg_fail(err, BG_ARG, "%s is \"%.*s\"; supported are none, linear, yarn and longrope",
                       key, (int)(type.n < 40 ? type.n : 40), type.p);
#undef IS
    st = bg_hparam_float(d, g, "rope.scale_linear", 0, 0, 1e6, &s->factor, err); /* its old name */
    if (!st) st = bg_hparam_float(d, g, "rope.scaling.factor", s->factor, 0, 1e6, &s->factor, err);
    if (!st)
        st = bg_hparam_int(d, g, "rope.scaling.original_context_length", d->n_ctx_train, 1, MAX_CTX,
                           &s->n_orig, err);
    if (!st)
        st = bg_hparam_float(d, g, "rope.scaling.attn_factor", 1, 0, 1e3, &s->attn_factor, err);
    if (!st)
        st = bg_hparam_float(d, g, "rope.scaling.yarn_attn_factor", 1, 0, 1e3, &attn_factor, err);
    if (!st)
        st = bg_hparam_float(d, g, "rope.scaling.yarn_ext_factor", 1, 0, 1e3, &s->ext_factor, err);
    if (!st)
        st =
            bg_hparam_float(d, g, "rope.scaling.yarn_beta_fast", 32, 1e-3, 1e6, &s->beta_fast, err);
    if (!st)
        st = bg_hparam_float(d, g, "rope.scaling.yarn_beta_slow", 1, 1e-3, 1e6, &s->beta_slow, err);
    if (st) return st;
    snprintf(key, sizeof key, "%s.rope.scaling.yarn_log_multiplier", d->arch_name);
    if (bg_gguf_find(g, key))
        st = bg_hparam_float(d, g, "rope.scaling.yarn_log_multiplier", 0, 0, 1e3, &s->log_mul, err);
    if (none || s->factor == 0) s->factor = 1;
    if (s->yarn) s->attn_factor *= attn_factor;
    d->rope_scale = 1 / s->factor;
    return st;
}

static bg_status read_common(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bool causal = true;
    bg_status st = bg_hparam_bool(d, g, "attention.causal", true, &causal, err);
    if (!st && !causal)
        st = bg_fail(err, BG_ARG, "%s.attention.causal is false: an encoder, which cannot generate",
                     d->arch_name);
    if (!st) st = read_shape(d, g, err);
    if (!st) st = read_rope(d, g, err);
    if (!st) st = bg_hparam_float(d, g, "attention.layer_norm_rms_epsilon", -1, 0, 1, &d->eps, err);
    if (!st) st = bg_hparam_float(d, g, "attention.scale", 0, 0, 1e3, &d->attn_scale, err);
    if (!st && d->attn_scale == 0) d->attn_scale = 1 / sqrtf((float)d->head_dim);
    d->embed_scale = 1;
    d->act_fn = BG_SILU;
    return st;
}

/* The embedding has a row for each token: its rows are the vocabulary's size. */
static bg_status read_vocab(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    const bg_tensor *t = bg_role_tensor(g, ROLE_TOKEN_EMBD, 0);
    if (!t) return bg_fail(err, BG_FORMAT, "tensor token_embd.weight is missing");
    if (t->ne[1] < 1 || t->ne[1] > MAX_VOCAB)
        return bg_fail(err, BG_FORMAT, "tensor token_embd.weight has %lld rows, 1..%d is possible",
                       (long long)t->ne[1], MAX_VOCAB);
    d->vocab_size = (int)t->ne[1];
    const bg_kv *tokens = bg_gguf_find(g, "tokenizer.ggml.tokens");
    if (tokens && tokens->type == BG_KV_ARR && tokens->n > (uint64_t)d->vocab_size)
        return bg_fail(err, BG_FORMAT,
                       "the vocabulary has %llu tokens, but token_embd.weight only %d rows",
                       (unsigned long long)tokens->n, d->vocab_size);
    return BG_OK;
}

static bg_status find_arch(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bg_str name = {0};
    char list[256] = "";
    bg_status st = bg_gguf_get_str(g, "general.architecture", &name, err);
    if (st) return st;
    if (!name.n)
        return bg_fail(err, BG_FORMAT, "general.architecture is missing: not a language model");
    d->arch = bg_arch_find(name.p, name.n);
    if (name.n == 6 && memcmp(name.p, "gptoss", 6) == 0)
        return bg_fail(
            err, BG_ARG,
            "architecture \"gptoss\": a gpt-oss file of another converter, with names of "
            "its own, which is not supported; use one whose architecture is \"gpt-oss\"");
    if (!d->arch) {
        for (const char *const *n = bg_arch_names(); *n; n++)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", *list ? ", " : "",
                     *n);
        return bg_fail(err, BG_ARG, "architecture \"%.*s\" is not supported; supported are %s",
                       (int)(name.n < 40 ? name.n : 40), name.p, list);
    }
    snprintf(d->arch_name, sizeof d->arch_name, "%s", d->arch->name);
    return BG_OK;
}

static bg_status read_name(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bg_str name = {0};
    bg_status st = bg_gguf_get_str(g, "general.name", &name, err);
    const char *path = bg_gguf_part_path(g, 0), *slash = strrchr(path, '/');
    if (name.n)
        snprintf(d->name, sizeof d->name, "%.*s", (int)(name.n < 127 ? name.n : 127), name.p);
    else
        snprintf(d->name, sizeof d->name, "%.127s", slash ? slash + 1 : path);
    return st;
}

bg_status bg_desc_read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    *d = (bg_desc){0};
    bg_status st = find_arch(d, g, err);
    if (!st) st = read_name(d, g, err);
    if (!st) st = read_common(d, g, err);
    if (!st) st = read_vocab(d, g, err);
    if (!st) st = d->arch->read(d, g, err);
    if (!st && d->n_experts && !d->n_dense) d->d_ff = 0;
    if (!st) st = bg_tensors_check(d, g, err);
    if (st) return bg_wrap(err, "%s", bg_gguf_part_path(g, 0));
    return BG_OK;
}
