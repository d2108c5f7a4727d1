/* kernels/comm.cu - what collectives between GPUs leave to do: sums in rank order, and logits put
 * side by side.
 *
 *   requires  what bgk.h says; 1 <= n_ranks <= BGK_MAX_RANKS
 *   launch    256 threads a block, ordinary launches (they follow NCCL's kernels); graph-capturable
 *   order     an element is part 0 + part 1 + ... in float32, as in comm/shm.c
 *   traffic   n_ranks + 1 values of 4 bytes an element; 2 in gather_shards
 *   peers     sum_peers reads the other GPUs' memory: a few us where a collective of NCCL takes 20
 *   proof     tests/gpu/test_comm.c: bit for bit against the same sums on the host */
#include "bgk.h"
#include "launch.cuh"

namespace
{

constexpr int BLOCK = 256;

/* Four elements a thread; 16-byte loads. */
__global__ void __launch_bounds__(BLOCK)
    sum_four(float4 *out, const float4 *parts, int64_t part4, int n_ranks, int64_t n4)
{
    ptx_let_next_start();
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n4) return;
    float4 s = parts[i];
    for (int r = 1; r < n_ranks; r++) {
        const float4 v = parts[r * part4 + i];
        s.x += v.x;
        s.y += v.y;
        s.z += v.z;
        s.w += v.w;
    }
    out[i] = s;
}

__global__ void __launch_bounds__(BLOCK)
    sum_one(float *out, const float *parts, int64_t part, int n_ranks, int64_t n)
{
    ptx_let_next_start();
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    float s = parts[i];
    for (int r = 1; r < n_ranks; r++)
        s += parts[r * part + i];
    out[i] = s;
}

struct shards {
    int start[BGK_MAX_RANKS +
              1]; /* start[r]: rank r's first column in out; the last: all columns */
};

/* Block (x, t, r): 4 BLOCK columns of row t of rank r's shard. */
__global__ void __launch_bounds__(BLOCK)
    place_shards(float *out, int64_t out_cols, const float *in, int64_t shard_cols, shards s)
{
    ptx_let_next_start();
    const int r = blockIdx.z, first = s.start[r], n = s.start[r + 1] - first;
    const float *row = in + ((int64_t)r * gridDim.y + blockIdx.y) * shard_cols;
    float *to = out + blockIdx.y * out_cols + first;
    for (int k = 0; k < 4; k++) {
        const int i = (blockIdx.x * 4 + k) * BLOCK + threadIdx.x;
        if (i < n) to[i] = row[i];
    }
}

/* ---- peers -----------------------------------------------------------------------------------
 * Calls use the two halves of data in turn. A rank writes a half again only in the call after the
 * next, when all blocks of the call between have met those of the others: so these have ended the
 * call before, as kernels of a stream follow each other, and read that half no more. The grid is
 * the same in all calls, so that blocks count alike. */

__device__ void say(uint32_t *flag, uint32_t epoch)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

__device__ uint32_t hear(const uint32_t *flag)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
    return v;
}

__global__ void __launch_bounds__(BLOCK) sum_peers(float4 *x, int64_t n4, bgk_peers p)
{
    const int b = blockIdx.x, t = threadIdx.x;
    const int64_t first = (int64_t)b * BLOCK + t, step = (int64_t)BGK_PEER_BLOCKS * BLOCK;
    const uint32_t epoch = p.epoch[b] + 1;
    const int64_t half = epoch % 2 * (BGK_PEER_FLOATS / 4);
    float4 *own = (float4 *)p.data[p.rank] + half;
    for (int64_t i = first; i < n4; i += step)
        own[i] = x[i];
    __threadfence_system();
    __syncthreads();
    if (t < p.n_ranks) {
        say(p.flags[t] + b * BGK_MAX_PEERS + p.rank, epoch);
        while ((int32_t)(hear(p.flags[p.rank] + b * BGK_MAX_PEERS + t) - epoch) < 0) {
        }
    }
    __syncthreads();
    ptx_let_next_start();
    if (t == 0) p.epoch[b] = epoch;
    for (int64_t i = first; i < n4; i += step) {
        float4 v[BGK_MAX_PEERS];
#pragma unroll
        for (int r = 0; r < BGK_MAX_PEERS; r++) /* all under way before the first is needed */
            if (r < p.n_ranks) v[r] = __ldcv((const float4 *)p.data[r] + half + i);
        float4 s = v[0];
#pragma unroll
        for (int r = 1; r < BGK_MAX_PEERS; r++)
            if (r < p.n_ranks) {
                s.x += v[r].x;
                s.y += v[r].y;
                s.z += v[r].z;
                s.w += v[r].w;
            }
        x[i] = s;
    }
}

