/* model/tensors.c - names and shapes of tensors, and the check that a file has what it must. */
#include "model/arch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const bg_role_info roles[N_ROLES] = {
    [ROLE_TOKEN_EMBD] = {"token_embd.weight", DIM_MODEL, DIM_IDS},
    [ROLE_OUTPUT_NORM] = {"output_norm.weight", DIM_MODEL, DIM_NONE},
    [ROLE_OUTPUT] = {"output.weight", DIM_MODEL, DIM_VOCAB},
    [ROLE_OUTPUT_B] = {"output.bias", DIM_VOCAB, DIM_NONE},
    [ROLE_ROPE_FREQS] = {"rope_freqs.weight", DIM_PAIRS, DIM_NONE},
    [ROLE_ROPE_LONG] = {"rope_factors_long.weight", DIM_PAIRS, DIM_NONE},
    [ROLE_ROPE_SHORT] = {"rope_factors_short.weight", DIM_PAIRS, DIM_NONE},
    [ROLE_ATTN_NORM] = {"attn_norm.weight", DIM_MODEL, DIM_NONE},
    [ROLE_Q] = {"attn_q.weight", DIM_MODEL, DIM_Q},
    [ROLE_K] = {"attn_k.weight", DIM_MODEL, DIM_K},
    [ROLE_V] = {"attn_v.weight", DIM_MODEL, DIM_V},
    [ROLE_QKV] = {"attn_qkv.weight", DIM_MODEL, DIM_QKV},
    [ROLE_Q_B] = {"attn_q.bias", DIM_Q, DIM_NONE},
    [ROLE_K_B] = {"attn_k.bias", DIM_K, DIM_NONE},
    [ROLE_V_B] = {"attn_v.bias", DIM_V, DIM_NONE},
    [ROLE_QKV_B] = {"attn_qkv.bias", DIM_QKV, DIM_NONE},
    [ROLE_Q_NORM] = {"attn_q_norm.weight", DIM_HEAD, DIM_NONE},
    [ROLE_K_NORM] = {"attn_k_norm.weight", DIM_HEAD, DIM_NONE},
    [ROLE_O] = {"attn_output.weight", DIM_ATT, DIM_MODEL},
    [ROLE_O_B] = {"attn_output.bias", DIM_MODEL, DIM_NONE},
    [ROLE_POST_ATTN_NORM] = {"post_attention_norm.weight", DIM_MODEL, DIM_NONE},
    [ROLE_FFN_NORM] = {"ffn_norm.weight", DIM_MODEL, DIM_NONE},
    [ROLE_GATE] = {"ffn_gate.weight", DIM_MODEL, DIM_FF},
    [ROLE_UP] = {"ffn_up.weight", DIM_MODEL, DIM_FF},
    [ROLE_DOWN] = {"ffn_down.weight", DIM_FF, DIM_MODEL},
    [ROLE_GATE_B] = {"ffn_gate.bias", DIM_FF, DIM_NONE},
    [ROLE_UP_B] = {"ffn_up.bias", DIM_FF, DIM_NONE},
    [ROLE_DOWN_B] = {"ffn_down.bias", DIM_MODEL, DIM_NONE},
    [ROLE_POST_FFN_NORM] = {"post_ffw_norm.weight", DIM_MODEL, DIM_NONE},
};

const bg_role_info *bg_role_get(bg_role r)
{
    return &roles[r];
}

int64_t bg_dim_size(const bg_desc *d, bg_dim dim)
{
    const int64_t dk = d->head_dim, dv = d->v_dim;
    switch (dim) {
    case DIM_NONE:
        return 1;
    case DIM_MODEL:
        return d->d_model;
    case DIM_Q:
        return d->n_heads * dk;
    case DIM_K:
        return d->n_kv_heads * dk;
    case DIM_V:
        return d->n_kv_heads * dv;
    case DIM_QKV:
        return d->n_heads * dk + d->n_kv_heads * (dk + dv);
    case DIM_ATT:
        return d->n_heads * dv;
    case DIM_FF:
        return d->d_ff;
    case DIM_VOCAB:
    case DIM_IDS:
        return d->vocab_size;
    case DIM_HEAD:
        return dk;
    case DIM_PAIRS:
        return d->n_rot / 2;
    }
    return 0;
}

static void tensor_name(bg_role r, int layer, char *name, size_t size)
{
    if (r < ROLE_ATTN_NORM)
        snprintf(name, size, "%s", roles[r].name);
    else
        // cppcheck-suppress arrayIndexOutOfBoundsCond ; r is a role
        snprintf(name, size, "blk.%d.%s", layer, roles[r].name);
}

