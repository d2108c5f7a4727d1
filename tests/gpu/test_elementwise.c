/* tests/gpu/test_elementwise.c - embedding rows, norms, gated activations, gathers, against float64. */
#include "gpu.h"

Test(elementwise, add)
{
    NEEDS_GPU();
    const size_t n = 7 * 33;
    float *x = random_f32(n, 1, 1), *y = random_f32(n, 2, 1);
    float *dx = to_device(x, n * sizeof *x), *dy = to_device(y, n * sizeof *y);
    CU(bgk_add(dx, 33, dy, 33, 7, 33, 0));
    float *got = from_device(dx, n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        cr_assert_eq(got[i], x[i] + y[i]);
}
