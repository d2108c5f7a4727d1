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
    [ROLE_FFN_NORM_2] = {"post_attention_norm.weight", DIM_MODEL, DIM_NONE},
    [ROLE_GATE_UP] = {"ffn_up.weight", DIM_MODEL, DIM_FF2},
    [ROLE_SINKS] = {"attn_sinks.weight", DIM_HEADS, DIM_NONE},
    [ROLE_ROUTER] = {"ffn_gate_inp.weight", DIM_MODEL, DIM_EXPERTS},
    [ROLE_ROUTER_B] = {"ffn_gate_inp.bias", DIM_EXPERTS, DIM_NONE},
    [ROLE_CHOICE_B] = {"exp_probs_b.bias", DIM_EXPERTS, DIM_NONE},
    [ROLE_GATE_EXPS] = {"ffn_gate_exps.weight", DIM_MODEL, DIM_FFE, DIM_EXPERTS},
    [ROLE_UP_EXPS] = {"ffn_up_exps.weight", DIM_MODEL, DIM_FFE, DIM_EXPERTS},
    [ROLE_DOWN_EXPS] = {"ffn_down_exps.weight", DIM_FFE, DIM_MODEL, DIM_EXPERTS},
    [ROLE_GATE_UP_EXPS] = {"ffn_gate_up_exps.weight", DIM_MODEL, DIM_FFE2, DIM_EXPERTS},
    [ROLE_GATE_EXPS_B] = {"ffn_gate_exps.bias", DIM_FFE, DIM_EXPERTS},
    [ROLE_UP_EXPS_B] = {"ffn_up_exps.bias", DIM_FFE, DIM_EXPERTS},
    [ROLE_DOWN_EXPS_B] = {"ffn_down_exps.bias", DIM_MODEL, DIM_EXPERTS},
    [ROLE_GATE_SHEXP] = {"ffn_gate_shexp.weight", DIM_MODEL, DIM_FFS},
    [ROLE_UP_SHEXP] = {"ffn_up_shexp.weight", DIM_MODEL, DIM_FFS},
    [ROLE_DOWN_SHEXP] = {"ffn_down_shexp.weight", DIM_FFS, DIM_MODEL},
    [ROLE_ROUTER_SHEXP] = {"ffn_gate_inp_shexp.weight", DIM_MODEL, DIM_NONE},
    [ROLE_Q_A] = {"attn_q_a.weight", DIM_MODEL, DIM_Q_RANK},
    [ROLE_Q_A_NORM] = {"attn_q_a_norm.weight", DIM_Q_RANK, DIM_NONE},
    [ROLE_Q_B_LORA] = {"attn_q_b.weight", DIM_Q_RANK, DIM_Q},
    [ROLE_KV_A] = {"attn_kv_a_mqa.weight", DIM_MODEL, DIM_KV_A},
    [ROLE_KV_A_NORM] = {"attn_kv_a_norm.weight", DIM_KV_RANK, DIM_NONE},
    [ROLE_K_B_MLA] = {"attn_k_b.weight", DIM_NOPE, DIM_KV_RANK, DIM_HEADS},
    [ROLE_V_B_MLA] = {"attn_v_b.weight", DIM_KV_RANK, DIM_V_HEAD, DIM_HEADS},
    [ROLE_KV_B] = {"attn_kv_b.weight", DIM_KV_RANK, DIM_KV_B},
    [ROLE_INDEX_Q] = {"indexer.attn_q_b.weight", DIM_Q_RANK, DIM_INDEX_Q},
    [ROLE_INDEX_K] = {"indexer.attn_k.weight", DIM_MODEL, DIM_INDEX},
    [ROLE_INDEX_K_NORM] = {"indexer.k_norm.weight", DIM_INDEX, DIM_NONE},
    [ROLE_INDEX_K_NORM_B] = {"indexer.k_norm.bias", DIM_INDEX, DIM_NONE},
    [ROLE_INDEX_PROJ] = {"indexer.proj.weight", DIM_MODEL, DIM_INDEX_HEADS},
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
    case DIM_HEADS:
        return d->n_heads;
    case DIM_FF2:
        return 2 * (int64_t)d->d_ff;
    case DIM_EXPERTS:
        return d->n_experts;
    case DIM_FFE:
        return d->d_ff_expert;
    case DIM_FFE2:
        return 2 * (int64_t)d->d_ff_expert;
    case DIM_FFS:
        return d->d_ff_shared;
    case DIM_Q_RANK:
        return d->q_rank;
    case DIM_KV_RANK:
        return d->kv_rank;
    case DIM_KV_A:
        return d->kv_rank + d->n_rot;
    case DIM_NOPE:
        return d->nope;
    case DIM_V_HEAD:
        return dv;
    case DIM_KV_B:
        return d->n_heads * (d->nope + dv);
    case DIM_INDEX_Q:
        return (int64_t)d->index_heads * d->index_dim;
    case DIM_INDEX:
        return d->index_dim;
    case DIM_INDEX_HEADS:
        return d->index_heads;
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

