/* kernels/index.cu - the lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2-Exp): which
 * keys a token attends to.
 *
 * Requires: dim even, at most 128.
 *
 * Launch: store: a block a row. scores: rows in y, blocks in x that take 256 keys (32 a warp) by
 * turns; the rest leaves at once. select: a block a row. Graph-capturable, may start early.
 *
 * Order: a score is, for each lane's heads in order, a chain of weight * relu(q . k), then lanes';
 * q . k on tensor cores in steps of 16 of a fixed order of the dims. Set by n_heads and dim alone.
 *
 * Proof: tests/gpu/test_mla.c. */
#include "mla.cuh"

namespace
{

constexpr int MOST = 128;

__device__ float wide(float v)
{
    return v;
}

__device__ float wide(__half v)
{
    return __half2float(v);
}

__device__ float wide(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

__device__ void narrow(float *to, float v)
{
    *to = v;
}

__device__ void narrow(__half *to, float v)
{
    *to = tile_half(v);
}

__device__ void narrow(__nv_bfloat16 *to, float v)
{
    *to = __float2bfloat16_rn(v);
}

/* ---- keys and queries --------------------------------------------------------------------------
 */

constexpr int STORE = 256;

struct store_args {
    bgk_index x;
    void *q;
    float *w;
    bgk_out iq;
    const float *ik;
    int64_t ik_cols;
    bgk_rows rows;
};

template <typename T> __device__ T *key_of(const bgk_index &x, const int32_t *table, int pos)
{
    const int64_t block = (int64_t)x.layer * x.n_blocks + table[pos / x.block_tokens];
    return (T *)x.keys + (block * x.block_tokens + pos % x.block_tokens) * x.dim;
}

/* Value i of a head whose values f(j) gives, rotated. */
template <typename F> __device__ float turned(const bgk_rotation &r, int pos, int i, F f)
{
    if (i >= r.n_rot) return f(i);
    const int half = r.n_rot / 2, pair = r.neox ? i % half : i / 2;
    const bool hi = r.neox ? i >= half : i % 2;
    const float2 v = mla_turn(f(r.neox ? pair : 2 * pair), f(r.neox ? pair + half : 2 * pair + 1),
                              pos, r.freq[pair], r.mscale);
    return hi ? v.y : v.x;
}

template <typename T> __global__ void __launch_bounds__(STORE) index_store(store_args a)
{
    __shared__ float key[MOST];
    const bgk_index &x = a.x;
    const int row = blockIdx.x, pos = a.rows.pos[row], thread = threadIdx.x;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    ptx_wait_prior();
    ptx_let_next_start();
    if (pos < 0) return;
    const float *ik = a.ik + row * a.ik_cols;
    if (thread < 32) { /* LayerNorm by a warp */
        float sum = 0, square = 0;
        for (int i = thread; i < x.dim; i += 32)
            sum = __fadd_rn(sum, ik[i]);
        for (int d = 16; d > 0; d /= 2)
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, d));
        const float mean = __fdiv_rn(sum, (float)x.dim);
        for (int i = thread; i < x.dim; i += 32) {
            const float v = __fsub_rn(ik[i], mean);
            square = __fmaf_rn(v, v, square);
        }
        for (int d = 16; d > 0; d /= 2)
            square = __fadd_rn(square, __shfl_xor_sync(0xffffffffu, square, d));
        const float f =
            __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(square, (float)x.dim), x.eps)));
        for (int i = thread; i < x.dim; i += 32)
            key[i] = __fmaf_rn(__fmul_rn(__fsub_rn(ik[i], mean), f), x.k_norm[i],
                               x.k_norm_b ? x.k_norm_b[i] : 0.0f);
        __syncwarp();
        T *to = key_of<T>(x, table, pos);
        for (int i = thread; i < x.dim; i += 32)
            narrow(to + i, turned(x.rope, pos, i, [&](int j) { return key[j]; }));
    }
    for (int i = thread; i < x.n_heads * x.dim; i += STORE) {
        const int col = i / x.dim * x.dim;
        narrow((T *)a.q + (int64_t)row * x.n_heads * x.dim + i,
               turned(x.rope, pos, i - col, [&](int j) { return mla_value(a.iq, row, col + j); }));
    }
    for (int i = thread; i < x.n_heads; i += STORE)
        a.w[(int64_t)row * x.n_heads + i] = __fmul_rn(ik[x.dim + i], x.scale);
}

