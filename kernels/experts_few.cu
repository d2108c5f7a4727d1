/* kernels/experts_few.cu - the second product of experts.cu for items of 8 or 16 tokens and few
 * chunks, where a tile is multiplied in less time than a pipeline of warpgroups takes to turn.
 *
 *     out[row, c] = half(limit(scale_c sum_k x[row, k] w[expert, c, k] + bias_c)), rows of items
 *
 * Requires: experts_few.cuh; sm_90a.
 *
 * Launch: blocks of rings, two blocks a processor. A ring is a warp with memory of its own: stages
 * of weights that bulk copies fill, one item's rows of x, and lines of results. No ring waits for
 * another: a lane asks for the next stage as soon as the warp has read one. Rings take consecutive
 * tiles of consecutive items, each as many bytes of weights; x is read once for an item and a ring.
 * Programmatic: the first stages are under way before the kernel before this one ends, where the
 * list is there. Graph-capturable.
 *
 * Order: one chain over K, chunk by chunk and step by step: that of experts.cu, whose bits
 * m16n8k16 gives.
 *
 * Traffic: an expert's weights once per item; they leave L2 first, so that results stay there for
 * who adds them up. Results in whole lines.
 *
 * Proof: tests/gpu/test_moe.c. */
#include "experts_few.cuh"

#include "matmul.cuh"
#include "ptx.cuh"

namespace
{

constexpr int MOST_RINGS = 4, LEAST_RINGS = 3, RING_STAGES = 2, BLOCKS_EACH = 2, MOST_CHUNKS = 8;
/* A stage: chunks, as many of the tile's as there is room for (4 of W4, 1 of W16); with the tile's
 * last, its scales and biases. */
constexpr int STAGE_CHUNKS = 4 * 2560, STAGE_SCALES = STAGE_CHUNKS, STAGE_BIAS = STAGE_SCALES + 256,
              STAGE_BYTES = STAGE_BIAS + 256;
constexpr int LINES = 8 * 128, ALIGNMENT = 128; /* LINES: results of a tile */
constexpr int BLOCK_SHARED = 113 * 1024 - 512;  /* dynamic; barriers need some more */

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
    int rings, ring_bytes;
    bool list_done;
};

/* Over the tiles of an item, then of the next. */
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
    __device__ bool step(const few_args &a)
    {
        if (++tile < a.n_tiles) return false;
        tile = 0;
        number++;
        item = next;
        next = read(a, number + 1);
        return true;
    }
};

/* The first tile of ring r of n, tiles counted through all items: of n shares of all bytes. */
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

