/* model/qwen3.c - qwen3, dense. As llama without biases, but each head of q and k is normalised
 * before its rotation, which pairs halves (i, i + n_rot/2); heads have a size of their own. */
#include "model/arch.h"

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    (void)g;
    (void)err;
    d->rope_neox = true;
    return BG_OK;
}

const bg_arch bg_arch_qwen3 = {
    .name = "qwen3",
    .need = ROLES_GLOBAL | ROLES_DENSE | ROLE(ROLE_Q_NORM) | ROLE(ROLE_K_NORM),
    .may = ROLE(ROLE_OUTPUT) | ROLE(ROLE_QKV),
    .dense = ROLES_FFN,
    .read = read,
    .forward = bg_prenorm_forward,
};
