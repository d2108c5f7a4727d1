/* kernels/mla_store.cu - latents of a step: norms, the rope key's rotation, rows into the cache.
 *
 * Requires: in_cols, q_rank and the cache's dims multiples of 4; q_rank + k_dim + n_rot <= 12000.
 *
 * Launch: a block of eight warps a token; graph-capturable, may start early.
 *
 * Order: a sum of squares is threads' chains (four values of every 1024 of the row), then lanes,
 * then warps: set by the ranks alone.
 *
 * Proof: tests/gpu/test_mla.c. */
#include "few.cuh"
#include "mla.cuh"

namespace
{

constexpr int BLOCK = 256, WARPS = BLOCK / 32, MOST = 12000;
constexpr size_t MOST_TOKENS = 64 * 1024; /* bytes of all */

struct store_args {
    bgk_out qa;
    const float *in;
    int64_t in_cols;
    bgk_cache cache;
    bgk_rows rows;
    int layer, q_rank;
    const float *q_norm, *kv_norm;
    float eps;
    bgk_rotation rope;
    bool panels;
    int64_t block_bytes;
};

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

__device__ float squares(float sum, float4 v)
{
    return __fmaf_rn(v.x, v.x, __fmaf_rn(v.y, v.y, __fmaf_rn(v.z, v.z, __fmaf_rn(v.w, v.w, sum))));
}

__device__ float over_lanes(float sum)
{
    for (int d = 16; d > 0; d /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, d));
    return sum;
}

/* 1 / root mean square, from the warps' sums. */
__device__ float norm_factor(const float *sums, int n, float eps)
{
    float sum = 0;
    for (int i = 0; i < WARPS; i++)
        sum = __fadd_rn(sum, sums[i]);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps)));
}

__device__ float4 normed(float4 v, float f, float4 w)
{
    return make_float4(__fmul_rn(__fmul_rn(v.x, f), w.x), __fmul_rn(__fmul_rn(v.y, f), w.y),
                       __fmul_rn(__fmul_rn(v.z, f), w.z), __fmul_rn(__fmul_rn(v.w, f), w.w));
}

/* Value i of the rotated rope key. */
__device__ float turned(const bgk_rotation &r, const float *key, const float2 *angles, int i)
{
    const int half = r.n_rot / 2, pair = r.neox ? i % half : i / 2;
    const float2 v = mla_turned(key[r.neox ? pair : 2 * pair],
                                key[r.neox ? pair + half : 2 * pair + 1], angles[pair]);
    return (r.neox ? i >= half : i % 2) ? v.y : v.x;
}

/* Values 4 i and on of a row in a 16-bit or float cache. */
template <typename T>
__device__ void put4(const store_args &a, char *block, int token, int i, float4 v)
{
    T n[4];
    narrow(&n[0], v.x);
    narrow(&n[1], v.y);
    narrow(&n[2], v.z);
    narrow(&n[3], v.w);
    char *to = block + ((int64_t)token * a.cache.k_dim + 4 * i) * (int64_t)sizeof(T);
    if (sizeof(T) == 2 && a.panels)
        to = block + mla_piece(a.cache.block_tokens, token, i / 2) + i % 2 * 8;
    if constexpr (sizeof(T) == 2)
        *(uint2 *)to = *(const uint2 *)n;
    else
        *(float4 *)to = v;
}

/* Q8 (mla.cuh): the largest magnitude becomes 127; beyond 32000 values saturate, as attention wants
 * scales. All threads, of which the first 128 have v; most_of: [WARPS]. */
