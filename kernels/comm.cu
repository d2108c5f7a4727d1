/* kernels/comm.cu - sums between GPUs: through each other's memory, and what NCCL's moves leave to
 * do; logits put side by side.
 *
 *   requires  what bgk.h says; 1 <= n_ranks <= BGK_MAX_RANKS (peers: BGK_MAX_PEERS)
 *   launch    sum_four, sum_one, place_shards: ordinary launches of 256 threads a block (they
 *             follow NCCL's kernels); peers: programmatic ones, up to 96 blocks, in clusters with
 *             the norm. Graph-capturable, in any mix with eager launches
 *   order     an element is rank 0's + rank 1's + ... in float32, as in comm/shm.c, everywhere
 *   traffic   sum_four: n_ranks + 1 values of 4 bytes an element. Between R GPUs, n elements:
 *             lines 8 (R-1) n bytes out, once 4 (R-1) n in, twice 8 (R-1) n / R in
 *   proof     tests/gpu/test_comm.c: bit for bit against the same sums on the host */
#include <cooperative_groups.h>

#include "bgk.h"
#include "launch.cuh"
#include "norm.cuh"

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

/* Block (x, t, r): 4 BLOCK columns of row t of rank r's shard. stride: from a rank's to the next
 * one's in `in`; most: columns that a rank has there, of which the last stands for more. */
__global__ void __launch_bounds__(BLOCK)
    place_shards(float *out, int64_t out_cols, const float *in, int64_t shard_cols, int64_t stride,
                 int most, shards s)
{
    ptx_let_next_start();
    const int r = blockIdx.z, first = s.start[r], n = s.start[r + 1] - first;
    const float *row = in + r * stride + blockIdx.y * shard_cols;
    float *to = out + blockIdx.y * out_cols + first;
    for (int k = 0; k < 4; k++) {
        const int i = (blockIdx.x * 4 + k) * BLOCK + threadIdx.x;
        if (i < n) to[i] = row[i < most ? i : most - 1];
    }
}

/* ---- peers -----------------------------------------------------------------------------------
 * A rank's memory, [bgk_peer_bytes()], as the others map it:
 *
 *     data    2 halves of BGK_PEER_FLOATS floats
 *     lines   2 halves of [BGK_MAX_PEERS, BGK_LINE_FLOATS / 2] lines: two floats and two flags
 *     flags   [BGK_PEER_BLOCKS, BGK_MAX_PEERS]: how far block b of rank r has come
 *     epoch   how many calls there were, and the blocks that have left the present one
 *
 * Calls use the halves in turn, and the number of a call is the same on all ranks. A rank writes
 * into half h again in the call after the next; then it has ended the one between, in which it met
 * every other rank, which by then had ended the call before, as a call begins when all before it on
 * the stream has ended: so nobody reads what is overwritten. */

constexpr int LINE_BLOCK = 256, WIDE_BLOCK = 512;
constexpr int64_t HALF4 = BGK_PEER_FLOATS / 4, LINES = BGK_LINE_FLOATS / 2;
constexpr size_t LINES_AT = 2 * (size_t)BGK_PEER_FLOATS * sizeof(float);
constexpr size_t FLAGS_AT = LINES_AT + 2 * BGK_MAX_PEERS * LINES * sizeof(uint4);
constexpr size_t EPOCH_AT = FLAGS_AT + BGK_PEER_BLOCKS * BGK_MAX_PEERS * sizeof(uint64_t);
constexpr size_t PEER_BYTES = EPOCH_AT + 128;

struct call_count {
    uint64_t epoch;
    unsigned left;
};

__device__ float4 *data_of(const bgk_peers &p, int rank, uint64_t epoch)
{
    return (float4 *)p.memory[rank] + (epoch & 1) * HALF4;
}

