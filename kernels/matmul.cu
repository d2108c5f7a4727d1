/* kernels/matmul.cu - out = x W^T for quantised weights on Hopper's tensor cores: one kernel for
 * every number of tokens, from one to a whole prefill step.
 *
 * What: weights are the A operand of wgmma, made in registers from their quants (bgk.h says how a
 * tile lies in memory): mask, and one half2 FMA with scale and min; tokens are N, from shared
 * memory. A warpgroup owns 64 rows (or twice that) and N tokens; WGS of them share the tokens of a
 * block. One more brings both operands by bulk copies through a ring of stages.
 *
 * Requires: bgk.h; sm_90a (elsewhere the launcher says cudaErrorNotSupported).
 *
 * Launch: a block is a warpgroup that brings and one to four that multiply; it goes over its tiles
 * by itself; up to 227 KB of dynamic shared memory; programmatic: weights are on their way before
 * the kernel before has ended. Graph-capturable. Where some of x's readers follow each other, one
 * may hold the next back until x is there, which then works beside it (bgk_start).
 *
 * Order: K in `splits` parts, each one chain in steps of 16, then the parts in order. Warpgroups of
 * a block, or blocks of a cluster, share the parts out among them; or (many tokens) one takes all
 * in turn. Blocks of 64 and 128 tokens in a cluster exchange them, and each sums up a share of the
 * tokens. The number of tokens, N, WGS and clusters change no bit.
 *
 * Traffic: weights once per token tile, tokens once per row tile; halves of 64 tokens and more go
 * out through shared memory, in whole lines.
 *
 * Proof: tests/gpu/test_matmul.c. (EVERY_LANE: matmul.cuh.) */
#include "matmul.cuh"

