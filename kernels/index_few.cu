/* kernels/index_few.cu - the lightning indexer's three steps (index.cu) in one launch, for a few
 * rows of few keys, where latency counts.
 *
 * What: blocks score 16 keys a warp, and the first block of a row selects. No clusters: a block
 * starts wherever there is room, while the kernel before is at work, and has its keys in shared
 * memory when that ends. A score's word is 0 until it is there; the first block looks until it is
 * not, and makes it 0 again: all blocks of a row are sure to run, since what looks is one block a
 * row.
 *
 * Requires: dim 64 or 128, 16 bits, n_heads a multiple of 16; of all rows' keys but their own that
 * they are of earlier steps.
 *
 * Launch: programmatic; graph-capturable. Lets the next kernel start when it has waited.
 *
 * Order: as index.cu, bit for bit.
 *
 * Proof: tests/gpu/test_index.c. */
#include "index.cuh"
#include "launch.cuh"

#pragma nv_diag_suppress 177 /* before compute capability 9.0 the kernel is empty */

namespace
{

constexpr int N_WARPS = 16, THREADS = 32 * N_WARPS, CHUNK = 16; /* keys of a warp at a time */
constexpr int PER_BLOCK = N_WARPS * CHUNK, MOST_BLOCKS = BGK_INDEX_FEW_KEYS / PER_BLOCK;

struct few_args {
    int32_t *list, *count;
    uint32_t *words; /* [n, BGK_INDEX_FEW_KEYS] */
    bgk_index x;
    bgk_out iq;
    const float *ik;
    int64_t ik_cols;
    bgk_rows rows;
    int row0, top_k, room;
};

/* Not 0, whatever v is. */
__device__ uint32_t word_of(float v)
{
    return max(~__float_as_uint(v), 1u);
}

__device__ uint32_t look(const uint32_t *word)
{
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
    return v;
}

__device__ void tell(uint32_t *word, uint32_t v)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory");
}

/* A row's n words to scores, by all threads; they become 0. low, high: the extremes' ranks, of
 * those that the thread has. */
__device__ void take_scores(float *scores, uint32_t *words, int n, uint32_t &low, uint32_t &high)
{
    constexpr int AHEAD = 5;
#pragma unroll 1
    for (int first = threadIdx.x; first < n; first += AHEAD * THREADS) {
        uint32_t v[AHEAD];
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                v[k] = first + k * THREADS < n ? look(words + first + k * THREADS) : 1;
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                missing |= !v[k];
        } while (missing);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int i = first + k * THREADS;
            if (i >= n) break;
            const float score = __uint_as_float(~v[k]);
            const uint32_t rank = rank_of(score);
            scores[i] = score;
            words[i] = 0;
            low = min(low, rank);
            high = max(high, rank);
        }
    }
}

