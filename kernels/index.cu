/* kernels/index.cu - the lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2-Exp): which
 * keys a token attends to.
 *
 * Requires: dim even, at most 128.
 *
 * Launch: store: a block a row. scores: rows in y, blocks in x that take 256 keys (32 a warp) by
 * turns; the rest leaves at once. select: a block a row. rows, all three in one: a cluster a row,
 * whose blocks take 32 keys a warp by turns and give scores to the first one, which selects.
 * Graph-capturable, may start early. (Few rows of few keys: index_few.cu.)
 *
 * Order: a score is, for each lane's heads in order, a chain of weight * relu(q . k), then lanes';
 * q . k on tensor cores in steps of 16 of a fixed order of the dims. Set by n_heads and dim alone.
 *
 * Selection: keys are told apart by (score, lower position), so the top_k-th is one key, and those
 * chosen are the ones that are not below it. It is found among the keys of one of 2048 bins, equal
 * parts of what scores range over; where that bin has too many (scores that are alike, outliers,
 * infinities) by the digits of score and position.
 *
 * Proof: tests/gpu/test_mla.c, tests/gpu/test_index.c. */
#include <cooperative_groups.h>

#include "cluster.cuh"
#include "index.cuh"

namespace
{

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

template <typename T> __global__ void __launch_bounds__(STORE) index_store(store_args a)
{
    __shared__ float key[MOST];
    const bgk_index &x = a.x;
    const int row = blockIdx.x, pos = a.rows.pos[row], thread = threadIdx.x;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const auto angle = [&](int p) { return mla_angle(pos, x.rope.freq[p], x.rope.mscale); };
    ptx_wait_prior();
    ptx_let_next_start();
    if (pos < 0) return;
    const float *ik = a.ik + row * a.ik_cols;
    if (thread < 32) {
        norm_key(key, x, x.k_norm, x.k_norm_b, ik, thread);
        T *to = key_of<T>(x, table, pos);
        for (int i = thread; i < x.dim; i += 32)
            narrow(to + i, turned(
                               x.rope, i, [&](int j) { return key[j]; }, angle));
    }
    for (int i = thread; i < x.n_heads * x.dim; i += STORE) {
        const int col = i / x.dim * x.dim;
        narrow((T *)a.q + (int64_t)row * x.n_heads * x.dim + i,
               turned(
                   x.rope, i - col, [&](int j) { return mla_value(a.iq, row, col + j); }, angle));
    }
    for (int i = thread; i < x.n_heads; i += STORE)
        a.w[(int64_t)row * x.n_heads + i] = __fmul_rn(ik[x.dim + i], x.scale);
}

/* ---- scores ------------------------------------------------------------------------------------
 */

constexpr int WARPS = 8, BLOCK = 32 * WARPS, CHUNK = 32; /* keys of a warp at a time */

struct score_args {
    float *scores;
    int64_t stride;
    bgk_index x;
    const void *q;
    const float *w;
    bgk_rows rows;
    int row0, top_k;
};

/* A chunk's keys: k[j] is part t of key 8 j + g. left: how many there are, others are 0; slot: of
 * key `lane`. All lanes. */
template <typename T, int DIM>
__device__ void load_keys(uint4 (&k)[4][DIM / 32], const T *keys, int slot, int left, int lane)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int key = 8 * j + lane / 4, at = __shfl_sync(0xffffffffu, slot, key);
        const uint4 *from = (const uint4 *)(keys + (int64_t)at * DIM) + lane % 4;
#pragma unroll
        for (int s = 0; s < DIM / 32; s++)
            k[j][s] = key < left ? from[4 * s] : uint4{};
    }
}

/* Eight values of a head, from a multiple of 8 on, to where the first of them lies. */
template <typename T> __device__ void put_eight(T *to, uint4 v)
{
    *(uint32_t *)to = v.x;
    *(uint32_t *)(to + 4) = v.y;
    *(uint32_t *)(to + 256) = v.z;
    *(uint32_t *)(to + 260) = v.w;
}

