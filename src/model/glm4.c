/* model/glm4.c - glm4: GLM-4-0414 9B and 32B, GLM-Z1.
 *
 *     each layer:  x += rms(Wo attention(..), post_attention_norm),        h = rms(x, attn_norm)
 *                  x += rms(Wdown(silu(g) * u), post_ffw_norm),   [g; u] = Wup rms(x, ffn_norm)
 *
 * Rotation pairs neighbours (2i, 2i+1) among the first n_rot values of a head; files of the models
 * that see pictures have them reordered for pairs of halves. */
#include "model/arch.h"

#include <stdio.h>

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    int64_t first = 0, second = 0;
    char key[64];
    (void)err;
    snprintf(key, sizeof key, "%s.rope.dimension_sections", d->arch_name);
    const bg_kv *kv = bg_gguf_find(g, key);
    d->rope_neox = kv && kv->type == BG_KV_ARR && kv->n >= 2 && bg_kv_int(kv, 0, &first) &&
                   bg_kv_int(kv, 1, &second) && first > 0 && second > 0;
    return BG_OK;
}

const bg_arch bg_arch_glm4 = {
    .name = "glm4",
    .need = ROLES_GLOBAL | ROLES_DENSE | ROLE(ROLE_POST_ATTN_NORM) | ROLE(ROLE_POST_FFN_NORM),
    .may = ROLE(ROLE_OUTPUT) | ROLE(ROLE_QKV) | ROLES_QKV_B | ROLE(ROLE_QKV_B),
    .dense = ROLE(ROLE_GATE_UP) | ROLE(ROLE_DOWN),
    .read = read,
    .forward = bg_sandwich_forward,
};
