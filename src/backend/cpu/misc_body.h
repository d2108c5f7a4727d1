/* backend/cpu/misc_body.h - the small loops of kernels.h, compiled once for each instruction set.
 *
 * The includer defines KERNELS, the name of the table, ATTEND, its attention, and INDEX_SCORES. An
 * element's result never depends on where in a row it lies, nor on how long the row is. */

#include <math.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/simd.h"
#include "base/rng.h"

enum { SUM_LANES = 32, SUM_VECTORS = SUM_LANES / VW };

static float dot(const float *x, const float *y, int64_t n)
{
    vf acc[SUM_VECTORS];
    float lane[SUM_LANES];
    for (int v = 0; v < SUM_VECTORS; v++)
        acc[v] = (vf){0};
    int64_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int v = 0; v < SUM_VECTORS; v++)
            acc[v] += vf_load(x + i + v * VW) * vf_load(y + i + v * VW); /* not fused: the same bits
                                                                          * in every build */
    for (int v = 0; v < SUM_VECTORS; v++)
        vf_store(lane + v * VW, acc[v]);
    for (int l = 0; i < n; i++, l++)
        lane[l] += x[i] * y[i];
    for (int w = SUM_LANES / 2; w; w /= 2)
        for (int l = 0; l < w; l++)
            lane[l] += lane[l + w];
    return lane[0];
}

static float sum_squares(const float *x, int64_t n)
{
    return dot(x, x, n);
}

static void add_scaled(float *x, const float *y, float s, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] += s * y[i];
}

static void scale_mul(float *out, const float *x, const float *w, float s, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i] * s * w[i];
}

static void add(float *x, const float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] += y[i];
}

SIMD vf sigmoid_times(vf x, vf t) /* x / (1 + e^-t) */
{
    return x / (vf_exp(-t) + 1.0f);
}

SIMD vf act_of(bg_act_fn fn, vf x)
{
    if (fn == BG_SILU) return sigmoid_times(x, x);
    /* (1 + tanh u) / 2 = 1 / (1 + e^-2u), without the cancellation of 1 + tanh u */
    vf inner = vf_fma(x * x * x, vf_set(0.044715f), x);
    return sigmoid_times(x, inner * (2 * 0.79788456080286536f));
}

/* fn of the gate, times up */
SIMD vf glu_vector(bg_act_fn fn, vf gate, vf up)
{
    if (fn != BG_SWIGLU_CLAMP) return act_of(fn, gate) * up;
    const vf seven = vf_set(7); /* selected, not taken as a minimum: NaN stays */
    gate = vf_select(gate > seven, seven, gate);
    up = vf_select(up > seven, seven, vf_select(up < -seven, -seven, up));
    return sigmoid_times(gate, gate * 1.702f) * (up + 1.0f);
}

SIMD void glu_of(bg_act_fn fn, float *out, const float *gate, const float *up, int64_t n)
{
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        vf_store(out + i, glu_vector(fn, vf_load(gate + i), vf_load(up + i)));
    if (i < n) {
        float g[VW] = {0}, u[VW] = {0}, o[VW];
        memcpy(g, gate + i, (size_t)(n - i) * sizeof(float));
        memcpy(u, up + i, (size_t)(n - i) * sizeof(float));
        vf_store(o, glu_vector(fn, vf_load(g), vf_load(u)));
        memcpy(out + i, o, (size_t)(n - i) * sizeof(float));
    }
}

static void glu(float *out, const float *gate, const float *up, int64_t n, bg_act_fn fn)
{
    if (fn == BG_SILU)
        glu_of(BG_SILU, out, gate, up, n);
    else if (fn == BG_GELU_TANH)
        glu_of(BG_GELU_TANH, out, gate, up, n);
    else if (fn == BG_SWIGLU_CLAMP)
        glu_of(BG_SWIGLU_CLAMP, out, gate, up, n);
    else
        for (int64_t i = 0; i < n; i++) /* erfc keeps the left tail; this form is rare */
            out[i] = 0.5f * gate[i] * erfcf(gate[i] * -0.70710678118654752f) * up[i];
}

