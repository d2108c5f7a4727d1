/* kernels/attention_tiles.cu - attention of prompts: many consecutive tokens of a sequence.
 *
 *   requires  a cache that bgk_attention_fits(); scale > 0
 *   launch    a block an item, KV head and 128 (token, query head) pairs of them, a token's heads
 *             beside each other; eight warps with 16 rows each. May start early
 *   memory    Q, and two stages of a unit's K and V, in shared memory; Q8: a unit as it is in the
 *             cache, from which the block makes one of halves for all its warps
 *   order     attention.cuh: a block takes its units in their order; a unit is skipped only where
 *             no row of a warp sees any of its keys
 *   proof     tests/gpu/test_attention.c */
#include "attention.cuh"

namespace
{

constexpr int ROWS = 128, WARPS = ROWS / 16, BLOCK = 32 * WARPS;

struct tiles_args {
    bgk_out out;
    bgk_att a;
    const bgk_item *items;
};

template <typename T, int D> struct tile_shape {
    using S = att_shape<T, D>;
    static constexpr bool Q8 = S::Q8;
    using V = std::conditional_t<Q8, __half, T>; /* what mma takes */
    using U = att_shape<V, D>;
    static constexpr int KEYS = BGK_UNIT / WARPS; /* of a unit, that a warp brings */
    static constexpr int PANELS = (D + 63) / 64;  /* of Q: [128 rows][64 values] */
    static constexpr int Q_BYTES = PANELS * ROWS * 128, UNIT = 4 * U::STEP, RAW = 4 * S::STEP;
    static constexpr int BYTES =
        Q_BYTES + (Q8 ? 2 * UNIT + 2 * RAW + 2 * BGK_UNIT * (int)sizeof(float) : 4 * UNIT);
};

/* Division by n of what is below 2^16. */
struct divider {
    int n;
    uint32_t magic;

    __device__ explicit divider(int by) : n(by), magic(0xffffffffu / (uint32_t)by + 1)
    {
    }
    __device__ int quotient(int x) const
    {
        return n == 1 ? x : (int)__umulhi((uint32_t)x, magic);
    }
};

/* Q of the block's rows, 0 where there is none. Q8: dims stand in the order of unpack();
 * else part of the thread's present group of copies. */
template <typename T, int D>
__device__ void load_q(unsigned char *to, const bgk_att &a, int row0, int head0,
                       const divider &heads, int pair0, int n_pairs)
{
    constexpr int TWOS = D / 16; /* pairs of pieces, 16 values */
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * TWOS; i += BLOCK) {
        const int r = i / TWOS, two = i % TWOS, pair = pair0 + r;
        const bool any = pair < n_pairs;
        const int token = any ? heads.quotient(pair) : 0, head = any ? pair - token * heads.n : 0;
        const uint4 *from = (const uint4 *)((const uint16_t *)a.q + (row0 + token) * a.q_cols +
                                            (int64_t)(head0 + head) * D + two * 16);
        unsigned char *row = to + two / 4 * ROWS * 128 + r * 128;
        unsigned char *to_x = row + (((two % 4 * 2) ^ (r & 7)) << 4);
        unsigned char *to_y = row + (((two % 4 * 2 + 1) ^ (r & 7)) << 4);
        if constexpr (sizeof(T) == 1) {
            const uint4 x = any ? from[0] : uint4{}, y = any ? from[1] : uint4{};
            *(uint4 *)to_x = make_uint4(x.x, x.z, y.x, y.z);
            *(uint4 *)to_y = make_uint4(x.y, x.w, y.y, y.w);
        } else {
            att_copy16(att_shared(to_x), from, any);
            att_copy16(att_shared(to_y), from + 1, any);
        }
    }
}

/* Q8: K (is_v false) or V of a unit to halves, and its scales. Of 16 dims of K, mma's k 2t, 2t + 1,
 * 2t + 8, 2t + 9 are 4t .. 4t + 3. */
