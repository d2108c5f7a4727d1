/* kernels/mla_store.cu - latents of a step: norms, the rope key's rotation, rows into the cache.
 *
 * Requires: in_cols, q_rank and the cache's dims multiples of 4; q_rank + k_dim + n_rot <= 12000.
 *
 * Launch: a block of eight warps a token; with products, of few tokens, blocks of four, so small
 * that all of them have their weights before the kernel before has ended. Graph-capturable, may
 * start early.
 *
 * Order: a sum of squares is 256 chains (four values of every 1024 of the row), then 32 of these at
 * a time as lanes of a warp, then these in order: set by the ranks alone. Products: as matmul.cu.
 *
 * Proof: tests/gpu/test_mla.c, test_mla_store.c. */
#include "few.cuh"
#include "mla.cuh"

namespace
{

constexpr int CHAINS = 256, CHAIN_WARPS = CHAINS / 32, MOST = 12000;

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
    for (int i = 0; i < CHAIN_WARPS; i++)
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

/* Where a block's stores go: in a rehearsal, to memory of the thread's own. */
struct sink {
    void *own; /* NULL: never one */
    bool real;
    template <typename V> __device__ void put(void *to, V v) const
    {
        *(V *)(own && !real ? own : to) = v;
    }
};

/* Values 4 i and on of a row in a 16-bit or float cache. */
template <typename T>
__device__ void put4(const store_args &a, const sink &s, char *block, int token, int i, float4 v)
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
        s.put(to, *(const uint2 *)n);
    else
        s.put(to, v);
}

/* Q8 (mla.cuh): the largest magnitude becomes 127; beyond 32000 values saturate, as attention wants
 * scales. All threads of a block, of which the first 128 have v; most_of: a value for each warp. */