/* What rank `from` has written for rank `at`. */
__device__ uint4 *lines_of(const bgk_peers &p, int at, uint64_t epoch, int from)
{
    return (uint4 *)((char *)p.memory[at] + LINES_AT) +
           ((epoch & 1) * BGK_MAX_PEERS + from) * LINES;
}

__device__ uint64_t *flag_of(const bgk_peers &p, int at, int block, int from)
{
    return (uint64_t *)((char *)p.memory[at] + FLAGS_AT) + block * BGK_MAX_PEERS + from;
}

__device__ call_count *count_of(const bgk_peers &p)
{
    return (call_count *)((char *)p.memory[p.rank] + EPOCH_AT);
}

/* The number of this call, from 1 on. */
__device__ uint64_t enter(const bgk_peers &p)
{
    return *(volatile uint64_t *)&count_of(p)->epoch + 1;
}

/* All blocks have read the old number before the last one sets the new one. */
__device__ void leave(const bgk_peers &p, uint64_t epoch)
{
    call_count *c = count_of(p);
    __syncthreads();
    if (threadIdx.x || atomicAdd(&c->left, 1) + 1 < gridDim.x * gridDim.y * gridDim.z) return;
    c->left = 0;
    *(volatile uint64_t *)&c->epoch = epoch;
}

/* Tells block b of every rank that this one has come so far, and waits until they have, too: what
 * any thread of theirs wrote before is seen by all threads here after. */
__device__ void meet(const bgk_peers &p, uint64_t step)
{
    const int t = threadIdx.x;
    __syncthreads();
    if (t < p.n_ranks && t != p.rank) {
        uint64_t v;
        asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag_of(p, t, blockIdx.x, p.rank)),
                     "l"(step)
                     : "memory");
        do
            asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                         : "=l"(v)
                         : "l"(flag_of(p, p.rank, blockIdx.x, t))
                         : "memory");
        while (v < step);
    }
    __syncthreads();
}

/* A line is stored and loaded as a whole, at least each float with its flag: no other order between
 * the two is needed. Flags are never 0, and those of the calls that use a half differ for 2^31 of
 * them. */
__device__ uint32_t line_flag(uint64_t epoch)
{
    return (uint32_t)(epoch >> 1) | 0x80000000u;
}

__device__ void put_line(uint4 *at, float2 v, uint32_t flag)
{
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(at),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(flag)
                 : "memory");
}

