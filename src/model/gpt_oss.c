/* model/gpt_oss.c - gpt-oss: 20b and 120b.
 *
 *     each layer:  x += Wo attention(..) + bo,                    h = rms(x, attn_norm)
 *                  x += sum over the experts chosen of w (Wdown act(Wgate h + bg, Wup h + bu) + bd)
 *
 * Even layers see a window of keys. Each head has a sink, a score without a value. All layers
 * rotate halves with YaRN, whose ramp has whole bounds here, as in the files' reference engine. The
 * router's logits have a bias; the weights of experts are a softmax over those chosen. */
#include "model/arch.h"

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    d->rope_neox = true;
    d->act_fn = BG_SWIGLU_CLAMP;
    d->gating = BG_GATING_SOFTMAX_CHOSEN;
    d->renormalise = false;
    d->expert_scale = 1;
    bg_status st = bg_expert_width(d, g, 0, err);
    if (!st) st = bg_hparam_int(d, g, "attention.sliding_window", 0, 0, 1 << 30, &d->window, err);
    if (!st) st = bg_hparam_windows(d, g, 2, err);
    return st;
}

const bg_arch bg_arch_gpt_oss = {
    .name = "gpt-oss",
    .need = ROLES_GLOBAL | ROLE(ROLE_OUTPUT) | ROLES_ATTN | ROLES_QKV_B | ROLE(ROLE_O_B) |
            ROLE(ROLE_SINKS) | ROLE(ROLE_FFN_NORM_2),
    .may = ROLE(ROLE_QKV) | ROLE(ROLE_QKV_B),
    .experts = ROLES_MOE | ROLE(ROLE_ROUTER_B) | ROLE(ROLE_GATE_EXPS_B) | ROLE(ROLE_UP_EXPS_B) |
               ROLE(ROLE_DOWN_EXPS_B),
    .always_experts = true,
    .read = read,
    .forward = bg_prenorm_forward,
};
