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

/* What device.c looks up by name. */
#define BG_EXPORT __attribute__((visibility("default")))
BG_EXPORT bg_status bg_cuda_backend_new(bg_backend **b, const bg_backend_config *config, int device,
                                        bg_error *err);
BG_EXPORT int bg_cuda_abi(void); /* BG_CUDA_ABI */
BG_EXPORT bg_status bg_cuda_gpus(bg_gpu *list, int cap, int *n, bg_error *err);

#endif