__device__ uint4 look_at_line(const uint4 *at)
{
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

/* N lines of every rank, `stride` lines apart, added in rank order onto nothing; own: this rank's.
 */
template <int MOST, int N>
__device__ void sum_of_lines(const bgk_peers &p, uint64_t epoch, int64_t first, int64_t stride,
                             const float2 *own, float2 *sum)
{
    const uint32_t flag = line_flag(epoch);
    uint4 got[MOST][N];
#pragma unroll
    for (int r = 0; r < MOST; r++) /* all under way before the first is needed */
#pragma unroll
        for (int k = 0; k < N; k++)
            if (r < p.n_ranks && r != p.rank)
                got[r][k] = look_at_line(lines_of(p, p.rank, epoch, r) + first + k * stride);
#pragma unroll
    for (int r = 0; r < MOST; r++) {
        if (r >= p.n_ranks) continue;
#pragma unroll
        for (int k = 0; k < N; k++) {
            float2 v = own[k];
            if (r != p.rank) {
                while (got[r][k].y != flag || got[r][k].w != flag)
                    got[r][k] = look_at_line(lines_of(p, p.rank, epoch, r) + first + k * stride);
                v = make_float2(__uint_as_float(got[r][k].x), __uint_as_float(got[r][k].z));
            }
            sum[k] = r ? make_float2(sum[k].x + v.x, sum[k].y + v.y) : v;
        }
    }
}

__device__ void send_lines(const bgk_peers &p, uint64_t epoch, int64_t i, float2 v)
{
    const uint32_t flag = line_flag(epoch);
    for (int k = 1; k < p.n_ranks; k++) { /* each begins with another rank */
        const int to = p.rank + k < p.n_ranks ? p.rank + k : p.rank + k - p.n_ranks;
        put_line(lines_of(p, to, epoch, p.rank) + i, v, flag);
    }
}

/* For few values: everyone writes to everyone, and values say by themselves that they have come. */
__global__ void __launch_bounds__(LINE_BLOCK)
    sum_lines(float2 *x, int n2, const __grid_constant__ bgk_peers p)
{
    const int i = blockIdx.x * LINE_BLOCK + threadIdx.x;
    ptx_let_next_start();
    ptx_wait_prior();
    const uint64_t epoch = enter(p);
    if (i < n2) {
        const float2 v = x[i];
        float2 sum;
        send_lines(p, epoch, i, v);
        sum_of_lines<BGK_MAX_PEERS, 1>(p, epoch, i, 0, &v, &sum);
        x[i] = sum;
    }
    leave(p, epoch);
}

/* ---- sum, residual and norm in one -------------------------------------------------------------
 * A row is a cluster's: each block has some of the warps that norm_rows (elementwise.cu) would give
 * the row, with the same columns, and the sums of squares of all warps meet in every block's shared
 * memory. What a row sends takes several blocks: those with blockIdx.y > 0 do nothing else, each
 * for other ranks. A thread's lines lie one row of threads apart. The next kernel starts, and has
 * its weights fetched, while lines travel and memory is idle: earlier than that it is in the way of
 * those before. */

constexpr int NORM_PART = 128, NORM_SENDERS = 4; /* threads of a block; blockIdx.y */

/* Those of pieces me, me + threads, ..: before anything is waited for. */
template <int EACH>
__device__ void norm_weights(float4 (&weights)[EACH][2], const float *w, int me, int threads,
                             int cols)
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int col = piece_col(me + i * threads);
        weights[i][0] = load4<true>(w, col, cols);
        weights[i][1] = load4<true>(w, col + 32, cols);
    }
}

#if __CUDA_ARCH__ >= 900
/* Columns [col, col + 4), past L1: whoever wrote them may have had another processor. */
__device__ float4 load4_l2(const float *p, int col, int cols)
{
    return col < cols ? __ldcg((const float4 *)(p + col)) : make_float4(0, 0, 0, 0);
}

/* The row whose pieces are a and b, normed; all threads of the cluster, which have arrived at its
 * barrier once. part: [NORM_WARPS], of the block's shared memory. */
template <int EACH>
__device__ void put_norm(const cooperative_groups::cluster_group &cluster, float *part,
                         const float4 (&a)[EACH], const float4 (&b)[EACH],
                         const float4 (&weights)[EACH][2], const bgk_out &out, int row, int cols,
                         int pieces, float eps)
{
    const int threads = gridDim.x * blockDim.x, me = blockIdx.x * blockDim.x + threadIdx.x;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        squares = add_squares(add_squares(squares, a[i]), b[i]);
    squares = warp_sum(squares);
    cluster.barrier_wait();
    if (threadIdx.x % 32 < gridDim.x)
        cluster.map_shared_rank(part, threadIdx.x % 32)[me / 32] = squares;
    cluster.sync();
    const float f = 1.0f / sqrtf(sum_of_warps(part, threads / 32) / (float)cols + eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int u = me + i * threads, col = piece_col(u);
        if (u < pieces)
            put_piece<true, true>(out, row, u, cols, scaled(a[i], f, weights[i][0], col, cols),
                                  scaled(b[i], f, weights[i][1], col + 32, cols));
    }
}
#endif