template <typename T, int DIM> __global__ void __launch_bounds__(BLOCK) index_scores(score_args a)
{
    __shared__ __align__(16) T queries[MOST_HEADS * DIM];
    __shared__ float weights[MOST_HEADS];
    const bgk_index &x = a.x;
    const int row = a.row0 + blockIdx.y, pos = a.rows.pos[row], n_keys = pos + 1;
    ptx_wait_prior();
    ptx_let_next_start();
    if (n_keys <= a.top_k || (int)blockIdx.x * BLOCK >= n_keys) return;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4 *q = (const uint4 *)((const T *)a.q + (int64_t)row * x.n_heads * DIM);
    for (int i = threadIdx.x; i < x.n_heads * (DIM / 8); i += BLOCK)
        put_eight(queries + query_head<DIM>(i / (DIM / 8)) + query_col(i % (DIM / 8) * 8), q[i]);
    for (int i = threadIdx.x; i < x.n_heads; i += BLOCK)
        weights[i] = a.w[(int64_t)row * x.n_heads + i];
    __syncthreads();
    for (int key0 = (blockIdx.x * WARPS + warp) * CHUNK; key0 < n_keys;
         key0 += gridDim.x * WARPS * CHUNK) {
        uint4 k[4][DIM / 32];
        const int slot = slot_of(x, table, min(key0 + lane, pos)), key = key0 + chunk_key<4>(lane);
        load_keys<T, DIM>(k, layer_keys<T>(x), slot, n_keys - key0, lane);
        const float score = chunk_score<T, DIM, 4>([&](int j, int s) { return k[j][s]; }, queries,
                                                   weights, x.n_heads, lane);
        if (key < n_keys) a.scores[blockIdx.y * a.stride + key] = score;
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

constexpr int SELECT_WARPS = 16;

struct select_args {
    int32_t *list, *count;
    const float *scores;
    int64_t stride;
    bgk_rows rows;
    int row0, top_k;
};

__global__ void __launch_bounds__(32 * SELECT_WARPS) index_select(select_args a)
{
    constexpr int THREADS = 32 * SELECT_WARPS;
    __shared__ select_room room;
    __shared__ uint2 ends[SELECT_WARPS];
    const int row = a.row0 + blockIdx.x, n = a.rows.pos[row] + 1, thread = threadIdx.x;
    const int lane = thread % 32;
    for (int i = thread; i < BINS; i += THREADS)
        room.bins[i] = 0;
    ptx_wait_prior();
    ptx_let_next_start();
    if (n <= a.top_k) {
        if (thread == 0) a.count[row] = -1;
        return;
    }
    const float *scores = a.scores + blockIdx.x * a.stride;
    uint32_t low = 0xffffffffu, high = 0;
#pragma unroll 4
    for (int i = thread; i < n; i += THREADS) {
        const uint32_t r = rank_of(scores[i]);
        low = min(low, r);
        high = max(high, r);
    }
    low = warp_least(low);
    high = warp_most(high);
    if (lane == 0) ends[thread / 32] = make_uint2(low, high);
    __syncthreads();
    const uint2 e = ends[lane % SELECT_WARPS];
    select_keys<SELECT_WARPS>(
        a.list + (int64_t)row * a.top_k, room, [&](int i) { return scores[i]; }, n, a.top_k,
        warp_least(e.x), warp_most(e.y), nullptr);
    if (thread == 0) a.count[row] = a.top_k;
}

/* ---- all in one --------------------------------------------------------------------------------
 * For rows whose keys but their own are of earlier steps: those of a warp's first chunk are loaded
 * while the kernel before ends, and what else a row needs before them, since memory then takes its
 * time. Chunk c is warp c / n_blocks's of block c % n_blocks; each half of one has its place in
 * shared memory, and the next one is on its way there while a half is at work. The next kernel may
 * start when this one has waited: what was there by then, it need not wait for. */

constexpr int MOST_CLUSTER = 16;

struct rows_args {
    int32_t *list, *count;
    float *scores; /* of rows that have no room */
    int64_t stride;
    bgk_index x;
    bgk_out iq;
    const float *ik;
    int64_t ik_cols;
    bgk_rows rows;
    int row0, top_k, room;
};

constexpr int N_WARPS = 16, THREADS = 32 * N_WARPS;
constexpr int MOST_SHARED = 208 * 1024; /* dynamic: keys, queries, and scores if there is room */

template <typename T, int DIM>
__global__ void __launch_bounds__(THREADS, 1) index_rows(const __grid_constant__ rows_args a)
{
#if __CUDA_ARCH__ >= 900
    namespace cg = cooperative_groups;
    constexpr int HALF = CHUNK / 2;
    extern __shared__ __align__(16) unsigned char dynamic[]; /* keys, queries, scores */
    __shared__ select_room room;
    __shared__ row_room<T, DIM> r;
    __shared__ uint2 ends[MOST_CLUSTER * N_WARPS];
    const cg::cluster_group cluster = cg::this_cluster();
    const bgk_index &x = a.x;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int n_blocks = gridDim.x, block = blockIdx.x, row = a.row0 + blockIdx.y;
    const int pos = a.rows.pos[row], n = pos + 1, step = n_blocks * N_WARPS;
    const int chunks = (n + CHUNK - 1) / CHUNK, last = pos < 0 ? 0 : pos / CHUNK;
    const bool all = n <= a.top_k, owner = block == last % n_blocks; /* of the row's own key */
    if (all && !owner) return;
    T *ring = (T *)dynamic + warp * CHUNK * DIM;
    T *queries = (T *)dynamic + N_WARPS * CHUNK * DIM;
    float *scores = (float *)(queries + x.n_heads * DIM);
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const T *keys = layer_keys<T>(x);
    /* Of the lane's key of a chunk: its block's number, and where it lies, once that is there. */
    const auto entry_at = [&](int chunk) {
        const int i = chunk * CHUNK + lane;
        return i < pos ? table[i / x.block_tokens] : 0;
    };
    const auto slot_at = [&](int chunk, int entry) {
        return entry * x.block_tokens + (chunk * CHUNK + lane) % x.block_tokens;
    };
    const auto start_half = [&](int chunk, int slot, int h) {
        start_keys<T, DIM, HALF>(ring + h * HALF * DIM, keys,
                                 __shfl_sync(0xffffffffu, slot, (HALF * h + lane) % 32),
                                 pos - chunk * CHUNK - HALF * h, lane);
    };
    int chunk = block + n_blocks * warp, entry = 0;
    static_assert(DIM <= THREADS && MOST / 2 <= THREADS, "a thread each");
    const row_constants constants = constants_of<DIM>(x, owner);
    if (!all) {
        cluster_arrive();
        const int first = slot_at(chunk, entry_at(chunk));
        start_half(chunk, first, 0);
        start_half(chunk, first, 1);
        entry = entry_at(chunk + step);
        for (int i = thread; i < BINS && block == 0; i += THREADS)
            room.bins[i] = 0;
    }
    put_constants(r, x, constants, pos, owner);
    __syncthreads();
    const lane_turn<DIM> turn = turn_of<DIM>(x.rope, r.angles, lane);
    ptx_wait_prior();
    ptx_let_next_start();
    if (warp == N_WARPS - 1)
        take_key(r, x, a.ik + row * a.ik_cols, table, pos, owner, lane);
    else if (!all)
        put_queries<T, DIM, N_WARPS - 1>(
            queries, turn, (const float *)a.iq.data + row * a.iq.stride, x.n_heads, warp);
    if (all) {
        if (thread == 0) a.count[row] = -1;
        return;
    }
    __syncthreads();
    cluster_wait(); /* all blocks are there: the first one's memory may be written */
    const bool fits = n <= a.room;
    float *far = a.scores + blockIdx.y * a.stride;
    float *to = fits ? cluster.map_shared_rank(scores, 0) : far;
    uint32_t low = 0xffffffffu, high = 0;
    for (; chunk < chunks; chunk += step) {
        const int slot = slot_at(chunk + step, entry);
        entry = entry_at(chunk + 2 * step);
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            ptx_copy_wait<1>();
            __syncwarp();
            uint4 k[2][DIM / 32];
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int s = 0; s < DIM / 32; s++)
                    k[j][s] =
                        *(const uint4 *)(ring + h * HALF * DIM +
                                         place_of<DIM>(8 * j + lane / 4, s * 32 + lane % 4 * 8));
            if (chunk == last) {
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (chunk * CHUNK + HALF * h + 8 * j + lane / 4 == pos)
#pragma unroll
                        for (int s = 0; s < DIM / 32; s++)
                            k[j][s] = *(const uint4 *)(r.own + s * 32 + lane % 4 * 8);
            }
            __syncwarp(); /* all have read, before more comes */
            if (chunk + step < chunks)
                start_half(chunk + step, slot, h);
            else
                ptx_copy_commit();
            const float score = chunk_score<T, DIM, 2>([&](int j, int s) { return k[j][s]; },
                                                       queries, r.weights, x.n_heads, lane);
            const int at = chunk * CHUNK + HALF * h + chunk_key<2>(lane);
            if (at < n && lane < 16) {
                to[at] = score;
                low = min(low, rank_of(score));
                high = max(high, rank_of(score));
            }
        }
    }
    low = warp_least(low);
    high = warp_most(high);
    if (lane == 0) cluster.map_shared_rank(ends, 0)[block * N_WARPS + warp] = make_uint2(low, high);
    __syncwarp();
    cluster.sync();
    if (block > 0) return;
    for (int i = lane; i < n_blocks * N_WARPS; i += 32) {
        low = min(low, ends[i].x);
        high = max(high, ends[i].y);
    }
    low = warp_least(low);
    high = warp_most(high);
    int32_t *list = a.list + (int64_t)row * a.top_k;
    const float *from = fits ? scores : far;
    select_keys<N_WARPS>(
        list, room, [&](int i) { return from[i]; }, n, a.top_k, low, high, nullptr);
    if (thread == 0) a.count[row] = a.top_k;
#endif
}

