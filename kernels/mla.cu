/* kernels/mla.cu - attention over latents (DeepSeek-V2, arXiv:2405.04434), absorbed, on Hopper.
 *
 *   requires  bgk_mla_fits(); q_lat in BGK_HALF_ROWS, q in BGK_TILES; scale > 0
 *   launch    a block a processor takes works by turns: an item, N of its (token, head) pairs (a
 *             token's heads beside each other), a split. Two warpgroups work, a warp (of listed
 *             keys four) brings keys, the next work's while the last one's results go out. May
 *             start early, lets the next start at once (few rows: "next")
 *   code      little, with loops as loops: among a layer's other kernels it is fetched anew for
 *             each launch, which takes longer than to run it. So lists, and spreading, are kernels
 *             of their own, and workers and bringers share the code that finds a work
 *   layout    keys, later values, are wgmma's A, both from the one copy of the latents in shared
 *             memory: S^T [64 keys, N] = K Q^T, O^T [512, N] = V^T P^T. Warpgroup w sums half of
 *             the dims of S and has dims 256 w and on of O. So 8 heads cost N = 8, not 64 rows
 *   memory    two stages of 64 keys; Q, P and S in shared memory, O in registers
 *   order     S is the sum of both halves. A unit is 64 keys from a multiple of 64 on: its m (the
 *             largest exponent), P relative to it (in 16 bits), l (a binary tree over the keys) and
 *             O = P V. A chunk is 16 units from a multiple of 16 on: from m = -inf, l = 0, O = 0 on
 *             it takes its units in their order (att_merge()); in the same way the row takes its
 *             chunks. Keys that a row does not see have P = 0 and leave its maximum as it is
 *   spread    where items are fewer than processors, units are spread over blocks. Each stores as
 *             parts (m, l, O) what it has from a chunk's first unit on, merged, and units of a
 *             chunk that a block before began by themselves; then it merges a share of the columns
 *             of all parts. Nobody signals: a part's words are 0 until they are there, whoever
 *             reads one looks until it is not and makes it 0 again (part_word()). All blocks of an
 *             item run at the same time: there are no more blocks than processors, kernels before
 *             need none of them to end, and no kernel that comes later starts before they have
 *   next      of few rows the next kernels, whose weights are larger than all keys, start when the
 *             queries are there: before that what they fetch is in the way of the kernels before.
 *             With lists and Q there, 2 rows and more let them start at once: ms of a GLM-5 step of
 *             1, 2 and 4 rows 6.09, 7.28, 9.42, else 6.04, 7.33, 9.48 (after the units 6.29)
 *   lists     few rows with lists wait for the indexer, while memory is idle: they have all keys
 *             brought to L2, before it is known which are listed. Their Q may be there (early)
 *   cluster   a single row of few keys and heads: the 16 blocks of a cluster share the units out,
 *             and each has in its shared memory what it merges: half a row's columns, of all units,
 *             which the blocks send as they have them (send_unit())
 *   proof     tests/gpu/test_mla.c */
#include <stddef.h>

#include "mla_tile.cuh"

namespace
{

/* ---- the kernel --------------------------------------------------------------------------------
 */

#if __CUDA_ARCH_FEAT_SM90_ALL

/* Where the key of unit t is that the thread brings, one of those that bring. */
template <int WARPS>
__device__ inline int listed_position(const mla_work &x, const int32_t *list, int t)
{
    constexpr int EACH = KEYS / WARPS;
    const int mine = (int)((threadIdx.x / 32 - WORKERS / 32) * EACH + threadIdx.x % EACH);
    return x.listed && t < x.end && t * KEYS + mine < x.n_keys ? list[t * KEYS + mine] : 0;
}

/* The threads that bring keys, for a work that has some: of consecutive keys the first warp. Tables
 * and items came with the step's copy, and keys before a single row are from earlier steps: they
 * are there before the kernels before are done, of which more than one may still run. next: where
 * the thread's first key is, where they are listed. n: units so far. */
template <typename T, int N, bool LISTS>
__device__ inline void bring_units(const mla_args &a, const mla_work &x, uint32_t base,
                                   const int32_t *list, int next, bool &waited, uint32_t &n)
{
    using L = mla_shape<T, N>;
    constexpr int WARPS = BRINGERS<N, LISTS> / 32;
    const uint32_t warp = (uint32_t)uniform((int)(threadIdx.x / 32)) - WORKERS / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t full = base + L::BARS, empty = full + 8 * STAGES;
    const bgk_cache &c = a.a.cache;
    const key_source keys = {mla_block(c, a.a.layer, 0, a.block_bytes),
                             a.rows.blocks + x.item.block0, a.block_bytes, c.block_tokens};
    int block = divided(x.begin * KEYS, c.block_tokens);
    int token = x.begin * KEYS - block * c.block_tokens;
    if (!waited && a.many) {
        ptx_wait_prior();
        waited = true;
    }
#pragma unroll 1
    for (int t = x.begin; t < x.end; t++, n++) {
        const uint32_t stage = n % STAGES, at = base + stage * L::STAGE, bar = full + 8 * stage;
        const int left = min(KEYS, x.n_keys - t * KEYS), pos = next;
        const int old = waited ? left : min(max(x.item.pos0 - t * KEYS, 0), left);
        if constexpr (LISTS) next = listed_position<WARPS>(x, list, t + 1);
        if (n >= STAGES) mbar_wait(empty + 8 * stage, (n / STAGES - 1) & 1);
        if constexpr (LISTS) {
            if (x.listed) {
                bring_listed<L, WARPS>(at, bar, keys, pos, left, warp, lane);
                continue;
            }
            if (threadIdx.x != WORKERS) mbar_arrive(bar); /* all bringers arrive there */
        }
        if (warp == 0) {
            if constexpr (L::Q8) {
                if (old < left) ptx_wait_prior();
                bring_q8<L>(at, bar, keys, block, token, left, lane);
            } else {
                if (lane == 0) mbar_expect(bar, (uint32_t)(left * MLA_PANELS * 128));
                __syncwarp();
#pragma unroll 1
                for (int first = 0, end = old; first < left; first = end, end = left)
                    bring(at, bar, keys, block, token, first, end, first >= old, lane);
            }
        }
        if (old < left) {
            ptx_wait_prior();
            waited = true;
        }
        token += KEYS;
        if (token >= c.block_tokens) {
            token = 0;
            block += KEYS >> (__ffs(min(c.block_tokens, KEYS)) - 1);
        }
    }
}

/* The row's table, to L1: who has the positions of listed keys needs it next. */
template <int WARPS> __device__ inline void fetch_table(const mla_args &a, const mla_work &x)
{
    const int32_t *table = a.rows.blocks + x.item.block0;
    const int blocks = (int)divide((uint32_t)x.item.pos0, (uint32_t)a.a.cache.block_tokens) + 1;
#pragma unroll 1
    for (int i = (int)threadIdx.x - WORKERS; i < blocks; i += 32 * WARPS) {
        int v;
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(table + i));
    }
}

