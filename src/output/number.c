#include "output/number.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>

/* v * 10^k for |k| < 66; powers up to 22 are exact in double. */
static double scale10(double v, int k)
{
    static const double exact[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                   1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                   1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    for (; k > 22; k -= 22)
        v *= 1e22;
    for (; k < -22; k += 22)
        v /= 1e22;
    return k >= 0 ? v * exact[k] : v / exact[-k];
}

void bg_number_put(bg_buf *b, float f)
{
    if (f == 0) {
        bg_buf_str(b, "0.0");
        return;
    }
    double d = fabs((double)f);
    double ulp = d - (double)nextafterf((float)d, 0); /* the smaller of the gaps on both sides */
    int e = 0;                                        /* 10^e <= d < 10^(e+1) */
    while (scale10(1, e + 1) <= d)
        e++;
    while (scale10(1, e) > d)
        e--;
    /* Nine digits always tell floats apart. Fewer do when the decimal is nearer than half a gap;
     * the margin is far above what the doubles here can be wrong by. */
    int p = 1;
    int64_t m;
    for (;; p++) {
        m = (int64_t)(scale10(d, p - 1 - e) + 0.5);
        if (p == 9 || fabs(scale10((double)m, e - p + 1) - d) < 0.499 * ulp) break;
    }
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)m);
    if (n > p) { /* rounded up to the next power of ten */
        e++;
        n = 1;
    }
    while (n > 1 && digits[n - 1] == '0')
        n--;
    if (f < 0) bg_buf_char(b, '-');
    if (e < -5 || e > 8) {
        bg_buf_char(b, digits[0]);
        if (n > 1) bg_buf_char(b, '.');
        bg_buf_add(b, digits + 1, (size_t)n - 1);
        bg_buf_printf(b, "e%d", e);
        return;
    }
    if (e < 0) {
        bg_buf_str(b, "0.");
        for (int i = -1; i > e; i--)
            bg_buf_char(b, '0');
        bg_buf_add(b, digits, (size_t)n);
        return;
    }
    for (int i = 0; i <= e; i++)
        bg_buf_char(b, i < n ? digits[i] : '0');
    bg_buf_char(b, '.');
    if (n > e + 1)
        bg_buf_add(b, digits + e + 1, (size_t)(n - e - 1));
    else
        bg_buf_char(b, '0');
}
