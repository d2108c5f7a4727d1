/* model/qwen2moe.c - qwen2moe: Qwen1.5-MoE, Qwen2-57B-A14B. Attention as in qwen2; experts chosen
 * by softmax, their weights left as they are, and a shared FFN that each token weights by the
 * sigmoid of a product of its own. */
#include "model/arch.h"

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    d->rope_neox = true;
    d->gating = BG_GATING_SOFTMAX;
    d->renormalise = false;
    d->expert_scale = 1;
    bg_status st = bg_expert_width(d, g, d->d_ff / d->n_used, err);
    if (st) return st;
    d->n_shared = 1;
    return bg_hparam_int(d, g, "expert_shared_feed_forward_length", d->d_ff, 1, 1 << 21,
                         &d->d_ff_shared, err);
}

const bg_arch bg_arch_qwen2moe = {
    .name = "qwen2moe",
    .need = ROLES_GLOBAL | ROLES_DENSE | ROLES_QKV_B,
    .may = ROLE(ROLE_OUTPUT) | ROLE(ROLE_OUTPUT_B) | ROLE(ROLE_QKV) | ROLE(ROLE_QKV_B),
    .dense = ROLES_FFN,
    .experts = ROLES_MOE | ROLES_SHARED | ROLE(ROLE_ROUTER_SHEXP),
    .always_experts = true,
    .read = read,
    .forward = bg_prenorm_forward,
};
