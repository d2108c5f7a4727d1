/* kernels/attention_single.cu - attention of rows that are their sequences' only ones: decode.
 *
 *   requires  a cache that bgk_attention_fits(); scale > 0
 *   launch    a block of four warps an item, KV head, 16 of its query heads, and split; combine: a
 *             block a head and item. Graph-capturable, may start early
 *   memory    a warp has a unit of its own: K and V in chunks of 8 KiB (64 keys, 128 bytes of each)
 *             through a ring of STAGES in shared memory, STAGES - 1 of them under way
 *   order     attention.cuh: units in their order, from shared memory after every four, or from
 *             `parts` by combine; so splits change no bit
 *   spread    where items and heads are fewer than the GPU takes, an item's units go to several
 *             blocks and its parts to memory: m, l and O of each unit and head
 *   proof     tests/gpu/test_attention.c */
#include "attention.cuh"

namespace
{

constexpr int WARPS = 4, BLOCK = 32 * WARPS, PAD = 4;

struct single_args {
    bgk_out out;
    bgk_att a;
    const bgk_item *items;
    float *parts;  /* O: [part, head, D]; then (m, l): [part, head] */
    int parts_cap; /* parts there is room for */
    int splits, q_tiles, rows_cap;
};

/* An item's units, and whether they are spread over blocks. */
struct unit_range {
    int begin, end;
    bool spread;
};

__device__ unit_range units_of(const single_args &a, const bgk_item &item)
{
    const int pos = item.pos0, window = a.a.heads.window;
    unit_range u;
    u.begin = window && pos >= window ? (pos - window + 1) / BGK_UNIT : 0;
    u.end = pos / BGK_UNIT + 1;
    u.spread = a.splits > 1 && u.end - u.begin > 1 && item.n <= a.parts_cap - u.end;
    return u;
}

/* A operand of q's rows r and r + 8 for all steps of 16 dims; heads from n on are 0. */
template <typename T, int D>
__device__ void load_q(uint32_t (&q)[D / 16][1][4], const bgk_att &a, int row, int head, int n,
                       int lane)
{
    constexpr bool Q8 = sizeof(T) == 1;
    const int r = lane / 4, t = lane % 4;
    const uint16_t *at = (const uint16_t *)a.q + row * a.q_cols + (int64_t)head * D;
#pragma unroll
    for (int s = 0; s < D / 16; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int j = r + i % 2 * 8,
                      dim = 16 * s + (Q8 ? 4 * t + i / 2 * 2 : 2 * t + i / 2 * 8);
            q[s][0][i] = j < n ? *(const uint32_t *)(at + j * D + dim) : 0;
        }
}

template <typename T, int D, int STAGES>
__global__ void __launch_bounds__(BLOCK, 2) attend_single(single_args a)
{
    using S = att_shape<T, D>;
    constexpr int CHUNKS = S::CHUNKS, PER_UNIT = 2 * CHUNKS, EACH = D / 32;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char *ring = shared + warp * STAGES * S::STAGE;
    float *o_of = (float *)(shared + WARPS * STAGES * S::STAGE);       /* [4][rows_cap][D + PAD] */
    float2 *ml_of = (float2 *)(o_of + WARPS * a.rows_cap * (D + PAD)); /* [4][rows_cap] */
    ptx_wait_prior();
    ptx_let_next_start();

    const bgk_heads &h = a.a.heads;
    const int split = blockIdx.x % a.splits, tile = blockIdx.x / a.splits;
    const int kv = tile / a.q_tiles;
    const att_group group = att_group_of(h, kv);
    const int head0 = group.first + tile % a.q_tiles * 16;
    const int rows = min(16, group.first + group.n - head0);
    const int4 raw = *(const int4 *)(a.items + blockIdx.y);
    const bgk_item item = {raw.x, raw.y, raw.z, raw.w};
    const unit_range all = units_of(a, item);
    int begin = all.begin, end = all.end;
    if (all.spread) {
        const int each = (end - begin + a.splits - 1) / a.splits;
        begin += split * each;
        end = min(end, begin + each);
    } else if (split) {
        return;
    }
    if (begin >= end || rows <= 0) return;

    const int pos = item.pos0, keys_end = pos + 1;
    const int first = h.window && pos >= h.window ? pos - h.window + 1 : 0;
    const att_keys keys = att_keys_of<T>(a.a, item.block0, kv);
    const att_scaling scaling = att_scaling_of(h);

    /* The ring: chunk i of the warp's units (K's, then V's) goes to stage i % STAGES. */
    att_rows<BGK_UNIT> at;
    int coming = begin + warp - WARPS, to = 0, from = 0;
    at.look_up(keys, (coming + WARPS) * BGK_UNIT, keys_end, lane);
    auto issue = [&](int chunk) {
        if (chunk == 0) {
            coming += WARPS;
            at.take(keys, coming * BGK_UNIT, lane);
            at.look_up(keys, (coming + WARPS) * BGK_UNIT, keys_end, lane);
        }
        if (coming < end)
            att_load<T, D, BGK_UNIT>(att_shared(ring + to * S::STAGE), keys, chunk >= CHUNKS,
                                     chunk % CHUNKS, at, 0, lane);
        ptx_copy_commit();
        to = to + 1 == STAGES ? 0 : to + 1;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        issue(i % PER_UNIT);
    uint32_t q[D / 16][1][4];
    load_q<T, D>(q, a.a, item.row0, head0, rows, lane);

    float4 o[EACH] = {};
    float m[EACH], l[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        m[i] = -INFINITY;
        l[i] = 0;
    }
    for (int round = begin; round < end; round += WARPS) {
        const int unit = round + warp;
        float m_unit[2], l_unit[2];
        uint32_t p[1][4][4];
        const int r = lane / 4, t = lane % 4;
        if (unit < end) {
            float s[1][8][4] = {};
            const unsigned char *stage = nullptr;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                ptx_copy_wait<STAGES - 2>();
                __syncwarp();
                issue((c + STAGES - 1) % PER_UNIT);
                stage = ring + from * S::STAGE;
                from = from + 1 == STAGES ? 0 : from + 1;
#pragma unroll
                for (int ks = 0; ks < (c < CHUNKS - 1 ? S::CHUNK : S::LAST) / 16; ks++)
                    att_scores<T, 1>(s, q[c * S::CHUNK / 16 + ks], att_shared(stage), ks, lane);
            }
            const float *k_scale = (const float *)(stage + S::CHUNK_BYTES);
            const float *v_scale = (const float *)(ring + from * S::STAGE + S::CHUNK_BYTES);
            if constexpr (S::Q8) { /* V's scales come with its first chunk */
                ptx_copy_wait<STAGES - 2>();
                __syncwarp();
            }
            const int key0 = unit * BGK_UNIT;
            const int lo[2] = {first - key0, first - key0}, hi[2] = {pos - key0, pos - key0};
            const bool mask = lo[0] > 0 || hi[0] < BGK_UNIT - 1;
            att_softmax<T>(p[0], m_unit, l_unit, s[0], scaling, mask, lo, hi, k_scale, v_scale,
                           lane);
        }
        if (!all.spread) __syncthreads(); /* the round before has been merged */
        if (unit < end) {
            const int64_t part = (int64_t)(item.n + unit) * h.n_heads + head0;
            float *o_to = all.spread ? a.parts + part * D : o_of + warp * a.rows_cap * (D + PAD);
            float2 *ml_to = all.spread
                                ? (float2 *)(a.parts + (int64_t)a.parts_cap * h.n_heads * D) + part
                                : ml_of + warp * a.rows_cap;
            const int pitch = all.spread ? D : D + PAD;
            if (t == 0) {
                if (r < rows) ml_to[r] = make_float2(m_unit[0], l_unit[0]);
                if (r + 8 < rows) ml_to[r + 8] = make_float2(m_unit[1], l_unit[1]);
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                ptx_copy_wait<STAGES - 2>();
                __syncwarp();
                issue((CHUNKS + c + STAGES - 1) % PER_UNIT);
                const uint32_t stage = att_shared(ring + from * S::STAGE);
                from = from + 1 == STAGES ? 0 : from + 1;
#pragma unroll
                for (int slab = 0; slab < (c < CHUNKS - 1 ? S::CHUNK : S::LAST) / 8 / S::SLAB;
                     slab++) {
                    float v[1][S::SLAB][4];
                    att_values<T, 1, S::SLAB>(v, p, stage, slab, lane);
#pragma unroll
                    for (int n = 0; n < S::SLAB; n++) {
                        const int nt = c * S::CHUNK / 8 + slab * S::SLAB + n;
                        const int c0 = att_col<S::Q8>(nt, t, 0), c1 = att_col<S::Q8>(nt, t, 1);
                        if (r < rows) {
                            o_to[r * pitch + c0] = v[0][n][0];
                            o_to[r * pitch + c1] = v[0][n][1];
                        }
                        if (r + 8 < rows) {
                            o_to[(r + 8) * pitch + c0] = v[0][n][2];
                            o_to[(r + 8) * pitch + c1] = v[0][n][3];
                        }
                    }
                }
            }
        }
        if (all.spread) continue;
        __syncthreads();
        const int n_units = min(WARPS, end - round);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int quad = threadIdx.x + i * BLOCK, row = quad / (D / 4),
                      col = quad % (D / 4) * 4;
            if (row >= rows) continue;
            for (int w = 0; w < n_units; w++) {
                const float2 ml = ml_of[w * a.rows_cap + row];
                const float4 v = *(const float4 *)(o_of + (w * a.rows_cap + row) * (D + PAD) + col);
                const att_weights weights = att_merge(m[i], ml.x);
                l[i] = att_merged(l[i], ml.y, weights);
                o[i].x = att_merged(o[i].x, v.x, weights);
                o[i].y = att_merged(o[i].y, v.y, weights);
                o[i].z = att_merged(o[i].z, v.z, weights);
                o[i].w = att_merged(o[i].w, v.w, weights);
            }
        }
    }
    if (all.spread) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int quad = threadIdx.x + i * BLOCK, row = quad / (D / 4), col = quad % (D / 4) * 4;
        if (row >= rows) continue;
        const int head = head0 + row, to_col = head * D + col;
        const float f = att_factor(m[i], l[i], h.sinks, head);
        put(a.out, item.row0, to_col, __fmul_rn(o[i].x, f));
        put(a.out, item.row0, to_col + 1, __fmul_rn(o[i].y, f));
        put(a.out, item.row0, to_col + 2, __fmul_rn(o[i].z, f));
        put(a.out, item.row0, to_col + 3, __fmul_rn(o[i].w, f));
    }
    fill_last_group(a.out, item.row0, head0 + rows - 1, h.n_heads, D, threadIdx.x, BLOCK);
}