template <int MOST, int EACH>
__global__ void __launch_bounds__(NORM_PART)
    sum_norm_lines(bgk_out out, float *x, int64_t x_cols, const float *y, int64_t y_cols,
                   const float *w, float eps, int cols, int pieces,
                   const __grid_constant__ bgk_peers p)
{
#if __CUDA_ARCH__ >= 900
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int threads = gridDim.x * blockDim.x, me = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.z;
    const int64_t first = (int64_t)row * EACH * 4 * threads + me;
    const float *yr = y + row * y_cols;
    float *xr = x + row * x_cols;
    const bool receives = blockIdx.y == 0;
    float2 own[EACH][4];
    float4 weights[EACH][2];
    __shared__ float part[NORM_WARPS];
    if (receives) cluster.barrier_arrive(); /* part may be written once all blocks are there */
    if (receives) norm_weights<EACH>(weights, w, me, threads, cols);
    ptx_wait_prior();
    ptx_let_next_start(); /* see above */
    const uint64_t epoch = enter(p);
    const uint32_t flag = line_flag(epoch);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int col = piece_col(me + i * threads);
        const float4 a = load4<true>(yr, col, cols), b = load4<true>(yr, col + 32, cols);
        own[i][0] = make_float2(a.x, a.y);
        own[i][1] = make_float2(a.z, a.w);
        own[i][2] = make_float2(b.x, b.y);
        own[i][3] = make_float2(b.z, b.w);
    }
    for (int k = 1 + blockIdx.y; k < p.n_ranks; k += gridDim.y) {
        const int to = p.rank + k < p.n_ranks ? p.rank + k : p.rank + k - p.n_ranks;
        uint4 *at = lines_of(p, to, epoch, p.rank) + first;
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (me + i * threads < pieces)
                    put_line(at + (i * 4 + j) * threads, own[i][j], flag);
    }
    if (receives) {
        float4 a[EACH], b[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) { /* while lines travel */
            const int col = piece_col(me + i * threads);
            a[i] = load4_l2(xr, col, cols);
            b[i] = load4_l2(xr, col + 32, cols);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int u = me + i * threads, col = piece_col(u);
            float2 s[4] = {};
            if (u < pieces)
                sum_of_lines<MOST, 4>(p, epoch, first + i * 4 * threads, threads, own[i], s);
            a[i] = a[i] + make_float4(s[0].x, s[0].y, s[1].x, s[1].y);
            b[i] = b[i] + make_float4(s[2].x, s[2].y, s[3].x, s[3].y);
            store4<true>(xr, col, cols, a[i]);
            store4<true>(xr, col + 32, cols, b[i]);
        }
        put_norm<EACH>(cluster, part, a, b, weights, out, row, cols, pieces, eps);
    }
    leave(p, epoch);
#endif
}

__device__ void add(float4 &s, float4 v)
{
    s.x += v.x;
    s.y += v.y;
    s.z += v.z;
    s.w += v.w;
}

/* In one shot: everyone reads everything. MOST: ranks at most. */
template <int MOST>
__global__ void __launch_bounds__(WIDE_BLOCK)
    sum_once(float4 *x, int64_t n4, const __grid_constant__ bgk_peers p)
{
    constexpr int EACH = BGK_MAX_PEERS / MOST; /* so many loads are under way for any MOST */
    const int64_t first = (int64_t)blockIdx.x * WIDE_BLOCK + threadIdx.x;
    const int64_t step = (int64_t)gridDim.x * WIDE_BLOCK;
    ptx_let_next_start();
    ptx_wait_prior();
    const uint64_t epoch = enter(p);
    float4 *own = data_of(p, p.rank, epoch);
#pragma unroll 4
    for (int64_t i = first; i < n4; i += step)
        own[i] = x[i];
    meet(p, 2 * epoch);
    for (int64_t i0 = first; i0 < n4; i0 += EACH * step) {
        float4 v[EACH][MOST];
#pragma unroll
        for (int k = 0; k < EACH; k++)
#pragma unroll
            for (int r = 0; r < MOST; r++)
                if (r < p.n_ranks && i0 + k * step < n4)
                    v[k][r] = __ldcv(data_of(p, r, epoch) + i0 + k * step);
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            if (i0 + k * step >= n4) break;
            float4 s = v[k][0];
#pragma unroll
            for (int r = 1; r < MOST; r++)
                if (r < p.n_ranks) add(s, v[k][r]);
            x[i0 + k * step] = s;
        }
    }
    leave(p, epoch);
}