/* ---- scores ------------------------------------------------------------------------------------
 */

constexpr int WARPS = 8, BLOCK = 32 * WARPS, CHUNK = 32; /* keys of a warp at a time */
constexpr int MOST_HEADS = 128;

struct score_args {
    float *scores;
    int64_t stride;
    bgk_index x;
    const void *q;
    const float *w;
    bgk_rows rows;
    int row0, top_k;
};

/* Dims of an mma: a thread's 16 bytes at 32 s + 8 t are its k 2t, 2t + 1 and 2t + 8, 2t + 9 of
 * steps 2 s and 2 s + 1, of queries and keys alike. */
template <typename T, int DIM> __global__ void __launch_bounds__(BLOCK) index_scores(score_args a)
{
    constexpr int PITCH = DIM * 2 + 16; /* bytes: heads' pieces in different banks */
    __shared__ __align__(16) unsigned char queries[MOST_HEADS * PITCH];
    __shared__ float weights[MOST_HEADS];
    const bgk_index &x = a.x;
    const int row = a.row0 + blockIdx.y, pos = a.rows.pos[row], n_keys = pos + 1;
    ptx_wait_prior();
    ptx_let_next_start();
    if (n_keys <= a.top_k || (int)blockIdx.x * BLOCK >= n_keys) return;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 *q = (const uint4 *)((const T *)a.q + (int64_t)row * x.n_heads * DIM);
    for (int i = threadIdx.x; i < x.n_heads * (DIM / 8); i += BLOCK)
        *(uint4 *)(queries + i / (DIM / 8) * PITCH + i % (DIM / 8) * 16) = q[i];
    for (int i = threadIdx.x; i < x.n_heads; i += BLOCK)
        weights[i] = a.w[(int64_t)row * x.n_heads + i];
    __syncthreads();
    for (int key0 = (blockIdx.x * WARPS + warp) * CHUNK; key0 < n_keys;
         key0 += gridDim.x * WARPS * CHUNK) {
        uint4 k[4][DIM / 32];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int key = key0 + 8 * j + g;
            const uint4 *from = (const uint4 *)(key < n_keys ? key_of<T>(x, table, key) : nullptr);
#pragma unroll
            for (int s = 0; s < DIM / 32; s++)
                k[j][s] = key < n_keys ? from[4 * s + t] : uint4{};
        }
        float score[4][2] = {};
        for (int head = 0; head < x.n_heads; head += 16) {
            float d[4][4] = {};
#pragma unroll
            for (int s = 0; s < DIM / 32; s++) {
                const uint4 lo = *(const uint4 *)(queries + (head + g) * PITCH + s * 64 + t * 16);
                const uint4 hi =
                    *(const uint4 *)(queries + (head + g + 8) * PITCH + s * 64 + t * 16);
                const uint32_t first[4] = {lo.x, hi.x, lo.y, hi.y};
                const uint32_t second[4] = {lo.z, hi.z, lo.w, hi.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    att_mma<T>(d[j], first, k[j][s].x, k[j][s].y);
                    att_mma<T>(d[j], second, k[j][s].z, k[j][s].w);
                }
            }
            const float w0 = weights[head + g], w1 = weights[head + g + 8];
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    score[j][e] = __fmaf_rn(w0, fmaxf(d[j][e], 0.0f), score[j][e]);
                    score[j][e] = __fmaf_rn(w1, fmaxf(d[j][2 + e], 0.0f), score[j][e]);
                }
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
#pragma unroll
                for (int by = 4; by < 32; by *= 2)
                    score[j][e] =
                        __fadd_rn(score[j][e], __shfl_xor_sync(0xffffffffu, score[j][e], by));
                const int key = key0 + 8 * j + 2 * t + e;
                if (g == 0 && key < n_keys)
                    a.scores[blockIdx.y * a.stride + key] = __fadd_rn(score[j][e], 0.0f);
            }
    }
}

