/* model/gemma3.c - gemma3: 270M to 27B, text.
 *
 *     x = sqrt(d) * embed(token)
 *     each layer:  x += rms(Wo attention(..), post_attention_norm),            h = rms(x,
 * attn_norm) x += rms(Wdown(gelu(Wgate h) * (Wup h)), post_ffw_norm),     h = rms(x, ffn_norm)
 *     logits = Wout rms(x, output_norm)
 *
 * Heads of q and k are normalised before rotation. Five layers of six see a window of keys and
 * rotate with a base of their own; context is extended in the others only. Norm weights hold the
 * "1 +" of the original already. */
#include "model/arch.h"

#include <math.h>

static bg_status read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    d->rope_neox = true;
    d->rope_swa_own = true;
    d->act_fn = BG_GELU_TANH;
    d->embed_scale = sqrtf((float)d->d_model);
    /* No key tells: the 27B model, alone with 62 layers, scales by its width over its heads. */
    d->attn_scale =
        1 / sqrtf(d->n_layers == 62 ? (float)d->d_model / (float)d->n_heads : (float)d->head_dim);
    bg_status st = bg_hparam_int(d, g, "attention.sliding_window", 0, 0, 1 << 30, &d->window, err);
    if (!st) st = bg_hparam_windows(d, g, 6, err);
    if (!st)
        st = bg_hparam_float(d, g, "rope.freq_base_swa", 10000, 1, 1e15, &d->rope_base_swa, err);
    if (!st)
        st = bg_hparam_float(d, g, "final_logit_softcapping", 0, 0, 1e6, &d->final_softcap, err);
    return st;
}

const bg_arch bg_arch_gemma3 = {
    .name = "gemma3",
    .need = ROLES_GLOBAL | ROLES_DENSE | ROLE(ROLE_Q_NORM) | ROLE(ROLE_K_NORM) |
            ROLE(ROLE_POST_ATTN_NORM) | ROLE(ROLE_POST_FFN_NORM),
    .may = ROLE(ROLE_OUTPUT) | ROLE(ROLE_QKV),
    .dense = ROLES_FFN,
    .read = read,
    .forward = bg_sandwich_forward,
};