/* In two: rank r adds slice r for all, then everyone reads the sums. Block b of every rank has the
 * same places of every slice, so it waits for the blocks b alone. */
template <int MOST>
__global__ void __launch_bounds__(WIDE_BLOCK)
    sum_twice(float4 *x, int64_t n4, int64_t slice, const __grid_constant__ bgk_peers p)
{
    const int64_t first = (int64_t)blockIdx.x * WIDE_BLOCK + threadIdx.x;
    const int64_t step = (int64_t)gridDim.x * WIDE_BLOCK;
    ptx_let_next_start();
    ptx_wait_prior();
    const uint64_t epoch = enter(p);
    float4 *own = data_of(p, p.rank, epoch);
    for (int64_t j = first; j < slice; j += step)
#pragma unroll
        for (int q = 0; q < MOST; q++) {
            const int64_t i = q * slice + j;
            if (q < p.n_ranks && q != p.rank && i < n4) own[i] = x[i];
        }
    meet(p, 2 * epoch);
    for (int64_t j = first; j < slice; j += step) {
        const int64_t i = p.rank * slice + j;
        if (i >= n4) break;
        float4 v[MOST];
#pragma unroll
        for (int r = 0; r < MOST; r++)
            if (r < p.n_ranks) v[r] = r == p.rank ? x[i] : __ldcv(data_of(p, r, epoch) + i);
        float4 s = v[0];
#pragma unroll
        for (int r = 1; r < MOST; r++)
            if (r < p.n_ranks) add(s, v[r]);
        x[i] = s;
        own[i] = s;
    }
    meet(p, 2 * epoch + 1);
    for (int64_t j = first; j < slice; j += step) {
        float4 v[MOST];
#pragma unroll
        for (int q = 0; q < MOST; q++)
            if (q < p.n_ranks && q != p.rank && q * slice + j < n4)
                v[q] = __ldcv(data_of(p, q, epoch) + q * slice + j);
#pragma unroll
        for (int q = 0; q < MOST; q++)
            if (q < p.n_ranks && q != p.rank && q * slice + j < n4) x[q * slice + j] = v[q];
    }
    leave(p, epoch);
}

/* ---- one rank of several, alone ----------------------------------------------------------------
 */

__global__ void stand_in(int64_t ns)
{
    unsigned long long start, now;
    ptx_let_next_start();
    ptx_wait_prior();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while ((int64_t)(now - start) < ns);
}

/* sum_norm_lines, with a wait for what would come; nothing is sent. */
template <int EACH>
__global__ void __launch_bounds__(NORM_PART)
    stand_in_norm(bgk_out out, float *x, int64_t x_cols, const float *y, int64_t y_cols,
                  const float *w, float eps, int cols, int pieces, int64_t ns)
{
#if __CUDA_ARCH__ >= 900
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int threads = gridDim.x * blockDim.x, me = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.z;
    const float *yr = y + row * y_cols;
    float *xr = x + row * x_cols;
    float4 weights[EACH][2], a[EACH], b[EACH], sum[EACH][2];
    unsigned long long start, now;
    __shared__ float part[NORM_WARPS];
    if (blockIdx.y > 0) return; /* whole clusters */
    cluster.barrier_arrive();   /* part may be written once all blocks are there */
    norm_weights<EACH>(weights, w, me, threads, cols);
    ptx_wait_prior();
    ptx_let_next_start();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start)::"memory");
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int col = piece_col(me + i * threads);
        sum[i][0] = load4<true>(yr, col, cols);
        sum[i][1] = load4<true>(yr, col + 32, cols);
        a[i] = load4_l2(xr, col, cols);
        b[i] = load4_l2(xr, col + 32, cols);
    }
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    while ((int64_t)(now - start) < ns);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int col = piece_col(me + i * threads);
        a[i] = a[i] + sum[i][0];
        b[i] = b[i] + sum[i][1];
        store4<true>(xr, col, cols, a[i]);
        store4<true>(xr, col + 32, cols, b[i]);
    }
    put_norm<EACH>(cluster, part, a, b, weights, out, row, cols, pieces, eps);