/* A share of the keys of the work's row to L2; by one thread. They are earlier steps', but the
 * last. */
__device__ inline void prefetch_keys(const mla_args &a, const mla_work &x)
{
    const bgk_cache &c = a.a.cache;
    const int32_t *table = a.rows.blocks + x.item.block0;
    const int blocks = (int)divide((uint32_t)x.item.pos0, (uint32_t)c.block_tokens) + 1;
#pragma unroll 1
    for (int i = x.split; i < blocks; i += a.splits)
        ptx_prefetch(mla_block(c, a.a.layer, table[i], a.block_bytes), a.block_bytes);
}

/* A warpgroup's half of S to where softmax() reads it. */
template <typename T, int N>
__device__ inline void scores(uint32_t base, uint32_t at, uint32_t panels, int wg)
{
    using L = mla_shape<T, N>;
    using V = typename L::V;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float s[N / 2] = {}, turned[L::Q8 ? N / 2 : 1] = {}; /* Q8: rope's products by themselves */
    uint64_t k = wgmma_desc(panels + wg * 4 * PANEL);
    uint64_t q = wgmma_desc(base + L::Q + wg * 4 * N * 128);
    const uint64_t rope_k = wgmma_desc(at + L::LAST + wg * 64);
    const uint64_t rope_q = wgmma_desc(base + L::Q + 8 * N * 128 + wg * 64);
    wgmma_fence();
#pragma unroll 1
    for (int i = 0; i < 4; i++, k += PANEL / 16, q += N * 128 / 16)
#pragma unroll
        for (int j = 0; j < 4; j++)
            multiply<V, N, 0>(s, k + j * 2, q + j * 2, i + j);
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

constexpr int SLOTS = offsetof(parts_table, slot), BEGINS = offsetof(parts_table, begin);

/* A unit's O = P V of the warpgroup's dims into the chunk's. Many rows: 64 dims at a time, to have
 * the registers. */
template <typename T, int N>
__device__ inline void values(float (&chunk)[4][N / 2], uint32_t base, uint32_t panels,
                              uint32_t factors, int wg, int lane)
{
    using L = mla_shape<T, N>;
    using V = typename L::V;
    uint64_t v = transposed_desc(panels + wg * 4 * PANEL), p = wgmma_desc(base + L::P);
    if constexpr (N <= 16) {
        float o[4][N / 2];
        wgmma_fence();
#pragma unroll 1
        for (int i = 0; i < 4; i++, v += 2048 / 16, p += 2)
#pragma unroll
            for (int m = 0; m < 4; m++)
                multiply<V, N, 1>(o[m], v + m * PANEL / 16, p, i);
        wgmma_commit();
        wgmma_wait<0>();
        merge_rows<N, 4>(chunk, o, factors, factors + N * 4, lane);
    } else {
        float o[2][1][N / 2];
#pragma unroll
        for (int m = 0; m < 5; m++) {
            if (m < 4) {
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; i++)
                    multiply<V, N, 1>(o[m % 2][0], v + (m * PANEL + i * 2048) / 16, p + i * 2,
                                      i > 0);
                wgmma_commit();
            }
            if (m == 0) continue;
            if (m < 4)
                wgmma_wait<1>();
            else
                wgmma_wait<0>();
            merge_rows<N, 1>(*(float(*)[1][N / 2]) & chunk[m - 1], o[(m - 1) % 2], factors,
                             factors + N * 4, lane);
        }
    }
}

