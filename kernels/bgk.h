/* kernels/bgk.h - launchers of the CUDA kernels: what src/backend/cuda may call, and nothing else.
 *
 * Every launcher checks what its kernel requires and returns cudaErrorInvalidValue where it is not
 * met; it starts work on `stream` and does not wait. No pointer may overlap another unless said.
 * Activations are float32, [rows, cols] with a stride of `..._cols` values; rows 0 is a no-op. A
 * row's bits depend on that row, never on how many there are or where it stands.
 *
 * C, so that the backend needs no C++. */
#ifndef BGK_H
#define BGK_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bgk_type { BGK_F32, BGK_F16, BGK_BF16 } bgk_type;
typedef enum bgk_act { BGK_SILU, BGK_GELU_TANH, BGK_GELU_ERF } bgk_act;

/* ---- elementwise.cu -------------------------------------------------------------------------- */

/* out[t,:] = scale * table[ids[t],:]; table [vocab, cols] of type F32 or F16. */
cudaError_t bgk_embed(float *out, int64_t out_cols, const void *table, bgk_type type,
                      const int32_t *ids, float scale, int rows, int cols, cudaStream_t stream);
/* out = rms_norm(x) * w; with y not NULL: x += y first. out == x is allowed without y. cols >= 1.
 */
cudaError_t bgk_rms_norm(float *out, int64_t out_cols, float *x, int64_t x_cols, const float *y,
                         int64_t y_cols, const float *w, float eps, int rows, int cols,
                         cudaStream_t stream);
cudaError_t bgk_add(float *x, int64_t x_cols, const float *y, int64_t y_cols, int rows, int cols,
                    cudaStream_t stream);
/* out[t,i] = fn(x[t,i]) * x[t,cols+i] */
cudaError_t bgk_glu(float *out, int64_t out_cols, const float *x, int64_t x_cols, bgk_act fn,
                    int rows, int cols, cudaStream_t stream);
/* out[j,:] = x[index[j],:] */
cudaError_t bgk_gather(float *out, int64_t out_cols, const float *x, int64_t x_cols,
                       const int32_t *index, int rows, int cols, cudaStream_t stream);
/* x = cap * tanh(x / cap) */
cudaError_t bgk_softcap(float *x, int64_t n, float cap, cudaStream_t stream);
/* All NaN; and *bad = the smallest row * cols + col that is not finite (unchanged if all are). */
cudaError_t bgk_poison(float *x, int64_t n, cudaStream_t stream);
cudaError_t bgk_find_bad(unsigned long long *bad, const float *x, int64_t x_cols, int64_t rows,
                         int64_t cols, cudaStream_t stream);

/* ---- linear.cu --------------------------------------------------------------------------------
 * out[t, n] = sum_k x[t, k] w[n, k] + bias[n] (NULL: none), for n in [0, n_rows). w: [n_rows,
 * k_padded], zero beyond k; k_padded is a multiple of 64; 16-byte aligned. One chain over k in
 * float32 for every output: the order depends on k alone.
 * F16: x is rounded to half, in scratch (tokens * k_padded halves, 16-byte aligned). F32: nothing
 * is, and scratch may be NULL. */
enum { BGK_K_PAD = 64 };
cudaError_t bgk_linear(float *out, int64_t out_cols, const void *w, bgk_type type,
                       const float *bias, const float *x, int64_t x_cols, int tokens, int n_rows,
                       int k, int k_padded, void *scratch, cudaStream_t stream);

/* ---- attention.cu ----------------------------------------------------------------------------
 * The cache: K [n_layers, n_blocks, n_kv_heads, block_tokens, k_dim], V with v_dim; of `type`. */
typedef struct bgk_cache {
    void *k, *v;
    bgk_type type;
    int n_blocks, n_kv_heads, block_tokens, k_dim, v_dim;
} bgk_cache;

typedef struct bgk_rows {  /* of the step, on the device */
    const int32_t *pos;    /* [rows] */
    const int32_t *seq;    /* [rows] */
    const int32_t *blocks; /* block tables, one after another */
    const int32_t *block0; /* [seqs] where a sequence's begins */
    int rows;
} bgk_rows;

/* qkv[t] = q heads, k heads, v heads. Norms (NULL: none) over each head's k_dim values, rotation by
 * pos * freq[i] (freq NULL: none) of the leading n_rot values, pairs (i, i + n_rot/2) if neox, else
 * (2i, 2i+1); cos and sin times mscale. k_dim <= 512. */
cudaError_t bgk_rope_store(float *q_out, int64_t q_cols, const float *qkv, int64_t qkv_cols,
                           const bgk_cache *cache, const bgk_rows *r, int layer, int n_heads,
                           const float *q_norm, const float *k_norm, float eps, const float *freq,
                           int n_rot, bool neox, float mscale, cudaStream_t stream);
/* Causal, window 0: all keys. Keys are taken 32 at a time from position 0 on, chunk c by warp c mod
 * 4, and the four are merged in order. sinks NULL: none. k_dim <= 512, v_dim <= 512, both multiples
 * of 4. Head h reads KV head (head0 + h) / group - kv_head0. */
cudaError_t bgk_attention(float *out, int64_t out_cols, const float *q, int64_t q_cols,
                          const bgk_cache *cache, const bgk_rows *r, int layer, int n_heads,
                          int head0, int kv_head0, int group, float scale, float softcap,
                          int window, const float *sinks, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
