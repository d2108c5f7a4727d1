/* kernels/few.cu - out = x W^T for up to 8 tokens where latency counts: a warp takes 16 rows and a
 * part of K, and has its weights, or the first of them, in shared memory before the kernel before
 * it ends. A block is small, so that those of the next kernels fit beside it and fetch as well.
 *
 * Requires: bgk.h; room for the tokens of a part of K (bgk_few_fits()); sm_90a (where the bits of
 * mma.sync are those of wgmma).
 *
 * Launch: blocks of two or four warps; programmatic; graph-capturable. Early (bgk_few_early()): its
 * tokens are there when it starts, so it is at work beside the kernel before, for which one thread
 * waits at its end, so that the end is that of all before. It lets the next start when its results
 * are there.
 *
 * Order: as matmul.cu, bit for bit.
 *
 * Proof: tests/gpu/test_matmul.c. */
#include "few.cuh"

namespace
{

__host__ __device__ constexpr int warps_of(int parts)
{
    return parts == 4 ? 4 : 2;
}

/* IDLE: with a rehearsal. EARLY: as the head says. */
enum start { ORDINARY, IDLE, EARLY };

template <unsigned FORMATS, int PARTS, start START>
__global__ void __launch_bounds__(warps_of(PARTS) * 32,
                                  START == IDLE ? (single(FORMATS) ? 20 : 12) / warps_of(PARTS) : 1)
    few(const __grid_constant__ args a, int shift, int weight_bytes)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int WARPS = warps_of(PARTS), SLICES = WARPS / PARTS;
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ float sums[PARTS > 1 ? PARTS - 1 : 1][SLICES][4][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int unit = blockIdx.x * WARPS + warp, part = unit % PARTS, slice = unit / PARTS % 4;
    const int number = unit / PARTS / 4, t = 32 * slice + lane;
    const bgk_wtile tile = a.tiles[number];
    const int begin = part_begin(a, part), n = part_begin(a, part + 1) - begin;
    if (START != EARLY) ptx_let_next_start();
    const rows to = rows_of<false>(a, number, number, 0, t);
    const int token_bytes = few_part_chunks(a.n_chunks, PARTS) * 128 << shift;
    unsigned char *tokens = dynamic + warp * (token_bytes + weight_bytes),
                  *weights = tokens + token_bytes;
    const char *w = (const char *)tile.w + (int64_t)begin * chunk_bytes(tile.format);
    float acc[4] = {};
    few_fill<FORMATS, FEW_RING>(tile.format, w, n, weights, weight_bytes, slice, lane);
#pragma unroll 1
    for (int round = START == IDLE ? launch_first_round() : 1; round < 2; round++) {
        if (round && START != EARLY) ptx_wait_prior();
        few_tokens(tokens, a.x, a.x_stride, tile.x_chunk0 + begin, n, shift, lane);
        few_product<FORMATS, FEW_RING>(tile.format, acc, w, n, round, weights, weight_bytes, tokens,
                                       shift, slice, lane);
        if (few_gather<PARTS, SLICES>(acc, sums, part, warp / PARTS, lane))
            write<8>(acc, a, to, number, 0, round ? a.tokens : 0, t);
    }
    if (START != EARLY) return;
    __threadfence();
    __syncthreads();
    ptx_let_next_start();
    if (blockIdx.x == 0 && threadIdx.x == 0) ptx_wait_prior();
#endif
}

/* Of a warp whose tokens are so many bytes; 0: there is no room. */
int ring_of(unsigned formats, int n_chunks, int parts, size_t token_bytes, int beside)
{
    return few_ring(formats, few_part_chunks(n_chunks, parts), warps_of(parts), token_bytes,
                    beside);
}

template <unsigned FORMATS, int PARTS, start START>
cudaError_t launch_few(const args &a, int shift, size_t bytes, cudaStream_t stream)
{
    constexpr int WARPS = warps_of(PARTS);
    static const cudaError_t ready = cudaFuncSetAttribute(
        few<FORMATS, PARTS, START>, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (ready != cudaSuccess) return ready;
    const int blocks = a.n_tiles * 4 * PARTS / WARPS;
    const int ring =
        ring_of(FORMATS, a.n_chunks, PARTS, bytes, max(2, (blocks + sm_count() - 1) / sm_count()));
    return launch_after(few<FORMATS, PARTS, START>, dim3(blocks), dim3(WARPS * 32),
                        WARPS * (bytes + ring), stream, a, shift, ring);
}

template <unsigned FORMATS, int PARTS>
cudaError_t launch_few(const args &a, start how, int shift, size_t bytes, cudaStream_t stream)
{
    switch (how) {
    case ORDINARY:
        return launch_few<FORMATS, PARTS, ORDINARY>(a, shift, bytes, stream);
    case IDLE:
        return launch_few<FORMATS, PARTS, IDLE>(a, shift, bytes, stream);
    default:
        return launch_few<FORMATS, PARTS, EARLY>(a, shift, bytes, stream);
    }
}

template <unsigned FORMATS>
cudaError_t launch_few(const args &a, start how, int shift, size_t bytes, cudaStream_t stream)
{
    switch (a.splits) {
    case 1:
        return launch_few<FORMATS, 1>(a, how, shift, bytes, stream);
    case 2:
        return launch_few<FORMATS, 2>(a, how, shift, bytes, stream);
    default:
        return launch_few<FORMATS, 4>(a, how, shift, bytes, stream);
    }
}

/* Rows of tokens are read 1, 2, 4 or 8 at a time. */
int shift_of(int tokens)
{
    return tokens <= 1 ? 0 : tokens <= 2 ? 1 : tokens <= 4 ? 2 : 3;
}

size_t token_bytes(const bgk_weights *w, int tokens)
{
    return ((size_t)few_part_chunks(w->n_chunks, w->splits) * 128) << shift_of(tokens);
}

cudaError_t launch_any(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                       int tokens, bgk_act fn, start how, cudaStream_t stream)
{
    if (!bgk_few_fits(w, tokens)) return cudaErrorInvalidValue;
    const args a = args_of(out, w, x, x_stride, tokens, fn);
    const int shift = shift_of(tokens);
    const size_t bytes = token_bytes(w, tokens);
    return by_formats<W4, W5, W6, W8, W16, W4 | W6, W8 | W16>(w->formats, [&](auto f) {
        return launch_few<decltype(f)::value>(a, how, shift, bytes, stream);
    });
}

} // namespace

bool bgk_few_fits(const bgk_weights *w, int tokens)
{
    return tokens <= 8 && ring_of(w->formats, w->n_chunks, w->splits, token_bytes(w, tokens), 1);
}

cudaError_t bgk_few(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                    int tokens, bgk_act fn, cudaStream_t stream)
{
    return launch_any(out, w, x, x_stride, tokens, fn, w->idle ? IDLE : ORDINARY, stream);
}

cudaError_t bgk_few_early(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                          int tokens, bgk_act fn, cudaStream_t stream)
{
    return launch_any(out, w, x, x_stride, tokens, fn, EARLY, stream);
}