/* The parts of as many chunks from chunk0 on as there is room for; by a warp, which leaves as one:
 * else ptxas takes what follows for divergent, and has wgmma wait for wgmma. */
__device__ __noinline__ void list_parts(uint32_t table, int units, int each, int per, int slot0,
                                        int chunk0, int lane)
{
    mla_work x = {};
    x.units = units;
    x.spread = {2, each, per};
    x.slot0 = slot0;
    const int c0 = (chunk0 + lane) * CHUNK, c1 = min(units, c0 + CHUNK);
    const uint32_t begins = table + BEGINS;
    int split = (int)divide((uint32_t)c0, (uint32_t)each);
    int begin = (split + 1) * each; /* of the next split */
    const int n = c0 < units ? 1 + max(c1 - begin, 0) : 0;
    int upto = n;
#pragma unroll 1
    for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, upto, d);
        if (lane >= d) upto += before;
    }
    const bool fits = n > 0 && upto <= MOST_PARTS;
    const int chunks = __popc(__ballot_sync(0xffffffffu, fits));
    if (lane == 0) {
        put_int(table, chunks);
        put_int(begins, 0);
    }
    if (fits) {
        put_int(begins + 4 * lane + 4, upto);
        uint32_t to = table + SLOTS + 4 * (upto - n);
        int slot = slot_of(x, c0, split++);
        int unit = begin;
#pragma unroll 1
        do { /* all but the first by themselves */
            put_int(to, slot);
            to += 4;
            slot = slot0 + split * per + unit - begin;
            if (unit + 1 == begin + each) {
                begin += each;
                split++;
            }
        } while (unit++ < c1);
    }
    __syncwarp();
}

template <typename T, int N>
__device__ inline void list_parts(uint32_t base, const mla_work &x, int chunk0, int lane)
{
    list_parts(base + mla_shape<T, N>::TABLE, x.units, x.spread.each, x.spread.per, x.slot0, chunk0,
               lane);
}

/* Words at `from` that are there; of these each is read once. */
__device__ inline uint4 look(const uint32_t *from)
{
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ inline uint2 look2(const uint32_t *from)
{
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ inline bool there(uint4 v)
{
    return min(min(v.x, v.y), min(v.z, v.w));
}

/* Quads [quad0, quad0 + quads) of the table's parts, each [quads] at `to`, by warp `warp` of the
 * workers; their words become 0. */
__device__ inline void gather_parts(const mla_args &a, uint32_t to, uint32_t table, int pair0,
                                    int n_parts, int quad0, int quads, int warp, int lane)
{
    constexpr int AHEAD = 4, SURE = 3;
    uint32_t *o = a.parts + (uint32_t)(pair0 * MLA_LATENT + (quad0 + lane) * 4);
    const uint32_t part_words = (uint32_t)(a.a.n_heads * MLA_LATENT);
    int part = warp, quad = 0;
#pragma unroll 1
    while (part < n_parts) {
        uint32_t *from[AHEAD], at[AHEAD];
        uint4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t slot = (uint32_t)get_int(table + SLOTS + 4 * part); /* or another word */
            const bool any = part < n_parts && quad + lane < quads;
            at[i] = to + (uint32_t)((part * quads + quad + lane) * 16);
            from[i] = any ? o + (slot * part_words + (uint32_t)quad * 4) : nullptr;
            quad += 32;
            part += quad < quads ? 0 : WORKERS / 32;
            quad = quad < quads ? quad : 0;
        }
        const uint32_t *missing;
        int round = 0;
#pragma unroll 1
        do {
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (from[i]) v[i] = look(from[i]);
            missing = nullptr;
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (from[i] && !there(v[i])) missing = from[i];
            /* Who is far behind has loads of its own: few look for what it does. */
            if (missing && ++round > SURE)
#pragma unroll 1
                while (!there(look(missing)))
                    __nanosleep(100);
        } while (missing);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (from[i]) {
                put16(at[i], uint4{~v[i].x, ~v[i].y, ~v[i].z, ~v[i].w});
                *(uint4 *)from[i] = uint4{};
            }
    }
}

/* What a batch of parts has: chunks, parts; of a share of columns: quads, rows. */
struct merging {
    int n_chunks, n_parts, quad0, quads, row0, n_rows;
};

/* 16 threads have the parts of a chunk's row, one each: where group j's (m, l) is; NULL: none. */
__device__ inline uint32_t *ml_of(const mla_args &a, const mla_work &x, uint32_t table,
                                  const merging &g, int shift, int j, int of_part)
{
    const int chunk = j >> shift, row = j & ((1 << shift) - 1);
    if (chunk >= g.n_chunks || row >= g.n_rows) return nullptr;
    const int part = get_int(table + BEGINS + 4 * chunk) + of_part;
    if (part >= get_int(table + BEGINS + 4 * chunk + 4)) return nullptr;
    return part_ml(a, get_int(table + SLOTS + 4 * part), x.pair0 + g.row0 + row, x.split);
}

/* Parts' O, l and weights to shared memory, and chunks' m. `end`: of the share. */
template <typename T, int N>
__device__ inline void take_parts(const mla_args &a, const mla_work &x, uint32_t base,
                                  const merging &g, int end, uint32_t thread)
{
    using L = mla_shape<T, N>;
    const uint32_t table = base + L::TABLE;
    const int of_part = (int)(thread % CHUNK), shift = 32 - __clz(g.n_rows - 1);
    const int n_groups = g.n_chunks << shift;
#pragma unroll 1
    for (int j0 = 0; j0 < n_groups; j0 += WORKERS / CHUNK) {
        const int j = j0 + (int)(thread / CHUNK), chunk = j >> shift, row = j & ((1 << shift) - 1);
        uint32_t *from = ml_of(a, x, table, g, shift, j, of_part);
        uint2 ml = {};
        if (from) ml = look2(from);
        if (!j0) /* which are on their way at the same time */
            gather_parts(a, base, table, x.pair0, g.n_parts, g.quad0, g.quads,
                         uniform((int)(thread / 32)), (int)(thread % 32));
        if (from)
#pragma unroll 1
            while (!min(ml.x, ml.y))
                ml = look2(from);
        __syncwarp();
        const float own = from ? part_value(ml.x) : -INFINITY;
        float upto = own;
#pragma unroll 1
        for (int d = 1; d < CHUNK; d *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, upto, d, CHUNK);
            if (of_part >= d) upto = fmaxf(upto, other);
        }
        const float before = __shfl_up_sync(0xffffffffu, upto, 1, CHUNK);
        if (chunk >= g.n_chunks || row >= g.n_rows) continue;
        if (of_part == CHUNK - 1)
            put_float(base + (uint32_t)(L::CHUNKS + (chunk * N + row) * 8), upto);
        if (!from) continue;
        float m = of_part ? before : -INFINITY;
        const att_weights w = att_merge(m, own);
        const int part = get_int(table + BEGINS + 4 * chunk) + of_part;
        put16(base + (uint32_t)(L::WEIGHTS + (part * N + row) * 16),
              uint4{__float_as_uint(w.old), __float_as_uint(w.add), ~ml.y, 0});
        /* Not before the block's last columns of the row. */
        if (min((g.row0 + row + 1) * QUADS, end) <= g.quad0 + g.quads) *(uint2 *)from = uint2{};
    }
}