__device__ void store_q8(char *block, int block_tokens, int token, float4 v, float *most_of)
{
    const int thread = threadIdx.x;
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    for (int d = 16; d > 0; d /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    if (thread % 32 == 0) most_of[thread / 32] = most;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        most = fmaxf(most, most_of[i]);
    most = fminf(most, 32000.0f);
    const float by = most > 1e-30f ? __fdiv_rn(127.0f, most) : 0.0f;
    const auto quant = [&](float x) {
        return (signed char)min(127, max(-127, __float2int_rn(__fmul_rn(x, by))));
    };
    if (thread < MLA_LATENT / 4)
        *(char4 *)(block + token * MLA_LATENT + 4 * thread) =
            make_char4(quant(v.x), quant(v.y), quant(v.z), quant(v.w));
    if (thread == 0)
        *(float *)(block + block_tokens * (MLA_LATENT + 128) + token * 4) =
            by > 0 ? __fdiv_rn(most, 127.0f) : 0.0f;
}

/* A piece of BGK_TILES: columns 64 g + 4 p and on, and those 32 further. */
struct piece {
    float4 lo, hi;
};

/* Of n values; 0 beyond them. */
__device__ piece piece_at(const float *x, int i, int n)
{
    const int col = i / 8 * 64 + i % 8 * 4;
    const float4 none = make_float4(0, 0, 0, 0);
    return {col < n ? *(const float4 *)(x + col) : none,
            col + 32 < n ? *(const float4 *)(x + col + 32) : none};
}

__device__ uint4 halves_of(const piece &x)
{
    const __half v[8] = {tile_half(x.lo.x), tile_half(x.hi.x), tile_half(x.lo.y),
                         tile_half(x.hi.y), tile_half(x.lo.z), tile_half(x.hi.z),
                         tile_half(x.lo.w), tile_half(x.hi.w)};
    return *(const uint4 *)v;
}

__device__ void put_piece(const bgk_out &out, int row, int i, const piece &x)
{
    *(uint4 *)((__half *)out.data + tile_piece(out.stride, row, i / 8, i % 8)) = halves_of(x);
}

/* A block's row. What does not come from the kernel before (positions, tables, weights, angles) is
 * fetched before it is waited for; from there it is one read, one barrier and one write. x: q_rank,
 * then k_dim values, then angles. */
template <typename T>
__device__ void store_row(const store_args &a, int row, float *x, float (*sums)[WARPS])
{
    const bgk_cache &c = a.cache;
    const int thread = threadIdx.x, rank = c.v_dim, n_rot = c.k_dim - rank;
    const int pos = a.rows.pos[row];
    const int block =
        pos < 0 ? 0 : a.rows.blocks[a.rows.block0[a.rows.seq[row]] + pos / c.block_tokens];
    float *latent = x + a.q_rank, *key = latent + rank;
    float2 *angles = (float2 *)(latent + c.k_dim);
    for (int i = thread; i < n_rot / 2; i += BLOCK)
        angles[i] = mla_angle(pos, a.rope.freq[i], a.rope.mscale);
    const bool tiles = a.qa.layout == BGK_TILES;
    const int pieces = tiles ? (a.q_rank + 63) / 64 * 8 : 0;
    const float4 none = make_float4(0, 0, 0, 0);
    const float4 kv_w = 4 * thread < rank ? *(const float4 *)(a.kv_norm + 4 * thread) : none;
    piece q_w = {none, none};
    if (thread < pieces) q_w = piece_at(a.q_norm, thread, a.q_rank);
    ptx_wait_prior();
    ptx_let_next_start();
    if (pos < 0) return;

    const float *in = a.in + row * a.in_cols;
    float q_sum = 0, kv_sum = 0;
    for (int i = 4 * thread; i < a.q_rank + c.k_dim; i += 4 * BLOCK) {
        const float4 v = *(const float4 *)(in + i);
        *(float4 *)(x + i) = v;
        if (i < a.q_rank)
            q_sum = squares(q_sum, v);
        else if (i < a.q_rank + rank)
            kv_sum = squares(kv_sum, v);
    }
    q_sum = over_lanes(q_sum);
    kv_sum = over_lanes(kv_sum);
    if (thread % 32 == 0) {
        sums[0][thread / 32] = q_sum;
        sums[1][thread / 32] = kv_sum;
    }
    __syncthreads();
    const float kv_f = norm_factor(sums[1], rank, a.eps);
    const float q_f = a.q_rank ? norm_factor(sums[0], a.q_rank, a.eps) : 0.0f;
    char *to = mla_block(c, a.layer, block, a.block_bytes);
    const int token = pos % c.block_tokens;
    for (int i = thread; i < pieces; i += BLOCK) {
        const piece w = i == thread ? q_w : piece_at(a.q_norm, i, a.q_rank);
        const piece v = piece_at(x, i, a.q_rank);
        put_piece(a.qa, row, i, {normed(v.lo, q_f, w.lo), normed(v.hi, q_f, w.hi)});
    }
    for (int i = thread; !tiles && i < a.q_rank; i += BLOCK)
        ((float *)a.qa.data)[row * a.qa.stride + i] = __fmul_rn(__fmul_rn(x[i], q_f), a.q_norm[i]);

    const float4 mine = 4 * thread < rank ? *(const float4 *)(latent + 4 * thread) : none;
    if constexpr (sizeof(T) == 1) {
        store_q8(to, c.block_tokens, token, normed(mine, kv_f, kv_w), sums[2]);
        for (int i = thread; i < MLA_ROPE; i += BLOCK)
            *(__half *)(to + c.block_tokens * MLA_LATENT + token * 128 +
                        (((i / 8) ^ (token & 7)) << 4) + i % 8 * 2) =
                tile_half(turned(a.rope, key, angles, i));
    } else {
        if (4 * thread < rank) put4<T>(a, to, token, thread, normed(mine, kv_f, kv_w));
        for (int i = thread + BLOCK; 4 * i < rank; i += BLOCK)
            put4<T>(a, to, token, i,
                    normed(*(const float4 *)(latent + 4 * i), kv_f,
                           *(const float4 *)(a.kv_norm + 4 * i)));
        for (int i = BLOCK - 1 - thread; i < n_rot / 4; i += BLOCK) /* other threads first */
            put4<T>(a, to, token, rank / 4 + i,
                    make_float4(turned(a.rope, key, angles, 4 * i),
                                turned(a.rope, key, angles, 4 * i + 1),
                                turned(a.rope, key, angles, 4 * i + 2),
                                turned(a.rope, key, angles, 4 * i + 3)));
    }
}

template <typename T> __global__ void __launch_bounds__(BLOCK) store_latents(store_args a)
{
    extern __shared__ __align__(16) float x[];
    __shared__ float sums[3][WARPS];
    store_row<T>(a, blockIdx.x, x, sums);
}

/* ---- with the product of the normed queries (few.cuh) ---- */

/* Row `row` of q's latents, normed as store_row() does it, to row `row` of 2^shift rows of tiles in
 * shared memory. weights: piece `thread` of the norm's. */
__device__ void norm_row(const store_args &a, int row, unsigned char *tokens, int shift,
                         const piece &weights, float *sums)
{
    const int thread = threadIdx.x, pieces = (a.q_rank + 63) / 64 * 8;
    const float *in = a.in + row * a.in_cols;
    const piece mine = piece_at(in, thread, a.q_rank); /* in L1 for the sum */
    float sum = 0;
    for (int i = 4 * thread; i < a.q_rank; i += 4 * BLOCK)
        sum = squares(sum, *(const float4 *)(in + i));
    sum = over_lanes(sum);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    const float f = norm_factor(sums, a.q_rank, a.eps);
    for (int i = thread; i < pieces; i += BLOCK) {
        const piece w = i == thread ? weights : piece_at(a.q_norm, i, a.q_rank);
        const piece v = i == thread ? mine : piece_at(in, i, a.q_rank);
        *(uint4 *)(tokens + (((i / 8) << shift) + row) * 128 + ((i % 8 ^ row) << 4)) =
            halves_of({normed(v.lo, f, w.lo), normed(v.hi, f, w.hi)});
    }
}

/* Blocks of 8 warps: the first ones a row each, as store_latents; the others slices of the product
 * of the normed queries, PARTS warps each. */
template <unsigned FORMATS, int PARTS>
__global__ void __launch_bounds__(BLOCK)
    store_and_multiply(const __grid_constant__ store_args a, const __grid_constant__ args m,
                       int shift, int weight_bytes)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int SLICES = WARPS / PARTS;
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ float norms[3][WARPS], sums[PARTS > 1 ? PARTS - 1 : 1][SLICES][4][32];
    if ((int)blockIdx.x < a.rows.rows) {
        ptx_let_next_start();
        if (a.cache.type == BGK_F16)
            store_row<__half>(a, blockIdx.x, (float *)dynamic, norms);
        else if (a.cache.type == BGK_BF16)
            store_row<__nv_bfloat16>(a, blockIdx.x, (float *)dynamic, norms);
        else
            store_row<int8_t>(a, blockIdx.x, (float *)dynamic, norms);
        return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS;
    const int at = (blockIdx.x - a.rows.rows) * SLICES + warp / PARTS, number = at / 4;
    const int t = at % 4 * 32 + lane, begin = part_begin(m, part),
              n = part_begin(m, part + 1) - begin;
    const bgk_wtile tile = m.tiles[number];
    const rows to = rows_of<false>(m, number, number, 0, t);
    ptx_let_next_start();
    const piece w = piece_at(a.q_norm, threadIdx.x, a.q_rank);
    float acc[4] = {};
    unsigned char *weights = dynamic + (m.n_chunks * 128 << shift) + warp * weight_bytes;
    few_chain<FORMATS, FEW_RING>(
        tile.format, acc, (const char *)tile.w + (int64_t)begin * chunk_bytes(tile.format), n,
        weights, weight_bytes, dynamic + (begin * 128 << shift), shift, at % 4, lane, [&] {
            ptx_wait_prior();
#pragma unroll 1
            for (int row = 0; row < a.rows.rows; row++) {
                if (row) __syncthreads(); /* the sums were read */
                norm_row(a, row, dynamic, shift, w, norms[0]);
            }
            __syncthreads();
        });
    if (!few_gather<PARTS, SLICES>(acc, sums, part, warp / PARTS, lane)) return;
    write<8>(acc, m, to, number, 0, m.tokens, t);
#endif
}

template <typename T> cudaError_t launch(const store_args &a, size_t bytes, cudaStream_t stream)
{
    return launch_after(store_latents<T>, dim3((unsigned)a.rows.rows), BLOCK, bytes, stream, a);
}

} // namespace