/* A thread a column. */
template <int D> __global__ void __launch_bounds__(D) combine(single_args a)
{
    constexpr int AHEAD = 32; /* so many loads under way: contexts may be long */
    ptx_wait_prior();
    ptx_let_next_start();
    const bgk_heads &h = a.a.heads;
    const int4 raw = *(const int4 *)(a.items + blockIdx.y);
    const bgk_item item = {raw.x, raw.y, raw.z, raw.w};
    const unit_range u = units_of(a, item);
    if (!u.spread) return;
    const int head = blockIdx.x, col = threadIdx.x;
    const float2 *ml_of = (const float2 *)(a.parts + (int64_t)a.parts_cap * h.n_heads * D);
    float m = -INFINITY, l = 0, o = 0;
    for (int unit = u.begin; unit < u.end; unit += AHEAD) {
        float2 ml[AHEAD];
        float v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (unit + i >= u.end) continue;
            const int64_t part = (int64_t)(item.n + unit + i) * h.n_heads + head;
            ml[i] = ml_of[part];
            v[i] = a.parts[part * D + col];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (unit + i >= u.end) continue;
            const att_weights w = att_merge(m, ml[i].x);
            l = att_merged(l, ml[i].y, w);
            o = att_merged(o, v[i], w);
        }
    }
    put(a.out, item.row0, head * D + col, __fmul_rn(o, att_factor(m, l, h.sinks, head)));
    fill_last_group(a.out, item.row0, head, h.n_heads, D, threadIdx.x, D);
}

