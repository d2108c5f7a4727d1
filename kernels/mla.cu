/* kernels/mla.cu - attention over latents (DeepSeek-V2, arXiv:2405.04434), absorbed, on Hopper.
 *
 *   requires  bgk_mla_fits(); q_lat in BGK_HALF_ROWS, q in BGK_TILES; scale > 0
 *   launch    a block a processor takes works by turns: an item, N of its (token, head) pairs (a
 *             token's heads beside each other), a split. Two warpgroups work, one brings keys, the
 *             next work's while the last one's results go out. May start early
 *   layout    keys, later values, are wgmma's A, both from the one copy of the latents in shared
 *             memory: S^T [64 keys, N] = K Q^T, O^T [512, N] = V^T P^T. Warpgroup w sums half of
 *             the dims of S and has dims 256 w and on of O. So 8 heads cost N = 8, not 64 rows
 *   memory    two stages of 64 keys; Q, P and S in shared memory, O in registers
 *   order     S is the sum of both halves. In a unit of BGK_MLA_UNIT keys: running maximum, O and
 *             l times its change, plus the next 64 keys' (P in 16 bits; l by a binary tree). Units
 *             are merged as in attention.cuh. Keys that a row does not see have P = 0 and leave
 *             its maximum as it is
 *   spread    where items are fewer than processors, units are spread over blocks; a unit's own
 *             (m, l, O) goes to `parts` (the first block's merged); once all are there, each block
 *             merges a share of the columns
 *   proof     tests/gpu/test_mla.c */
#include "mla_tile.cuh"