#endif
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
                             const int64_t *widths, int n_ranks, int only, int rows,
                             cudaStream_t stream)
{
    shards s;
    int64_t at = 0;
    if (n_ranks < 1 || n_ranks > BGK_MAX_RANKS || rows < 0 || rows > 65535 || shard_cols < 1 ||
        only >= n_ranks || (only >= 0 && widths[only] < 1))
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
    place_shards<<<grid, BLOCK, 0, stream>>>(out, out_cols, in, shard_cols,
                                             only < 0 ? rows * shard_cols : 0,
                                             (int)(only < 0 ? shard_cols : widths[only]), s);
    return cudaGetLastError();
}

size_t bgk_peer_bytes(void)
{
    return PEER_BYTES;
}

/* Lines carry twice the bytes, but need one trip where flags behind values need three. In one shot
 * a rank reads (R-1) n floats, in two 2 (R-1) n / R and waits once more: for as long as the
 * difference takes that is worth it. */
bgk_sum bgk_sum_way(int64_t n, int n_ranks)
{
    constexpr int64_t WAIT_FLOATS = 5 << 16; /* 1.25 MB: what links bring during a wait */
    if (n <= BGK_LINE_FLOATS) return BGK_SUM_LINES;
    return n * (n_ranks - 1) * (n_ranks - 2) / n_ranks <= WAIT_FLOATS ? BGK_SUM_ONCE
                                                                      : BGK_SUM_TWICE;
}

static unsigned wide_blocks(int64_t n4)
{
    const int64_t blocks = (n4 + WIDE_BLOCK - 1) / WIDE_BLOCK;
    return (unsigned)(blocks < BGK_PEER_BLOCKS ? blocks : BGK_PEER_BLOCKS);
}

cudaError_t bgk_sum_peers(float *x, int64_t n, const bgk_peers *p, bgk_sum way, cudaStream_t stream)
{
    if (n < 1 || n > BGK_PEER_FLOATS || n % 4 || !aligned(x) || p->n_ranks < 1 ||
        p->n_ranks > BGK_MAX_PEERS || p->rank < 0 || p->rank >= p->n_ranks ||
        (way == BGK_SUM_LINES && n > BGK_LINE_FLOATS))
        return cudaErrorInvalidValue;
    const int64_t n4 = n / 4, slice = (n4 + p->n_ranks - 1) / p->n_ranks;
    if (way == BGK_SUM_LINES)
        return launch_after(sum_lines, (unsigned)((n / 2 + LINE_BLOCK - 1) / LINE_BLOCK),
                            LINE_BLOCK, 0, stream, (float2 *)x, (int)(n / 2), *p);
    if (way == BGK_SUM_ONCE)
        return launch_after(p->n_ranks <= 2   ? sum_once<2>
                            : p->n_ranks <= 4 ? sum_once<4>
                                              : sum_once<8>,
                            wide_blocks(n4), WIDE_BLOCK, 0, stream, (float4 *)x, n4, *p);
    return launch_after(p->n_ranks <= 2   ? sum_twice<2>
                        : p->n_ranks <= 4 ? sum_twice<4>
                                          : sum_twice<8>,
                        wide_blocks(slice), WIDE_BLOCK, 0, stream, (float4 *)x, n4, slice, *p);
}

/* Blocks of a row's cluster: a power of two that warps are cut by; 0: threads are too many. */
static unsigned norm_blocks(unsigned threads)
{
    unsigned blocks = 8;
    while (blocks > 1 && threads / 32 % blocks)
        blocks /= 2;
    return threads / blocks <= NORM_PART ? blocks : 0;
}

