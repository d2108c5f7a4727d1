/* What the backend holds on the device: memory, activations, small vectors; poison and its search.
 */
#include "backend/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

bg_status bg_cuda_fail(bg_error *err, cudaError_t e, const char *what)
{
    return bg_fail(err, e == cudaErrorMemoryAllocation ? BG_NOMEM : BG_DEVICE, "%s: CUDA: %s", what,
                   cudaGetErrorString(e));
}

bg_status bg_cuda_done(bg_error *err, cudaError_t e, const char *what)
{
    return e == cudaSuccess ? BG_OK : bg_cuda_fail(err, e, what);
}

/* Room for one more pointer in the array that *list points to. */
bg_status bg_cuda_grow(void *list, size_t n, size_t *cap, bg_error *err)
{
    void ***array = list;
    if (n < *cap) return BG_OK;
    const size_t more = *cap ? 2 * *cap : 64;
    void **p = realloc(*array, more * sizeof *p);
    if (!p) return bg_fail(err, BG_NOMEM, "out of memory for %zu objects", more);
    *array = p;
    *cap = more;
    return BG_OK;
}

bg_status bg_cuda_take(bg_cuda *c, void *p, size_t bytes, const char *what, bg_error *err)
{
    void *at = NULL;
    bg_status st = bg_cuda_grow(&c->memory, c->n_memory, &c->memory_cap, err);
    if (st) return st;
    cudaError_t e = cudaMalloc(&at, bytes ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        size_t left = 0, total = 0;
        (void)cudaGetLastError(); /* it is not a failure of the device */
        cudaMemGetInfo(&left, &total);
        return bg_fail(err, BG_NOMEM,
                       "%s: %.2f GB are needed on GPU %d, which has %.2f of %.1f GB left; does "
                       "another process use it? Else lower --gpu-memory-utilization or "
                       "--max-num-seqs",
                       what, (double)bytes * 1e-9, c->device, (double)left * 1e-9,
                       (double)total * 1e-9);
    }
    /* What is made up shall be numbers, where nothing was written yet, too. */
    if (e == cudaSuccess && c->config.dummy) {
        e = cudaMemset(at, 0, bytes);
        if (e == cudaSuccess) e = cudaStreamSynchronize(cudaStreamLegacy); /* as bg_cuda_put() */
    }
    if (e != cudaSuccess) return bg_cuda_fail(err, e, what);
    c->memory[c->n_memory++] = at;
    c->bytes += bytes;
    memcpy(p, &at, sizeof at); /* into a pointer of any type */
    return BG_OK;
}

bg_status bg_cuda_put(void *to, const void *from, size_t bytes, const char *what, bg_error *err)
{
    cudaError_t e = cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice);
    /* It may return with the bytes on their way, and the backend's stream does not wait for them.
     */
    if (e == cudaSuccess) e = cudaStreamSynchronize(cudaStreamLegacy);
    return bg_cuda_done(err, e, what);
}

uint64_t bg_cuda_memory(const bg_backend *b)
{
    return ((const bg_cuda *)b)->bytes;
}

static bg_status check_shape(const char *name, int64_t max_rows, int64_t cols, bg_error *err)
{
    if (max_rows >= 0 && cols >= 0 && (!cols || max_rows <= INT64_MAX / 32 / cols)) return BG_OK;
    return bg_fail(err, BG_INTERNAL, "%s: [%lld, %lld] is no shape", name, (long long)max_rows,
                   (long long)cols);
}

bg_status bg_cuda_act_new(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                          int64_t cols, bg_error *err)
{
    *a = (bg_act){0};
    void *data = NULL;
    bg_status st = check_shape(name, max_rows, cols, err);
    if (!st)
        st =
            bg_cuda_take((bg_cuda *)b, &data, (size_t)(max_rows * cols) * sizeof(float), name, err);
    if (!st) *a = (bg_act){.data = data, .max_rows = max_rows, .cols = cols, .name = name};
    return st;
}

bg_status bg_cuda_fits(const bg_act *a, int64_t rows, int64_t cols, const char *op, bg_error *err)
{
    if (rows <= a->max_rows && cols <= a->cols) return BG_OK;
    return bg_fail(err, BG_INTERNAL, "op %s: %s is [%lld, %lld], [%lld, %lld] are needed", op,
                   a->name, (long long)a->max_rows, (long long)a->cols, (long long)rows,
                   (long long)cols);
}

