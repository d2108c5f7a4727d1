/* base/f16.h - IEEE half, bfloat16 and their conversions, exact and round-to-nearest-even. */
#ifndef BG_BASE_F16_H
#define BG_BASE_F16_H

#include <stdint.h>
#include <string.h>

static inline float bg_f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t bg_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float bg_bf16_to_f32(uint16_t h)
{
    return bg_f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t bg_f32_to_bf16(float f)
{
    uint32_t u = bg_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u); /* NaN stays NaN */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static inline float bg_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = h >> 10 & 0x1fu, man = h & 0x3ffu;
    if (exp == 0x1f) return bg_f32_from_bits(sign | 0x7f800000u | man << 13);
    if (exp == 0) { /* zero and subnormals: man * 2^-24, exact in float */
        float f = (float)man * 0x1p-24f;
        return sign ? -f : f;
    }
    return bg_f32_from_bits(sign | (exp + 112u) << 23 | man << 13);
}

static inline uint16_t bg_f32_to_f16(float f)
{
    uint32_t u = bg_f32_bits(f), sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or more: inf */
    if (u <
        0x38800000u) { /* below 2^-14: adding 0.5 leaves the rounded subnormal in the low bits */
        uint32_t r = bg_f32_bits(bg_f32_from_bits(u) + 0.5f) - 0x3f000000u;
        return (uint16_t)(sign | r);
    }
    u += 0xfffu + (u >> 13 & 1u);
    return (uint16_t)(sign | (u - 0x38000000u) >> 13);
}

#endif