/* Each chunk to where its first part is, as many side by side as have threads. */
template <typename T, int N>
__device__ inline void merge_chunks(uint32_t base, const merging &g, uint32_t thread)
{
    using L = mla_shape<T, N>;
    const uint32_t begins = base + L::TABLE + BEGINS;
    const int cols = g.quads * 4, shift = min(32 - __clz(cols - 1), 8); /* of 256 threads */
    const int wide = 1 << shift, pitch = cols * 4;
#pragma unroll 1
    for (int chunk = (int)(thread >> shift); chunk < g.n_chunks; chunk += WORKERS >> shift) {
        const int begin = get_int(begins + 4 * chunk), n = get_int(begins + 4 * chunk + 4) - begin;
#pragma unroll 1
        for (int col = (int)(thread & (wide - 1)); col < cols; col += wide) {
            const uint32_t head_col = (uint32_t)(g.quad0 * 4 + col);
            const int row = (int)(head_col / MLA_LATENT) - g.row0;
            const uint32_t at = base + (uint32_t)(begin * pitch + col * 4);
            uint32_t by = base + (uint32_t)(L::WEIGHTS + (begin * N + row) * 16), from = at;
            float o = get_float(at), l = get_float(by + 8);
#pragma unroll 1
            for (int i = 1; i < n; i += 4) {
                float4 w[4];
                float v[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const bool any = i + k < n;
                    w[k] = get_float4(by += any ? N * 16 : 0);
                    v[k] = get_float(from += any ? pitch : 0);
                }
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (i + k < n) {
                        o = att_merged(o, v[k], att_weights{w[k].x, w[k].y});
                        l = att_merged(l, w[k].z, att_weights{w[k].x, w[k].y});
                    }
            }
            put_float(at, o);
            if (col == 0 || head_col % MLA_LATENT == 0)
                put_float(base + (uint32_t)(L::CHUNKS + (chunk * N + row) * 8 + 4), l);
        }
    }
}

