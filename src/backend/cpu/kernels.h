/* backend/cpu/kernels.h - the loops that exist once for each instruction set.
 *
 * attention_body.h and misc_body.h are compiled by NAME.c, NAME_avx2.c and NAME_avx512.c; the
 * backend picks one bg_kernels when it is made. Everything here works on memory that the caller
 * owns, keeps no state and may run on any number of threads at once. */
#ifndef BG_BACKEND_CPU_KERNELS_H
#define BG_BACKEND_CPU_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "backend/ops.h"

enum {
    BG_LANES = 16,        /* block and V rows are padded to a multiple of it */
    BG_ATTEND_ROWS = 64,  /* query vectors of one bg_attend at most */
    BG_INDEX_ROWS = 8,    /* query heads that index_scores works on at once, at most */
    BG_CHUNK_TOKENS = 64, /* of the vocabulary: a unit of the sampler's scans */
};

/* Attention of n_heads query heads that share one KV head, for n_rows consecutive positions of one
 * sequence; n_rows * n_heads <= BG_ATTEND_ROWS.
 *
 * The cache of one block and KV head: K as [head_dim][block_lanes] (a position is a column, so that
 * scores of neighbouring keys are neighbouring lanes), V as [block_tokens][v_stride]. block_lanes
 * and v_stride are block_tokens and v_dim rounded up to BG_LANES. */
typedef struct bg_attend {
    const float *q; /* row r, head h at q + r * q_stride + h * head_dim */
    float *out;     /* at out + r * out_stride + h * v_dim */
    int64_t q_stride, out_stride;
    int n_rows, n_heads;
    int pos0;                            /* position of row 0 */
    const char *k, *v;                   /* this layer and KV head in block 0 */
    size_t k_block_bytes, v_block_bytes; /* from a block to the next */
    const int32_t *blocks;               /* the sequence's block table */
    int block_tokens, block_lanes;
    int head_dim, v_dim, v_stride;
    bg_cache_type type;
    float scale, softcap;
    int window;
    const float *sinks; /* n_heads values, or NULL */
    float *scratch;     /* bg_attend_scratch() floats, 64-byte aligned */
} bg_attend;

size_t bg_attend_scratch(int block_tokens, int head_dim, int v_dim); /* floats */

void bg_cpu_attend_plain(const bg_attend *a);
void bg_cpu_attend_avx2(const bg_attend *a);
void bg_cpu_attend_avx512(const bg_attend *a);

/* scores[j] += sum over heads h, in order, of w[h] * max(0, q_h . k_j) for the lanes keys of a
 * block laid out as K. q: [n_heads][dim], scratch: BG_INDEX_ROWS * lanes floats. Lanes without a
 * key are added to as well. */
typedef void bg_index_scores(float *scores, bg_cache_type type, const float *q, int n_heads,
                             int dim, const float *w, const char *k, int lanes, float *scratch);
bg_index_scores bg_cpu_index_scores_plain, bg_cpu_index_scores_avx2, bg_cpu_index_scores_avx512;

typedef struct bg_kernels {
    /* Sum of squares in 32 lanes, the same bits in every instruction set. */
    float (*sum_squares)(const float *x, int64_t n);
    /* x . y in the same way. */
    float (*dot)(const float *x, const float *y, int64_t n);
    void (*add_scaled)(float *x, const float *y, float s, int64_t n); /* x += s*y */
    void (*scale_mul)(float *out, const float *x, const float *w, float s, int64_t n); /* x*s*w */
    void (*add)(float *x, const float *y, int64_t n);                                  /* x += y */
    void (*glu)(float *out, const float *gate, const float *up, int64_t n, bg_act_fn fn);
    /* The first n_rot elements of a head; cosine[i] and sine[i] belong to pair i. */
    void (*rotate)(float *x, const float *cosine, const float *sine, int n_rot, bool neox);
    void (*store)(bg_cache_type type, void *dst, const float *x, int64_t n);
    /* dst[i * stride] = x[i], in elements */
    void (*store_column)(bg_cache_type type, void *dst, int64_t stride, const float *x, int64_t n);
    void (*softcap)(float *x, int64_t n, float cap); /* x = cap * tanh(x / cap) */
    /* chunk_max[c] = largest of x[c * BG_CHUNK_TOKENS ..]; -inf if none is a number */
    void (*chunk_max)(float *chunk_max, const float *x, int64_t n);
    /* sum of e^((x_i - max) * inv_t) over the x_i >= least, gathered in float64; -inf adds 0 */
    double (*exp_sum)(const float *x, int64_t n, float least, float max, float inv_t);
    /* words[4 i + j] = word j of Philox block first + i, i < 16: those of 64 token ids */
    void (*words)(uint32_t words[BG_CHUNK_TOKENS], uint64_t seed, uint64_t pos, uint32_t first);
    /* bound[i] >= (x_i - max) * inv_t + the Gumbel noise of words[i], save rounding (1e-3 at most
     * where a token could win), and mostly close to it; returns the largest of n. */
    float (*gumbel_bound)(float bound[BG_CHUNK_TOKENS], const float *x, const uint32_t *words,
                          int n, float max, float inv_t);
    void (*attend)(const bg_attend *a);
    bg_index_scores *index_scores;
} bg_kernels;

extern const bg_kernels bg_kernels_plain, bg_kernels_avx2, bg_kernels_avx512;

#endif
