/* model/rope.c - the table of frequencies that rotation uses.
 *
 *     angle of pair i at position p = p * freq[i],  freq[i] = s * b^(-2i/n_rot) / factor[i]
 *
 * YaRN (Peng et al., arXiv:2309.00071, section 3) keeps the fast pairs as they are and stretches
 * the slow ones, with a linear ramp between the pairs that turn beta_fast and beta_slow times
 * within the original context; and it scales cos and sin by mscale. */
#include "model/arch.h"

#include <math.h>

static double clamp01(double x)
{
    return x < 0 ? 0 : x > 1 ? 1 : x;
}

/* The pair (a real number) that turns `turns` times in the original context. */
static double pair_of(const bg_desc *d, double turns)
{
    const double tau = 6.283185307179586;
    return d->n_rot * log(d->rope_scaling.n_orig / (tau * turns)) / (2 * log(d->rope_base));
}

static double yarn_magnitude(double factor, double mul)
{
    return factor <= 1 ? 1 : 1 + 0.1 * mul * log(factor);
}

void bg_rope_table(const bg_desc *d, bool windowed, const float *factors, float *freq,
                   float *mscale)
{
    const bg_rope_scaling *y = &d->rope_scaling;
    windowed = windowed && d->rope_swa_own;
    const double base = windowed ? d->rope_base_swa : d->rope_base;
    const double s = windowed ? d->rope_scale_swa : d->rope_scale;
    const bool yarn = y->yarn && !windowed;
    double low = 0, high = 0;
    *mscale = 1;
    if (!windowed && (y->yarn || y->longrope)) *mscale = y->attn_factor;
    if (yarn) {
        low = fmax(0, floor(pair_of(d, y->beta_fast)));
        high = fmin(d->n_rot - 1, ceil(pair_of(d, y->beta_slow)));
        double m = yarn_magnitude(y->factor, y->log_mul >= 0 ? y->mul : 1);
        if (y->log_mul >= 0) m /= yarn_magnitude(y->factor, y->log_mul);
        *mscale = (float)(*mscale * m);
    }
    for (int i = 0; i < d->n_rot / 2; i++) {
        double scale = s;
        if (yarn) {
            const double keep = y->ext_factor * (1 - clamp01((i - low) / fmax(0.001, high - low)));
            scale = s * (1 - keep) + keep;
        }
        freq[i] = (float)(scale * pow(base, -2.0 * i / d->n_rot) / (factors ? factors[i] : 1));
    }
}