template <int THREADS>
__device__ void store_q8(const sink &s, char *block, int block_tokens, int token, float4 v,
                         float *most_of)
{
    const int thread = threadIdx.x;
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    for (int d = 16; d > 0; d /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    if (thread % 32 == 0) most_of[thread / 32] = most;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++)
        most = fmaxf(most, most_of[i]);
    most = fminf(most, 32000.0f);
    const float by = most > 1e-30f ? __fdiv_rn(127.0f, most) : 0.0f;
    const auto quant = [&](float x) {
        return (signed char)min(127, max(-127, __float2int_rn(__fmul_rn(x, by))));
    };
    if (thread < MLA_LATENT / 4)
        s.put(block + token * MLA_LATENT + 4 * thread,
              make_char4(quant(v.x), quant(v.y), quant(v.z), quant(v.w)));
    if (thread == 0)
        s.put(block + block_tokens * (MLA_LATENT + 128) + token * 4,
              by > 0 ? __fdiv_rn(most, 127.0f) : 0.0f);
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

__device__ float4 fresh4(const float *x)
{
    return __ldcg((const float4 *)x); /* not from L1: a rehearsal may have left it there */
}

/* A block's row. What does not come from the kernel before (positions, tables, weights, angles) is
 * fetched before it is waited for; from there it is one read, one barrier and one write. x: q_rank,
 * then k_dim values, then angles; blocks of fewer threads than CHAINS write BGK_TILES, rehearse
 * where there is time (idle), and have 16 bytes a thread behind those. sums: [3]. */
template <typename T, int THREADS>
__device__ __forceinline__ void store_row(const store_args &a, int row, bool idle, float *x,
                                          float (*sums)[CHAIN_WARPS])
{
    constexpr int TURNS = CHAINS / THREADS, AT_ONCE = 3;
    const bgk_cache &c = a.cache;
    const int thread = threadIdx.x, rank = c.v_dim, n_rot = c.k_dim - rank;
    const int pos = a.rows.pos[row];
    const int block =
        pos < 0 ? 0 : a.rows.blocks[a.rows.block0[a.rows.seq[row]] + pos / c.block_tokens];
    float *latent = x + a.q_rank, *key = latent + rank;
    float2 *angles = (float2 *)(latent + c.k_dim);
    for (int i = thread; i < n_rot / 2; i += THREADS)
        angles[i] = mla_angle(pos, a.rope.freq[i], a.rope.mscale);
    const bool tiles = TURNS > 1 || a.qa.layout == BGK_TILES;
    const int pieces = tiles ? (a.q_rank + 63) / 64 * 8 : 0;
    const float4 none = make_float4(0, 0, 0, 0);
    const float4 kv_w = 4 * thread < rank ? *(const float4 *)(a.kv_norm + 4 * thread) : none;
    piece q_w = {none, none};
    if (thread < pieces) q_w = piece_at(a.q_norm, thread, a.q_rank);
    char *to = mla_block(c, a.layer, block, a.block_bytes);
    const int token = max(pos, 0) % c.block_tokens;
    const float *in = a.in + row * a.in_cols;
    sink s = {TURNS > 1 ? latent + c.k_dim + n_rot + 4 * thread : nullptr, true};
#pragma unroll 1
    for (int round = TURNS > 1 && idle ? launch_first_round() : 1; round < 2; round++) {
        s.real = round;
        if (round) {
            if (TURNS > 1) __syncthreads(); /* x and sums were read */
            ptx_wait_prior();
            ptx_let_next_start();
            if (pos < 0) return;
        }
        float q_sum[TURNS] = {}, kv_sum[TURNS] = {};
#pragma unroll 1
        for (int i0 = 4 * thread; i0 < a.q_rank + c.k_dim; i0 += 4 * CHAINS * AT_ONCE) {
            float4 v[AT_ONCE * TURNS];
#pragma unroll
            for (int k = 0; k < AT_ONCE * TURNS; k++) {
                const int i = i0 + 4 * THREADS * k;
                v[k] = i < a.q_rank + c.k_dim ? fresh4(in + i) : none;
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE * TURNS; k++) {
                const int i = i0 + 4 * THREADS * k;
                if (i < a.q_rank + c.k_dim) *(float4 *)(x + i) = v[k];
                if (i < a.q_rank)
                    q_sum[k % TURNS] = squares(q_sum[k % TURNS], v[k]);
                else if (i < a.q_rank + rank)
                    kv_sum[k % TURNS] = squares(kv_sum[k % TURNS], v[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < TURNS; k++) {
            q_sum[k] = over_lanes(q_sum[k]);
            kv_sum[k] = over_lanes(kv_sum[k]);
            if (thread % 32 == 0) {
                sums[0][(thread + THREADS * k) / 32] = q_sum[k];
                sums[1][(thread + THREADS * k) / 32] = kv_sum[k];
            }
        }
        __syncthreads();
        const float kv_f = norm_factor(sums[1], rank, a.eps);
        const float q_f = a.q_rank ? norm_factor(sums[0], a.q_rank, a.eps) : 0.0f;
        for (int i = thread; i < pieces; i += THREADS) {
            const piece w = i == thread ? q_w : piece_at(a.q_norm, i, a.q_rank);
            const piece v = piece_at(x, i, a.q_rank);
            s.put((__half *)a.qa.data + tile_piece(a.qa.stride, row, i / 8, i % 8),
                  halves_of({normed(v.lo, q_f, w.lo), normed(v.hi, q_f, w.hi)}));
        }
        for (int i = thread; !tiles && i < a.q_rank; i += THREADS)
            ((float *)a.qa.data)[row * a.qa.stride + i] =
                __fmul_rn(__fmul_rn(x[i], q_f), a.q_norm[i]);

        const float4 mine = 4 * thread < rank ? *(const float4 *)(latent + 4 * thread) : none;
        if constexpr (sizeof(T) == 1) {
            store_q8<THREADS>(s, to, c.block_tokens, token, normed(mine, kv_f, kv_w), sums[2]);
            for (int i = thread; i < MLA_ROPE; i += THREADS)
                s.put(to + c.block_tokens * MLA_LATENT + token * 128 +
                          (((i / 8) ^ (token & 7)) << 4) + i % 8 * 2,
                      tile_half(turned(a.rope, key, angles, i)));
        } else {
            if (4 * thread < rank) put4<T>(a, s, to, token, thread, normed(mine, kv_f, kv_w));
            for (int i = thread + THREADS; 4 * i < rank; i += THREADS)
                put4<T>(a, s, to, token, i,
                        normed(*(const float4 *)(latent + 4 * i), kv_f,
                               *(const float4 *)(a.kv_norm + 4 * i)));
            for (int i = THREADS - 1 - thread; i < n_rot / 4;
                 i += THREADS) /* other threads first */
                put4<T>(a, s, to, token, rank / 4 + i,
                        make_float4(turned(a.rope, key, angles, 4 * i),
                                    turned(a.rope, key, angles, 4 * i + 1),
                                    turned(a.rope, key, angles, 4 * i + 2),
                                    turned(a.rope, key, angles, 4 * i + 3)));
        }
    }
}

template <typename T> __global__ void __launch_bounds__(CHAINS) store_latents(store_args a)
{
    extern __shared__ __align__(16) float x[];
    __shared__ float sums[3][CHAIN_WARPS];
    store_row<T, CHAINS>(a, blockIdx.x, false, x, sums);
}

/* ---- with products of the normed queries (few.cuh) ---- */

constexpr int BLOCK = 128, WARPS = BLOCK / 32; /* 1, 2 or 4 parts of K are warps of a block */
constexpr int NORM4 = 4, MOST_RANK = 4 * NORM4 * BLOCK; /* a thread has so many times four values */
constexpr int64_t HALF = 56 * 1024; /* two such blocks fit beside the largest of few.cu */

/* Rows of q's latents, normed as store_row() does it, become n rows of 2^shift of tiles in shared
 * memory. All threads; round: 0 or 1, for sums: [2] to be free. */
__device__ __forceinline__ void norm_rows(const store_args &a, int n, unsigned char *tokens,
                                          int shift, int round, float (*sums)[CHAIN_WARPS])
{
    const int thread = threadIdx.x, lane = thread % 32, upper = lane / 8 % 2;
    const float4 none = make_float4(0, 0, 0, 0);
    const float *in = a.in + 4 * thread, *weights = a.q_norm + 4 * thread;
    float4 next[NORM4], w[NORM4];
    const auto load = [&] {
#pragma unroll
        for (int k = 0; k < NORM4; k++)
            next[k] = 4 * (thread + BLOCK * k) < a.q_rank ? fresh4(in + 4 * BLOCK * k) : none;
        in += a.in_cols;
    };
    load();
#pragma unroll
    for (int k = 0; k < NORM4; k++)
        w[k] = 4 * (thread + BLOCK * k) < a.q_rank
                   ? __ldg((const float4 *)(weights + 4 * BLOCK * k))
                   : none;
#pragma unroll 1
    for (int row = 0; row < n; row++) {
        float4 v[NORM4];
        float sum[2] = {};
#pragma unroll
        for (int k = 0; k < NORM4; k++) {
            v[k] = next[k];
            sum[k % 2] = squares(sum[k % 2], v[k]);
        }
        if (row + 1 < n) load();
        sum[0] = over_lanes(sum[0]);
        sum[1] = over_lanes(sum[1]);
        float *all = sums[(round + row) % 2];
        if (lane == 0) {
            all[thread / 32] = sum[0];
            all[thread / 32 + WARPS] = sum[1];
        }
        __syncthreads();
        const float f = norm_factor(all, a.q_rank, a.eps);
        unsigned char *to = tokens + row * 128 + ((lane % 8 ^ row) << 4) + 8 * upper;
        /* A lane's four values and those of the lane 8 further are 32 columns apart: they share a
         * piece, of which each of the two makes a half. */
#pragma unroll
        for (int k = 0; k < NORM4; k++) {
            const float4 x = normed(v[k], f, w[k]);
            const __half2 lo = __halves2half2(tile_half(x.x), tile_half(x.y));
            const __half2 hi = __halves2half2(tile_half(x.z), tile_half(x.w));
            const uint32_t first = *(const uint32_t *)&lo, last = *(const uint32_t *)&hi;
            const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? first : last, 8);
            const uint32_t low = upper ? got : first, high = upper ? last : got;
            const int group = (thread + BLOCK * k) / 16;
            if (64 * group < a.q_rank)
                *(uint2 *)(to + (group << shift) * 128) =
                    make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
        }
    }
    __syncthreads();
}

/* As few_gather(), for as many parts as are asked for. */
__device__ __forceinline__ bool gather(float (&acc)[4], float (*sums)[4][32], int warp, int parts,
                                       int lane)
{
    const int part = warp % parts;
    if (part > 0)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[warp - 1][i][lane] = acc[i];
    __syncthreads();
    if (part > 0) return false;
#pragma unroll 1
    for (int p = 0; p < parts - 1; p++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[i] += sums[warp + p][i][lane];
    return true;
}

/* Blocks of 4 warps: one a row, as store_latents; then slices of the first product, n_first blocks,
 * and of the second. Parts of K are neighbouring warps. rings: bytes of a warp's weights. */
template <unsigned FORMATS>
__global__ void __launch_bounds__(BLOCK, single(FORMATS) ? 3 : 2)
    store_and_multiply(const __grid_constant__ store_args a, const __grid_constant__ args first,
                       const __grid_constant__ args second, int n_first, int shift, int2 rings)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ __align__(16) float norms[3][CHAIN_WARPS];
    __shared__ float sums[WARPS - 1][4][32];
    const int block = (int)blockIdx.x - a.rows.rows;
    /* Of two products there are so many blocks that some start late. */
    const bool idle = first.idle && !second.n_tiles;
    ptx_let_next_start();
    if (block < 0) {
        const int row = blockIdx.x;
        if (a.cache.type == BGK_F16)
            store_row<__half, BLOCK>(a, row, idle, (float *)dynamic, norms);
        else if (a.cache.type == BGK_BF16)
            store_row<__nv_bfloat16, BLOCK>(a, row, idle, (float *)dynamic, norms);
        else
            store_row<int8_t, BLOCK>(a, row, idle, (float *)dynamic, norms);
        return;
    }
    const bool is_first = block < n_first;
    const int number = is_first ? block : block - n_first, ring = is_first ? rings.x : rings.y;
    const args m = is_first ? first : second;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int unit = (number * WARPS + warp) / m.splits, part = warp % m.splits;
    const int slice = unit % 4, tile_number = unit / 4, t = 32 * slice + lane;
    const int begin = part_begin(m, part), chunks = part_begin(m, part + 1) - begin;
    const bgk_wtile tile = m.tiles[tile_number];
    const int n = 16 * slice < tile.n_rows ? chunks : 0; /* not where only filling rows are */
    const int each = chunk_bytes(tile.format);
    const char *w = (const char *)tile.w + (int64_t)begin * each;
    unsigned char *tokens = dynamic + (begin * 128 << shift);
    unsigned char *weights = dynamic + (m.n_chunks * 128 << shift) + warp * ring;
    few_fill<FORMATS, FEW_RING>(tile.format, w, n, weights, ring, slice, lane);
    if (lane == 0 && chunks * each / 4 > ring)
        ptx_prefetch(w + slice * chunks * (each / 4), chunks * (each / 4));
    const rows to = rows_of<false>(m, tile_number, tile_number, 0, t);
    float acc[4] = {};
#pragma unroll 1
    for (int round = idle ? launch_first_round() : 1; round < 2; round++) {
        if (round) ptx_wait_prior();
        norm_rows(a, round ? a.rows.rows : 1, dynamic, shift, round, norms);
        few_product<FORMATS, FEW_RING>(tile.format, acc, w, n, round, weights, ring, tokens, shift,
                                       slice, lane);
        if (gather(acc, sums, warp, m.splits, lane))
            write<8>(acc, m, to, tile_number, 0, round ? m.tokens : 0, t);
    }
#endif
}

template <typename T> cudaError_t launch(const store_args &a, size_t bytes, cudaStream_t stream)
{
    return launch_after(store_latents<T>, dim3((unsigned)a.rows.rows), CHAINS, bytes, stream, a);
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

/* Rows of tokens are read 1, 2 or 4 at a time. */
int shift_of(int rows)
{
    return rows <= 1 ? 0 : rows <= 2 ? 1 : 2;
}

/* Of a warp's weights, beside the tokens of all of them; 0: there is no room. */
int ring_of(const bgk_weights *w, int shift)
{
    const int n = few_part_chunks(w->n_chunks, w->splits);
    const int tokens = (w->n_chunks * 128 << shift) / WARPS;
    const int most = (int)(HALF / WARPS - tokens) / 128 * 128;
    const int ring = few_ring(w->formats, n, WARPS, tokens, 1);
    const bool small = most >= QUARTERS * largest_chunk(w->formats) / 4;
    return small ? min(ring, most) : ring;
}

template <unsigned FORMATS>
cudaError_t launch_products(const store_args &a, const args &first, const args &second, int shift,
                            int2 rings, size_t bytes, cudaStream_t stream)
{
    static const cudaError_t ready = cudaFuncSetAttribute(
        store_and_multiply<FORMATS>, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (ready != cudaSuccess) return ready;
    const int n_first = first.n_tiles * first.splits, n_second = second.n_tiles * second.splits;
    return launch_after(store_and_multiply<FORMATS>, dim3(a.rows.rows + n_first + n_second),
                        dim3(BLOCK), bytes, stream, a, first, second, n_first, shift, rings);
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
    return q_rank > 0 && q_rank <= MOST_RANK && cache->type != BGK_F32 &&
           w->n_chunks == (q_rank + 63) / 64 && !w->block_tiles && w->n_tiles > 0 &&
           w->n_tiles < 4 * sm_count() && rows <= BGK_STORE_LINEAR && !w->n_ff &&
           (w->splits == 1 || w->splits == 2 || w->splits == 4) && w->formats &&
           ring_of(w, shift_of(rows));
}

static bool out_fits(const bgk_out *out, const bgk_weights *w, int rows)
{
    return out->layout != BGK_TILES ||
           (out->stride % BGK_TILE_ROWS == 0 && rows <= out->stride && w->n_out > 0);
}

cudaError_t bgk_mla_store_linear(const bgk_product *products, int n, const bgk_out *qa,
                                 const float *in, int64_t in_cols, const bgk_cache *cache,
                                 const bgk_rows *r, int layer, int q_rank, const float *q_norm,
                                 const float *kv_norm, float eps, const bgk_rotation *rope,
                                 cudaStream_t stream)
{
    store_args a;
    if (n < 1 || n > BGK_STORE_PRODUCTS || qa->layout != BGK_TILES ||
        !store_args_of(&a, qa, in, in_cols, cache, r, layer, q_rank, q_norm, kv_norm, eps, rope))
        return cudaErrorInvalidValue;
    for (int i = 0; i < n; i++)
        if (!bgk_mla_store_linear_fits(products[i].w, cache, q_rank, r->rows) ||
            !out_fits(&products[i].out, products[i].w, r->rows))
            return cudaErrorInvalidValue;
    if (!on_hopper()) return cudaErrorNotSupported;
    if (!r->rows) return cudaSuccess;
    const int shift = shift_of(r->rows);
    args m[BGK_STORE_PRODUCTS] = {};
    int ring[BGK_STORE_PRODUCTS] = {};
    unsigned formats = 0;
    size_t bytes = row_bytes(a) + BLOCK * 16;
    for (int i = 0; i < n; i++) {
        const bgk_product &p = products[i];
        m[i] = args_of(&p.out, p.w, qa->data, qa->stride, r->rows, BGK_SILU);
        ring[i] = ring_of(p.w, shift);
        formats |= p.w->formats;
        bytes = max(bytes, (size_t)(m[i].n_chunks * 128 << shift) + (size_t)WARPS * ring[i]);
    }
    return by_formats<W4, W8>(formats, [&](auto f) {
        return launch_products<decltype(f)::value>(a, m[0], m[1], shift, {ring[0], ring[1]}, bytes,
                                                   stream);
    });
}
