/* model/llama.c - llama: Llama 1 to 3, Mistral, Mixtral, SmolLM2 and their many relatives.
 *
 *     x = embed(token)
 *     each layer:  x += Wo attention(rope(Wq h), rope(Wk h), Wv h),  h = rms(x, attn_norm)
 *                  x += Wdown(silu(Wgate h) * (Wup h)),              h = rms(x, ffn_norm)
 *     logits = Wout rms(x, output_norm)
 *
 * Rotation pairs neighbours (2i, 2i+1): converters reorder the rows of q and k for it. Biases
 * may occur anywhere. No layer is windowed, as in the files' reference engine. With
 * experts (Mixtral): chosen by softmax, their weights always renormalised. */
#include "model/arch.h"

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    d->rope_neox = false;
    if (d->n_rot != d->head_dim)
        return bg_fail(
            err, BG_ARG,
            "llama.rope.dimension_count is %d, heads have %d values: partial rotation is "
            "not supported",
            d->n_rot, d->head_dim);
    if (!d->n_experts) return BG_OK;
    d->gating = BG_GATING_SOFTMAX;
    d->renormalise = true;
    d->n_shared = 0;
    return bg_expert_width(d, g, d->d_ff, err);
}

const bg_arch bg_arch_llama = {
    .name = "llama",
    .need = ROLES_GLOBAL | ROLES_DENSE,
    .may = ROLE(ROLE_OUTPUT) | ROLE(ROLE_ROPE_FREQS) | ROLE(ROLE_ROPE_LONG) |
           ROLE(ROLE_ROPE_SHORT) | ROLES_QKV_B | ROLE(ROLE_QKV) | ROLE(ROLE_QKV_B) | ROLE(ROLE_O_B),
    .dense = ROLES_FFN,
    .may_dense = ROLE(ROLE_GATE_B) | ROLE(ROLE_UP_B) | ROLE(ROLE_DOWN_B),
    .experts = ROLES_MOE,
    .read = read,
    .forward = bg_prenorm_forward,
};
