/* model/deepseek2.c - deepseek2: DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash. Latent attention
 * (mla.c); after the first dense layers experts, chosen by softmax (V2) or by sigmoid with a bias
 * that only chooses, in groups or not, and shared ones. */
#include "model/arch.h"

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bg_rope_scaling *s = &d->rope_scaling;
    d->rope_neox = false;
    if (s->log_mul >= 0) { /* a tenth of it is stored */
        s->log_mul /= 0.1f;
        s->mul = s->log_mul;
    }
    /* Files of GLM-4.7-Flash exist without the key. */
    const bool flash =
        (d->n_layers + d->n_mtp == 47 || d->n_layers + d->n_mtp == 48) && d->vocab_size == 154880;
    bg_status st = BG_OK;
    if (d->n_experts)
        st = bg_hparam_gating(d, g, flash ? BG_GATING_SIGMOID : BG_GATING_SOFTMAX, err);
    if (!st && d->n_experts) st = bg_expert_width(d, g, 0, err);
    if (!st) st = bg_mla_resolve(d, g, err);
    return st;
}

const bg_arch bg_arch_deepseek2 = {
    .name = "deepseek2",
    .need = ROLES_GLOBAL | ROLES_MLA,
    .may = ROLE(ROLE_OUTPUT),
    .dense = ROLES_FFN,
    .experts = ROLES_MOE | ROLES_SHARED,
    .may_expert = ROLE(ROLE_CHOICE_B),
    .mla = true,
    .read = read,
    .forward = bg_prenorm_forward,
};