/* The workers: a share of the columns of the row tile's parts to the result. */
template <typename T, int N>
__device__ inline void merge_parts(const mla_args &a, const mla_work &x, uint32_t base,
                                   uint32_t thread)
{
    using L = mla_shape<T, N>;
    const uint32_t table = base + L::TABLE, begins = table + BEGINS;
    const int chunks = chunks_of(x.units), all = min(N, x.n_pairs - x.pair0) * QUADS;
    const int end = min((x.split + 1) * x.share, all); /* of the share of the tile's quads */
    merging g = {uniform(get_int(table))};
    /* All parts at once, or 256 columns, one for each thread, chunks after chunks. */
    const bool at_once = g.n_chunks == chunks;
    g.n_parts = uniform(get_int(begins + 4 * g.n_chunks));
    const int most = at_once ? divided(MERGE_QUADS, g.n_parts) : WORKERS / 4;
#pragma unroll 1
    for (g.quad0 = x.split * x.share; g.quad0 < end; g.quad0 += most) {
        g.quads = min(most, end - g.quad0);
        g.row0 = (int)((uint32_t)g.quad0 / QUADS);
        g.n_rows = (int)((uint32_t)(g.quad0 + g.quads - 1) / QUADS) + 1 - g.row0;
        float m = -INFINITY, l = 0, o = 0; /* of a row's column */
#pragma unroll 1
        for (int chunk0 = 0; chunk0 < chunks; chunk0 += g.n_chunks) {
            if (!at_once) {
                if (thread < 32) list_parts<T, N>(base, x, chunk0, (int)thread);
                workers_meet();
                g.n_chunks = uniform(get_int(table));
                g.n_parts = uniform(get_int(begins + 4 * g.n_chunks));
            }
            take_parts<T, N>(a, x, base, g, end, thread);
            workers_meet();
            merge_chunks<T, N>(base, g, thread);
            workers_meet();
#pragma unroll 1
            for (int col = (int)thread; col < g.quads * 4; col += WORKERS) {
                const uint32_t head_col = (uint32_t)(g.quad0 * 4 + col);
                const int row = (int)(head_col / MLA_LATENT) - g.row0;
                uint32_t by = base + (uint32_t)(L::CHUNKS + row * 8);
#pragma unroll 1
                for (int i = 0; i < g.n_chunks; i++, by += N * 8) {
                    const int begin = get_int(begins + 4 * i);
                    const float2 ml = get_float2(by);
                    const att_weights w = att_merge(m, ml.x);
                    l = att_merged(l, ml.y, w);
                    o = att_merged(o, get_float(base + (uint32_t)((begin * g.quads * 4 + col) * 4)),
                                   w);
                }
                if (chunk0 + g.n_chunks < chunks) continue; /* its only column */
                store_value(a, (uint32_t)x.item.row0, (uint32_t)x.pair0 * MLA_LATENT + head_col,
                            __fadd_rn(__fmul_rn(o, inverse(l)), 0.0f));
                m = -INFINITY;
                l = o = 0;
            }
            workers_meet();
        }
    }
}

/* A worker's part in unit number `n` of the block: its O into the chunk's, its (m, l) into the
 * row's. Of its keys `left` are left, those of the thread's row that it sees are `seen`. */
template <typename T, int N, bool LISTS>
__device__ __forceinline__ void attend_unit(row_state &state, float (&chunk)[4][N / 2],
                                            uint32_t base, uint32_t n, bool listed, int left,
                                            int seen, float by, bool begins, bool ends, int wg)
{
    using L = mla_shape<T, N>;
    const uint32_t thread = threadIdx.x, lane = thread % 32;
    const uint32_t full = base + L::BARS, empty = full + 8 * STAGES, factors = base + L::FACTORS;
    const uint32_t row = thread / L::THREADS, k0 = thread % L::THREADS * L::MINE;
    const uint32_t stage = n % STAGES, at = base + stage * L::STAGE;
    const uint32_t panels = L::Q8 ? base + L::MADE : at;
    mbar_wait(full + 8 * stage, n / STAGES & 1);
    if (LISTS && listed) fence_async(); /* the copies were ordinary ones */
    const bool consecutive = !(LISTS && listed);
    if (!L::Q8 && left < KEYS && consecutive && n < STAGES) /* never written: may be NaN */
#pragma unroll 1
        for (int i = (int)thread; i < (KEYS - left) * 64; i += WORKERS)
            put16(at + (uint32_t)i % 8 * PANEL + (uint32_t)left * 128 + (uint32_t)i / 8 * 16,
                  uint4{});
    if constexpr (L::Q8) {
        warpgroup_meets(wg); /* all have multiplied by the panels before */
        unpack(panels, at, thread);
        fence_async();
        warpgroup_meets(wg);
    }
    scores<T, N>(base, at, panels, wg);
    workers_meet();
    if (N * L::THREADS == WORKERS || row < N)
        softmax<T, N>(state, base + L::S, base + L::P, factors, at + L::SCALES, row, k0, seen, by,
                      begins, ends);
    fence_async();
    workers_meet();
    if (L::Q8 && lane == 0) mbar_arrive(empty + 8 * stage); /* nothing more is read there */
    values<T, N>(chunk, base, panels, factors, wg, lane);
    __syncwarp();
    if (!L::Q8 && lane == 0) mbar_arrive(empty + 8 * stage);
}