template <typename T, int D, int STAGES>
cudaError_t launch_stages(const single_args &a, int n, size_t bytes, cudaStream_t stream)
{
    cudaError_t e = cudaFuncSetAttribute(attend_single<T, D, STAGES>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    const dim3 grid((unsigned)(a.a.cache.n_kv_heads * a.q_tiles * a.splits), (unsigned)n);
    if (e == cudaSuccess)
        e = launch_after(attend_single<T, D, STAGES>, grid, BLOCK, bytes, stream, a);
    if (e == cudaSuccess && a.splits > 1)
        e = launch_after(combine<D>, dim3((unsigned)a.a.heads.n_heads, (unsigned)n), D, 0, stream,
                         a);
    return e;
}

size_t shared_room()
{
    int device = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return (size_t)bytes;
}

template <typename T, int D> cudaError_t launch(single_args a, int n, cudaStream_t stream)
{
    using S = att_shape<T, D>;
    const size_t merge = (size_t)WARPS * (size_t)a.rows_cap * ((D + PAD) * 4 + 8);
    const size_t three = (size_t)WARPS * 3 * S::STAGE + merge;
    /* Two blocks on a processor of Hopper's 228 KiB, 1 KiB more for each. */
    if (three <= (233472 - 2048) / 2 && three <= shared_room())
        return launch_stages<T, D, 3>(a, n, three, stream);
    return launch_stages<T, D, 2>(a, n, (size_t)WARPS * 2 * S::STAGE + merge, stream);
}

template <typename T> cudaError_t launch_type(const single_args &a, int n, cudaStream_t stream)
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

} // namespace