template <typename T, int DIM>
cudaError_t launch_rows(rows_args a, int n, int max_ctx, int n_sms, cudaStream_t stream)
{
    const auto kernel = index_rows<T, DIM>;
    static const cudaError_t ready = att_shared_memory(kernel, MOST_SHARED);
    if (ready != cudaSuccess) return cudaErrorNotSupported;
    static const int most_of_16 =
        launch_clusters_at_once(kernel, MOST_CLUSTER, THREADS, MOST_SHARED);
    int blocks = 1;
    while (2 * blocks * n <= n_sms && (blocks < 8 || (blocks < 16 && n <= most_of_16)))
        blocks *= 2;
    const int keys = N_WARPS * CHUNK * DIM * 2, queries = a.x.n_heads * DIM * 2;
    a.room = min(max_ctx, (MOST_SHARED - keys - queries) / (int)sizeof(float));
    return launch_clusters_after(kernel, (unsigned)blocks, dim3((unsigned)blocks, (unsigned)n),
                                 THREADS, (size_t)(keys + queries) + (size_t)a.room * sizeof(float),
                                 stream, a);
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
    return launch_after(index_select, dim3((unsigned)n), 32 * SELECT_WARPS, 0, stream, a);
}

cudaError_t bgk_index_rows(int32_t *list, int32_t *count, float *scores, int64_t stride,
                           uint32_t *words, const bgk_index *x, const bgk_out *iq, const float *ik,
                           int64_t ik_cols, const bgk_rows *r, int row0, int n, int top_k,
                           int max_ctx, int n_sms, cudaStream_t stream)
{
    if (bad_index(x) || !x->k_norm || row0 < 0 || n < 0 || n > 65535 || stride < max_ctx ||
        n_sms < 1 || top_k < 1)
        return cudaErrorInvalidValue;
    if (!launch_programmatic() || x->type == BGK_F32 || iq->layout != BGK_ROWS ||
        (x->dim != 128 && x->dim != 64) || x->n_heads % 16 || x->n_heads > MOST_HEADS)
        return cudaErrorNotSupported;
    if (!n) return cudaSuccess;
    if (words && bgk_index_few_fits(n, max_ctx, n_sms)) {
        const cudaError_t e = bgk_index_few(list, count, words, x, iq, ik, ik_cols, r, row0, n,
                                            top_k, max_ctx, stream);
        if (e != cudaErrorNotSupported) return e; /* no room for a block */
    }
    const rows_args a = {list, count, scores, stride, *x, *iq, ik, ik_cols, *r, row0, top_k, 0};
    if (x->type == BGK_F16)
        return x->dim == 128 ? launch_rows<__half, 128>(a, n, max_ctx, n_sms, stream)
                             : launch_rows<__half, 64>(a, n, max_ctx, n_sms, stream);
    return x->dim == 128 ? launch_rows<__nv_bfloat16, 128>(a, n, max_ctx, n_sms, stream)
                         : launch_rows<__nv_bfloat16, 64>(a, n, max_ctx, n_sms, stream);
}
