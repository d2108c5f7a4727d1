/* kernels/experts_few.cu - the second product of experts.cu for items of up to 32 tokens and few
 * chunks, where a tile is multiplied in less time than a pipeline of warpgroups takes to turn.
 *
 *     out[row, c] = half(limit(scale_c sum_k x[row, k] w[expert, c, k] + bias_c)), rows of items
 *
 * Requires: experts_few.cuh; sm_90a.
 *
 * Launch: blocks of rings and a warp that brings them rows of x, item by item, one item ahead. A
 * ring is a warp with memory of its own: stages of weights that bulk copies fill, and lines of
 * results; a lane asks for the next stage as soon as the warp has read one. A block takes
 * consecutive tiles of consecutive items, each block as many bytes of weights; its rings take them
 * by turns, and wait for each other only before x of an item is overwritten. Programmatic: the
 * first stages are under way before the kernel before this one ends, where the list is there.
 * Graph-capturable.
 *
 * Order: one chain over K, chunk by chunk and step by step: that of experts.cu, whose bits
 * m16n8k16 gives.
 *
 * Traffic: an expert's weights once per item; they leave L2 first, so that results stay there for
 * who adds them up. x once for an item and a block. Results in whole lines.
 *
 * Proof: tests/gpu/test_moe.c. */
#include "experts_few.cuh"

#include "matmul.cuh"
#include "ptx.cuh"

namespace
{

constexpr int LEAST_RINGS = 3, RING_STAGES = 2, X_STAGES = 2, MOST_CHUNKS = 8;
/* A stage: chunks, as many of the tile's as there is room for (4 of W4, 1 of W16); with the tile's
 * last, its scales and biases. (Stages of two chunks, and more rings: items of 16 take 12 to 28 %
 * longer, with 56 M warp instructions instead of 48 for 512 tokens of a rank of GLM-5.) */
constexpr int STAGE_CHUNKS = 4 * 2560, STAGE_SCALES = STAGE_CHUNKS, STAGE_BIAS = STAGE_SCALES + 256,
              STAGE_BYTES = STAGE_BIAS + 256;
constexpr int LINES = 8 * 128, ALIGNMENT = 128; /* LINES: results of a tile */
constexpr int RING_BYTES = RING_STAGES * STAGE_BYTES + LINES;

/* By tokens of an item: blocks a processor, and rings a block at most. A thread has 168 registers
 * then, and for 32 tokens 255, of which it takes 212 (with eight rings it would have 168). */
__host__ __device__ constexpr int blocks_each(int n)
{
    return n > 16 ? 1 : 2;
}

__host__ __device__ constexpr int most_rings(int n)
{
    return n > 16 ? 7 : 4;
}

constexpr int block_shared(int n) /* dynamic; barriers need some more */
{
    return 226 * 1024 / blocks_each(n) - 512;
}

struct few_args {
    const char *stack[2];            /* tiles of experts [0, n_first), and of the others */
    int format[2], bytes[2], per[2]; /* per: chunks in a stage */
    int n_first;
    const float *row_scale, *bias;
    const __half *x;
    int64_t x_stride;
    __half *out;
    int64_t out_stride;
    int n_tiles, n_chunks, n_out; /* of one expert */
    const bgk_moe_item *items;
    const int *n_items;
    int most;  /* items at most */
    int front; /* the first items, of experts from n_first on */
    int rings;
    bool list_done;
};

/* Over every `step`th tile of an item, then of the next; step <= n_tiles. */
struct walk {
    int number, tile;
    int4 item, next; /* next: takes its time, so it is read an item ahead */