/* The layer that a tensor's name tells, and what follows; -1: none, *rest is the name. */
static int layer_of(const char *name, const char **rest)
{
    char *end, canonical[16];
    *rest = name;
    if (strncmp(name, "blk.", 4) != 0) return -1;
    const long l = strtol(name + 4, &end, 10);
    if (l < 0 || l >= BG_MAX_LAYERS || *end != '.') return -1;
    /* "blk.01." and "blk.+1." are other names than "blk.1." */
    const int len = snprintf(canonical, sizeof canonical, "blk.%ld.", l);
    if (strncmp(name, canonical, (size_t)len) != 0) return -1;
    *rest = end + 1;
    return (int)l;
}

/* The role, one of a set, that a name stands for; N_ROLES: none. Some roles share a name, but no
 * architecture has both. */
static bg_role role_of(const char *name, bool global, uint64_t set)
{
    for (int r = global ? 0 : ROLE_ATTN_NORM; r < (global ? ROLE_ATTN_NORM : (int)N_ROLES); r++)
        if (set & ROLE(r) && strcmp(name, roles[r].name) == 0) return (bg_role)r;
    return N_ROLES;
}

/* The layer holds `other` in place of the roles of `first`. */
static void take_other(bg_layer_roles *r, bg_role other, uint64_t first)
{
    r->need = (r->need & ~first) | ROLE(other);
    r->may = (r->may & ~first) | ROLE(other);
}

bg_layer_roles bg_roles_of(const bg_desc *d, const bg_gguf *g, int layer)
{
    const bg_arch *a = d->arch;
    const bool moe = bg_layer_moe(d, layer);
    bg_layer_roles r = {.need = a->need | (moe ? a->experts : a->dense)};
    r.may = r.need | a->may | (moe ? a->may_expert : a->may_dense);
    if (moe && !d->n_shared) {
        r.need &= ~(ROLES_SHARED | ROLE(ROLE_ROUTER_SHEXP));
        r.may &= ~(ROLES_SHARED | ROLE(ROLE_ROUTER_SHEXP));
    }
    if (r.may & ROLE(ROLE_QKV) && bg_role_tensor(g, ROLE_QKV, layer)) {
        r.wrong = r.may & (ROLES_QKV | ROLES_QKV_B);
        r.need &= ~(ROLES_QKV | ROLES_QKV_B);
        r.may &= ~(ROLES_QKV | ROLES_QKV_B);
    } else if (r.may & ROLE(ROLE_QKV)) {
        r.wrong = ROLE(ROLE_QKV_B);
        r.may &= ~(ROLE(ROLE_QKV) | ROLE(ROLE_QKV_B));
    }
    if (moe && bg_role_tensor(g, ROLE_GATE_UP_EXPS, layer)) {
        take_other(&r, ROLE_GATE_UP_EXPS, ROLE(ROLE_GATE_EXPS) | ROLE(ROLE_UP_EXPS));
        r.wrong |= ROLE(ROLE_GATE_EXPS) | ROLE(ROLE_UP_EXPS);
    }
    if (a->mla) {
        if (!d->q_rank) take_other(&r, ROLE_Q, ROLES_MLA_Q);
        r.wrong |= d->q_rank ? ROLE(ROLE_Q) : ROLES_MLA_Q;
        if (d->kv_b) take_other(&r, ROLE_KV_B, ROLES_MLA_KV);
        r.ignored |= d->kv_b ? ROLES_MLA_KV : ROLE(ROLE_KV_B); /* a file may have both forms */
    }
    if (d->index_heads && bg_layer_indexed(d, layer)) {
        r.need |= ROLES_INDEX;
        r.may |= ROLES_INDEX;
    } else if (d->index_top_k) { /* some files repeat them in layers that have none */
        r.ignored |= ROLES_INDEX;
    }
    return r;
}

