/* model/glm4moe.c - glm4moe: GLM-4.5, 4.5-Air, 4.6, 4.7. Norms before each branch only (the one
 * before the FFN is called post_attention_norm), rotation of halves among the first n_rot values of
 * a head, per-head norms of q and k in the large models. After the first dense layers: experts
 * chosen by sigmoid with a bias that only chooses, and shared ones. */
#include "model/arch.h"

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    d->rope_neox = true;
    bg_status st = bg_hparam_gating(d, g, BG_GATING_SIGMOID, err);
    if (!st) st = bg_expert_width(d, g, 0, err);
    return st;
}

const bg_arch bg_arch_glm4moe = {
    .name = "glm4moe",
    .need = ROLES_GLOBAL | ROLES_ATTN | ROLE(ROLE_FFN_NORM_2),
    .may = ROLE(ROLE_OUTPUT) | ROLE(ROLE_QKV) | ROLES_QKV_B | ROLE(ROLE_QKV_B) | ROLE(ROLE_Q_NORM) |
           ROLE(ROLE_K_NORM),
    .dense = ROLES_FFN,
    .experts = ROLES_MOE | ROLES_SHARED | ROLE(ROLE_CHOICE_B),
    .always_experts = true,
    .read = read,
    .forward = bg_prenorm_forward,
};
