/* model/qwen2.c - qwen2: Qwen 1.5 to 2.5, QwQ, distillates. As llama, but q, k and v have biases
 * (large ones) and rotation pairs halves (i, i + n_rot/2). */
#include "model/arch.h"

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    (void)g;
    (void)err;
    d->rope_neox = true;
    return BG_OK;
}

const bg_arch bg_arch_qwen2 = {
    .name = "qwen2",
    /* A fused file has attn_qkv.bias instead of the three. */
    .need = ROLES_GLOBAL | ROLES_DENSE | ROLES_QKV_B,
    .may = ROLE(ROLE_OUTPUT) | ROLE(ROLE_OUTPUT_B) | ROLE(ROLE_QKV) | ROLE(ROLE_QKV_B),
    .dense = ROLES_FFN,
    .read = read,
    .forward = bg_prenorm_forward,
};