namespace
{

/* ---- the kernel --------------------------------------------------------------------------------
 */

#if __CUDA_ARCH_FEAT_SM90_ALL

/* The warpgroup that brings keys: all of it where some are listed, else one warp. */
template <typename T, int N> __device__ inline void bring_works(const mla_args &a, uint32_t base)
{
    using L = mla_shape<T, N>;
    const int thread = threadIdx.x, warp = thread / 32 - WORKERS / 32, lane = thread % 32;
    const uint32_t full = base + L::BARS, empty = full + 8 * STAGES;
    const bgk_cache &c = a.a.cache;
    bool waited = false;
    int n = 0; /* tiles so far */
    if (a.s.list) {
        ptx_wait_prior();
        waited = true;
    } else if (warp > 0) {
        return;
    }
    for (int w = blockIdx.x; w < a.works; w += gridDim.x) {
        const bgk_item item = item_of(a, item_number(a, w));
        const mla_work x = work_of(a, w, item, listed_of(a, item), N);
        const key_source keys = {mla_block(c, a.a.layer, 0, a.block_bytes),
                                 a.rows.blocks + item.block0, a.block_bytes, c.block_tokens};
        for (int t = x.begin; t < x.end; t++, n++) {
            const int stage = n % STAGES, left = min(KEYS, x.n_keys - t * KEYS);
            const uint32_t at = base + stage * L::STAGE, bar = full + 8 * stage;
            if (n >= STAGES) mbar_wait(empty + 8 * stage, (n / STAGES - 1) & 1);
            /* Tables came with the step's copy, and keys before the item's first are from earlier
             * steps: nothing that the kernel before writes. */
            if (!waited && (t + 1) * KEYS > item.pos0) {
                ptx_wait_prior();
                waited = true;
            }
            if (x.listed) {
                bring_listed<L>(at, bar, keys, a.s.list + (int64_t)item.row0 * a.s.top_k + t * KEYS,
                                left, warp, lane);
                continue;
            }
            if (a.s.list && thread != WORKERS) mbar_arrive(bar); /* all bringers arrive there */
            if (warp > 0) continue;
            if (L::Q8)
                bring_q8<L>(at, bar, keys, t * KEYS, left, lane);
            else
                bring(at, bar, keys, t * KEYS, left, lane);
        }
    }
    if (a.s.list) ptx_copy_wait<0>();
}

/* A warpgroup's half of S to where softmax() reads it. */
template <typename T, int N>
__device__ inline void scores(uint32_t base, uint32_t at, uint32_t panels, int wg)
{
    using L = mla_shape<T, N>;
    using V = typename L::V;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float s[N / 2] = {}, turned[L::Q8 ? N / 2 : 1] = {}; /* Q8: rope's products by themselves */
    const uint64_t k = wgmma_desc(panels + wg * 4 * PANEL);
    const uint64_t q = wgmma_desc(base + L::Q + wg * 4 * N * 128);
    const uint64_t rope_k = wgmma_desc(at + L::LAST + wg * 64);
    const uint64_t rope_q = wgmma_desc(base + L::Q + 8 * N * 128 + wg * 64);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 16; i++)
        multiply<V, N, 0>(s, k + (i / 4 * PANEL + i % 4 * 32) / 16,
                          q + (i / 4 * N * 128 + i % 4 * 32) / 16, i > 0);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if constexpr (L::Q8)
            multiply<V, N, 0>(turned, rope_k + i * 2, rope_q + i * 2, i > 0);
        else
            multiply<V, N, 0>(s, rope_k + i * 2, rope_q + i * 2, 1);
    wgmma_commit();
    wgmma_wait<0>();
    if constexpr (L::Q8) {
        float by_key[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            by_key[i] = __uint_as_float(
                att_word(at + (uint32_t)(L::SCALES + (warp % 4 * 16 + lane / 4 + 8 * i) * 4)));
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            s[i] = __fmaf_rn(s[i], by_key[i % 4 / 2], turned[i]);
    }
    const uint32_t to =
        base + L::S + (uint32_t)(((wg * N + lane % 4 * 2) * PITCH + warp % 4 * 16 + lane / 4) * 4);
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            put_float(to + (uint32_t)(((8 * j + e % 2) * PITCH + e / 2 * 8) * 4), s[4 * j + e]);
}

/* O += P V, or O = P V, of the warpgroup's dims. */
template <typename T, int N>
__device__ inline void values(float (&o)[4][N / 2], uint32_t base, uint32_t panels, int wg,
                              bool begins)
{
    using L = mla_shape<T, N>;
    const uint64_t v = transposed_desc(panels + wg * 4 * PANEL), p = wgmma_desc(base + L::P);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int m = 0; m < 4; m++)
            multiply<typename L::V, N, 1>(o[m], v + (m * PANEL + i * 2048) / 16, p + i * 2,
                                          i > 0 || !begins);
    wgmma_commit();
    wgmma_wait<0>();
}

/* Waits until all splits of a row tile have stored their parts. They run at the same time: there
 * are no more of them than processors, and no kernel that comes later starts before they have. */
__device__ inline void splits_meet(unsigned *arrived, int splits)
{
    workers_meet();
    if (threadIdx.x == 0) {
        unsigned seen;
        __threadfence(); /* for all workers: they met */
        atomicAdd(arrived, 1u);
        do
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(arrived)
                         : "memory");
        while (seen < (unsigned)splits);
        if (atomicAdd(arrived + MEETINGS, 1u) == (unsigned)splits - 1) { /* all went on */
            arrived[MEETINGS] = 0;
            arrived[0] = 0;
        }
    }
    workers_meet();
}