template <typename T, int DIM>
__global__ void __launch_bounds__(THREADS, 2) index_few(const __grid_constant__ few_args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(16) unsigned char dynamic[]; /* queries, keys, scores */
    __shared__ select_room room;
    __shared__ row_room<T, DIM> r;
    __shared__ uint2 ends[N_WARPS];
    const bgk_index &x = a.x;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int block = blockIdx.x, row = a.row0 + blockIdx.y;
    const int seq = a.rows.seq[row], pos = a.rows.pos[row], n = pos + 1;
    const int32_t *table = a.rows.blocks + a.rows.block0[seq];
    const int chunk = block + (int)gridDim.x * warp, first = chunk * CHUNK;
    const int last = pos < 0 ? 0 : pos / CHUNK;
    const bool all = n <= a.top_k,
               owner = block == last % (int)gridDim.x; /* of the row's own key */
    if (all && !owner) return;
    static_assert(DIM <= THREADS && MOST / 2 <= THREADS, "a thread each");
    const row_constants constants = constants_of<DIM>(x, owner);
    T *queries = (T *)dynamic, *keys = queries + x.n_heads * DIM + warp * PER_BLOCK / N_WARPS * DIM;
    float *scores = (float *)(queries + (x.n_heads + PER_BLOCK) * DIM);
    if (!all) {
        const int at = first + lane, slot = lane < CHUNK && at < pos ? slot_of(x, table, at) : 0;
        start_keys<T, DIM, CHUNK>(keys, layer_keys<T>(x), slot, pos - first, lane);
        for (int i = thread; i < BINS && block == 0; i += THREADS)
            room.bins[i] = 0;
    }
    put_constants(r, x, constants, pos, owner);
    __syncthreads();
    const lane_turn<DIM> turn = turn_of<DIM>(x.rope, r.angles, lane);
    ptx_copy_wait<0>();
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
    uint32_t *words = a.words + (int64_t)blockIdx.y * BGK_INDEX_FEW_KEYS;
    if (first < n) {
        if (chunk == last && lane < DIM / 8)
            *(uint4 *)(keys + place_of<DIM>(pos % CHUNK, lane * 8)) =
                *(const uint4 *)(r.own + lane * 8);
        __syncwarp();
        const auto key_at = [&](int j, int s) {
            return *(const uint4 *)(keys + place_of<DIM>(8 * j + lane / 4, s * 32 + lane % 4 * 8));
        };
        const float score = chunk_score<T, DIM, 2>(key_at, queries, r.weights, x.n_heads, lane);
        const int at = first + chunk_key<2>(lane);
        if (lane < CHUNK && at < n) tell(words + at, word_of(score));
    }
    if (block > 0) return;
    uint32_t low = 0xffffffffu, high = 0;
    take_scores(scores, words, n, low, high);
    low = warp_least(low);
    high = warp_most(high);
    if (lane == 0) ends[warp] = make_uint2(low, high);
    __syncthreads();
    const uint2 e = ends[lane % N_WARPS];
    select_keys<N_WARPS>(
        a.list + (int64_t)row * a.top_k, room, [&](int i) { return scores[i]; }, n, a.top_k,
        warp_least(e.x), warp_most(e.y), (int32_t *)scores);
    if (thread == 0) a.count[row] = a.top_k;
#endif
}

template <typename T, int DIM>
cudaError_t launch(const few_args &a, int n, int blocks, cudaStream_t stream)
{
    constexpr int MOST_BYTES = (MOST_HEADS + PER_BLOCK) * DIM * 2 + BGK_INDEX_FEW_KEYS * 4;
    static const bool ready = [] {
        const cudaError_t e = cudaFuncSetAttribute(
            index_few<T, DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_BYTES);
        cudaGetLastError(); /* a no is none of the next launch's */
        return e == cudaSuccess;
    }();
    if (!ready) return cudaErrorNotSupported;
    return launch_after(index_few<T, DIM>, dim3((unsigned)blocks, (unsigned)n), THREADS,
                        (size_t)(a.x.n_heads + PER_BLOCK) * DIM * 2 + (size_t)a.room * 4, stream,
                        a);
}

} // namespace

bool bgk_index_few_fits(int n, int max_ctx, int n_sms)
{
    return n <= BGK_INDEX_FEW && max_ctx <= BGK_INDEX_FEW_KEYS && MOST_BLOCKS * n <= 2 * n_sms;
}

cudaError_t bgk_index_few(int32_t *list, int32_t *count, uint32_t *words, const bgk_index *x,
                          const bgk_out *iq, const float *ik, int64_t ik_cols, const bgk_rows *r,
                          int row0, int n, int top_k, int max_ctx, cudaStream_t stream)
{
    const int blocks = (max_ctx + PER_BLOCK - 1) / PER_BLOCK;
    const few_args a = {
        list, count, words, *x, *iq, ik, ik_cols, *r, row0, top_k, blocks * PER_BLOCK};
    if (x->type == BGK_F16)
        return x->dim == 128 ? launch<__half, 128>(a, n, blocks, stream)
                             : launch<__half, 64>(a, n, blocks, stream);
    return x->dim == 128 ? launch<__nv_bfloat16, 128>(a, n, blocks, stream)
                         : launch<__nv_bfloat16, 64>(a, n, blocks, stream);
}
