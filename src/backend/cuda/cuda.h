/* backend/cuda/cuda.h - the CUDA backend's own types: one rank's state on one GPU.
 *
 * Everything here lives in libbatchgen_cuda.so, which the program loads when it is there and a GPU
 * is asked for; it finds bg_* functions in the program. */
#ifndef BG_BACKEND_CUDA_CUDA_H
#define BG_BACKEND_CUDA_CUDA_H

#include <cuda_runtime_api.h>

#include "backend/cpu/cpu.h"
#include "backend/device.h"
#include "backend/ops.h"
#include "backend/steps.h"
#include "bgk.h"

struct bg_linear {
    char *name;
    void *w; /* [n_rows, k_padded] */
    float *bias;
    int n_rows, k, k_padded;
};

typedef struct bg_cuda {
    bg_backend base;
    bg_backend_config config;
    int device;
    cudaStream_t stream;
    uint64_t bytes;
    void **memory; /* every allocation on the device */
    size_t n_memory, memory_cap;
    bg_linear **linears;
    size_t n_linears, linears_cap;
    bg_embedding **embeddings;
    size_t n_embeddings, embeddings_cap;
    void *scratch; /* halves of the widest input of a linear */
    size_t scratch_bytes;
    bgk_type weights; /* F16, or F32 in proof mode */
    bool tiled;       /* what linears read is BGK_TILES, and they are bgk_matmul's */

    bg_steps s;
    bool has_cache, sampled, has_logits;
    bgk_cache cache;
    int n_layers;
    /* the step on the device, and its pinned twin on the host */
    int32_t *step, *host_step;
    size_t step_ints;
    int32_t *ids, *pos, *seq, *block0, *out_row, *blocks; /* parts of step */
    bgk_rows rows;
    struct { /* rotations' frequencies, by the host pointer that names them */
        const float *host;
        float *device;
        int n;
    } freqs[8];
    int n_freqs;

    float *logits; /* [max_out, vocab] */
    float *host_logits;
    unsigned long long *bad;
    bg_sampled *results;
    bg_sampler sampler;
} bg_cuda;

/* objects.c. What every file here uses: */
bg_status bg_cuda_fail(bg_error *err, cudaError_t e, const char *what);
bg_status bg_cuda_done(bg_error *err, cudaError_t e, const char *what); /* BG_OK for cudaSuccess */
/* Room for one more pointer in the array that *list points to. */
bg_status bg_cuda_grow(void *list, size_t n, size_t *cap, bg_error *err);
/* Device memory that is freed with the backend, into the pointer that p points to. BG_NOMEM. */
bg_status bg_cuda_take(bg_cuda *c, void *p, size_t bytes, const char *what, bg_error *err);
bg_status bg_cuda_put(void *to, const void *from, size_t bytes, const char *what, bg_error *err);
uint64_t bg_cuda_memory(const bg_backend *b);
bg_status bg_cuda_act_new(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                          int64_t cols, bg_error *err);
bg_status bg_cuda_act_input_new(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                                int64_t cols, bg_error *err);
bgk_out bg_cuda_out(const bg_act *a); /* the buffer as kernels take it */
bool bg_cuda_fuses_glu(const bg_backend *b);
bg_status bg_cuda_vec_new(bg_backend *b, bg_vec *v, const char *name, const float *host, int64_t n,
                          bg_error *err);
void bg_cuda_poison(bg_backend *b, bg_act *a, int64_t rows);
bool bg_cuda_all_finite(bg_backend *b, const bg_act *a, int64_t rows, int64_t cols, int64_t *row,
                        int64_t *col);
void bg_cuda_sync(bg_backend *b);

/* weights.c */
bg_status bg_cuda_linear_new(bg_backend *b, bg_linear **out, const bg_linear_spec *spec,
                             bg_error *err);
int64_t bg_cuda_linear_rows(const bg_linear *l);
bg_status bg_cuda_embedding_new(bg_backend *b, bg_embedding **e, const bg_tensor *t, bg_error *err);

/* step.c */
bg_status bg_cuda_cache_new(bg_backend *b, const bg_cache_spec *spec, bg_error *err);
bg_status bg_cuda_slot_seat(bg_backend *b, int slot, const bg_sampling *s, const int32_t *tokens,
                            int n_tokens, int n_generated, bg_error *err);
bg_status bg_cuda_begin_step(bg_backend *b, const bg_batch *batch, bg_error *err);
int bg_cuda_n_rows(const bg_backend *b);
int bg_cuda_n_out(const bg_backend *b);

/* ops.c */
bg_status bg_cuda_embed(bg_backend *b, bg_act *out, const bg_embedding *e, float scale,
                        bg_error *err);
bg_status bg_cuda_rms_norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w, float eps,
                           int n_rows, bg_error *err);
bg_status bg_cuda_add(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err);
bg_status bg_cuda_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                               const bg_vec *w, float eps, bg_error *err);
bg_status bg_cuda_linear(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x,
                         int n_rows, bg_error *err);
bg_status bg_cuda_rope_store(bg_backend *b, bg_act *q_out, const bg_act *qkv, const bg_attn_in *p,
                             bg_error *err);
bg_status bg_cuda_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                            bg_error *err);
bg_status bg_cuda_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn,
                      bg_error *err);
bg_status bg_cuda_all_reduce(bg_backend *b, bg_act *x, bg_error *err);
bg_status bg_cuda_gather_out(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err);
bg_status bg_cuda_logits(bg_backend *b, const bg_linear *head, const bg_act *x,
                         const int64_t *rank_rows, float softcap, bg_error *err);

/* sample.c */
bg_status bg_cuda_sampling_new(bg_cuda *c, bg_error *err);
bg_status bg_cuda_sample(bg_backend *b, bg_error *err);
bg_status bg_cuda_fetch(bg_backend *b, bg_sampled *out, int *n, bg_error *err);
bg_status bg_cuda_fetch_logits(bg_backend *b, float *out, bg_error *err);

/* What device.c looks up by name. */
#define BG_EXPORT __attribute__((visibility("default")))
BG_EXPORT bg_status bg_cuda_backend_new(bg_backend **b, const bg_backend_config *config, int device,
                                        bg_error *err);
BG_EXPORT int bg_cuda_abi(void); /* BG_CUDA_ABI */
BG_EXPORT bg_status bg_cuda_gpus(bg_gpu *list, int cap, int *n, bg_error *err);

#endif