/* Units' parts to the result: four columns a thread, of a share of the row tile's. */
template <int N> __device__ inline void merge_parts(const mla_args &a, const mla_work &x)
{
    constexpr int QUADS = MLA_LATENT / 4, AHEAD = N > 24 ? 4 : N > 16 ? 8 : 16; /* registers */
    const int rows = min(N, x.n_pairs - x.pair0), heads = a.a.n_heads;
    for (int quad = x.split * WORKERS + threadIdx.x; quad < rows * QUADS;
         quad += x.splits * WORKERS) {
        const int head = x.pair0 + quad / QUADS, col = quad % QUADS * 4;
        const float2 *ml_of = part_ml(a) + (int64_t)x.item.n * heads + head;
        const float *o_of = a.parts + ((int64_t)x.item.n * heads + head) * MLA_LATENT + col;
        float m = -INFINITY, l = 0;
        float4 o = {};
        for (int unit = x.each - 1; unit < x.units; unit += AHEAD) { /* those before are in it */
            float2 ml[AHEAD];
            float4 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (unit + i >= x.units) continue;
                ml[i] = __ldcg(ml_of + (unit + i) * heads);
                v[i] = __ldcg((const float4 *)(o_of + (int64_t)(unit + i) * heads * MLA_LATENT));
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (unit + i >= x.units) continue;
                const att_weights w = att_merge(m, ml[i].x);
                l = att_merged(l, ml[i].y, w);
                o.x = att_merged(o.x, v[i].x, w);
                o.y = att_merged(o.y, v[i].y, w);
                o.z = att_merged(o.z, v[i].z, w);
                o.w = att_merged(o.w, v[i].w, w);
            }
        }
        const float f = __fdiv_rn(1.0f, l), r[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            put(a.out, x.item.row0, head * MLA_LATENT + col + i,
                __fadd_rn(__fmul_rn(r[i], f), 0.0f));
    }
}

/* The workers, for work w; n: tiles so far. */
template <typename T, int N>
__device__ inline void attend_work(const mla_args &a, const mla_work &x, int w, uint32_t base,
                                   int wg, int &n)
{
    using L = mla_shape<T, N>;
    const int thread = threadIdx.x, lane = thread % 32;
    const uint32_t full = base + L::BARS, empty = full + 8 * STAGES, factors = base + L::FACTORS;
    const int row = thread / L::THREADS, k0 = thread % L::THREADS * L::MINE;
    const float by = __fmul_rn(a.a.scale, LOG2E);
    load_q<typename L::V, N>(base + L::Q, a, x, thread);
    fence_async();
    workers_meet();
    const int last_key = /* that the row sees */
        x.listed ? x.listed - 1 : x.item.pos0 + heads_divided(a, min(x.pair0 + row, x.n_pairs - 1));
    row_state state = {-INFINITY, 0, -INFINITY, 0};
    float o[4][N / 2] = {}, all[4][N / 2] = {};
    for (int t = x.begin; t < x.end; t++, n++) {
        const int stage = n % STAGES, left = x.n_keys - t * KEYS;
        const uint32_t at = base + stage * L::STAGE, panels = L::Q8 ? base + L::MADE : at;
        const bool begins = t % UNIT_TILES == 0;
        const bool ends = t + 1 == x.end || (t + 1) % UNIT_TILES == 0;
        mbar_wait(full + 8 * stage, n / STAGES & 1);
        if (x.listed) fence_async();                          /* the copies were ordinary ones */
        if (!L::Q8 && left < KEYS && !x.listed && n < STAGES) /* never written: may be NaN */
            for (int i = thread; i < (KEYS - left) * 64; i += WORKERS)
                put16(at + (uint32_t)(i % 8 * PANEL + left * 128 + i / 8 * 16), uint4{});
        if constexpr (L::Q8) {
            warpgroup_meets(wg); /* all have multiplied by the panels before */
            unpack(panels, at, thread);
            fence_async();
            warpgroup_meets(wg);
        }
        scores<T, N>(base, at, panels, wg);
        workers_meet();
        if (row < N)
            softmax<T, N>(state, base + L::S, base + L::P, factors, at + L::SCALES, row, k0,
                          last_key + 1 - t * KEYS, by, begins, ends);
        fence_async();
        workers_meet();
        if (L::Q8 && lane == 0) mbar_arrive(empty + 8 * stage); /* nothing more is read there */
        if (!begins) scale_rows<N>(o, factors, lane);
        values<T, N>(o, base, panels, wg, begins);
        __syncwarp();
        if (!L::Q8 && lane == 0) mbar_arrive(empty + 8 * stage);
        if (!ends) continue;
        if (x.split == 0) /* the first split's are merged as they come */
            merge_rows<N>(all, o, factors + N * 4, factors + 2 * N * 4, lane);
        else
            store_part<T, N>(a, x, t / UNIT_TILES, o, state.m, state.l, row, k0, thread);
    }
    if (x.splits == 1) {
        end_rows<N>(all, factors + 3 * N * 4, lane);
        store_result<N>(a, all, x, base + L::Q, thread);
    } else {
        if (x.split == 0)
            store_part<T, N>(a, x, x.each - 1, all, state.all_m, state.all_l, row, k0, thread);
        splits_meet(a.arrived + w / a.splits, x.splits);
        merge_parts<N>(a, x);
    }
    workers_meet(); /* Q and factors are free */
}

