/* backend/cpu/simd.h - vectors of float32 as wide as the file's machine flags allow.
 *
 * One source (a *_body.h) is compiled for plain C, AVX2 and AVX-512 by three small .c files; VW is
 * the width in floats. Arithmetic operators work on vf as they are; vf_fma() fuses where the
 * machine can, so results of different builds may differ in their last bits, results of one never
 * do. */
#ifndef BG_BACKEND_CPU_SIMD_H
#define BG_BACKEND_CPU_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "backend/ops.h"
#include "base/f16.h"

#if defined(__AVX512F__)
enum { VW = 16 };
#define VF_BYTES 64
#elif defined(__AVX2__)
enum { VW = 8 };
#define VF_BYTES 32
#else
enum { VW = 4 };
#define VF_BYTES 16
#endif

#define SIMD static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VF_BYTES)));
typedef int32_t vi __attribute__((vector_size(VF_BYTES)));
typedef float vf_any __attribute__((vector_size(VF_BYTES), aligned(4), may_alias));

SIMD vf vf_load(const float *p)
{
    return *(const vf_any *)p;
}

SIMD void vf_store(float *p, vf v)
{
    *(vf_any *)p = v;
}

SIMD vf vf_set(float x)
{
    return x - (vf){0}; /* a broadcast: x - 0 is x, also for -0 */
}

SIMD vi vi_set(int32_t x)
{
    return x + (vi){0};
}

SIMD vf vf_fma(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* mask lanes are 0 or -1 */
SIMD vf vf_select(vi mask, vf yes, vf no)
{
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

SIMD vf vf_max(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

SIMD vf vf_min(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vf_select(a < b, a, b);
#endif
}

SIMD float vf_max_lane(vf v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float a[VW];
    vf_store(a, v);
    for (int w = VW / 2; w; w /= 2)
        for (int i = 0; i < w; i++)
            a[i] = a[i] > a[i + w] ? a[i] : a[i + w];
    return a[0];
#endif
}

SIMD float vf_sum_lanes(vf v) /* halves added pairwise: one order for a width */
{
    float a[VW];
    vf_store(a, v);
    for (int w = VW / 2; w; w /= 2)
        for (int i = 0; i < w; i++)
            a[i] += a[i + w];
    return a[0];
}

/* ---- cache elements -------------------------------------------------------------------------- */

typedef uint16_t vu16 __attribute__((vector_size(VF_BYTES / 2), aligned(2), may_alias));

SIMD size_t cache_elem_bytes(bg_cache_type type)
{
    return type == BG_CACHE_F32 ? 4 : 2;
}

/* VW cache elements as float32, exact. */
SIMD vf vf_load_cache(bg_cache_type type, const void *p)
{
    if (type == BG_CACHE_F32) return vf_load(p);
#if defined(__AVX512F__)
    if (type == BG_CACHE_F16) return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16);
#elif defined(__AVX2__)
    if (type == BG_CACHE_F16) return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16);
#else
    vi h = __builtin_convertvector(*(const vu16 *)p, vi);
    if (type == BG_CACHE_BF16) return (vf)(h << 16);
    /* The exponent field is rebased by a product, which is exact for subnormals too. */
    vi bits = (h & 0x7fff) << 13;
    vf value = (vf)bits * 0x1p112f;
    value = vf_select(bits >= 0x0f800000, (vf)(bits | 0x7f800000), value); /* inf and NaN */
    // cppcheck-suppress integerOverflow ; lanes of a vector wrap
    return (vf)((vi)value | (h & 0x8000) << 16);
#endif
}

SIMD void store_cache(bg_cache_type type, void *dst, int64_t i, float x)
{
    if (type == BG_CACHE_F32)
        ((float *)dst)[i] = x;
    else if (type == BG_CACHE_F16)
        ((uint16_t *)dst)[i] = bg_f32_to_f16(x);
    else
        ((uint16_t *)dst)[i] = bg_f32_to_bf16(x);
}

/* ---- exp ------------------------------------------------------------------------------------- */

/* x = n ln 2 + r with |r| <= ln(2)/2; returns e^r - 1 and 2^n. x lies in [-87.3, 88.3]. */
SIMD vf vf_exp_parts(vf x, vf *pow2)
{
    const vf magic = vf_set(0x1.8p23f); /* adding it rounds to an integer, left in the low bits */
    vf shifted = vf_fma(x, vf_set(0x1.715476p+0f), magic);
    vf n = shifted - magic;
    vf r = vf_fma(n, vf_set(-0x1.63p-1f), x); /* ln 2 in two parts; n times the first is exact */
    r = vf_fma(n, vf_set(0x1.bd0106p-13f), r);
    vf p = vf_fma(vf_set(1.0f / 5040), r, vf_set(1.0f / 720));
    p = vf_fma(p, r, vf_set(1.0f / 120));
    p = vf_fma(p, r, vf_set(1.0f / 24));
    p = vf_fma(p, r, vf_set(1.0f / 6));
    p = vf_fma(p, r, vf_set(0.5f));
    *pow2 = (vf)(((vi)shifted << 23) + 0x3f800000);
    return vf_fma(p, r * r, r);
}

/* e^x within 2 ulp; 0 below -87.3, no more than e^88.3. NaN gives a number: callers' inputs are
 * finite or -inf. */
SIMD vf vf_exp(vf x)
{
    vf pow2, y = vf_min(vf_max(x, vf_set(-87.3f)), vf_set(88.3f));
    vf p = vf_exp_parts(y, &pow2);
    return vf_select(x < vf_set(-87.3f), (vf){0}, vf_fma(p, pow2, pow2));
}

/* tanh within 3 ulp, through e^(-2|x|) - 1, which keeps small arguments exact. */
SIMD vf vf_tanh(vf x)
{
    vf pow2, a = (vf)((vi)x & 0x7fffffff);
    vf p = vf_exp_parts(vf_max(a * -2.0f, vf_set(-40.0f)), &pow2);
    vf t = vf_fma(p, pow2, pow2 - 1.0f);
    vf y = t / (-2.0f - t);
    return (vf)((vi)y | ((vi)x & INT32_MIN));
}

#endif