bg_role bg_tensor_role(const bg_desc *d, const bg_gguf *g, const bg_tensor *t, bool *known)
{
    const char *name;
    const int layer = layer_of(t->cname, &name);
    *known = layer >= d->n_layers && layer < d->n_layers + d->n_mtp;
    if (layer >= d->n_layers) return N_ROLES;
    const bg_layer_roles here = bg_roles_of(d, g, layer < 0 ? 0 : layer);
    const bg_role r = role_of(name, layer < 0, here.may);
    *known = r != N_ROLES || role_of(name, layer < 0, here.ignored) != N_ROLES;
    return r;
}

static bg_status check_shape(const bg_desc *d, const bg_tensor *t, bg_role r, bg_error *err)
{
    const int64_t in = bg_dim_size(d, roles[r].in), out = bg_dim_size(d, roles[r].out);
    const int64_t depth = bg_dim_size(d, roles[r].depth);
    const bg_qtype_info *type = bg_qtype_get(t->type);
    if (t->ne[0] != in || t->ne[1] != out || t->ne[2] != depth || t->ne[3] != 1)
        return bg_fail(err, BG_FORMAT,
                       "tensor %s is [%lld, %lld, %lld, %lld]; the metadata says [%lld, %lld, "
                       "%lld, 1]",
                       t->cname, (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2],
                       (long long)t->ne[3], (long long)in, (long long)out, (long long)depth);
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

/* The first converters wrote a tensor for each expert. */
static bg_status check_experts_are_stacks(const bg_desc *d, const bg_gguf *g, bg_error *err)
{
    char name[64];
    snprintf(name, sizeof name, "blk.%d.ffn_gate.0.weight", d->n_dense);
    if (!d->n_experts || !bg_gguf_find_tensor(g, name)) return BG_OK;
    return bg_fail(err, BG_ARG,
                   "tensor %s: an old file with one tensor for each expert, which is not "
                   "supported; convert the model again",
                   name);
}

bg_status bg_tensors_check(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bg_status st = check_experts_are_stacks(d, g, err);
    for (int layer = 0; !st && layer < d->n_layers; layer++) {
        const bg_layer_roles roles_here = bg_roles_of(d, g, layer);
        for (int r = layer ? ROLE_ATTN_NORM : 0; !st && r < N_ROLES; r++) {
            const bg_tensor *t =
                roles_here.wrong & ROLE(r) ? bg_role_tensor(g, (bg_role)r, layer) : NULL;
            if (t)
                st = bg_fail(err, BG_FORMAT,
                             "tensor %s: this layer holds its matrices in another form, in which "
                             "there is no such tensor",
                             t->cname);
            else if (roles_here.may & ROLE(r))
                st = check_role(d, g, (bg_role)r, layer, roles_here.need & ROLE(r), err);
        }
    }
    if (st) return st;

    d->n_params = d->weight_bytes = 0;
    d->n_unused = 0;
    for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
        const bg_tensor *t = bg_gguf_tensor(g, i);
        bool known;
        if (bg_tensor_role(d, g, t, &known) != N_ROLES) {
            d->n_params += (uint64_t)(t->ne[0] * t->ne[1] * t->ne[2]);
            d->weight_bytes += t->bytes;
        } else if (!known && d->n_unused++ == 0) {
            snprintf(d->unused_name, sizeof d->unused_name, "%.90s", t->cname);
        }
    }
    d->tied = !bg_role_tensor(g, ROLE_OUTPUT, 0);
    return BG_OK;
}
