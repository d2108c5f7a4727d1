/* backend/cpu/attention_body.h - the attention kernel, compiled once for each instruction set.
 *
 * The includer defines ATTEND and INDEX_SCORES, the names of the functions. For each query vector
 * (a row of one head):
 *
 *     for each block from the first that it sees, in order
 *         s_j   = chain of fma over 64 dimensions at a time, these partial sums added in order
 *         s_j   = softcap(scale s_j); -inf for positions that it does not see
 *         m'    = max(m, max_j s_j);  c = e^(m - m');  p_j = e^(s_j - m')
 *         lane sums l = l c + p;  o = o c + (chain of fma over the visible j of p_j v_j)
 *     out = o / sum of lanes of l
 *
 * How many query vectors are worked on together changes none of these orders, so a row has the same
 * bits in a decode step and in any prefill chunk. Positions that a row does not see are never
 * multiplied: they may hold anything. */

#include <math.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/simd.h"

enum {
    DIM_CHUNK = 64,                        /* dimensions summed in one chain */
    SCORE_ROWS = sizeof(vf) == 64 ? 8 : 6, /* query vectors in registers: scores, */
    VALUE_ROWS = 6,                        /* and values */
    VALUE_VECTORS = sizeof(vf) == 64 ? 4 : 2,
};

/* The next block is fetched into the second-level cache: the first has too few places for lines
 * that are under way to keep up with memory. */
SIMD void fetch_ahead(const char *p)
{
    __builtin_prefetch(p, 0, 2);
}

