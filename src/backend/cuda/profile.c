/* Times and costs of ops, ranges for tracers, and what the GPU can do in a second.
 *
 * A pair of events around each op's kernels; they are read when the caller asks, so that the step
 * runs as it would. What the host cannot issue in time would be counted as the op's: so where the
 * stream has run dry it gets a pause first, and launches come ahead of the GPU.
 *
 * Ranges are NVTX's, which cost next to nothing where no tool listens. */
#include "backend/cuda/cuda.h"

#include <nvtx3/nvToolsExt.h>
#include <stdlib.h>

#include "backend/cost.h"

enum { PAUSE_NS = 1000000, PROBE_RUNS = 8, MIB = 1 << 20 };

typedef struct mark {
    cudaEvent_t begin, end;
    int kind;
} mark;

struct bg_cuda_profile {
    mark *marks; /* events are made once and used again */
    size_t n, made, cap;
};

static mark *next_mark(struct bg_cuda_profile *p)
{
    if (p->n == p->cap) {
        const size_t cap = p->cap ? 2 * p->cap : 4096;
        mark *more = realloc(p->marks, cap * sizeof *more);
        if (!more) return NULL;
        p->marks = more;
        p->cap = cap;
    }
    mark *m = &p->marks[p->n];
    if (p->n < p->made) return m;
    if (cudaEventCreate(&m->begin) != cudaSuccess) return NULL;
    if (cudaEventCreate(&m->end) != cudaSuccess) {
        cudaEventDestroy(m->begin);
        return NULL;
    }
    p->made++;
    return m;
}

void bg_cuda_op_begin(bg_backend *b, int kind)
{
    bg_cuda *c = (bg_cuda *)b;
    nvtxRangePushA(bg_op_kind_name(kind));
    if (!b->profile || c->capturing) return;
    if (!c->profile) c->profile = calloc(1, sizeof *c->profile);
    mark *m = c->profile ? next_mark(c->profile) : NULL;
    if (!m) return; /* the op goes without */
    if (cudaStreamQuery(c->stream) == cudaSuccess) bgk_pause(PAUSE_NS, c->stream);
    m->kind = kind;
    cudaEventRecord(m->begin, c->stream);
}

void bg_cuda_op_end(bg_backend *b, int kind)
{
    bg_cuda *c = (bg_cuda *)b;
    struct bg_cuda_profile *p = c->profile;
    nvtxRangePop();
    if (!b->profile || c->capturing || !p || p->n == p->made || p->marks[p->n].kind != kind) return;
    cudaEventRecord(p->marks[p->n++].end, c->stream);
}

void bg_cuda_op_times(bg_backend *b)
{
    bg_cuda *c = (bg_cuda *)b;
    struct bg_cuda_profile *p = c->profile;
    if (!p) return;
    cudaStreamSynchronize(c->stream);
    for (size_t i = 0; i < p->n; i++) {
        float ms = 0;
        if (cudaEventElapsedTime(&ms, p->marks[i].begin, p->marks[i].end) != cudaSuccess) continue;
        b->op_ns[p->marks[i].kind] += (int64_t)((double)ms * 1e6);
        b->op_calls[p->marks[i].kind]++;
    }
    p->n = 0;
}

void bg_cuda_profile_free(bg_cuda *c)
{
    struct bg_cuda_profile *p = c->profile;
    for (size_t i = 0; p && i < p->made; i++) {
        cudaEventDestroy(p->marks[i].begin);
        cudaEventDestroy(p->marks[i].end);
    }
    if (p) free(p->marks);
    free(p);
}

void bg_cuda_linear_cost(const bg_backend *b, const bg_linear *l, int64_t n_rows, bg_cost *cost)
{
    (void)b;
    cost->bytes = bg_cuda_fast_serves(l, NULL, (int)n_rows)
                      ? (double)l->n_rows * l->k_padded * sizeof(uint16_t)
                      : (double)l->w_bytes;
    cost->flops = 2.0 * (double)n_rows * (double)l->n_weights;
}

void bg_cuda_attention_cost(const bg_backend *b, const bg_attn *p, bg_cost *cost)
{
    const bg_cuda *c = (const bg_cuda *)b;
    const double q8 = 1 + 2 * sizeof(float) / (double)(p->head_dim + p->v_dim); /* and scales */
    bg_attention_cost(&c->s, p,
                      c->cache.type == BGK_F32  ? 4
                      : c->cache.type == BGK_Q8 ? q8
                                                : 2,
                      cost);
}

/* Bytes read and written in a second by copies on the device; 0: no memory is left to see it. */
static double copy_rate(bg_cuda *c)
{
    char *from = NULL, *to = NULL;
    cudaEvent_t e[2] = {NULL, NULL};
    size_t bytes = (size_t)512 * MIB;
    float ms = 0;
    for (; bytes >= (size_t)128 * MIB; bytes /= 2) { /* several times the cache */
        if (cudaMalloc((void **)&from, bytes) == cudaSuccess &&
            cudaMalloc((void **)&to, bytes) == cudaSuccess)
            break;
        cudaFree(from);
        from = NULL;
    }
    cudaGetLastError(); /* a refusal is none of the next launch's */
    if (to && cudaEventCreate(&e[0]) == cudaSuccess && cudaEventCreate(&e[1]) == cudaSuccess) {
        cudaMemsetAsync(from, 0, bytes, c->stream);
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, c->stream);
        cudaEventRecord(e[0], c->stream);
        for (int i = 0; i < PROBE_RUNS; i++)
            cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, c->stream);
        cudaEventRecord(e[1], c->stream);
        cudaStreamSynchronize(c->stream);
        if (cudaEventElapsedTime(&ms, e[0], e[1]) != cudaSuccess) ms = 0;
    }
    for (int i = 0; i < 2; i++)
        if (e[i]) cudaEventDestroy(e[i]);
    cudaFree(from);
    cudaFree(to);
    return ms > 0 ? 2.0 * PROBE_RUNS * (double)bytes / (ms * 1e-3) : 0;
}

/* Half-precision products with float32 sums that one multiprocessor of compute capability 9.0 keeps
 * up: 790 TFLOP/s on the 132 of an H200, what its vendor's library reaches on large bf16 matrices
 * (989 is the figure for the highest clock, which the power limit does not allow). */
static const double HOPPER_FLOPS_PER_SM = 790e12 / 132;

void bg_cuda_roofs(bg_backend *b, bg_cost *per_second)
{
    bg_cuda *c = (bg_cuda *)b;
    int major = 0, sms = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, c->device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, c->device);
    per_second->bytes = copy_rate(c);
    per_second->flops = major == 9 ? sms * HOPPER_FLOPS_PER_SM : 0;
}