cudaError_t bgk_attention_single(const bgk_out *out, const bgk_att *a, const bgk_item *items, int n,
                                 void *parts, size_t parts_bytes, int n_sms, cudaStream_t stream)
{
    const bgk_heads *h = &a->heads;
    if (!bgk_attention_fits(&a->cache) || bad_heads(h, &a->cache) || bad_attention_out(out) ||
        !(h->scale > 0) || n < 0 || n > 65535 || n_sms < 1 || (uintptr_t)items % 16 ||
        (uintptr_t)a->q % 16 || a->q_cols % 8 || (uintptr_t)parts % 16)
        return cudaErrorInvalidValue;
    if (!n || !h->n_heads) return cudaSuccess;
    const size_t part = (size_t)h->n_heads * (size_t)(a->cache.v_dim + 2) * sizeof(float);
    const size_t cap = parts ? parts_bytes / part : 0;
    const int q_tiles = (h->group + 15) / 16, blocks = n * a->cache.n_kv_heads * q_tiles;
    const int splits = cap ? 2 * n_sms / blocks : 1;
    const single_args args = {.out = *out,
                              .a = *a,
                              .items = items,
                              .parts = (float *)parts,
                              .parts_cap = (int)(cap < 1u << 30 ? cap : 1u << 30),
                              .splits = splits > 64  ? 64
                                        : splits < 1 ? 1
                                                     : splits,
                              .q_tiles = q_tiles,
                              .rows_cap = h->group < 16 ? h->group : 16};
    switch (a->cache.type) {
    case BGK_F16:
        return launch_type<__half>(args, n, stream);
    case BGK_BF16:
        return launch_type<__nv_bfloat16>(args, n, stream);
    default:
        return launch_type<int8_t>(args, n, stream);
    }
}
