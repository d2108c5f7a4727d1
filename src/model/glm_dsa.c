/* model/glm_dsa.c - glm-dsa: GLM-5, 5.1, 5.2. As DeepSeek-V3, and in each layer, or in some, an
 * indexer that chooses the keys which attention sees (DeepSeek Sparse Attention, of
 * DeepSeek-V3.2-Exp); the other layers use the choice of the nearest one below. */
#include "model/arch.h"

/* What files without the key attention.indexer.types are: GLM-5 and 5.1, or 5.2. */
static void default_types(bg_desc *d)
{
    for (int l = 0; l < d->n_layers; l++)
        if (d->n_ctx_train < 1 << 20 || l < 2 || l % 4 == 2)
            d->index_layers[l / 64] |= UINT64_C(1) << (l % 64);
}

static bg_status read_indexer(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bool found = false;
    bg_status st =
        bg_hparam_int(d, g, "attention.indexer.head_count", -1, 1, 1024, &d->index_heads, err);
    if (!st)
        st = bg_hparam_int(d, g, "attention.indexer.key_length", -1, d->n_rot, 4096, &d->index_dim,
                           err);
    if (!st)
        st = bg_hparam_int(d, g, "attention.indexer.top_k", -1, 1, 1 << 30, &d->index_top_k, err);
    if (!st) st = bg_hparam_layers(d, g, "attention.indexer.types", d->index_layers, &found, err);
    if (!st && !found) default_types(d);
    if (!st && !bg_layer_indexed(d, 0))
        st = bg_fail(err, BG_FORMAT,
                     "%s.attention.indexer.types: the first layer has no indexer, and none below "
                     "it to share",
                     d->arch_name);
    return st;
}

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    d->rope_neox = false;
    if (d->rope_scaling.log_mul >= 0) d->rope_scaling.log_mul /= 0.1f; /* a tenth of it is stored */
    bg_status st = bg_hparam_gating(d, g, BG_GATING_SIGMOID, err);
    if (!st) st = bg_expert_width(d, g, 0, err);
    if (!st) st = bg_mla_resolve(d, g, err);
    if (!st && !d->q_rank)
        st = bg_fail(err, BG_FORMAT, "%s.attention.q_lora_rank is missing", d->arch_name);
    if (!st) st = read_indexer(d, g, err);
    return st;
}

const bg_arch bg_arch_glm_dsa = {
    .name = "glm-dsa",
    .need = ROLES_GLOBAL | ROLES_MLA,
    .may = ROLE(ROLE_OUTPUT),
    .dense = ROLES_FFN,
    .experts = ROLES_MOE | ROLES_SHARED | ROLE(ROLE_CHOICE_B),
    .always_experts = true,
    .mla = true,
    .read = read,
    .forward = bg_prenorm_forward,
};