/* The workers, for a work whose Q is there; n: units so far. */
template <typename T, int N, bool LISTS, bool SPREAD>
__device__ inline void attend_work(const mla_args &a, const mla_work &x, uint32_t base, int wg,
                                   uint32_t &n)
{
    using L = mla_shape<T, N>;
    const uint32_t thread = threadIdx.x, lane = thread % 32;
    const uint32_t factors = base + L::FACTORS;
    const uint32_t row = thread / L::THREADS, k0 = thread % L::THREADS * L::MINE;
    const float by = __fmul_rn(a.a.scale, LOG2E);
    const int last_key = /* that the row sees */
        LISTS && x.listed ? x.listed - 1
                          : x.item.pos0 + heads_divided(a, min(x.pair0 + (int)row, x.n_pairs - 1));
    const bool spread = SPREAD && x.spread.splits > 1;
    const int lead = spread ? lead_end(x, x.begin) : 0;
    row_state state = {-INFINITY, 0, -INFINITY, 0};
    float chunk[4][N / 2] = {}, all[4][N / 2] = {};
#pragma unroll 1
    for (int t = x.begin; t < x.end; t++, n++) {
        const bool begins = t < lead || (uint32_t)t % CHUNK == 0;
        const bool ends = t < lead || t + 1 == x.end || (uint32_t)(t + 1) % CHUNK == 0;
        attend_unit<T, N, LISTS>(state, chunk, base, n, x.listed, x.n_keys - t * KEYS,
                                 last_key + 1 - t * KEYS, by, begins, ends && !spread, wg);
        if (!ends) continue;
        if (spread)
            store_part<T, N>(a, x, slot_of(x, t < lead ? t : t & -CHUNK, x.split), chunk, state.m,
                             state.l, row, k0, thread);
        else
            merge_rows<N, 4>(all, chunk, factors + 2 * N * 4, factors + 3 * N * 4, lane);
    }
    if (spread) {
        workers_meet(); /* stages are free */
        merge_parts<T, N>(a, x, base, thread);
        return;
    }
    end_rows<N>(all, factors + 4 * N * 4, lane);
    store_result<N>(a, all, x, base + L::Q, thread);
    workers_meet(); /* Q and factors are free */
}

/* Who runs a copy of attend_works(): one for all is least code. */
enum role { ANYONE, WORKER, BRINGER };

/* All works of the block, which has one where SPREAD. item: of the first, number `number`. */
template <typename T, int N, bool LISTS, bool SPREAD, role ROLE>
__device__ inline void attend_works(const mla_args &a, bgk_item item, int number, uint32_t base)
{
    constexpr int WARPS = BRINGERS<N, LISTS> / 32;
    const uint32_t thread = threadIdx.x;
    const int warp = uniform((int)(thread / 32)), wg = warp / 4; /* in uniform registers */
    const bool brings = ROLE == ANYONE ? warp >= WORKERS / 32 : ROLE == BRINGER;
    bool waited = false;
    int listed = LISTS && item.pos0 >= a.s.top_k ? a.s.top_k : 0; /* of the first a guess */
    uint32_t n = 0;
    int w = (int)blockIdx.x;
#pragma unroll 1
    do {
        mla_work x = work_of<SPREAD>(a, w, number, item, N);
        q_source<N> q;
        if (!brings) find_q<N>(q, a, x, thread);
        if (LISTS && SPREAD && brings && x.item.pos0 >= a.s.top_k) {
            fetch_table<WARPS>(a, x);
            if (a.prefetches && thread == WORKERS && !x.pair0) prefetch_keys(a, x);
        }
        const int32_t *list = LISTS ? a.s.list + (int64_t)item.row0 * a.s.top_k : nullptr;
        int first = 0, guess; /* the list is asked for before it is known to be so long */
        int now = listed;
        if constexpr (LISTS && SPREAD) {
            if (!a.a.early) {
                ptx_wait_prior();
                now = listed_of(a, item);
                waited = true;
            }
            if (waited || a.rows.rows > 1) ptx_let_next_start();
            if (!brings)
                load_q<typename mla_shape<T, N>::V, N>(base + mla_shape<T, N>::Q, a, q, thread);
        }
#pragma unroll 1
        do {
            guess = listed;
            add_keys<SPREAD>(x, a, listed, N);
            if constexpr (LISTS) {
                if (!waited) {
                    ptx_wait_prior();
                    if (SPREAD) ptx_let_next_start();
                    now = listed_of(a, item);
                    waited = true;
                }
                if (brings) first = listed_position<WARPS>(x, list, x.begin);
                listed = uniform(now);
            }
        } while (LISTS && listed != guess);
        const bool any = x.begin < x.end;
        if constexpr (SPREAD && !LISTS) {
            /* One block of those with nothing to do waits: the grid's end is that of all before. */
            if (!any && blockIdx.x) return;
        }
        w += gridDim.x;
        if constexpr (!SPREAD) { /* so early that nobody waits for it */
            number = item_number(a, min(w, a.works - 1));
            item = item_of<LISTS>(a, number);
            if constexpr (LISTS) listed = listed_of(a, item);
        }
        if (brings) {
            if (any) bring_units<T, N, LISTS>(a, x, base, list, first, waited, n);
        } else {
            if (SPREAD && x.spread.splits > 1 && warp == 0)
                list_parts<T, N>(base, x, 0, (int)thread);
            if (!waited) {
                ptx_wait_prior();
                if (SPREAD) ptx_let_next_start();
            }
            waited = true;
            if (any) {
                if constexpr (!(LISTS && SPREAD))
                    load_q<typename mla_shape<T, N>::V, N>(base + mla_shape<T, N>::Q, a, q, thread);
                fence_async();
                workers_meet();
                attend_work<T, N, LISTS, SPREAD>(a, x, base, wg, n);
            }
        }
        if constexpr (!SPREAD) {
            item = uniform(item);
            listed = uniform(listed);
        }
    } while (!SPREAD && w < a.works);
}