namespace
{

bool store_args_of(store_args *out, const bgk_out *qa, const float *in, int64_t in_cols,
                   const bgk_cache *cache, const bgk_rows *r, int layer, int q_rank,
                   const float *q_norm, const float *kv_norm, float eps, const bgk_rotation *rope)
{
    if (cache->k_dim % 4 || cache->v_dim % 4 || cache->v_dim < 4 || cache->k_dim < cache->v_dim ||
        cache->n_kv_heads != 1 || cache->block_tokens < 1 || q_rank < 0 || q_rank % 4 ||
        q_rank + 2 * cache->k_dim - cache->v_dim > MOST || in_cols % 4 || (uintptr_t)in % 16 ||
        rope->n_rot != cache->k_dim - cache->v_dim || rope->n_rot % 4 || (uintptr_t)q_norm % 16 ||
        (uintptr_t)kv_norm % 16 || layer < 0 || !kv_norm ||
        (q_rank && (!qa || !q_norm || bad_attention_out(qa))) ||
        (cache->type == BGK_Q8 && !bgk_mla_fits(cache)))
        return false;
    *out = {.qa = q_rank ? *qa : bgk_out{},
            .in = in,
            .in_cols = in_cols,
            .cache = *cache,
            .rows = *r,
            .layer = layer,
            .q_rank = q_rank,
            .q_norm = q_norm,
            .kv_norm = kv_norm,
            .eps = eps,
            .rope = *rope,
            .panels = bgk_mla_fits(cache),
            .block_bytes = (int64_t)bgk_mla_block_bytes(cache)};
    return true;
}

template <unsigned FORMATS, int PARTS>
cudaError_t launch_both(const store_args &a, const args &m, int shift, int ring, size_t bytes,
                        cudaStream_t stream)
{
    static const cudaError_t ready =
        cudaFuncSetAttribute(store_and_multiply<FORMATS, PARTS>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (ready != cudaSuccess) return ready;
    return launch_after(store_and_multiply<FORMATS, PARTS>,
                        dim3(a.rows.rows + m.n_tiles * 4 * PARTS / WARPS), dim3(BLOCK), bytes,
                        stream, a, m, shift, ring);
}

size_t row_bytes(const store_args &a)
{
    return (size_t)(a.q_rank + a.cache.k_dim + a.rope.n_rot) * sizeof(float);
}

} // namespace

cudaError_t bgk_mla_store(const bgk_out *qa, const float *in, int64_t in_cols,
                          const bgk_cache *cache, const bgk_rows *r, int layer, int q_rank,
                          const float *q_norm, const float *kv_norm, float eps,
                          const bgk_rotation *rope, cudaStream_t stream)
{
    store_args a;
    if (!store_args_of(&a, qa, in, in_cols, cache, r, layer, q_rank, q_norm, kv_norm, eps, rope))
        return cudaErrorInvalidValue;
    if (!r->rows) return cudaSuccess;
    switch (cache->type) {
    case BGK_F32:
        return launch<float>(a, row_bytes(a), stream);
    case BGK_F16:
        return launch<__half>(a, row_bytes(a), stream);
    case BGK_BF16:
        return launch<__nv_bfloat16>(a, row_bytes(a), stream);
    default:
        return launch<int8_t>(a, row_bytes(a), stream);
    }
}

bool bgk_mla_store_linear_fits(const bgk_weights *w, const bgk_cache *cache, int q_rank, int rows)
{
    return rows <= BGK_STORE_LINEAR && q_rank > 0 && cache->type != BGK_F32 &&
           w->n_chunks == (q_rank + 63) / 64 && !w->block_tiles && !w->n_ff && w->n_tiles > 0 &&
           w->n_tiles < 4 * sm_count() && w->n_tiles * w->splits % 2 == 0 &&
           bgk_few_fits(w, rows) && (size_t)w->n_chunks * 128 * 4 <= MOST_TOKENS;
}

cudaError_t bgk_mla_store_linear(const bgk_out *out, const bgk_weights *w, const bgk_out *qa,
                                 const float *in, int64_t in_cols, const bgk_cache *cache,
                                 const bgk_rows *r, int layer, int q_rank, const float *q_norm,
                                 const float *kv_norm, float eps, const bgk_rotation *rope,
                                 cudaStream_t stream)
{
    store_args a;
    if (!bgk_mla_store_linear_fits(w, cache, q_rank, r->rows) || qa->layout != BGK_TILES ||
        !store_args_of(&a, qa, in, in_cols, cache, r, layer, q_rank, q_norm, kv_norm, eps, rope))
        return cudaErrorInvalidValue;
    if (!on_hopper()) return cudaErrorNotSupported;
    if (!r->rows) return cudaSuccess;
    const args m = args_of(out, w, qa->data, qa->stride, r->rows, BGK_SILU);
    const int shift = r->rows == 1 ? 0 : r->rows == 2 ? 1 : 2;
    const size_t tokens = (size_t)w->n_chunks * 128 << shift;
    const int ring = few_ring(w->formats, few_widest(w->formats),
                              few_part_chunks(w->n_chunks, w->splits), WARPS, tokens / WARPS, 1);
    const size_t needs = tokens + (size_t)WARPS * ring,
                 bytes = needs > row_bytes(a) ? needs : row_bytes(a);
    return by_formats<W4, W8>(w->formats, [&](auto f) {
        constexpr unsigned FORMATS = decltype(f)::value;
        return w->splits == 1   ? launch_both<FORMATS, 1>(a, m, shift, ring, bytes, stream)
               : w->splits == 2 ? launch_both<FORMATS, 2>(a, m, shift, ring, bytes, stream)
                                : launch_both<FORMATS, 4>(a, m, shift, ring, bytes, stream);
    });
}