template <unsigned F, int N>
__global__ void __launch_bounds__(MOST_RINGS * 32, BLOCKS_EACH)
    experts_few(const __grid_constant__ few_args a)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int SLICES = 4; /* of a tile */
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t barriers[MOST_RINGS][RING_STAGES + 1];
    const int lane = threadIdx.x % 32, ring = threadIdx.x / 32;
    const uint32_t full = ptx_shared(barriers[ring]), x_full = full + 8 * RING_STAGES;
    uint8_t *const memory =
        dynamic + (-ptx_shared(dynamic) & (ALIGNMENT - 1)) + (size_t)ring * (size_t)a.ring_bytes;
    uint8_t *const x = memory + RING_STAGES * STAGE_BYTES;
    const uint32_t data = ptx_shared(memory), lines = ptx_shared(x) + a.n_chunks * N * 128;
    if (lane == 0) {
        for (int i = 0; i <= RING_STAGES; i++)
            mbar_init(full + 8 * i, 1);
        mbar_init_fence();
    }
    __syncwarp();
    /* Whoever starts after this kernel may count on what the kernel before it has done. */
    if (!a.list_done) ptx_wait_prior();
    ptx_let_next_start();
    const int n_rings = a.rings * (int)gridDim.x, own = ring * (int)gridDim.x + (int)blockIdx.x;
    const int edge = first_tile(a, __ldcg(a.n_items), own + lane % 2, n_rings);
    const int begin = __shfl_sync(~0u, edge, 0), end = __shfl_sync(~0u, edge, 1);

    walk ahead, now; /* what is brought, and what is multiplied */
    now.begin(a, min(begin, max(end - 1, 0)));
    ahead = now;
    int chunk = 0, left = end - begin; /* to be brought: the tile's next, and so many tiles */
    auto bring = [&](int stage) {
        if (!left) return;
        const int expert = ahead.item.x & 0xffff;
        const bool other = expert >= a.n_first;
        const int bytes = a.bytes[other], count = min(a.per[other], a.n_chunks - chunk);
        const bool last = chunk + count == a.n_chunks;
        const uint32_t bar = full + 8 * stage, to = data + stage * STAGE_BYTES;
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
        ahead.step(a);
    };
    /* An item's rows, filled up to 8 or 16. */
    auto bring_x = [&](const int4 &item) {
        const int bytes = (item.w + 7) / 8 * 1024;
        if (lane == 0) mbar_expect(x_full, a.n_chunks * bytes);
        __syncwarp();
        if (lane < a.n_chunks)
            ptx_bulk_copy(ptx_shared(x) + lane * N * 128, a.x + (lane * a.x_stride + item.z) * 64,
                          bytes, x_full);
        __syncwarp();
    };
    for (int i = 0; i < RING_STAGES; i++)
        bring(i);
    ptx_wait_prior();
    if (begin == end) return;
    bring_x(now.item);
    int stage = 0, phase = 0, x_phase = 0;
    bool fresh = true; /* the item */
    for (int i = begin; i < end; i++) {
        const bool other = (now.item.x & 0xffff) >= a.n_first;
        const int format = a.format[other], per = a.per[other];
        float acc[N / 8][SLICES][4], scale[SLICES][2], bias[SLICES][2];
#pragma unroll
        for (int j = 0; j < N / 2 * SLICES; j++)
            acc[j / (4 * SLICES)][j / 4 % SLICES][j % 4] = 0.0f;
        if (fresh) {
            mbar_wait(x_full, x_phase);
            x_phase ^= 1;
        }
        for (int c = 0; c < a.n_chunks; c += per) {
            const uint32_t w = data + stage * STAGE_BYTES;
            mbar_wait(full + 8 * stage, phase);
            const int count = min(per, a.n_chunks - c);
            if (N > 8 && now.item.w > 8)
                multiply_any<F, N, SLICES, N / 8>(acc, x + c * N * 128, w, count, lane, format);
            else
                multiply_any<F, N, SLICES, 1>(acc, x + c * N * 128, w, count, lane, format);
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
        fresh = now.step(a);
        if (fresh && i + 1 < end) bring_x(now.item);
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
        experts_few<F, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, BLOCK_SHARED);
    if (ready != cudaSuccess) return ready;
    a.ring_bytes = RING_STAGES * STAGE_BYTES + a.n_chunks * N * 128 + LINES;
    a.rings = min(MOST_RINGS, (BLOCK_SHARED - ALIGNMENT) / a.ring_bytes);
    if (a.rings < LEAST_RINGS) return cudaErrorNotSupported;
    return launch_after(experts_few<F, N>, dim3(min(a.most * a.n_tiles, sm_count() * BLOCKS_EACH)),
                        dim3(a.rings * 32), (size_t)a.rings * a.ring_bytes + ALIGNMENT, stream, a);
}

template <unsigned F> cudaError_t launch_few(const few_args &a, int n, cudaStream_t stream)
{
    return n == 8 ? launch_few<F, 8>(a, stream) : launch_few<F, 16>(a, stream);
}

} // namespace

cudaError_t bgk_experts_few(const bgk_out *out, const bgk_weights *w, const bgk_out *x,
                            const bgk_moe *m, bool list_done, cudaStream_t stream)
{
    if (m->n > 16 || w->n_chunks > MOST_CHUNKS || w->splits != 1 || w->n_ff ||
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