/* The workers of a cluster's block, whose Q is there. */
template <typename T>
__device__ inline void attend_in_cluster(const mla_args &a, const mla_work &x, uint32_t base,
                                         int wg)
{
    using L = mla_shape<T, 8>;
    const uint32_t thread = threadIdx.x;
    const float by = __fmul_rn(a.a.scale, LOG2E);
    if (thread == 0) /* what will be sent here */
        mbar_expect(base + L::SENT, x.split / 2 < x.n_pairs ? (uint32_t)x.units * (PIECE + 8) : 0);
    row_state state = {-INFINITY, 0, -INFINITY, 0};
    float o[4][4] = {};
#pragma unroll 1
    for (int t = x.begin; t < x.end; t++) {
        const int left = x.n_keys - t * KEYS;
        attend_unit<T, 8, false>(state, o, base, (uint32_t)(t - x.begin), false, left, left, by,
                                 true, false, wg);
        send_unit<T>(base, t, o, state.m, state.l, x.n_pairs, thread);
    }
    mbar_wait_cluster(base + L::SENT, 0);
    merge_units<T>(a, x, base, thread);
}

#endif

template <typename T, int N, bool LISTS, bool SPREAD>
__global__ void __launch_bounds__(WORKERS + BRINGERS<N, LISTS>, 1)
    attend_latents(const __grid_constant__ mla_args a)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    using L = mla_shape<T, N>;
    extern __shared__ unsigned char dynamic[];
    if (!SPREAD) ptx_let_next_start(); /* once all blocks run; it may wait for us, we not for it */
    const int number = item_number(a, (int)blockIdx.x);
    const bgk_item item = item_of<LISTS>(a, number);
    const uint32_t base = (ptx_shared(dynamic) + 1023) & ~1023u;
    const uint32_t full = base + L::BARS, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) {
            mbar_init(full + 8 * i, LISTS ? BRINGERS<N, LISTS> : 1);
            mbar_init(empty + 8 * i, WORKERS / 32);
        }
        mbar_init_fence();
    }
    __syncthreads();
    if constexpr (N <= 16) {
        attend_works<T, N, LISTS, SPREAD, ANYONE>(a, uniform(item), number, base);
    } else if (threadIdx.x >= WORKERS) {
        ptx_fewer_registers<N == 24 ? 72 : 56>();
        if (!LISTS && threadIdx.x >= WORKERS + 32) return;
        attend_works<T, N, LISTS, SPREAD, BRINGER>(a, uniform(item), number, base);
    } else {
        ptx_more_registers<N == 24 ? 216 : 224>();
        attend_works<T, N, LISTS, SPREAD, WORKER>(a, uniform(item), number, base);
    }
    if constexpr (LISTS) ptx_copy_wait<0>();
#endif
}

/* Threads that a cluster's block is compiled for: more than it has, so that it takes few registers,
 * and starts beside blocks of other kernels. Q8 needs more. */
template <typename T>
constexpr int CLUSTER_BOUND = sizeof(T) == 1 ? WORKERS + BRINGERS<8, false> : 512;

/* The only item, by one cluster. */
template <typename T>
__global__ void __launch_bounds__(CLUSTER_BOUND<T>, 1)
    attend_row(const __grid_constant__ mla_args a)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    using L = mla_shape<T, 8>;
    extern __shared__ unsigned char dynamic[];
    const bgk_item item = item_of<false>(a, 0);
    const uint32_t base = (ptx_shared(dynamic) + 1023) & ~1023u;
    const uint32_t thread = threadIdx.x, full = base + L::BARS, empty = full + 8 * STAGES;
    const int warp = uniform((int)(thread / 32)); /* in uniform registers */
    if (thread == 0) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) {
            mbar_init(full + 8 * i, 1);
            mbar_init(empty + 8 * i, WORKERS / 32);
        }
        mbar_init(base + L::SENT, 1);
        mbar_init_fence();
    }
    __syncthreads();
    const mla_work x = work_in_cluster(a, uniform(item), (int)blockIdx.x);
    if (!x.units) { /* the grid's end is that of all before */
        ptx_wait_prior();
        return;
    }
    cluster_arrive();
    if (warp >= WORKERS / 32) {
        bool waited = false;
        uint32_t n = 0;
        bring_units<T, 8, false>(a, x, base, nullptr, 0, waited, n);
        cluster_wait();
        return;
    }
    q_source<8> q;
    find_q<8>(q, a, x, thread);
    cluster_wait(); /* all blocks are there, and may be sent to */
    ptx_wait_prior();
    ptx_let_next_start();
    load_q<typename L::V, 8>(base + L::Q, a, q, thread);
    fence_async();
    workers_meet();
    attend_in_cluster<T>(a, x, base, warp / 4);
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

template <typename T, int N, bool LISTS, bool SPREAD>
cudaError_t start(const mla_args &a, int blocks, cudaStream_t stream)
{
    using L = mla_shape<T, N>;
    constexpr auto kernel = attend_latents<T, N, LISTS, SPREAD>;
    static const cudaError_t ready = att_shared_memory(kernel, L::BYTES);
    if (ready != cudaSuccess) return ready;
    return launch_after(kernel, dim3((unsigned)blocks), WORKERS + BRINGERS<N, LISTS>, L::BYTES,
                        stream, a);
}

/* Whether a cluster of attend_row() can be launched. */
template <typename T> bool cluster_fits()
{
    static const bool yes = [] {
        using L = mla_shape<T, 8>;
        const bool ready = att_shared_memory(attend_row<T>, L::CLUSTER_BYTES) == cudaSuccess;
        const int most = launch_clusters_at_once(attend_row<T>, CLUSTER_BLOCKS,
                                                 WORKERS + BRINGERS<8, false>, L::CLUSTER_BYTES);
        return ready && most > 0;
    }();
    return yes;
}