const bg_tensor *bg_role_tensor(const bg_gguf *g, bg_role r, int layer)
{
    char name[64];
    tensor_name(r, layer, name, sizeof name);
    return bg_gguf_find_tensor(g, name);
}

/* The role that a tensor's name stands for, and its layer; N_ROLES: none. */
static bg_role role_of(const char *name, int *layer)
{
    int first = 0, last = ROLE_ATTN_NORM;
    *layer = -1;
    if (strncmp(name, "blk.", 4) == 0) {
        char *rest, canonical[16];
        const long l = strtol(name + 4, &rest, 10);
        if (l < 0 || l >= BG_MAX_LAYERS || *rest != '.') return N_ROLES;
        /* "blk.01." and "blk.+1." are other names than "blk.1." */
        const int len = snprintf(canonical, sizeof canonical, "blk.%ld.", l);
        if (strncmp(name, canonical, (size_t)len) != 0) return N_ROLES;
        *layer = (int)l;
        name = rest + 1;
        first = ROLE_ATTN_NORM;
        last = N_ROLES;
    }
    for (int r = first; r < last; r++)
        if (strcmp(name, roles[r].name) == 0) return (bg_role)r;
    return N_ROLES;
}

static bg_status check_shape(const bg_desc *d, const bg_tensor *t, bg_role r, bg_error *err)
{
    const int64_t in = bg_dim_size(d, roles[r].in), out = bg_dim_size(d, roles[r].out);
    const bg_qtype_info *type = bg_qtype_get(t->type);
    if (t->ne[0] != in || t->ne[1] != out || t->ne[2] != 1 || t->ne[3] != 1)
        return bg_fail(err, BG_FORMAT,
                       "tensor %s is [%lld, %lld, %lld, %lld]; the metadata says [%lld, %lld]",
                       t->cname, (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2],
                       (long long)t->ne[3], (long long)in, (long long)out);
    if (!type->dequant)
        return bg_fail(err, BG_ARG, "tensor %s has type %s, which is not supported", t->cname,
                       type->name ? type->name : "(unknown)");
    return BG_OK;
}

static bg_status check_role(const bg_desc *d, const bg_gguf *g, bg_role r, int layer, bool needed,
                            bg_error *err)
{
    const bg_tensor *t = bg_role_tensor(g, r, layer);
    if (t) return check_shape(d, t, r, err);
    if (!needed) return BG_OK;
    char name[64];
    tensor_name(r, layer, name, sizeof name);
    return bg_fail(err, BG_FORMAT, "tensor %s is missing; architecture %s needs it", name,
                   d->arch_name);
}

bg_status bg_tensors_check(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bg_status st = BG_OK;
    const bg_arch *a = d->arch;
    const uint64_t may = a->need | a->may;
    for (int layer = 0; !st && layer < d->n_layers; layer++) {
        uint64_t need = a->need;
        const bool fused = may & ROLE(ROLE_QKV) && bg_role_tensor(g, ROLE_QKV, layer);
        if (fused) need &= ~(ROLES_QKV | ROLES_QKV_B);
        for (int r = layer ? ROLE_ATTN_NORM : 0; !st && r < N_ROLES; r++) {
            if (!(may & ROLE(r))) continue;
            const uint64_t other = fused ? ROLES_QKV | ROLES_QKV_B : ROLE(ROLE_QKV_B);
            const bg_tensor *t = other & ROLE(r) ? bg_role_tensor(g, (bg_role)r, layer) : NULL;
            if (t)
                st = bg_fail(err, BG_FORMAT,
                             "tensor %s: q, k and v are %s in this layer, and it fits only the "
                             "other form",
                             t->cname, fused ? "one matrix" : "three matrices");
            if (other & ROLE(r)) continue;
            st = check_role(d, g, (bg_role)r, layer, need & ROLE(r), err);
        }
    }
    if (st) return st;

    d->n_params = d->weight_bytes = 0;
    d->n_unused = 0;
    for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
        const bg_tensor *t = bg_gguf_tensor(g, i);
        int layer;
        const bg_role r = role_of(t->cname, &layer);
        if (r == N_ROLES || !(may & ROLE(r)) || layer >= d->n_layers) {
            if (d->n_unused++ == 0)
                snprintf(d->unused_name, sizeof d->unused_name, "%.90s", t->cname);
            continue;
        }
        d->n_params += (uint64_t)(t->ne[0] * t->ne[1]);
        d->weight_bytes += t->bytes;
    }
    d->tied = !bg_role_tensor(g, ROLE_OUTPUT, 0);
    return BG_OK;
}