bool bgk_sum_peers_norm_fits(int rows, int cols)
{
    int each;
    const int pieces = pieces_of(cols, &each);
    const unsigned threads = norm_threads(pieces, each);
    return launch_programmatic() && rows >= 1 && cols >= 4 && cols % 4 == 0 &&
           (each == 1 || each == 2) && norm_blocks(threads) &&
           (int64_t)rows * each * 4 * threads <= LINES;
}

cudaError_t bgk_sum_peers_norm(const bgk_out *out, float *x, int64_t x_cols, const float *y,
                               int64_t y_cols, const float *w, float eps, int rows, int cols,
                               const bgk_peers *p, cudaStream_t stream)
{
    if (!bgk_sum_peers_norm_fits(rows, cols) || out->layout != BGK_TILES ||
        out->stride % BGK_TILE_ROWS || (uintptr_t)out->data % 1024 || !aligned(x) || !aligned(y) ||
        !aligned(w) || x_cols % 4 || y_cols % 4 || p->n_ranks < 2 || p->n_ranks > BGK_MAX_PEERS)
        return cudaErrorInvalidValue;
    int each;
    const int pieces = pieces_of(cols, &each);
    const unsigned threads = norm_threads(pieces, each), blocks = norm_blocks(threads);
    const unsigned senders = p->n_ranks - 1 < NORM_SENDERS ? p->n_ranks - 1 : NORM_SENDERS;
    const auto kernel = p->n_ranks <= 2 ? (each == 1 ? sum_norm_lines<2, 1> : sum_norm_lines<2, 2>)
                        : p->n_ranks <= 4
                            ? (each == 1 ? sum_norm_lines<4, 1> : sum_norm_lines<4, 2>)
                            : (each == 1 ? sum_norm_lines<8, 1> : sum_norm_lines<8, 2>);
    return launch_clusters_after(kernel, blocks, dim3(blocks, senders, (unsigned)rows),
                                 threads / blocks, 0, stream, *out, x, x_cols, y, y_cols, w, eps,
                                 cols, pieces, *p);
}

/* Launched as bgk_sum_peers_norm() is. */
cudaError_t bgk_stand_in_norm(const bgk_out *out, float *x, int64_t x_cols, const float *y,
                              int64_t y_cols, const float *w, float eps, int rows, int cols,
                              int n_ranks, int64_t ns, cudaStream_t stream)
{
    if (!bgk_sum_peers_norm_fits(rows, cols) || out->layout != BGK_TILES ||
        out->stride % BGK_TILE_ROWS || (uintptr_t)out->data % 1024 || !aligned(x) || !aligned(y) ||
        !aligned(w) || x_cols % 4 || y_cols % 4 || n_ranks < 2 || n_ranks > BGK_MAX_PEERS)
        return cudaErrorInvalidValue;
    int each;
    const int pieces = pieces_of(cols, &each);
    const unsigned threads = norm_threads(pieces, each), blocks = norm_blocks(threads);
    const unsigned senders = n_ranks - 1 < NORM_SENDERS ? n_ranks - 1 : NORM_SENDERS;
    return launch_clusters_after(each == 1 ? stand_in_norm<1> : stand_in_norm<2>, blocks,
                                 dim3(blocks, senders, (unsigned)rows), threads / blocks, 0, stream,
                                 *out, x, x_cols, y, y_cols, w, eps, cols, pieces, ns);
}

cudaError_t bgk_stand_in(int64_t ns, cudaStream_t stream)
{
    return launch_after(stand_in, 1, 32, 0, stream, ns);
}

cudaError_t bgk_fault(bool hang, const int *never, cudaStream_t stream)
{
    if (hang)
        spin_for_ever<<<1, 1, 0, stream>>>(never);
    else
        write_nowhere<<<1, 1, 0, stream>>>();
    return cudaGetLastError();
}
