/* Half and bfloat16: every value, every rounding boundary, against the compiler's _Float16 and
 * plain arithmetic. */
#include "base/f16.h"

#include <math.h>

#include <criterion/criterion.h>

/* From the definition: sign, 5 bits of exponent, 10 of fraction. */
static double half_value(uint16_t h)
{
    int exp = h >> 10 & 0x1f, man = h & 0x3ff;
    double v = exp == 0x1f ? (man ? NAN : INFINITY)
               : exp       ? ldexp(1024 + man, exp - 25)
                           : ldexp(man, -24);
    return h & 0x8000 ? -v : v;
}

static bool same(float a, double b)
{
    return isnan(b) ? isnan(a) : a == (float)b && !signbit(a) == !signbit(b);
}

Test(f16, every_half_to_float)
{
    for (uint32_t h = 0; h < 0x10000; h++)
        cr_assert(same(bg_f16_to_f32((uint16_t)h), half_value((uint16_t)h)), "%04x gives %a", h,
                  (double)bg_f16_to_f32((uint16_t)h));
}

Test(f16, every_half_comes_back)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        uint16_t back = bg_f32_to_f16(bg_f16_to_f32((uint16_t)h));
        bool nan = (h & 0x7fff) > 0x7c00;
        cr_assert(nan ? (back & 0x7fff) > 0x7c00 && (back & 0x8000) == (h & 0x8000) : back == h,
                  "%04x came back as %04x", h, back);
    }
}

/* Nearest half to f >= 0, ties to even, by looking at both neighbours in double. */
static uint16_t nearest_half(float f, uint16_t below)
{
    double lo = half_value(below), hi = below == 0x7bff ? 65536 : half_value((uint16_t)(below + 1));
    double to_lo = f - lo, to_hi = hi - f;
    if (to_lo != to_hi) return to_lo < to_hi ? below : (uint16_t)(below + 1);
    return below & 1 ? (uint16_t)(below + 1) : below;
}

Test(f16, rounds_to_nearest_even)
{
    for (uint32_t h = 0; h <= 0x7bff; h++) {
        double lo = half_value((uint16_t)h);
        double hi = h == 0x7bff ? 65536 : half_value((uint16_t)(h + 1));
        float mid = (float)(lo + (hi - lo) / 2); /* exact: one bit more than a half has */
        const float around[] = {nextafterf(mid, 0),        mid,
                                nextafterf(mid, INFINITY), (float)(lo + (hi - lo) / 4),
                                nextafterf((float)hi, 0),  nextafterf((float)lo, INFINITY)};
        for (size_t i = 0; i < sizeof around / sizeof *around; i++) {
            float f = around[i];
            if (f < lo || f > hi) continue;
            uint16_t want =
                f == (float)hi && h != 0x7bff ? (uint16_t)(h + 1) : nearest_half(f, (uint16_t)h);
            cr_assert_eq(bg_f32_to_f16(f), want, "%a gives %04x, not %04x", (double)f,
                         bg_f32_to_f16(f), want);
            cr_assert_eq(bg_f32_to_f16(-f), want | 0x8000);
        }
    }
    cr_expect_eq(bg_f32_to_f16(65519.996f), 0x7bff);
    cr_expect_eq(bg_f32_to_f16(65520.0f), 0x7c00);
    cr_expect_eq(bg_f32_to_f16(3e38f), 0x7c00);
    cr_expect_eq(bg_f32_to_f16(-INFINITY), 0xfc00);
    cr_expect_eq(bg_f32_to_f16(0x1p-25f), 0);
    cr_expect_eq(bg_f32_to_f16(0x1.000002p-25f), 1);
    cr_expect_eq(bg_f32_to_f16(0x1p-149f), 0);
}

#ifdef __FLT16_MAX__
Test(f16, agrees_with_the_compiler)
{
    for (uint64_t i = 0; i < UINT64_C(1) << 32; i += 977) {
        float f = bg_f32_from_bits((uint32_t)i);
        _Float16 c = (_Float16)f;
        uint16_t want;
        memcpy(&want, &c, 2);
        if (isnan(f))
            cr_assert_gt(bg_f32_to_f16(f) & 0x7fff, 0x7c00);
        else
            cr_assert_eq(bg_f32_to_f16(f), want, "%a", (double)f);
    }
}
#endif

Test(f16, bfloat16)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = bg_bf16_to_f32((uint16_t)h);
        cr_assert_eq(bg_f32_bits(f), h << 16);
        bool nan = (h & 0x7fff) > 0x7f80;
        uint16_t back = bg_f32_to_bf16(f);
        cr_assert(nan ? (back & 0x7fff) > 0x7f80 : back == h, "%04x came back as %04x", h, back);
        if ((h & 0x7fff) >= 0x7f80) continue;
        /* The bits between h and h + 1 in magnitude are those of the lower half of the word. */
        uint16_t up = (uint16_t)(h + 1), even = h & 1 ? up : (uint16_t)h;
        cr_assert_eq(bg_f32_to_bf16(bg_f32_from_bits(h << 16 | 0x7fff)), h);
        cr_assert_eq(bg_f32_to_bf16(bg_f32_from_bits(h << 16 | 0x8000)), even);
        cr_assert_eq(bg_f32_to_bf16(bg_f32_from_bits(h << 16 | 0x8001)), up);
    }
    cr_expect_gt(bg_f32_to_bf16(bg_f32_from_bits(0x7f800001)), 0x7f80, "a NaN stays one");
}