namespace
{

template <unsigned F>
cudaError_t launch_shape(const args &a, int w_bytes, bgk_shape shape, cudaStream_t stream)
{
    constexpr bool MIXED = !single(F);
    constexpr int TWO = MIXED ? 1 : 2, B2 = MIXED ? 1 : 2;
    switch (shape) {
    case BGK_8X2:
        if (a.splits == 1) return launch<F, 8, 2, 1, 4, B2, 1, false>(a, w_bytes, stream);
        return launch_parts<F, 8, 3>(a, w_bytes, stream);
    case BGK_8X1:
        return launch_parts<F, 8, 3>(a, w_bytes, stream);
    case BGK_16X2:
        if (a.splits == 1) return launch<F, 16, 2, 1, 4, B2, 1, false>(a, w_bytes, stream);
        return launch_parts<F, 16, 3>(a, w_bytes, stream);
    case BGK_16X1:
        return launch_parts<F, 16, 3>(a, w_bytes, stream);
    case BGK_32X2:
        if (a.splits == 1) return launch<F, 32, 2, 1, 2, B2, 1, false>(a, w_bytes, stream);
        return launch_parts<F, 32, 2>(a, w_bytes, stream);
    case BGK_32X1:
        return launch_parts<F, 32, 2>(a, w_bytes, stream);
    case BGK_64X1:
        return launch_parts<F, 64, 2>(a, w_bytes, stream);
    case BGK_64X2:
        if (a.splits == 1)
            return launch < F, 64, 2, 1, 2, F == 1u << BGK_W16 ? 1 : B2, 1,
                   false > (a, w_bytes, stream);
        return launch_in_turn < F, 64, 1, MIXED ? 1 : 2 > (a, w_bytes, stream);
    case BGK_64X4:
        if (a.splits == 1) return launch<F, 64, 2, TWO, 2, 1, 1, false>(a, w_bytes, stream);
        return launch_in_turn<F, 64, 2, 1>(a, w_bytes, stream);
    case BGK_128X4:
        if (a.splits == 1) return launch<F, 128, 2, TWO, 2, 1, 1, false>(a, w_bytes, stream);
        return launch_in_turn<F, 128, 2, 1>(a, w_bytes, stream);
    case BGK_64X2C:
        return launch_exchange<F, 64>(a, w_bytes, stream);
    case BGK_128X2C:
        return launch_exchange<F, 128>(a, w_bytes, stream);
    case BGK_128X2:
        return launch_in_turn<F, 128, 2, 1>(a, w_bytes, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

/* Tiles of one block of rows read the same columns: of a block-diagonal matrix they must be of one
 * of its blocks. */
static bgk_shape within(bgk_shape shape, int block_tiles)
{
    static const bgk_shape two[BGK_SHAPES] = {BGK_8X1,   BGK_8X2,   BGK_16X1,  BGK_16X2, BGK_32X1,
                                              BGK_32X2,  BGK_64X1,  BGK_64X2,  BGK_64X2, BGK_128X2,
                                              BGK_128X2, BGK_64X2C, BGK_128X2C};
    static const bgk_shape one[BGK_SHAPES] = {BGK_8X1,  BGK_8X1,  BGK_16X1, BGK_16X1, BGK_32X1,
                                              BGK_32X1, BGK_64X1, BGK_64X1, BGK_64X1, BGK_64X1,
                                              BGK_64X1, BGK_64X1, BGK_64X1};
    if (block_tiles % 4 == 0) return shape;
    return block_tiles % 2 ? one[shape] : two[shape];
}

static bool bad_matmul(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                       int tokens)
{
    return tokens < 0 || w->n_tiles < 1 || w->n_chunks < 1 || !w->row_scale || !w->tiles ||
           (w->splits != 1 && w->splits != 2 && w->splits != 4) || x_stride % BGK_TILE_ROWS ||
           tokens > x_stride || (uintptr_t)x % 128 || !w->formats || w->formats >> BGK_FORMATS ||
           (w->n_ff && (out->layout != BGK_TILES || w->n_tiles % 2 || w->n_ff > w->n_tiles * 32)) ||
           (out->layout == BGK_TILES &&
            (out->stride % BGK_TILE_ROWS || tokens > out->stride || (!w->n_ff && w->n_out < 1))) ||
           w->block_tiles < 0 || (w->block_tiles && w->n_tiles % w->block_tiles);
}

static cudaError_t multiply_in(const bgk_out *out, const bgk_weights *w, const void *x,
                               int64_t x_stride, int tokens, bgk_act fn, bgk_shape shape,
                               bgk_start start, cudaStream_t stream)
{
    if (bad_matmul(out, w, x, x_stride, tokens) || (unsigned)shape >= BGK_SHAPES)
        return cudaErrorInvalidValue;
    if (!on_hopper()) return cudaErrorNotSupported;
    if (!tokens) return cudaSuccess;
    const int w_bytes = largest_chunk(w->formats);
    if (shape == BGK_8W && bgk_few_fits(w, tokens))
        return start == BGK_WAITS ? bgk_few(out, w, x, x_stride, tokens, fn, stream)
                                  : cudaErrorNotSupported;
    shape = within(shape == BGK_8W ? BGK_8X1 : shape, w->block_tiles);
    args a = args_of(out, w, x, x_stride, tokens, fn);
    a.start = start;
    /* Q4_K comes with Q6_K. */
    return by_formats<W4, W5, W6, W8, W16, W4 | W6, W8 | W16>(w->formats, [&](auto f) {
        return launch_shape<decltype(f)::value>(a, w_bytes, shape, stream);
    });
}

cudaError_t bgk_matmul_as(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                          int tokens, bgk_act fn, bgk_shape shape, cudaStream_t stream)
{
    return multiply_in(out, w, x, x_stride, tokens, fn, shape, BGK_WAITS, stream);
}

static int rounds(int blocks, int at_a_time)
{
    return (blocks + at_a_time - 1) / at_a_time;
}

/* Whether few.cu is faster: its warps copy their tokens once for every 16 rows. Decode steps of one
 * token of Llama-3.1-8B Q4_K_M, tokens/s, with up to 0, 4, 8 and 16 MB of that: 430, 438, 444, 427;
 * of two 851, 851, 842, 837; of a rank of 8 of GLM-5 (its q_a and kv_a in four parts of K),
 * ms: 6.45, 6.01, 5.97, 6.03; 7.61, 7.47, 7.38, 7.45. */
static bool by_warps(const bgk_weights *w, int tokens)
{
    const int64_t rows = tokens <= 1 ? 1 : tokens <= 2 ? 2 : tokens <= 4 ? 4 : 8;
    const bool mixed = w->formats & (w->formats - 1);
    return tokens <= 8 &&
           rows * w->n_tiles * w->n_chunks * 512 <= (tokens == 1 || mixed ? 8000000 : 4000000);
}

/* The fewest tokens that hold all; beyond 64 what takes less: blocks of 64 tokens and rows, two a
 * multiprocessor, or of 128 and 128, which take about 1.4 times as long (measured: README.md). */
static bgk_shape choose(const bgk_weights *w, int tokens)
{
    const bool few = w->n_tiles < 2 * sm_count();
    const int blocks = w->n_tiles * ((tokens + 63) / 64), pairs = (w->n_tiles + 1) / 2;
    if (by_warps(w, tokens)) return BGK_8W;
    if (tokens <= 8) return few ? BGK_8X1 : BGK_8X2;
    if (tokens <= 16) return few ? BGK_16X1 : BGK_16X2;
    if (tokens <= 32) return few ? BGK_32X1 : BGK_32X2;
    /* Clusters, where all run at the same time, for which those of four blocks leave some of the
     * multiprocessors without. us, and those of the best other block of 64 tokens and more: [2816,
     * 6144] Q8_0 with 64 tokens 10.1, 13.6, with 128 13.5, 15.8; [2048, 10240] Q4_K 12.6, 14.0 and
     * 17.1, 21.6; [6144, 4096] with 128 15.0, 16.5; [4096, 14336] with 256 44.9, 57.6. Short parts
     * do not pay for the exchange: [2048, 2048] Q8_0 with 128 7.5, 7.3. */
    if (w->splits == 4) {
        const int room = sm_count() * 7 / 8;
        if (4 * pairs * ((tokens + 63) / 64) <= room) return BGK_64X2C;
        if (w->n_chunks >= 64 && 4 * pairs * ((tokens + 127) / 128) <= room) return BGK_128X2C;
    }
    /* Two token tiles of 32 on all multiprocessors beat one of 64 on half of them: [4096, 4096]
     * Q4_K 8.5 us against 10.0, [4096, 14336] 27.0 against 35.3, [2624, 6144] Q8_0 12.1
     * against 13.5. */
    if (tokens <= 64 && 2 * w->n_tiles <= sm_count()) return BGK_32X1;
    if (w->splits > 1 && blocks <= sm_count()) return BGK_64X1; /* parts side by side */
    if (w->splits == 2 && w->n_chunks >= 64 && 2 * pairs * ((tokens + 127) / 128) <= sm_count())
        return BGK_128X2C;
    if (tokens <= 64) return !few ? BGK_64X2 : w->splits == 4 ? BGK_32X1 : BGK_64X1;
    const int small = rounds(blocks, 2 * sm_count());
    const int large = rounds((w->n_tiles + 1) / 2 * ((tokens + 127) / 128), sm_count());
    if (14 * large <= 10 * small) return BGK_128X2;
    return w->splits > 1 ? BGK_64X2 : BGK_64X1;
}

bgk_shape bgk_matmul_shape(const bgk_weights *w, int tokens)
{
    const int picked = w->shape[bgk_token_class(tokens)];
    return picked ? (bgk_shape)(picked - 1) : choose(w, tokens);
}

cudaError_t bgk_matmul_start(const bgk_out *out, const bgk_weights *w, const void *x,
                             int64_t x_stride, int tokens, bgk_act fn, bgk_start start,
                             cudaStream_t stream)
{
    return multiply_in(out, w, x, x_stride, tokens, fn, bgk_matmul_shape(w, tokens), start, stream);
}

cudaError_t bgk_matmul(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                       int tokens, bgk_act fn, cudaStream_t stream)
{
    return bgk_matmul_start(out, w, x, x_stride, tokens, fn, BGK_WAITS, stream);
}

cudaError_t bgk_matmul_early(const bgk_out *out, const bgk_weights *w, const void *x,
                             int64_t x_stride, int tokens, bgk_act fn, cudaStream_t stream)
{
    if (bad_matmul(out, w, x, x_stride, tokens)) return cudaErrorInvalidValue;
    if (!on_hopper() || !bgk_few_fits(w, tokens) || bgk_matmul_shape(w, tokens) != BGK_8W)
        return cudaErrorNotSupported;
    return tokens ? bgk_few_early(out, w, x, x_stride, tokens, fn, stream) : cudaSuccess;
}