#endif

template <typename T, int N> __global__ void __launch_bounds__(BLOCK, 1) attend_latents(mla_args a)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    using L = mla_shape<T, N>;
    extern __shared__ unsigned char dynamic[];
    const uint32_t base = (ptx_shared(dynamic) + 1023) & ~1023u;
    const uint32_t full = base + L::BARS, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(full + 8 * i, a.s.list ? BRINGERS : 1);
            mbar_init(empty + 8 * i, WORKERS / 32);
        }
        mbar_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= WORKERS) {
        ptx_fewer_registers<72>();
        bring_works<T, N>(a, base);
        return;
    }
    ptx_more_registers<216>();
    const int wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); /* in a uniform register */
    if (a.s.list) ptx_wait_prior();
    bgk_item item = item_of(a, item_number(a, blockIdx.x));
    int listed = listed_of(a, item), n = 0;
    ptx_wait_prior();
    ptx_let_next_start();
    for (int w = blockIdx.x; w < a.works; w += gridDim.x) {
        const mla_work x = work_of(a, w, item, listed, N);
        item = item_of(a, item_number(a, min(w + (int)gridDim.x, a.works - 1)));
        listed = listed_of(a, item); /* so early that nobody waits for it */
        if (x.begin < x.end) attend_work<T, N>(a, x, w, base, wg, n);
    }
#endif
}

/* ---- launches ----------------------------------------------------------------------------------
 */

int sm_count()
{
    static const int n = [] {
        int device = 0, count = 0;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
            return 1;
        return count;
    }();
    return n;
}

template <typename T, int N>
cudaError_t launch(mla_args a, int n, int pairs, int n_sms, cudaStream_t stream)
{
    using L = mla_shape<T, N>;
    static const cudaError_t ready = att_shared_memory(attend_latents<T, N>, L::BYTES);
    if (ready != cudaSuccess) return ready;
    const int sms = min(sm_count(), MEETINGS);
    a.row_tiles = (pairs + N - 1) / N;
    const int splits = a.parts_cap && !a.many ? min(n_sms, sms) / (n * a.row_tiles) : 1;
    a.splits = splits < 1 ? 1 : splits > 64 ? 64 : splits;
    a.works = n * a.row_tiles * a.splits;
    a.by_heads = 0xffffffffu / (uint32_t)a.a.n_heads + 1;
    return launch_after(attend_latents<T, N>, dim3((unsigned)(a.works < sms ? a.works : sms)),
                        BLOCK, L::BYTES, stream, a);
}

template <typename T>
cudaError_t launch_rows(const mla_args &a, int n, int n_sms, cudaStream_t stream)
{
    const int pairs = (a.many ? BGK_MLA_TOKENS : 1) * a.a.n_heads;
    if (pairs <= 8) return launch<T, 8>(a, n, pairs, n_sms, stream);
    if (pairs <= 16) return launch<T, 16>(a, n, pairs, n_sms, stream);
    if (pairs <= 24) return launch<T, 24>(a, n, pairs, n_sms, stream);
    return launch<T, 32>(a, n, pairs, n_sms, stream);
}