/* A thread a key, any dim. */
template <typename T> __global__ void __launch_bounds__(BLOCK) index_scores_plain(score_args a)
{
    const bgk_index &x = a.x;
    const int row = a.row0 + blockIdx.y, pos = a.rows.pos[row], n_keys = pos + 1;
    ptx_wait_prior();
    ptx_let_next_start();
    if (n_keys <= a.top_k) return;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const T *q = (const T *)a.q + (int64_t)row * x.n_heads * x.dim;
    for (int key = blockIdx.x * BLOCK + threadIdx.x; key < n_keys; key += gridDim.x * BLOCK) {
        const T *k = key_of<T>(x, table, key);
        float score = 0;
        for (int head = 0; head < x.n_heads; head++) {
            float d = 0;
            for (int i = 0; i < x.dim; i++)
                d = __fmaf_rn(wide(q[head * x.dim + i]), wide(k[i]), d);
            score = __fmaf_rn(a.w[(int64_t)row * x.n_heads + head], fmaxf(d, 0.0f), score);
        }
        a.scores[blockIdx.y * a.stride + key] = __fadd_rn(score, 0.0f); /* no -0 */
    }
}

/* ---- selection ---------------------------------------------------------------------------------
 */

constexpr int SELECT = 512;

struct select_args {
    int32_t *list, *count;
    const float *scores;
    int64_t stride;
    bgk_rows rows;
    int row0, top_k;
};

/* Larger for larger floats. */
__device__ uint32_t rank_of(float v)
{
    const uint32_t b = __float_as_uint(v);
    return b ^ (b >> 31 ? 0xffffffffu : 0x80000000u);
}

/* The rank of the top_k-th largest, eight bits at a time; need: how many of that rank are wanted.
 */
__device__ uint32_t threshold(const float *scores, int n, int top_k, int &need)
{
    __shared__ int histogram[256], found[2];
    uint32_t prefix = 0, known = 0; /* its upper bits, and which they are */
    need = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += SELECT)
            histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += SELECT) {
            const uint32_t r = rank_of(scores[i]);
            if ((r & known) == prefix) atomicAdd(&histogram[r >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) { /* a lane eight digits, from the largest down */
            const int lane = threadIdx.x;
            int mine = 0;
            for (int i = 0; i < 8; i++)
                mine += histogram[255 - (8 * lane + i)];
            int before = mine;
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, before, d);
                if (lane >= d) before += other;
            }
            before -= mine;
            if (before < need && before + mine >= need) {
                int digit = 255 - 8 * lane;
                for (; before + histogram[digit] < need; digit--)
                    before += histogram[digit];
                found[0] = digit;
                found[1] = need - before;
            }
        }
        __syncthreads();
        prefix |= (uint32_t)found[0] << shift;
        known |= 255u << shift;
        need = found[1];
        __syncthreads();
    }
    return prefix;
}

__global__ void __launch_bounds__(SELECT) index_select(select_args a)
{
    constexpr int N = SELECT / 32;
    __shared__ int larger[N], equal[N];
    const int row = a.row0 + blockIdx.x, n = a.rows.pos[row] + 1, thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    ptx_wait_prior();
    ptx_let_next_start();
    if (n <= a.top_k) {
        if (thread == 0) a.count[row] = -1;
        return;
    }
    const float *scores = a.scores + blockIdx.x * a.stride;
    int need;
    const uint32_t least = threshold(scores, n, a.top_k, need);
    int n_larger = 0, n_equal = 0; /* before this round's */
    int32_t *list = a.list + (int64_t)row * a.top_k;
    for (int at = 0; at < n; at += SELECT) {
        const int pos = at + thread;
        const uint32_t r = pos < n ? rank_of(scores[pos]) : 0;
        const unsigned l = __ballot_sync(0xffffffffu, pos < n && r > least);
        const unsigned e = __ballot_sync(0xffffffffu, pos < n && r == least);
        if (lane == 0) {
            larger[warp] = __popc(l);
            equal[warp] = __popc(e);
        }
        __syncthreads();
        int my_l = n_larger + __popc(l & ((1u << lane) - 1));
        int my_e = n_equal + __popc(e & ((1u << lane) - 1));
        for (int i = 0; i < N; i++) {
            if (i < warp) {
                my_l += larger[i];
                my_e += equal[i];
            }
            n_larger += larger[i];
            n_equal += equal[i];
        }
        if (l >> lane & 1 || (e >> lane & 1 && my_e < need)) list[my_l + min(my_e, need)] = pos;
        __syncthreads();
    }
    if (thread == 0) a.count[row] = a.top_k;
}