    __device__ static int4 read(const few_args &a, int i)
    {
        return i < a.most ? __ldcg((const int4 *)(a.items + i)) : make_int4(0, 0, 0, 0);
    }
    __device__ void begin(const few_args &a, int at)
    {
        number = at / a.n_tiles;
        tile = at % a.n_tiles;
        item = read(a, number);
        next = read(a, number + 1);
    }
    /* Whether this leads to another item. */
    __device__ bool move(const few_args &a, int step)
    {
        tile += step;
        if (tile < a.n_tiles) return false;
        tile -= a.n_tiles;
        number++;
        item = next;
        next = read(a, number + 1);
        return true;
    }
};

/* The first tile of block r of n, tiles counted through all items: of n shares of all bytes. */
__device__ int first_tile(const few_args &a, int n_items, int r, int n)
{
    const int front = min(a.front, n_items) * a.n_tiles, rest = n_items * a.n_tiles - front;
    const int64_t size = (int64_t)front * a.bytes[1];
    const int64_t at = (size + (int64_t)rest * a.bytes[0]) / 256 * r / n * 256;
    if (r >= n) return front + rest;
    if (at < size) return (int)((at + a.bytes[1] - 1) / a.bytes[1]);
    return front + (int)((at - size + a.bytes[0] - 1) / a.bytes[0]);
}

/* acc[h][j] += 16 rows, those of threads t + 32 j of a tile, by tokens 8 h to 8 h + 7, over n
 * chunks; h < HALVES. w: chunks, x: N rows of 128 bytes a chunk, in shared memory. */
template <bgk_format F, int N, int SLICES, int HALVES>
__device__ __forceinline__ void multiply_slices(float (&acc)[N / 8][SLICES][4], const uint8_t *x,
                                                uint32_t w, int n, int t)
{
    const int lane = t % 32;
    const uint8_t *low = x + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4),
                  *high = x + lane % 8 * 128 + (((4 + lane / 8) ^ lane % 8) << 4);
#pragma unroll 2
    for (int c = 0; c < n; c++) {
        uint32_t b[HALVES][2][4]; /* steps 0, 1 and 2, 3 */
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            ptx_ldmatrix4(b[h][0], low + c * N * 128 + h * 1024);
            ptx_ldmatrix4(b[h][1], high + c * N * 128 + h * 1024);
        }
#pragma unroll
        for (int j = 0; j < SLICES; j += 2) {
            raw<F> r[2];
            uint32_t q[2][4][4];
#pragma unroll
            for (int k = 0; k < 2; k++)
                r[k].load(w + c * chunk_bytes(F), t + 32 * (j + k));
#pragma unroll
            for (int k = 0; k < 2; k++)
                dequantise(q[k], r[k]);
#pragma unroll
            for (int s = 0; s < 4; s++)
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    const uint32_t own[2] = {b[h][s / 2][s % 2 * 2], b[h][s / 2][s % 2 * 2 + 1]};
#pragma unroll
                    for (int k = 0; k < 2; k++)
                        ptx_mma16816(acc[h][j + k], q[k][s], own);
                }
        }
    }
}

/* The same, of a format among `F`. */
template <unsigned F, int N, int SLICES, int HALVES>
__device__ __forceinline__ void multiply_any(float (&acc)[N / 8][SLICES][4], const uint8_t *x,
                                             uint32_t w, int n, int t, int format)
{
    if ((F & 1u << BGK_W4) != 0 && (F == 1u << BGK_W4 || format == BGK_W4))
        multiply_slices<BGK_W4, N, SLICES, HALVES>(acc, x, w, n, t);
    else if ((F & 1u << BGK_W5) != 0 && (F == 1u << BGK_W5 || format == BGK_W5))
        multiply_slices<BGK_W5, N, SLICES, HALVES>(acc, x, w, n, t);
    else if ((F & 1u << BGK_W6) != 0 && (F == 1u << BGK_W6 || format == BGK_W6))
        multiply_slices<BGK_W6, N, SLICES, HALVES>(acc, x, w, n, t);
    else if ((F & 1u << BGK_W8) != 0 && (F == 1u << BGK_W8 || format == BGK_W8))
        multiply_slices<BGK_W8, N, SLICES, HALVES>(acc, x, w, n, t);
    else if ((F & 1u << BGK_W16) != 0)
        multiply_slices<BGK_W16, N, SLICES, HALVES>(acc, x, w, n, t);
}