/* Rows of BGK_TILES with room for max_rows. */
static int64_t tile_stride(int64_t max_rows)
{
    return (max_rows + BGK_TILE_ROWS - 1) / BGK_TILE_ROWS * BGK_TILE_ROWS;
}

bg_status bg_cuda_act_input_new(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                                int64_t cols, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    if (!c->tiled) return bg_cuda_act_new(b, a, name, max_rows, cols, err);
    *a = (bg_act){0};
    char *data = NULL;
    bg_status st = check_shape(name, max_rows + BGK_TILE_ROWS, cols + BGK_TILE_COLS, err);
    const int64_t groups = (cols + BGK_TILE_COLS - 1) / BGK_TILE_COLS;
    const size_t bytes = (size_t)(groups * tile_stride(max_rows)) * BGK_TILE_COLS * 2;
    if (!st) st = bg_cuda_take(c, &data, bytes + 1024, name, err); /* cudaMalloc aligns to 256 */
    if (st) return st;
    data += -(uintptr_t)data % 1024;
    /* Rows between those of a step and the stride are read too, by what multiplies whole tiles. */
    st = bg_cuda_done(err, cudaMemsetAsync(data, 0, bytes, ((bg_cuda *)b)->stream), name);
    if (!st)
        *a = (bg_act){
            .data = data, .max_rows = max_rows, .cols = cols, .name = name, .layout = BGK_TILES};
    return st;
}

bgk_out bg_cuda_out(const bg_act *a)
{
    const bgk_layout layout = (bgk_layout)a->layout;
    return (bgk_out){a->data, layout, layout == BGK_TILES ? tile_stride(a->max_rows) : a->cols};
}

bool bg_cuda_fuses_glu(const bg_backend *b)
{
    return ((const bg_cuda *)b)->tiled;
}

bg_status bg_cuda_vec_new(bg_backend *b, bg_vec *v, const char *name, const float *host, int64_t n,
                          bg_error *err)
{
    *v = (bg_vec){0};
    float *data = NULL;
    if (n < 0) return bg_fail(err, BG_INTERNAL, "%s: %lld values", name, (long long)n);
    bg_status st = bg_cuda_take((bg_cuda *)b, &data, (size_t)n * sizeof *data, name, err);
    if (!st && n) st = bg_cuda_put(data, host, (size_t)n * sizeof *data, name, err);
    if (!st) *v = (bg_vec){data, n, name};
    return st;
}

void bg_cuda_poison(bg_backend *b, bg_act *a, int64_t rows)
{
    bg_cuda *c = (bg_cuda *)b;
    const bgk_out out = bg_cuda_out(a);
    bgk_poison(&out, rows, a->cols, c->stream);
}

bool bg_cuda_all_finite(bg_backend *b, const bg_act *a, int64_t rows, int64_t cols, int64_t *row,
                        int64_t *col)
{
    bg_cuda *c = (bg_cuda *)b;
    const bgk_out x = bg_cuda_out(a);
    unsigned long long bad = ~0ull;
    *row = *col = 0;
    if (!rows || !cols) return true;
    cudaMemcpyAsync(c->bad, &bad, sizeof bad, cudaMemcpyHostToDevice, c->stream);
    bgk_find_bad(c->bad, &x, rows, cols, c->stream);
    cudaMemcpyAsync(&bad, c->bad, sizeof bad, cudaMemcpyDeviceToHost, c->stream);
    if (cudaStreamSynchronize(c->stream) != cudaSuccess) return false;
    if (bad == ~0ull) return true;
    if (x.layout == BGK_TILES) cols = (cols + BGK_TILE_COLS - 1) / BGK_TILE_COLS * BGK_TILE_COLS;
    *row = (int64_t)(bad / (unsigned long long)cols);
    *col = (int64_t)(bad % (unsigned long long)cols);
    return false;
}

void bg_cuda_sync(bg_backend *b)
{
    cudaStreamSynchronize(((bg_cuda *)b)->stream);
}