bool bad_index(const bgk_index *a)
{
    return a->dim < 2 || a->dim > MOST || a->dim % 2 || a->n_heads < 1 || a->block_tokens < 1 ||
           a->layer < 0 || a->rope.n_rot < 0 || a->rope.n_rot % 2 || a->rope.n_rot > a->dim ||
           (uintptr_t)a->keys % 16 || a->type == BGK_Q8;
}

template <typename T> cudaError_t scores_of(const score_args &a, dim3 grid, cudaStream_t stream)
{
    if constexpr (sizeof(T) == 2)
        if (a.x.n_heads % 16 == 0 && a.x.n_heads <= MOST_HEADS) {
            if (a.x.dim == 128)
                return launch_after(index_scores<T, 128>, grid, BLOCK, 0, stream, a);
            if (a.x.dim == 64) return launch_after(index_scores<T, 64>, grid, BLOCK, 0, stream, a);
        }
    return launch_after(index_scores_plain<T>, grid, BLOCK, 0, stream, a);
}

} // namespace

cudaError_t bgk_index_store(const bgk_index *x, void *q, float *w, const bgk_out *iq,
                            const float *ik, int64_t ik_cols, const bgk_rows *r,
                            cudaStream_t stream)
{
    if (bad_index(x) || !x->k_norm || (uintptr_t)q % 16) return cudaErrorInvalidValue;
    if (!r->rows) return cudaSuccess;
    const store_args a = {*x, q, w, *iq, ik, ik_cols, *r};
    const dim3 grid((unsigned)r->rows);
    if (x->type == BGK_F32) return launch_after(index_store<float>, grid, STORE, 0, stream, a);
    if (x->type == BGK_F16) return launch_after(index_store<__half>, grid, STORE, 0, stream, a);
    return launch_after(index_store<__nv_bfloat16>, grid, STORE, 0, stream, a);
}

cudaError_t bgk_index_scores(float *scores, int64_t stride, const bgk_index *x, const void *q,
                             const float *w, const bgk_rows *r, int row0, int n, int top_k,
                             int max_ctx, int n_sms, cudaStream_t stream)
{
    if (bad_index(x) || (uintptr_t)q % 16 || row0 < 0 || n < 0 || n > 65535 || stride < max_ctx ||
        n_sms < 1)
        return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    const score_args a = {scores, stride, *x, q, w, *r, row0, top_k};
    const int most = (max_ctx + BLOCK - 1) / BLOCK, wanted = 8 * n_sms / n;
    const dim3 grid((unsigned)(wanted < 1 ? 1 : wanted < most ? wanted : most), (unsigned)n);
    if (x->type == BGK_F32) return scores_of<float>(a, grid, stream);
    if (x->type == BGK_F16) return scores_of<__half>(a, grid, stream);
    return scores_of<__nv_bfloat16>(a, grid, stream);
}

cudaError_t bgk_index_select(int32_t *list, int32_t *count, const float *scores, int64_t stride,
                             const bgk_rows *r, int row0, int n, int top_k, cudaStream_t stream)
{
    if (row0 < 0 || n < 0 || top_k < 1) return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    const select_args a = {list, count, scores, stride, *r, row0, top_k};
    return launch_after(index_select, dim3((unsigned)n), SELECT, 0, stream, a);
}