template <int D>
__device__ void unpack(unsigned char *to, float *scales, const unsigned char *raw, bool is_v)
{
    using S = att_shape<int8_t, D>;
    using U = att_shape<__half, D>;
    constexpr int ALL = BGK_UNIT * S::PIECES;
#pragma unroll 2
    for (int i = threadIdx.x; i < ALL; i += BLOCK) {
        const int key = i / S::PIECES, piece = i % S::PIECES;
        uint4 x =
            *(const uint4 *)(raw + key / 16 * S::STEP + att_place<S::PIECES>(key % 16, piece));
        x.x ^= 0x80808080u;
        x.y ^= 0x80808080u;
        x.z ^= 0x80808080u;
        x.w ^= 0x80808080u;
        const uint4 low = make_uint4(att_halves<0x4140>(x.x), att_halves<0x4140>(x.y),
                                     att_halves<0x4140>(x.z), att_halves<0x4140>(x.w));
        const uint4 high = make_uint4(att_halves<0x4342>(x.x), att_halves<0x4342>(x.y),
                                      att_halves<0x4342>(x.z), att_halves<0x4342>(x.w));
        unsigned char *step = to + key / 16 * U::STEP;
        *(uint4 *)(step + att_place<U::PIECES>(key % 16, 2 * piece)) =
            is_v ? make_uint4(low.x, high.x, low.y, high.y) : low;
        *(uint4 *)(step + att_place<U::PIECES>(key % 16, 2 * piece + 1)) =
            is_v ? make_uint4(low.z, high.z, low.w, high.w) : high;
    }
    for (int key = threadIdx.x; key < BGK_UNIT; key += BLOCK)
        scales[key] = *(const float *)(raw + key / 16 * S::STEP + S::SCALES + key % 16 * 4);
}