cudaError_t launch_any(mla_args a, int n, void *parts, size_t parts_bytes, int n_sms,
                       cudaStream_t stream)
{
    const bgk_mla *m = &a.a;
    if (!bgk_mla_fits(&m->cache) || bad_attention_out(&a.out) || !(m->scale > 0) || n < 0 ||
        n > 65535 || n_sms < 1 || (uintptr_t)a.items % 16 || (uintptr_t)parts % 16 ||
        m->layer < 0 || m->n_heads < 0 || m->nope < 0 || m->rope.n_rot != MLA_ROPE ||
        m->q_lat.layout != BGK_HALF_ROWS || m->q_lat.stride % 8 || (uintptr_t)m->q_lat.data % 16 ||
        m->q.layout != BGK_TILES || m->q.stride % BGK_TILE_ROWS || (uintptr_t)m->q.data % 1024)
        return cudaErrorInvalidValue;
    if (!n || !m->n_heads) return cudaSuccess;
    const size_t part = (size_t)m->n_heads * (MLA_LATENT + 2) * sizeof(float);
    const size_t meetings = 2 * MEETINGS * sizeof(unsigned);
    const size_t cap = parts && parts_bytes > meetings ? (parts_bytes - meetings) / part : 0;
    a.arrived = (unsigned *)parts;
    a.parts = (float *)((char *)parts + meetings);
    a.parts_cap = (int)(cap < 1u << 30 ? cap : 1u << 30);
    a.splits = 1;
    a.block_bytes = (int64_t)bgk_mla_block_bytes(&m->cache);
    switch (m->cache.type) {
    case BGK_F16:
        return launch_rows<__half>(a, n, n_sms, stream);
    case BGK_BF16:
        return launch_rows<__nv_bfloat16>(a, n, n_sms, stream);
    default:
        return launch_rows<int8_t>(a, n, n_sms, stream);
    }
}

} // namespace

bool bgk_mla_fits(const bgk_cache *c)
{
    static const bool hopper = [] {
        int device = 0, major = 0;
        return cudaGetDevice(&device) == cudaSuccess &&
               cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
                   cudaSuccess &&
               major == 9;
    }();
    const int b = c->block_tokens;
    return hopper && c->type != BGK_F32 && c->n_kv_heads == 1 && c->v_dim == MLA_LATENT &&
           c->k_dim == MLA_LATENT + MLA_ROPE && b >= 8 && b % 8 == 0 &&
           (KEYS % b == 0 || b % KEYS == 0);
}

size_t bgk_mla_block_bytes(const bgk_cache *c)
{
    const size_t value = c->type == BGK_F32 ? 4 : 2;
    if (c->type == BGK_Q8) /* int8, halves, a float */
        return (size_t)c->block_tokens * ((size_t)c->k_dim * 2 - (size_t)c->v_dim + sizeof(float));
    return (size_t)c->block_tokens * (size_t)c->k_dim * value;
}

cudaError_t bgk_mla_single(const bgk_out *out, const bgk_mla *a, const int32_t *blocks,
                           const bgk_item *items, int n, void *parts, size_t parts_bytes, int n_sms,
                           cudaStream_t stream)
{
    const mla_args args = {.out = *out, .a = *a, .rows = {.blocks = blocks}, .items = items};
    return launch_any(args, n, parts, parts_bytes, n_sms, stream);
}

cudaError_t bgk_mla_tiles(const bgk_out *out, const bgk_mla *a, const int32_t *blocks,
                          const bgk_item *items, int n, cudaStream_t stream)
{
    mla_args args = {.out = *out, .a = *a, .rows = {.blocks = blocks}, .items = items};
    args.many = true;
    return launch_any(args, n, NULL, 0, 1, stream);
}

cudaError_t bgk_mla_selected(const bgk_out *out, const bgk_mla *a, const bgk_rows *r,
                             const bgk_selected *s, void *parts, size_t parts_bytes, int n_sms,
                             cudaStream_t stream)
{
    if (!s->list || !s->count || s->top_k < 1) return cudaErrorInvalidValue;
    mla_args args = {.out = *out, .a = *a, .rows = *r};
    args.s = *s;
    return launch_any(args, r->rows, parts, parts_bytes, n_sms, stream);
}