/* A row of few keys is faster in a cluster; more rows, and longer ones, are not. */
template <typename T> bool takes_cluster(const mla_args &a, int n)
{
    return n == 1 && a.row_tiles == 1 && a.splits >= CLUSTER_BLOCKS && a.a.max_keys > 0 &&
           a.a.max_keys <= CLUSTER_UNITS * KEYS && cluster_fits<T>();
}

constexpr int PREFETCHED = 24 << 20; /* bytes: half of L2 */

template <typename T, int N, bool LISTS>
cudaError_t launch(mla_args a, int n, int pairs, size_t parts_bytes, int n_sms, cudaStream_t stream)
{
    const int sms = sm_count();
    a.row_tiles = (pairs + N - 1) / N;
    const int splits = a.parts && !a.many ? min(n_sms, sms) / (n * a.row_tiles) : 1;
    a.splits = splits < 1 ? 1 : splits > 64 ? 64 : splits;
    const size_t heads = (size_t)a.a.n_heads, part = heads * (MLA_LATENT + 2 * (size_t)a.splits);
    a.parts_cap = (int)(min(parts_bytes / 4, (size_t)UINT32_MAX) / part);
    a.parts_ml = a.parts + (size_t)a.parts_cap * heads * MLA_LATENT;
    a.room = a.parts_cap / n;
    a.works = n * a.row_tiles * a.splits;
    a.prefetches = a.a.max_keys > 0 && (int64_t)n * a.a.max_keys * a.block_bytes <=
                                           (int64_t)PREFETCHED * a.a.cache.block_tokens;
    a.by_heads = 0x80000000u / (uint32_t)a.a.n_heads + 1;
    if constexpr (N == 8 && !LISTS)
        if (takes_cluster<T>(a, n))
            return launch_clusters_after(attend_row<T>, CLUSTER_BLOCKS, dim3(CLUSTER_BLOCKS),
                                         WORKERS + BRINGERS<8, false>,
                                         mla_shape<T, 8>::CLUSTER_BYTES, stream, a);
    const int blocks = a.works < sms ? a.works : sms;
    return a.splits > 1 ? start<T, N, LISTS, true>(a, blocks, stream)
                        : start<T, N, LISTS, false>(a, blocks, stream);
}

template <typename T, bool LISTS>
cudaError_t launch_rows(const mla_args &a, int n, size_t parts_bytes, int n_sms,
                        cudaStream_t stream)
{
    const int pairs = (a.many ? BGK_MLA_TOKENS : 1) * a.a.n_heads;
    if (pairs <= 8) return launch<T, 8, LISTS>(a, n, pairs, parts_bytes, n_sms, stream);
    if (pairs <= 16) return launch<T, 16, LISTS>(a, n, pairs, parts_bytes, n_sms, stream);
    if (pairs <= 24) return launch<T, 24, LISTS>(a, n, pairs, parts_bytes, n_sms, stream);
    return launch<T, 32, LISTS>(a, n, pairs, parts_bytes, n_sms, stream);
}

template <typename T>
cudaError_t launch_type(const mla_args &a, int n, size_t parts_bytes, int n_sms,
                        cudaStream_t stream)
{
    return a.s.list ? launch_rows<T, true>(a, n, parts_bytes, n_sms, stream)
                    : launch_rows<T, false>(a, n, parts_bytes, n_sms, stream);
}

cudaError_t launch_any(mla_args a, int n, void *parts, size_t parts_bytes, int n_sms,
                       cudaStream_t stream)
{
    const bgk_mla *m = &a.a;
    const size_t block_bytes = bgk_mla_block_bytes(&m->cache);
    if (!bgk_mla_fits(&m->cache) || bad_attention_out(&a.out) || !(m->scale > 0) || n < 0 ||
        n > 65535 || n_sms < 1 || (uintptr_t)a.items % 16 || (uintptr_t)parts % 16 ||
        m->layer < 0 || m->n_heads < 0 || m->nope < 0 || m->rope.n_rot != MLA_ROPE ||
        m->q_lat.layout != BGK_HALF_ROWS || m->q_lat.stride % 8 || (uintptr_t)m->q_lat.data % 16 ||
        m->q.layout != BGK_TILES || block_bytes > UINT32_MAX || m->q_lat.stride > UINT32_MAX ||
        m->q.stride > UINT32_MAX || a.out.stride > UINT32_MAX || m->q.stride % BGK_TILE_ROWS ||
        (uintptr_t)m->q.data % 1024)
        return cudaErrorInvalidValue;
    if (!n || !m->n_heads) return cudaSuccess;
    a.parts = (uint32_t *)parts;
    a.block_bytes = (uint32_t)block_bytes;
    switch (m->cache.type) {
    case BGK_F16:
        return launch_type<__half>(a, n, parts_bytes, n_sms, stream);
    case BGK_BF16:
        return launch_type<__nv_bfloat16>(a, n, parts_bytes, n_sms, stream);
    default:
        return launch_type<int8_t>(a, n, parts_bytes, n_sms, stream);
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