static void rotate(float *x, const float *cosine, const float *sine, int n_rot, bool neox)
{
    const int half = n_rot / 2;
    if (neox)
        for (int i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cosine[i] - b * sine[i];
            x[i + half] = a * sine[i] + b * cosine[i];
        }
    else
        for (int i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosine[i] - b * sine[i];
            x[2 * i + 1] = a * sine[i] + b * cosine[i];
        }
}

static void store(bg_cache_type type, void *dst, const float *x, int64_t n)
{
    int64_t i = 0;
    if (type == BG_CACHE_F32) {
        memcpy(dst, x, (size_t)n * sizeof *x);
        return;
    }
#if defined(__AVX512F__)
    if (type == BG_CACHE_F16)
        for (; i + 16 <= n; i += 16)
            _mm256_storeu_si256((__m256i *)((uint16_t *)dst + i),
                                _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    if (type == BG_CACHE_F16)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128((__m128i *)((uint16_t *)dst + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        store_cache(type, dst, i, x[i]);
}

static void store_column(bg_cache_type type, void *dst, int64_t stride, const float *x, int64_t n)
{
    if (type == BG_CACHE_F32) {
        for (int64_t i = 0; i < n; i++)
            ((float *)dst)[i * stride] = x[i];
        return;
    }
    for (int64_t i = 0; i < n; i += BG_LANES) {
        uint16_t half[BG_LANES];
        const int m = n - i < BG_LANES ? (int)(n - i) : BG_LANES;
        store(type, half, x + i, m);
        for (int j = 0; j < m; j++)
            ((uint16_t *)dst)[(i + j) * stride] = half[j];
    }
}

static void softcap(float *x, int64_t n, float cap)
{
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        vf_store(x + i, vf_tanh(vf_load(x + i) / cap) * cap);
    if (i < n) {
        float t[VW] = {0};
        memcpy(t, x + i, (size_t)(n - i) * sizeof(float));
        vf_store(t, vf_tanh(vf_load(t) / cap) * cap);
        memcpy(x + i, t, (size_t)(n - i) * sizeof(float));
    }
}

static void chunk_max(float *most, const float *x, int64_t n)
{
    for (int64_t c = 0; c * BG_CHUNK_TOKENS < n; c++) {
        const float *p = x + c * BG_CHUNK_TOKENS;
        const int64_t left = n - c * BG_CHUNK_TOKENS;
        vf m = vf_set(-INFINITY);
        if (left >= BG_CHUNK_TOKENS)
            for (int i = 0; i < BG_CHUNK_TOKENS; i += VW)
                m = vf_max(vf_load(p + i), m); /* NaN on the left: the right one stays */
        float v = vf_max_lane(m);
        if (left < BG_CHUNK_TOKENS)
            for (int64_t i = 0; i < left; i++)
                v = p[i] > v ? p[i] : v;
        most[c] = v;
    }
}

SIMD vf exp_from(vf x, float least, float max, float inv_t)
{
    return vf_select(x >= least, vf_exp((x - max) * inv_t), (vf){0});
}

static double exp_sum(const float *x, int64_t n, float least, float max, float inv_t)
{
    enum { PIECE = 16 * BG_LANES }; /* terms added in float32 before they go to float64 */
    double total = 0;
    for (int64_t p = 0; p < n; p += PIECE) {
        const int64_t end = n - p < PIECE ? n : p + PIECE;
        vf sum = (vf){0};
        int64_t i = p;
        for (; i + VW <= end; i += VW)
            sum += exp_from(vf_load(x + i), least, max, inv_t);
        if (i < end) {
            float t[VW];
            for (int l = 0; l < VW; l++)
                t[l] = i + l < end ? x[i + l] : -INFINITY;
            sum += exp_from(vf_load(t), least, max, inv_t);
        }
        total += (double)vf_sum_lanes(sum);
    }
    return total;
}

#if defined(__AVX512F__)
/* One of the two products of a Philox round for 16 blocks: low and high words. */
SIMD __m512i mul_words(__m512i x, __m512i m, __m512i *high)
{
    const __m512i even = _mm512_mul_epu32(x, m);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
    *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    return _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}

static void words(uint32_t out[BG_CHUNK_TOKENS], uint64_t seed, uint64_t pos, uint32_t first)
{
    /* Element 4 l + r works on block 4 r + l, so that unpacking leaves the words in order. */
    const __m512i block = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i m0 = _mm512_set1_epi32((int)0xD2511F53u),
                  m1 = _mm512_set1_epi32((int)0xCD9E8D57u);
    __m512i c0 = _mm512_add_epi32(block, _mm512_set1_epi32((int)first));
    __m512i c1 = _mm512_setzero_si512(); /* the low counter is a block number below 2^30 */
    __m512i c2 = _mm512_set1_epi32((int)(uint32_t)pos);
    __m512i c3 = _mm512_set1_epi32((int)(uint32_t)(pos >> 32));
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 10; i++) {
        __m512i h0, h1;
        const __m512i l0 = mul_words(c0, m0, &h0), l1 = mul_words(c2, m1, &h1);
        c0 = _mm512_xor_si512(_mm512_xor_si512(h1, c1), _mm512_set1_epi32((int)k0));
        c2 = _mm512_xor_si512(_mm512_xor_si512(h0, c3), _mm512_set1_epi32((int)k1));
        c1 = l1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const __m512i a = _mm512_unpacklo_epi32(c0, c1), b = _mm512_unpacklo_epi32(c2, c3);
    const __m512i c = _mm512_unpackhi_epi32(c0, c1), d = _mm512_unpackhi_epi32(c2, c3);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(a, b));
    _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi64(a, b));
    _mm512_storeu_si512(out + 32, _mm512_unpacklo_epi64(c, d));
    _mm512_storeu_si512(out + 48, _mm512_unpackhi_epi64(c, d));
}
#else
static void words(uint32_t out[BG_CHUNK_TOKENS], uint64_t seed, uint64_t pos, uint32_t first)
{
    for (uint32_t i = 0; i < BG_CHUNK_TOKENS / 4; i++) {
        const bg_philox w = bg_philox4x32(seed, first + i, pos);
        memcpy(out + (size_t)i * 4, w.v, sizeof w.v);
    }
}
#endif

/* With u the uniform number of word w and z = 2^32 - 1 - w: -ln(-ln u) <= -ln(1 - u), and 1 - u is
 * (z + 0.5) / 2^32. The bits of a float read as an integer are a lower bound of its log2. */
static float gumbel_bound(float bound[BG_CHUNK_TOKENS], const float *x, const uint32_t *word, int n,
                          float max, float inv_t)
{
    const float ln2 = 0.69314718f;
    float most = -INFINITY;
    for (int i = 0; i < BG_CHUNK_TOKENS; i++) {
        const float half = (float)(int32_t)(~word[i] >> 1) + 0.25f; /* at most (z + 0.5) / 2 */
        int32_t bits;
        memcpy(&bits, &half, sizeof bits);
        bound[i] = ln2 * 158.0f - ln2 * 0x1p-23f * (float)bits;
    }
    for (int i = 0; i < n; i++)
        bound[i] += (x[i] - max) * inv_t;
    for (int i = 0; i < n; i++)
        most = bound[i] > most ? bound[i] : most;
    return most;
}

const bg_kernels KERNELS = {
    .sum_squares = sum_squares,
    .dot = dot,
    .add_scaled = add_scaled,
    .scale_mul = scale_mul,
    .add = add,
    .glu = glu,
    .rotate = rotate,
    .store = store,
    .store_column = store_column,
    .softcap = softcap,
    .chunk_max = chunk_max,
    .exp_sum = exp_sum,
    .words = words,
    .gumbel_bound = gumbel_bound,
    .attend = ATTEND,
    .index_scores = INDEX_SCORES,
};