/* Scores of n_rows query vectors (constant, <= SCORE_ROWS) against n_vec vectors of keys. */
SIMD void score_tile(const int n_rows, const int n_vec, bg_cache_type type, const float *q,
                     int head_dim, const char *k, const char *next, size_t key_bytes, float *s,
                     int lanes)
{
    const size_t vec_bytes = VW * cache_elem_bytes(type);
    for (int d0 = 0; d0 < head_dim; d0 += DIM_CHUNK) {
        const int d1 = d0 + DIM_CHUNK < head_dim ? d0 + DIM_CHUNK : head_dim;
        vf acc[SCORE_ROWS][2];
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 2
            for (int n = 0; n < n_vec; n++)
                acc[r][n] = (vf){0};
        for (int d = d0; d < d1; d++) {
            vf key[2];
#pragma GCC unroll 2
            for (int n = 0; n < n_vec; n++)
                key[n] = vf_load_cache(type, k + (size_t)d * key_bytes + (size_t)n * vec_bytes);
            if (next) fetch_ahead(next + (size_t)d * key_bytes);
#pragma GCC unroll 8
            for (int r = 0; r < n_rows; r++) {
                vf qd = vf_set(q[(size_t)r * (size_t)head_dim + (size_t)d]);
#pragma GCC unroll 2
                for (int n = 0; n < n_vec; n++)
                    acc[r][n] = vf_fma(qd, key[n], acc[r][n]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 2
            for (int n = 0; n < n_vec; n++) {
                float *to = s + (size_t)r * (size_t)lanes + (size_t)n * VW;
                vf_store(to, d0 == 0 ? acc[r][n] : vf_load(to) + acc[r][n]);
            }
    }
}

/* o = o c + sum over j in [lo, hi) of p_j v_j for n_rows (constant, <= VALUE_ROWS) query vectors.
 */
SIMD void value_tile(const int n_rows, const int n_vec, bg_cache_type type, const float *p,
                     int lanes, int lo, int hi, const char *v, const char *next, size_t value_bytes,
                     const float *c, float *o, int v_stride)
{
    const size_t vec_bytes = VW * cache_elem_bytes(type);
    vf acc[VALUE_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < n_vec; n++)
            acc[r][n] = (vf){0};
    for (int j = lo; j < hi; j++) {
        const char *vj = v + (size_t)j * value_bytes;
        vf value[4];
#pragma GCC unroll 4
        for (int n = 0; n < n_vec; n++)
            value[n] = vf_load_cache(type, vj + (size_t)n * vec_bytes);
        if (next) {
            fetch_ahead(next + (size_t)j * value_bytes);
            if ((size_t)n_vec * vec_bytes > 64) fetch_ahead(next + (size_t)j * value_bytes + 64);
        }
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++) {
            vf pj = vf_set(p[(size_t)r * (size_t)lanes + (size_t)j]);
#pragma GCC unroll 4
            for (int n = 0; n < n_vec; n++)
                acc[r][n] = vf_fma(pj, value[n], acc[r][n]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < n_vec; n++) {
            float *to = o + (size_t)r * (size_t)v_stride + (size_t)n * VW;
            vf_store(to, vf_fma(vf_load(to), vf_set(c[r]), acc[r][n]));
        }
}

/* All keys of a block for n_rows query vectors. */
SIMD void score_rows(const int n_rows, bg_cache_type type, const float *q, int head_dim,
                     const char *k, const char *next, float *s, int lanes)
{
    const size_t elem = cache_elem_bytes(type), key_bytes = (size_t)lanes * elem;
    int n = 0;
    for (; n + 2 * VW <= lanes; n += 2 * VW)
        score_tile(n_rows, 2, type, q, head_dim, k + (size_t)n * elem,
                   next ? next + (size_t)n * elem : NULL, key_bytes, s + n, lanes);
    for (; n < lanes; n += VW)
        score_tile(n_rows, 1, type, q, head_dim, k + (size_t)n * elem,
                   next ? next + (size_t)n * elem : NULL, key_bytes, s + n, lanes);
}

SIMD void value_rows(const int n_rows, bg_cache_type type, const float *p, int lanes, int lo,
                     int hi, const char *v, const char *next, const float *c, float *o,
                     int v_stride)
{
    const size_t elem = cache_elem_bytes(type), value_bytes = (size_t)v_stride * elem;
    int n = 0;
    for (; n + VALUE_VECTORS * VW <= v_stride; n += VALUE_VECTORS * VW)
        value_tile(n_rows, VALUE_VECTORS, type, p, lanes, lo, hi, v + (size_t)n * elem,
                   next ? next + (size_t)n * elem : NULL, value_bytes, c, o + n, v_stride);
    for (; n < v_stride; n += VW)
        value_tile(n_rows, 1, type, p, lanes, lo, hi, v + (size_t)n * elem,
                   next ? next + (size_t)n * elem : NULL, value_bytes, c, o + n, v_stride);
}

/* One function a row count and element type; a switch on both picks it. */
typedef void score_fn(const float *q, int head_dim, const char *k, const char *next, float *s,
                      int lanes);
typedef void value_fn(const float *p, int lanes, int lo, int hi, const char *v, const char *next,
                      const float *c, float *o, int v_stride);

#define SCORE_FN(rows, name, type)                                                 \
    static void score_##rows##_##name(const float *q, int head_dim, const char *k, \
                                      const char *next, float *s, int lanes)       \
    {                                                                              \
        score_rows(rows, type, q, head_dim, k, next, s, lanes);                    \
    }
#define VALUE_FN(rows, name, type)                                                              \
    static void value_##rows##_##name(const float *p, int lanes, int lo, int hi, const char *v, \
                                      const char *next, const float *c, float *o, int v_stride) \
    {                                                                                           \
        value_rows(rows, type, p, lanes, lo, hi, v, next, c, o, v_stride);                      \
    }
#define BOTH_FN(rows, name, type) SCORE_FN(rows, name, type) VALUE_FN(rows, name, type)
#define ROWS_FN(name, type) \
    BOTH_FN(1, name, type)  \
    BOTH_FN(2, name, type)  \
    BOTH_FN(3, name, type)  \
    BOTH_FN(4, name, type)  \
    BOTH_FN(5, name, type)  \
    BOTH_FN(6, name, type)

ROWS_FN(f16, BG_CACHE_F16)
ROWS_FN(bf16, BG_CACHE_BF16)
ROWS_FN(f32, BG_CACHE_F32)
#if defined(__AVX512F__)
SCORE_FN(7, f16, BG_CACHE_F16)
SCORE_FN(7, bf16, BG_CACHE_BF16)
SCORE_FN(7, f32, BG_CACHE_F32)
SCORE_FN(8, f16, BG_CACHE_F16)
SCORE_FN(8, bf16, BG_CACHE_BF16)
SCORE_FN(8, f32, BG_CACHE_F32)
#define MORE(name) score_7_##name, score_8_##name,
#else
#define MORE(name)
#endif

#define SCORES(name)                                                                          \
    {                                                                                         \
        NULL, score_1_##name, score_2_##name, score_3_##name, score_4_##name, score_5_##name, \
            score_6_##name, MORE(name)                                                        \
    }
#define VALUES(name)                                                                          \
    {                                                                                         \
        NULL, value_1_##name, value_2_##name, value_3_##name, value_4_##name, value_5_##name, \
            value_6_##name                                                                    \
    }

static score_fn *const score_table[3][SCORE_ROWS + 1] = {
    [BG_CACHE_F16] = SCORES(f16), [BG_CACHE_BF16] = SCORES(bf16), [BG_CACHE_F32] = SCORES(f32)};
static value_fn *const value_table[3][VALUE_ROWS + 1] = {
    [BG_CACHE_F16] = VALUES(f16), [BG_CACHE_BF16] = VALUES(bf16), [BG_CACHE_F32] = VALUES(f32)};

/* n elements (a multiple of BG_LANES) to float32; reads the next block's lines ahead. */
SIMD void widen_as(bg_cache_type type, float *dst, const char *src, const char *next, size_t n)
{
    const size_t elem = cache_elem_bytes(type);
    for (size_t i = 0; i < n; i += BG_LANES) {
        fetch_ahead(next + i * elem);
#pragma GCC unroll 4
        for (int w = 0; w < BG_LANES; w += VW)
            vf_store(dst + i + w, vf_load_cache(type, src + (i + (size_t)w) * elem));
    }
}

static void widen(bg_cache_type type, float *dst, const char *src, const char *next, size_t n)
{
    if (type == BG_CACHE_F16)
        widen_as(BG_CACHE_F16, dst, src, next, n);
    else
        widen_as(BG_CACHE_BF16, dst, src, next, n);
}

/* The working memory of one call, cut from its scratch. */
typedef struct work {
    float *k, *v;    /* one block in float32 */
    float *q;        /* [n_rows * n_heads][head_dim] */
    float *s;        /* [..][lanes] scores, then probabilities */
    float *o;        /* [..][v_stride] */
    float *lane_sum; /* [..][VW] */
    float *max, *c;  /* [..] running maximum; this block's correction */
} work;

/* Scores of one query vector in a block whose visible keys are [lo, hi): scales, caps, masks, and
 * returns the largest. */
SIMD float finish_scores(const bg_attend *a, float *s, int lo, int hi)
{
    vf iota = {0}, most = vf_set(-INFINITY);
    const vf scale = vf_set(a->scale);
    for (int i = 0; i < VW; i++)
        iota[i] = (float)i;
    const bool all = lo == 0 && hi == a->block_lanes;
    for (int n = 0; n < a->block_lanes; n += VW) {
        vf x = vf_load(s + n) * scale;
        if (a->softcap > 0) x = vf_tanh(x / a->softcap) * a->softcap;
        if (!all) {
            vf at = iota + (float)n;
            x = vf_select((at >= (float)lo) & (at < (float)hi), x, vf_set(-INFINITY));
        }
        vf_store(s + n, x);
        most = vf_max(x, most);
    }
    return vf_max_lane(most);
}

SIMD void exp_scores(const bg_attend *a, float *s, float max, float c, float *lane_sum)
{
    vf sum = (vf){0};
    for (int n = 0; n < a->block_lanes; n += VW) {
        vf p = vf_exp(vf_load(s + n) - max);
        vf_store(s + n, p);
        sum += p;
    }
    vf_store(lane_sum, vf_fma(vf_load(lane_sum), vf_set(c), sum));
}

static void start(const bg_attend *a, const work *w)
{
    const size_t dim = (size_t)a->head_dim;
    for (int r = 0; r < a->n_rows; r++)
        for (int h = 0; h < a->n_heads; h++) {
            const size_t i = (size_t)r * (size_t)a->n_heads + (size_t)h;
            memcpy(w->q + i * dim, a->q + r * a->q_stride + (int64_t)h * a->head_dim,
                   dim * sizeof(float));
            memset(w->o + i * (size_t)a->v_stride, 0, (size_t)a->v_stride * sizeof(float));
            memset(w->lane_sum + i * VW, 0, VW * sizeof(float));
            w->max[i] = -INFINITY;
            if (a->sinks) { /* one more key, whose value is 0 */
                w->max[i] = a->sinks[h];
                w->lane_sum[i * VW] = 1;
            }
        }
}

/* The first position that the query at pos sees. */
static int first_key(const bg_attend *a, int pos)
{
    return a->window > 0 && pos >= a->window ? pos - a->window + 1 : 0;
}

static void one_block(const bg_attend *a, const work *w, int block, int last, bool wide)
{
    const int heads = a->n_heads, lanes = a->block_lanes, key0 = block * a->block_tokens;
    /* Rows that see any key of it: a run, as positions are consecutive. */
    int row0 = 0, row1 = a->n_rows;
    while (row0 < row1 && a->pos0 + row0 < key0)
        row0++;
    while (row1 > row0 && first_key(a, a->pos0 + row1 - 1) >= key0 + a->block_tokens)
        row1--;
    const int i0 = row0 * heads, i1 = row1 * heads;

    const size_t at = (size_t)a->blocks[block];
    const size_t at_next = (size_t)a->blocks[block < last ? block + 1 : block];
    const char *k = a->k + at * a->k_block_bytes, *k_next = a->k + at_next * a->k_block_bytes;
    const char *v = a->v + at * a->v_block_bytes, *v_next = a->v + at_next * a->v_block_bytes;
    bg_cache_type type = a->type;
    if (wide) {
        widen(type, w->k, k, k_next, (size_t)a->head_dim * (size_t)lanes);
        widen(type, w->v, v, v_next, (size_t)a->block_tokens * (size_t)a->v_stride);
        k = (const char *)w->k;
        v = (const char *)w->v;
        k_next = v_next = NULL;
        type = BG_CACHE_F32;
    }

    for (int i = i0, n; i < i1; i += n) {
        n = i1 - i < SCORE_ROWS ? i1 - i : SCORE_ROWS;
        score_table[type][n](w->q + (size_t)i * (size_t)a->head_dim, a->head_dim, k,
                             i == i0 ? k_next : NULL, w->s + (size_t)i * (size_t)lanes, lanes);
    }

    for (int r = row0, i = i0; r < row1; r++) {
        const int pos = a->pos0 + r, from = first_key(a, pos);
        const int lo = from > key0 ? from - key0 : 0;
        const int hi = pos + 1 - key0 < a->block_tokens ? pos + 1 - key0 : a->block_tokens;
        for (int h = 0; h < heads; h++, i++) {
            const float most = finish_scores(a, w->s + (size_t)i * (size_t)lanes, lo, hi);
            const float max = most > w->max[i] ? most : w->max[i];
            w->c[i] = w->max[i] - max;
            w->max[i] = max;
        }
    }
    for (int i = i0 / VW * VW; i < i1; i += VW) /* c is padded; a lane is its own */
        vf_store(w->c + i, vf_exp(vf_load(w->c + i)));
    for (int i = i0; i < i1; i++)
        exp_scores(a, w->s + (size_t)i * (size_t)lanes, w->max[i], w->c[i], w->lane_sum + i * VW);

    for (int i = i0, n; i < i1; i += n) { /* query vectors that see the same keys */
        const int pos = a->pos0 + i / heads, from = first_key(a, pos);
        const int lo = from > key0 ? from - key0 : 0;
        const int hi = pos + 1 - key0 < a->block_tokens ? pos + 1 - key0 : a->block_tokens;
        for (n = 1; n < VALUE_ROWS && i + n < i1; n++) {
            const int other = a->pos0 + (i + n) / heads;
            if (other != pos && (first_key(a, other) > key0 || hi < a->block_tokens)) break;
        }
        value_table[type][n](w->s + (size_t)i * (size_t)lanes, lanes, lo, hi, v,
                             i == i0 ? v_next : NULL, w->c + i,
                             w->o + (size_t)i * (size_t)a->v_stride, a->v_stride);
    }
}

void ATTEND(const bg_attend *a)
{
    const size_t n = (size_t)BG_ATTEND_ROWS;
    work w;
    w.k = a->scratch;
    w.v = w.k + (size_t)a->head_dim * (size_t)a->block_lanes;
    w.q = w.v + (size_t)a->block_tokens * (size_t)a->v_stride;
    w.s = w.q + n * (size_t)((a->head_dim + BG_LANES - 1) / BG_LANES * BG_LANES);
    w.o = w.s + n * (size_t)a->block_lanes;
    w.lane_sum = w.o + n * (size_t)a->v_stride;
    w.max = w.lane_sum + n * BG_LANES;
    w.c = w.max + n;
    start(a, &w);

    /* Converting a block pays once it is read for several tiles of query vectors. */
    const bool wide = a->type != BG_CACHE_F32 && a->n_rows * a->n_heads > 2 * SCORE_ROWS;
    const int last = (a->pos0 + a->n_rows - 1) / a->block_tokens;
    for (int block = first_key(a, a->pos0) / a->block_tokens; block <= last; block++)
        one_block(a, &w, block, last, wide);

    for (int r = 0, i = 0; r < a->n_rows; r++)
        for (int h = 0; h < a->n_heads; h++, i++) {
            const float sum = vf_sum_lanes(vf_load(w.lane_sum + i * VW));
            const float *o = w.o + (size_t)i * (size_t)a->v_stride;
            float *out = a->out + r * a->out_stride + (int64_t)h * a->v_dim;
            for (int j = 0; j < a->v_dim; j++)
                out[j] = o[j] / sum;
        }
}

_Static_assert((int)SCORE_ROWS <= (int)BG_INDEX_ROWS, "scratch of index_scores is too small");

void INDEX_SCORES(float *scores, bg_cache_type type, const float *q, int n_heads, int dim,
                  const float *w, const char *k, int lanes, float *scratch)
{
    for (int h = 0, n; h < n_heads; h += n) {
        n = n_heads - h < SCORE_ROWS ? n_heads - h : SCORE_ROWS;
        score_table[type][n](q + (size_t)h * (size_t)dim, dim, k, NULL, scratch, lanes);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < lanes; j += VW) {
                const vf dot = vf_load(scratch + (size_t)i * (size_t)lanes + j);
                const vf relu = vf_max((vf){0}, dot); /* NaN stays */
                vf_store(scores + j, vf_fma(vf_set(w[h + i]), relu, vf_load(scores + j)));
            }
    }
}