/* A row's O, as the thread has it, to where it goes. */
template <int D>
__device__ void store_o(const bgk_out &out, int row, int head, int n_heads,
                        const float (&o)[D / 8][4], int e0, float f, int t)
{
    if (out.layout == BGK_TILES && D % 64 == 0) {
#pragma unroll
        for (int g = 0; g < D / 64; g++)
#pragma unroll
            for (int n = 0; n < 4; n++) { /* columns c, c + 1 and 32 further */
                const int low = 8 * g + n, c = 8 * n + 2 * t;
                const __half2 v[2] = {__halves2half2(tile_half(__fmul_rn(o[low][e0], f)),
                                                     tile_half(__fmul_rn(o[low + 4][e0], f))),
                                      __halves2half2(tile_half(__fmul_rn(o[low][e0 + 1], f)),
                                                     tile_half(__fmul_rn(o[low + 4][e0 + 1], f)))};
                __half *to = (__half *)out.data +
                             tile_piece(out.stride, row, head * (D / 64) + g, c / 4) + c % 4 * 2;
                *(uint2 *)to = *(const uint2 *)v;
            }
        return;
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            put(out, row, head * D + 8 * n + 2 * t + e, __fmul_rn(o[n][e0 + e], f));
    fill_last_group(out, row, head, n_heads, D, t, 4);
}

template <typename T, int D>
__global__ void __launch_bounds__(BLOCK, D > 128 ? 1 : 2) attend_tiles(tiles_args a)
{
    using S = att_shape<T, D>;
    using L = tile_shape<T, D>;
    constexpr bool Q8 = L::Q8;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    unsigned char *units = shared + L::Q_BYTES; /* [stage][K, V]; Q8: [K, V], then as they came */
    unsigned char *coming = units + (Q8 ? 2 * L::UNIT : 0);
    float *scales = (float *)(coming + 2 * L::RAW); /* Q8: K's, V's */

    const bgk_heads &h = a.a.heads;
    const int kv = blockIdx.x;
    const att_group group = att_group_of(h, kv);
    const int4 raw = *(const int4 *)(a.items + blockIdx.z);
    const bgk_item item = {raw.x, raw.y, raw.z, raw.w};
    const int pair0 = (gridDim.y - 1 - blockIdx.y) * ROWS, n_pairs = item.n * group.n;
    if (pair0 >= n_pairs) return;
    const divider heads(group.n);
    const int last_pair = min(pair0 + ROWS, n_pairs) - 1;
    const int block_lo = item.pos0 + heads.quotient(pair0),
              block_hi = item.pos0 + heads.quotient(last_pair);
    const int first_key = h.window ? max(block_lo - h.window + 1, 0) : 0;
    const int begin = first_key / BGK_UNIT, end = block_hi / BGK_UNIT + 1;
    const int keys_end = block_hi + 1;
    const att_keys keys = att_keys_of<T>(a.a, item.block0, kv);
    const att_scaling scaling = att_scaling_of(h);

    /* The warp's rows: positions of the first and last, and the thread's own. */
    const int warp_pair = pair0 + warp * 16;
    const bool works = warp_pair < n_pairs;
    const int warp_lo = item.pos0 + heads.quotient(warp_pair);
    const int warp_hi = item.pos0 + heads.quotient(min(warp_pair + 15, n_pairs - 1));
    int pos[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        pos[i] = item.pos0 + heads.quotient(min(warp_pair + lane / 4 + 8 * i, n_pairs - 1));

    att_rows<L::KEYS> at;
    at.look_up(keys, begin * BGK_UNIT + warp * L::KEYS, keys_end, lane);
    auto issue = [&](int unit) {
        const int key0 = unit * BGK_UNIT + warp * L::KEYS;
        unsigned char *to = coming + (Q8 ? 0 : unit % 2 * 2 * L::UNIT);
        at.take(keys, key0, lane);
        at.look_up(keys, key0 + BGK_UNIT, keys_end, lane);
#pragma unroll
        for (int v = 0; v < 2; v++)
            att_load<T, D, L::KEYS>(
                att_shared(to + v * L::RAW + warp * L::KEYS / S::KEYS * S::STEP), keys, v,
                at.row[0], 0, warp * L::KEYS % S::KEYS, keys_end - key0, lane);
        ptx_copy_commit();
    };
    ptx_wait_prior(); /* items and tables came with the step's copy, not from the kernel before */
    ptx_let_next_start();
    load_q<T, D>(shared, a.a, item.row0, group.first, heads, pair0, n_pairs);
    issue(begin);

    const uint32_t q_at = att_shared(shared) + (uint32_t)((warp * 16 + lane % 16) * 128);
    float o[D / 8][4] = {};
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for (int unit = begin; unit < end; unit++) {
        ptx_copy_wait<0>();
        __syncthreads(); /* the unit is there, and all have left the one before */
        if constexpr (Q8) {
            unpack<D>(units, scales, coming, false);
            unpack<D>(units + L::UNIT, scales + BGK_UNIT, coming + L::RAW, true);
            __syncthreads();
        }
        if (unit + 1 < end) issue(unit + 1);
        const int key0 = unit * BGK_UNIT;
        if (!works || key0 > warp_hi || (h.window && key0 + BGK_UNIT - 1 < warp_lo - h.window + 1))
            continue;
        const uint32_t k_at = att_shared(units) + (uint32_t)(Q8 ? 0 : unit % 2 * 2 * L::UNIT);
        float s[8][4] = {};
#pragma unroll
        for (int ks = 0; ks < D / 16; ks++) {
            uint32_t q[4];
            att_matrix4(q, q_at + (uint32_t)(ks / 4 * ROWS * 128 +
                                             (((ks % 4 * 2 + lane / 16) ^ (lane & 7)) << 4)));
            att_scores<typename L::V, D>(s, q, k_at, ks, lane);
        }
        const bool mask =
            key0 + BGK_UNIT - 1 > warp_lo || (h.window && key0 < warp_hi - h.window + 1);
        uint32_t p[4][4];
        att_weights w[2];
        float m_unit[2], l_unit[2];
        int lo[2], hi[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            hi[i] = pos[i] - key0;
            lo[i] = h.window ? hi[i] - h.window + 1 : 0;
        }
        att_softmax<T, 16>(p, m_unit, l_unit, s, scaling, mask, lo, hi, scales, scales + BGK_UNIT,
                           lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            w[i] = att_merge(most[i], m_unit[i]);
            sum[i] = att_merged(sum[i], l_unit[i], w[i]);
        }
#pragma unroll
        for (int two = 0; two < D / 16; two++) {
            float v[2][4];
            att_values<typename L::V, D>(v, p, k_at + L::UNIT, two, lane);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if constexpr (Q8) v[n][e] = __fmul_rn(v[n][e], 1.0f / ATT_RAISE);
                    o[2 * two + n][e] = att_merged(o[2 * two + n][e], v[n][e], w[e / 2]);
                }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int pair = warp_pair + lane / 4 + 8 * i;
        if (pair >= n_pairs) continue;
        const int token = heads.quotient(pair);
        const int head = group.first + pair - token * group.n;
        const float f = att_factor(most[i], sum[i], h.sinks, head);
        store_o<D>(a.out, item.row0 + token, head, h.n_heads, o, 2 * i, f, t);
    }
}

template <typename T, int D> cudaError_t launch(const tiles_args &a, int n, cudaStream_t stream)
{
    using L = tile_shape<T, D>;
    const cudaError_t e = att_shared_memory(attend_tiles<T, D>, L::BYTES);
    if (e != cudaSuccess) return e;
    constexpr int TOKENS = BGK_TILE_TOKENS;
    const int parts = (TOKENS * a.a.heads.group + ROWS - 1) / ROWS;
    return launch_after(attend_tiles<T, D>,
                        dim3((unsigned)a.a.cache.n_kv_heads, (unsigned)parts, (unsigned)n), BLOCK,
                        L::BYTES, stream, a);
}

template <typename T> cudaError_t launch_type(const tiles_args &a, int n, cudaStream_t stream)
{
    switch (a.a.cache.k_dim) {
    case 64:
        return launch<T, 64>(a, n, stream);
    case 96:
        return launch<T, 96>(a, n, stream);
    case 128:
        return launch<T, 128>(a, n, stream);
    default:
        return launch<T, 256>(a, n, stream);
    }
}

template <typename T> int bytes_of(int dim)
{
    switch (dim) {
    case 64:
        return tile_shape<T, 64>::BYTES;
    case 96:
        return tile_shape<T, 96>::BYTES;
    case 128:
        return tile_shape<T, 128>::BYTES;
    case 256:
        return tile_shape<T, 256>::BYTES;
    default:
        return 0;
    }
}

} // namespace

bool bgk_attention_fits(const bgk_cache *c)
{
    const int bytes = c->type == BGK_Q8 ? bytes_of<int8_t>(c->k_dim) : bytes_of<__half>(c->k_dim);
    if (c->type == BGK_F32 || c->k_dim != c->v_dim || !bytes || c->block_tokens < 1) return false;
    int device = 0, room = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
               cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           major >= 8 && room >= bytes;
}

cudaError_t bgk_attention_tiles(const bgk_out *out, const bgk_att *a, const bgk_item *items, int n,
                                cudaStream_t stream)
{
    const bgk_heads *h = &a->heads;
    if (!bgk_attention_fits(&a->cache) || bad_heads(h, &a->cache) || bad_attention_out(out) ||
        !(h->scale > 0) || n < 0 || n > 65535 || (uintptr_t)items % 16 || (uintptr_t)a->q % 16 ||
        a->q_cols % 8)
        return cudaErrorInvalidValue;
    if (!n || !h->n_heads) return cudaSuccess;
    const tiles_args args = {.out = *out, .a = *a, .items = items};
    switch (a->cache.type) {
    case BGK_F16:
        return launch_type<__half>(args, n, stream);
    case BGK_BF16:
        return launch_type<__nv_bfloat16>(args, n, stream);
    default:
        return launch_type<int8_t>(args, n, stream);
    }
}