/* The same for an item of `tokens`, so many of the N as there may be, to the next eight. */
template <unsigned F, int N, int SLICES>
__device__ __forceinline__ void multiply_item(float (&acc)[N / 8][SLICES][4], const uint8_t *x,
                                              uint32_t w, int n, int t, int format, int tokens)
{
    if constexpr (N == 32) {
        if (tokens > 24)
            multiply_any<F, N, SLICES, 4>(acc, x, w, n, t, format);
        else if (tokens > 16)
            multiply_any<F, N, SLICES, 3>(acc, x, w, n, t, format);
        else
            multiply_any<F, N, SLICES, 2>(acc, x, w, n, t, format);
    } else if constexpr (N == 16) {
        if (tokens > 8)
            multiply_any<F, N, SLICES, 2>(acc, x, w, n, t, format);
        else
            multiply_any<F, N, SLICES, 1>(acc, x, w, n, t, format);
    } else {
        multiply_any<F, N, SLICES, 1>(acc, x, w, n, t, format);
    }
}

/* A piece, of whose halves n > 0 are there. */
__device__ void store_piece(__half *to, const uint4 &v, int n)
{
    if (n >= 8) {
        *(uint4 *)to = v;
        return;
    }
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < n) to[i] = __ushort_as_half((unsigned short)(word[i / 2] >> i % 2 * 16));
}

/* v[2 j + i]: of 8 rows, number j's slice i, a half for two tokens. To out, the place of the first
 * row and token, through `lines`, the warp's: each token's rows in one piece. cols: so many of the
 * rows are there. */
template <int SLICES>
__device__ __forceinline__ void write_tokens(__half *out, int64_t stride, uint32_t (&v)[SLICES][2],
                                             uint32_t lines, int tokens, int cols, int lane)
{
    /* Pieces of 16 bytes are turned, so that 8 tokens' lie in different banks. */
    auto at = [&](int token, int piece) {
        return lines + token * 32 * SLICES + ((piece ^ token * SLICES / 4) << 4);
    };
#pragma unroll
    for (int j = 0; j < SLICES; j += 2) {
        const uint32_t four[4] = {v[j][0], v[j][1], v[j + 1][0], v[j + 1][1]};
        store_matrices(at(lane % 8, 2 * j + lane / 8), four);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLICES / 2; i++) {
        const int number = lane + 32 * i, token = number / (2 * SLICES),
                  piece = number % (2 * SLICES);
        if (token < tokens && 8 * piece < cols)
            store_piece(out + token * stride + 8 * piece, shared16(at(token, piece)),
                        cols - 8 * piece);
    }
    __syncwarp(); /* before it is written again */
}

