/* model/qwen3moe.c - qwen3moe: Qwen3-30B-A3B, 235B-A22B, Coder. Attention as in qwen3; the FFN of
 * every layer is a mixture of experts, chosen by softmax, their weights always renormalised. */
#include "model/arch.h"

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    d->rope_neox = true;
    d->gating = BG_GATING_SOFTMAX;
    d->renormalise = true;
    return bg_expert_width(d, g, d->d_ff / d->n_used, err);
}

const bg_arch bg_arch_qwen3moe = {
    .name = "qwen3moe",
    .need = ROLES_GLOBAL | ROLES_DENSE | ROLE(ROLE_Q_NORM) | ROLE(ROLE_K_NORM),
    .may = ROLE(ROLE_OUTPUT) | ROLE(ROLE_QKV),
    .dense = ROLES_FFN,
    .experts = ROLES_MOE,
    .always_experts = true,
    .read = read,
    .forward = bg_prenorm_forward,
};