/* ---- faults for tests ------------------------------------------------------------------------ */

__global__ void write_nowhere()
{
    *(volatile int *)(uintptr_t)64 = 1;
}

__global__ void spin_for_ever(const volatile int *never)
{
    while (!*never)
        for (int i = 0; i < 64; i++)
            asm volatile("" ::: "memory");
}

bool aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

} // namespace

cudaError_t bgk_sum_ranks(float *out, const float *parts, int64_t part, int n_ranks, int64_t n,
                          cudaStream_t stream)
{
    if (n_ranks < 1 || n_ranks > BGK_MAX_RANKS || n < 0 || part < n) return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    if (n % 4 == 0 && part % 4 == 0 && aligned(out) && aligned(parts)) {
        const int64_t n4 = n / 4;
        sum_four<<<(unsigned)((n4 + BLOCK - 1) / BLOCK), BLOCK, 0, stream>>>(
            (float4 *)out, (const float4 *)parts, part / 4, n_ranks, n4);
    } else {
        sum_one<<<(unsigned)((n + BLOCK - 1) / BLOCK), BLOCK, 0, stream>>>(out, parts, part,
                                                                           n_ranks, n);
    }
    return cudaGetLastError();
}

cudaError_t bgk_place_shards(float *out, int64_t out_cols, const float *in, int64_t shard_cols,
                             const int64_t *widths, int n_ranks, int rows, cudaStream_t stream)
{
    shards s;
    int64_t at = 0;
    if (n_ranks < 1 || n_ranks > BGK_MAX_RANKS || rows < 0 || rows > 65535 || shard_cols < 1)
        return cudaErrorInvalidValue;
    for (int r = 0; r < n_ranks; r++) {
        s.start[r] = (int)at;
        if (widths[r] < 0 || widths[r] > shard_cols) return cudaErrorInvalidValue;
        at += widths[r];
    }
    if (at > out_cols || at > INT32_MAX) return cudaErrorInvalidValue;
    s.start[n_ranks] = (int)at;
    if (!rows) return cudaSuccess;
    const dim3 grid((unsigned)((shard_cols + 4 * BLOCK - 1) / (4 * BLOCK)), (unsigned)rows,
                    (unsigned)n_ranks);
    place_shards<<<grid, BLOCK, 0, stream>>>(out, out_cols, in, shard_cols, s);
    return cudaGetLastError();
}

cudaError_t bgk_sum_peers(float *x, int64_t n, const bgk_peers *p, cudaStream_t stream)
{
    if (n < 0 || n > BGK_PEER_FLOATS || n % 4 || !aligned(x) || p->n_ranks < 1 ||
        p->n_ranks > BGK_MAX_PEERS || p->rank < 0 || p->rank >= p->n_ranks)
        return cudaErrorInvalidValue;
    sum_peers<<<BGK_PEER_BLOCKS, BLOCK, 0, stream>>>((float4 *)x, n / 4, *p);
    return cudaGetLastError();
}

cudaError_t bgk_fault(bool hang, const int *never, cudaStream_t stream)
{
    if (hang)
        spin_for_ever<<<1, 1, 0, stream>>>(never);
    else
        write_nowhere<<<1, 1, 0, stream>>>();
    return cudaGetLastError();
}