/* Brings the rows of items [first, end), filled up to 8, 16, ..: lane by lane a chunk. */
template <int N>
__device__ void bring_rows(const few_args &a, int first, int end, uint32_t full, uint32_t empty,
                           uint32_t x, int lane)
{
    int4 item = walk::read(a, first);
    ptx_wait_prior();
    for (int i = first, stage = 0, phase = 1; i < end; i++) {
        const int4 next = walk::read(a, i + 1);
        const int bytes = (item.w + 7) / 8 * 1024;
        mbar_wait(empty + 8 * stage, phase);
        if (lane == 0) mbar_expect(full + 8 * stage, a.n_chunks * bytes);
        __syncwarp();
        if (lane < a.n_chunks)
            ptx_bulk_copy(x + (stage * a.n_chunks + lane) * N * 128,
                          a.x + (lane * a.x_stride + item.z) * 64, bytes, full + 8 * stage);
        item = next;
        if (++stage == X_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
}

template <unsigned F, int N>
__global__ void __launch_bounds__(most_rings(N) * 32 + 32, blocks_each(N))
    experts_few(const __grid_constant__ few_args a)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int SLICES = 4; /* of a tile */
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t barriers[most_rings(N)][RING_STAGES], x_barriers[2][X_STAGES];
    const int lane = threadIdx.x % 32, ring = threadIdx.x / 32;
    const uint32_t x_full = ptx_shared(x_barriers[0]), x_empty = ptx_shared(x_barriers[1]);
    uint8_t *const rows = dynamic + (-ptx_shared(dynamic) & (ALIGNMENT - 1));
    const uint32_t own = ptx_shared(rows) + X_STAGES * a.n_chunks * N * 128 + ring * RING_BYTES;
    const uint32_t lines = own + RING_STAGES * STAGE_BYTES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.rings * RING_STAGES; i++)
            mbar_init(ptx_shared(&barriers[i / RING_STAGES][i % RING_STAGES]), 1);
        for (int i = 0; i < X_STAGES; i++) {
            mbar_init(x_full + 8 * i, 1);
            mbar_init(x_empty + 8 * i, a.rings * ARRIVALS);
        }
        mbar_init_fence();
    }
    __syncthreads();
    /* Whoever starts after this kernel may count on what the kernel before it has done. */
    if (!a.list_done) ptx_wait_prior();
    ptx_let_next_start();
    const int edge = first_tile(a, __ldcg(a.n_items), (int)blockIdx.x + lane % 2, (int)gridDim.x);
    const int begin = __shfl_sync(~0u, edge, 0), end = __shfl_sync(~0u, edge, 1);
    const int first = begin / a.n_tiles;
    if (ring == a.rings) {
        if (begin < end)
            bring_rows<N>(a, first, (end + a.n_tiles - 1) / a.n_tiles, x_full, x_empty,
                          ptx_shared(rows), lane);
        return;
    }

    const uint32_t full = ptx_shared(barriers[ring]);
    walk ahead, now; /* what is brought, and what is multiplied */
    now.begin(a, min(begin + ring, max(end - 1, 0)));
    ahead = now;
    int chunk = 0; /* to be brought: the tile's next, and so many tiles */
    int left = (end - begin - ring + a.rings - 1) / a.rings;
    auto bring = [&](int stage) {
        if (left <= 0) return;
        const int expert = ahead.item.x & 0xffff;
        const bool other = expert >= a.n_first;
        const int bytes = a.bytes[other], count = min(a.per[other], a.n_chunks - chunk);
        const bool last = chunk + count == a.n_chunks;
        const uint32_t bar = full + 8 * stage, to = own + stage * STAGE_BYTES;
        if (lane == 0) {
            const int64_t row = (int64_t)expert * a.n_tiles + ahead.tile,
                          tile = row - (other ? (int64_t)a.n_first * a.n_tiles : 0);
            const char *from = a.stack[other] + (tile * a.n_chunks + chunk) * bytes;
            mbar_expect(bar, count * bytes + (last ? a.bias ? 512 : 256 : 0));
            if (other) /* of all tokens: others read it too */
                ptx_bulk_copy(to, from, count * bytes, bar);
            else
                ptx_bulk_copy_once(to, from, count * bytes, bar);
            if (last) {
                ptx_bulk_copy(to + STAGE_SCALES, a.row_scale + row * 64, 256, bar);
                if (a.bias) ptx_bulk_copy(to + STAGE_BIAS, a.bias + row * 64, 256, bar);
            }
        }
        __syncwarp();
        chunk += count;
        if (!last) return;
        chunk = 0;
        left--;
        ahead.move(a, a.rings);
    };
    for (int i = 0; i < RING_STAGES; i++)
        bring(i);
    ptx_wait_prior();
    int stage = 0, phase = 0, x_stage = 0, x_phase = 0;
    bool fresh = true; /* the item: its x is still to come */
    auto leave_item = [&]() {
        give_back(x_empty + 8 * x_stage, lane);
        if (++x_stage == X_STAGES) {
            x_stage = 0;
            x_phase ^= 1;
        }
    };
    if (now.number > first) leave_item(); /* of which other rings have tiles */
    for (int i = begin + ring; i < end; i += a.rings) {
        const bool other = (now.item.x & 0xffff) >= a.n_first;
        const int format = a.format[other], per = a.per[other];
        const uint8_t *const x = rows + (size_t)(x_stage * a.n_chunks) * N * 128;
        float acc[N / 8][SLICES][4], scale[SLICES][2], bias[SLICES][2];
#pragma unroll
        for (int j = 0; j < N / 2 * SLICES; j++)
            acc[j / (4 * SLICES)][j / 4 % SLICES][j % 4] = 0.0f;
        if (fresh) mbar_wait(x_full + 8 * x_stage, x_phase);
        for (int c = 0; c < a.n_chunks; c += per) {
            const uint32_t w = own + stage * STAGE_BYTES;
            mbar_wait(full + 8 * stage, phase);
            multiply_item<F, N, SLICES>(acc, x + c * N * 128, w, min(per, a.n_chunks - c), lane,
                                        format, now.item.w);
            if (c + per >= a.n_chunks) {
#pragma unroll
                for (int j = 0; j < 2 * SLICES; j++) {
                    const int row = 16 * (j / 2) + 8 * (j % 2) + lane / 4;
                    scale[j / 2][j % 2] = __uint_as_float(shared4(w + STAGE_SCALES + 4 * row));
                    bias[j / 2][j % 2] =
                        a.bias ? __uint_as_float(shared4(w + STAGE_BIAS + 4 * row)) : 0.0f;
                }
            }
            __syncwarp();
            bring(stage);
            if (++stage == RING_STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        const int4 item = now.item;
        const int col = now.tile * 64;
        fresh = now.move(a, a.rings);
        if (fresh) leave_item();
#pragma unroll
        for (int h = 0; h < N / 8; h++) {
            if (8 * h >= item.w) break;
            uint32_t v[SLICES][2];
#pragma unroll
            for (int j = 0; j < 2 * SLICES; j++) {
                const float *d = acc[h][j / 2] + 2 * (j % 2);
                const float s = scale[j / 2][j % 2], b = bias[j / 2][j % 2];
                v[j / 2][j % 2] = limited_pair(fmaf(d[0], s, b), fmaf(d[1], s, b));
            }
            write_tokens<SLICES>(a.out + (item.z + 8 * h) * a.out_stride + col, a.out_stride, v,
                                 lines, item.w - 8 * h, a.n_out - col, lane);
        }
    }
#endif
}

template <unsigned F, int N> cudaError_t launch_few(few_args a, cudaStream_t stream)
{
    static const cudaError_t ready = cudaFuncSetAttribute(
        experts_few<F, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, block_shared(N));
    if (ready != cudaSuccess) return ready;
    const int x_bytes = X_STAGES * a.n_chunks * N * 128 + ALIGNMENT;
    a.rings = min(min(most_rings(N), a.n_tiles), (block_shared(N) - x_bytes) / RING_BYTES);
    if (a.rings < LEAST_RINGS) return cudaErrorNotSupported;
    return launch_after(
        experts_few<F, N>, dim3(min(a.most * a.n_tiles, sm_count() * blocks_each(N))),
        dim3(a.rings * 32 + 32), (size_t)(x_bytes + a.rings * RING_BYTES), stream, a);
}

template <unsigned F> cudaError_t launch_few(const few_args &a, int n, cudaStream_t stream)
{
    return n == 8    ? launch_few<F, 8>(a, stream)
           : n == 16 ? launch_few<F, 16>(a, stream)
                     : launch_few<F, 32>(a, stream);
}

} // namespace

