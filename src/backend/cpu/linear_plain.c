/* backend/cpu/linear_plain.c - the kernels in portable C: the reference of the others. */
#include <math.h>

#include "backend/cpu/linear_kernels.h"

static void fma_panel(float (*sum)[LIN_ROWS], const float (*panel)[LIN_ROWS], const float *x,
                      int64_t x_stride, int w, int n)
{
    for (int t = 0; t < w; t++) {
        float acc[LIN_ROWS] = {0};
        for (int k = 0; k < n; k++) {
            const float v = x[t * x_stride + k];
            for (int r = 0; r < LIN_ROWS; r++)
                acc[r] = fmaf(panel[k][r], v, acc[r]);
        }
        for (int r = 0; r < LIN_ROWS; r++)
            sum[t][r] = acc[r];
    }
}

const lin_isa *lin_isa_plain(void)
{
    static const lin_isa isa = {.fma = fma_panel};
    return &isa;
}