cudaError_t bgk_experts_few(const bgk_out *out, const bgk_weights *w, const bgk_out *x,
                            const bgk_moe *m, bool list_done, cudaStream_t stream)
{
    if (m->n > 32 || w->n_chunks > MOST_CHUNKS || w->splits != 1 || w->n_ff ||
        out->layout != BGK_HALF_ROWS || out->stride % 8 || (uintptr_t)out->data % 16 ||
        (w->bias && (uintptr_t)w->bias % 16))
        return cudaErrorNotSupported;
    few_args a = {};
    for (int i = 0; i < 2; i++) {
        a.stack[i] = (const char *)w->stack[i];
        a.format[i] = w->stack_format[i];
        a.bytes[i] = chunk_bytes(w->stack_format[i]);
        a.per[i] = STAGE_CHUNKS / a.bytes[i];
    }
    a.n_first = w->n_first;
    a.row_scale = w->row_scale;
    a.bias = w->bias;
    a.x = (const __half *)x->data;
    a.x_stride = x->stride;
    a.out = (__half *)out->data;
    a.out_stride = out->stride;
    a.n_tiles = w->n_tiles;
    a.n_chunks = w->n_chunks;
    a.n_out = w->n_out;
    a.items = m->items;
    a.n_items = m->n_items;
    a.most = (int)bgk_moe_items(m);
    a.front = m->n_shared * ((m->tokens + m->n - 1) / m->n);
    a.list_done = list_done;
    return by_formats<W4, W6, W8, W16, W4 | W6, W4 | W8, W6 | W8>(
        w->formats, [&](auto f) { return launch_few<decltype(f)::value>(a, m->n, stream); });
}
