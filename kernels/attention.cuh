/* kernels/attention.cuh - what attention kernels share: writing results, and on tensor cores the
 * one arithmetic that gives a row the same bits in every kernel.
 *
 * A unit is 64 keys, from a multiple of 64 on. For 16 query rows and a unit:
 *   S = q K^T (mma, q in 16 bits), then times scale, softcap, times log2 e; -inf where masked
 *   m = max S; P = exp2(S - m); l = sum of P; O = P V (mma, P in 16 bits)
 * and units are merged in their order into the row's running (m, l, O), all float32. A unit that is
 * wholly masked for a row leaves its (m, l, O) as they are. Q8: mma takes the int8 values as
 * halves; scales go to S before everything else, and to P after the sum.
 *
 * l is summed over keys j, j + 8, j + 16, ... in order, then over j in 0..7 as a tree (j ^ 1, j ^
 * 2, j ^ 4).
 *
 * Steps: K and V come to shared memory in steps of 16 keys, whole rows, the 16-byte piece p of key
 * j at piece p ^ att_swizzle(j); keys at or beyond the end are zero. Q8: behind them, 16 float
 * scales. */
#ifndef BGK_ATTENTION_CUH
#define BGK_ATTENTION_CUH

#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bgk.h"
#include "launch.cuh"
#include "ptx.cuh"
#include "tiles.cuh"

/* ---- results -------------------------------------------------------------------------------- */

__device__ inline void put(const bgk_out &out, int row, int col, float v)
{
    if (out.layout == BGK_TILES)
        ((__half *)out.data)[tile_at(out.stride, row, col)] = tile_half(v);
    else
        ((float *)out.data)[row * out.stride + col] = v;
}

/* The last head's threads write zeros to the columns that fill up the last group. */
__device__ inline void fill_last_group(const bgk_out &out, int row, int head, int n_heads, int dim,
                                       int thread, int n_threads)
{
    if (out.layout != BGK_TILES || head != n_heads - 1) return;
    const int end = (n_heads * dim + BGK_TILE_COLS - 1) / BGK_TILE_COLS * BGK_TILE_COLS;
    for (int col = n_heads * dim + thread; col < end; col += n_threads)
        put(out, row, col, 0.0f);
}

inline bool bad_attention_out(const bgk_out *o)
{
    if (o->layout == BGK_ROWS) return false;
    return o->layout != BGK_TILES || o->stride % BGK_TILE_ROWS || (uintptr_t)o->data % 1024;
}

inline bool bad_heads(const bgk_heads *h, const bgk_cache *c)
{
    return h->layer < 0 || h->n_heads < 0 || h->group < 1 || h->window < 0 || h->head0 < 0 ||
           h->kv_head0 < 0 ||
           (h->n_heads && (h->head0 + h->n_heads - 1) / h->group - h->kv_head0 >= c->n_kv_heads) ||
           (h->n_heads && h->head0 / h->group < h->kv_head0);
}

/* A kernel that takes `bytes` of shared memory, and as many blocks to a processor as that allows.
 */
template <typename... P> cudaError_t att_shared_memory(void (*kernel)(P...), int bytes)
{
    const cudaError_t e =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

template <typename T, int D> struct att_shape {
    static constexpr bool Q8 = sizeof(T) == 1;
    static constexpr int ROW = D * (int)sizeof(T), PIECES = ROW / 16;
    static constexpr int KEYS = 16, SCALES = KEYS * ROW, STEP = SCALES + (Q8 ? KEYS * 4 : 0);
};

/* So that eight keys' pieces p lie in different banks. */
template <int PIECES> __device__ inline int att_swizzle(int key)
{
    return PIECES % 8 == 0 ? key & 7 : PIECES % 4 == 0 ? key >> 1 & 3 : key >> 2 & 1;
}

/* Where a piece of a key lies in a step. */
template <int PIECES> __device__ inline uint32_t att_place(int key, int piece)
{
    return (uint32_t)(key * PIECES * 16 + ((piece ^ att_swizzle<PIECES>(key)) << 4));
}

/* ---- single instructions ----------------------------------------------------------------------
 */

__device__ inline uint32_t att_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ inline float att_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 16 bytes, or zeros. */
__device__ inline void att_copy16(uint32_t to, const void *from, bool any)
{
    const int n = any ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n)
                 : "memory");
}

__device__ inline void att_copy4(uint32_t to, const void *from, bool any)
{
    const int n = any ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(n)
                 : "memory");
}

__device__ inline void att_matrix4(uint32_t (&r)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ inline void att_matrix4_trans(uint32_t (&r)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

/* An 8x8 matrix of 16-bit values, as mma holds it, transposed. */
__device__ inline uint32_t att_transposed(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ inline uint32_t att_word(uint32_t at)
{
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

template <typename T>
__device__ inline void att_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (sizeof(T) == 2 && !std::is_same<T, __half>::value)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two values of P, as mma takes them. */
template <typename T> __device__ inline uint32_t att_pack(float a, float b)
{
    if constexpr (sizeof(T) == 2 && !std::is_same<T, __half>::value) {
        const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
        return *(const uint32_t *)&v;
    } else {
        const __half2 v = __floats2half2_rn(a, b);
        return *(const uint32_t *)&v;
    }
}

/* Two of four int8 values (each with 128 added) as halves: bytes by prmt's selector, exactly. */
template <int SELECT> __device__ inline uint32_t att_halves(uint32_t four)
{
    const uint32_t raised = __byte_perm(four, 0x64646464u, SELECT); /* 1024 + byte */
    const __half2 v = __hsub2(*(const __half2 *)&raised, __floats2half2_rn(1152.0f, 1152.0f));
    return *(const uint32_t *)&v;
}

/* ---- keys and values to shared memory ---------------------------------------------------------
 */

/* The keys of one sequence, layer and KV head. Its rows in the cache are numbered from its layer
 * and head's first on. */
struct att_keys {
    const char *k, *v;
    const float *k_scale, *v_scale;
    const int32_t *table;
    int block_tokens, block_rows; /* rows from one block to the next */
};

template <typename T>
__device__ inline att_keys att_keys_of(const bgk_att &a, int32_t block0, int kv_head)
{
    const bgk_cache &c = a.cache;
    const int64_t row =
        ((int64_t)a.heads.layer * c.n_blocks * c.n_kv_heads + kv_head) * c.block_tokens;
    att_keys s;
    s.k = (const char *)c.k + row * c.k_dim * (int64_t)sizeof(T);
    s.v = (const char *)c.v + row * c.v_dim * (int64_t)sizeof(T);
    s.k_scale = c.k_scale + row;
    s.v_scale = c.v_scale + row;
    s.table = a.blocks + block0;
    s.block_tokens = c.block_tokens;
    s.block_rows = c.n_kv_heads * c.block_tokens;
    return s;
}

constexpr uint32_t ATT_NONE = 0xffffffffu;

/* KEYS consecutive keys of a warp: lane l's are l, l + 32, ... of them. Block numbers are looked up
 * ahead of need. */
template <int KEYS> struct att_rows {
    static constexpr int N = (KEYS + 31) / 32;
    int block[N];
    uint32_t row[N];

    __device__ void look_up(const att_keys &s, int key0, int end, int lane)
    {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int key = key0 + 32 * i + lane;
            block[i] = key < end && 32 * i + lane < KEYS ? s.table[key / s.block_tokens] : -1;
        }
    }

    /* From the blocks that were looked up for the same keys. */
    __device__ void take(const att_keys &s, int key0, int lane)
    {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int key = key0 + 32 * i + lane;
            row[i] = block[i] < 0 ? ATT_NONE
                                  : (uint32_t)block[i] * (uint32_t)s.block_rows +
                                        (uint32_t)(key % s.block_tokens);
        }
    }
};

/* KEYS consecutive keys of K (is_v false) or V to the step at `to`, where they are keys `first` (0
 * or KEYS) and on; `left` of them exist; lane lane0 + i has the row of the i-th. Q8: their scales
 * too. Where blocks are of a multiple of KEYS tokens, the keys' rows follow one another. */
template <typename T, int D, int KEYS>
__device__ inline void att_load(uint32_t to, const att_keys &s, bool is_v, uint32_t my_row,
                                int lane0, int first, int left, int lane)
{
    using S = att_shape<T, D>;
    constexpr int P = S::PIECES, ALL = KEYS * P;
    const char *from = is_v ? s.v : s.k;
    to += (uint32_t)(first * S::ROW); /* swizzles are the same 8 keys further */
    if (s.block_tokens % KEYS == 0) {
        const uint32_t row0 = __shfl_sync(0xffffffffu, my_row, lane0);
        const char *src = from + (left > 0 ? (int64_t)row0 * S::ROW : 0) + lane * 16;
        const uint32_t mine = att_place<P>(lane / P, lane % P);
#pragma unroll
        for (int i = 0; i < (ALL + 31) / 32; i++) {
            const int at = 32 * i + lane, c = i * (32 / P);
            if (ALL % 32 && at >= ALL) continue;
            const uint32_t place =
                32 % P ? att_place<P>(at / P, at % P)
                       : (mine ^ (uint32_t)(att_swizzle<P>(c) << 4)) + (uint32_t)(c * S::ROW);
            att_copy16(to + place, src + i * 512, at / P < left);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < (ALL + 31) / 32; i++) {
            const int at = 32 * i + lane, key = at / P, piece = at % P;
            const uint32_t row = __shfl_sync(0xffffffffu, my_row, (lane0 + key) % 32);
            if (ALL % 32 && at >= ALL) continue;
            const bool any = key < left;
            att_copy16(to + att_place<P>(key, piece),
                       from + (any ? (int64_t)row * S::ROW + piece * 16 : 0), any);
        }
    }
    if constexpr (S::Q8) {
        const int key = lane - lane0;
        if (key >= 0 && key < KEYS)
            att_copy4(to + (uint32_t)(S::SCALES - first * S::ROW + 4 * (first + key)),
                      (is_v ? s.v_scale : s.k_scale) + (key < left ? my_row : 0u), key < left);
    }
}

/* ---- a unit -----------------------------------------------------------------------------------
 */

/* S += q K^T over dims 16 ks and on, for a unit of four steps of 16-bit values. */
template <typename T, int D>
__device__ inline void att_scores(float (&s)[8][4], const uint32_t (&q)[4], uint32_t unit, int ks,
                                  int lane)
{
    using S = att_shape<T, D>;
    const uint32_t at =
        unit + att_place<S::PIECES>(lane / 16 * 8 + lane % 8, 2 * ks + lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        uint32_t b[4];
        att_matrix4(b, at + n * S::STEP);
        att_mma<T>(s[2 * n], q, b[0], b[1]);
        att_mma<T>(s[2 * n + 1], q, b[2], b[3]);
    }
}

/* Q8's P, times a scale of V, would often be subnormal in 16 bits: it is raised by this. So scales
 * of V are less than 256. */
constexpr float ATT_RAISE = 256.0f;

/* How scores become exponents: exp2(by * s), with a cap s is the tanh of pre * score. */
struct att_scaling {
    float by, pre;
    bool cap;
};

__device__ inline att_scaling att_scaling_of(const bgk_heads &h)
{
    constexpr float LOG2E = 1.4426950408889634f;
    att_scaling x;
    x.cap = h.softcap > 0;
    x.by = __fmul_rn(x.cap ? h.softcap : h.scale, LOG2E);
    x.pre = x.cap ? __fdiv_rn(h.scale, h.softcap) : 1.0f;
    return x;
}

__device__ inline float att_tanh(float x)
{
    const float e = att_exp2(__fmul_rn(x, 2.885390081777927f));
    return __fadd_rn(1.0f, -__fdiv_rn(2.0f, __fadd_rn(1.0f, e)));
}

/* Of 16 rows, of which a thread has lane / 4 and that + 8: S to P (in 16 bits, p), and the unit's m
 * and l. Row i sees keys lo[i] .. hi[i] (of the unit: 0..63), all if !mask. Q8: scales
 * of K and V, those of the next 16 keys SCALE_STEP floats on. */
template <typename T, int SCALE_STEP>
__device__ inline void att_softmax(uint32_t (&p)[4][4], float (&m)[2], float (&l)[2],
                                   float (&s)[8][4], const att_scaling &x, bool mask,
                                   const int (&lo)[2], const int (&hi)[2], const float *k_scale,
                                   const float *v_scale, int lane)
{
    const int t = lane % 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float by[2] = {1, 1};
        if constexpr (sizeof(T) == 1)
            *(float2 *)by = *(const float2 *)(k_scale + n / 2 * SCALE_STEP + n % 2 * 8 + 2 * t);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if constexpr (sizeof(T) == 1) s[n][e] = __fmul_rn(s[n][e], by[e % 2]);
            if (x.cap) s[n][e] = att_tanh(__fmul_rn(s[n][e], x.pre));
        }
    }
    if (mask) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = 8 * n + 2 * t + e % 2, i = e / 2;
                if (key < lo[i] || key > hi[i]) s[n][e] = -INFINITY;
            }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = -INFINITY;
#pragma unroll
        for (int n = 0; n < 8; n++)
            most = fmaxf(most, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        m[i] = __fmul_rn(most, x.by);
        const float base = most == -INFINITY ? 0.0f : -m[i];
        float sums[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; e++) {
                s[n][e] = att_exp2(__fmaf_rn(s[n][e], x.by, base));
                sums[e % 2] = __fadd_rn(sums[e % 2], s[n][e]);
            }
        float sum = __fadd_rn(sums[0], sums[1]);
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        l[i] = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if constexpr (sizeof(T) == 1) {
            const float2 by = *(const float2 *)(v_scale + n / 2 * SCALE_STEP + n % 2 * 8 + 2 * t);
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[n][e] = __fmul_rn(s[n][e], __fmul_rn(e % 2 ? by.y : by.x, ATT_RAISE));
        }
        p[n / 2][n % 2 * 2] = att_pack<T>(s[n][0], s[n][1]);
        p[n / 2][n % 2 * 2 + 1] = att_pack<T>(s[n][2], s[n][3]);
    }
}

/* The unit's O in columns 16 two and on, two tiles of 8, from 16-bit values. */
template <typename T, int D>
__device__ inline void att_values(float (&o)[2][4], const uint32_t (&p)[4][4], uint32_t unit,
                                  int two, int lane)
{
    using S = att_shape<T, D>;
    const uint32_t at =
        unit + att_place<S::PIECES>(lane / 8 % 2 * 8 + lane % 8, 2 * two + lane / 16);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            o[n][e] = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t b[4];
        att_matrix4_trans(b, at + k * S::STEP);
        att_mma<T>(o[0], p[k], b[0], b[1]);
        att_mma<T>(o[1], p[k], b[2], b[3]);
    }
}

/* ---- merging ----------------------------------------------------------------------------------
 */

struct att_weights {
    float old, add;
};

/* The running largest exponent m takes the unit's in. */
__device__ inline att_weights att_merge(float &m, float m_unit)
{
    const float now = fmaxf(m, m_unit), base = now == -INFINITY ? 0.0f : now;
    const att_weights w = {att_exp2(__fadd_rn(m, -base)), att_exp2(__fadd_rn(m_unit, -base))};
    m = now;
    return w;
}

__device__ inline float att_merged(float old, float unit, const att_weights &w)
{
    return __fmaf_rn(unit, w.add, __fmul_rn(old, w.old));
}

/* What O is multiplied by at the end. */
__device__ inline float att_factor(float m, float l, const float *sinks, int head)
{
    if (!sinks) return __fdiv_rn(1.0f, l);
    const float sink = __fmul_rn(sinks[head], 1.4426950408889634f), all = fmaxf(m, sink);
    const float w = att_exp2(__fadd_rn(m, -all));
    return __fdiv_rn(w, __fmaf_rn(l, w, att_exp2(__fadd_rn(sink, -all))));
}

/* Query heads of this rank that read a KV head: [first, first + n). */
struct att_group {
    int first, n;
};

__device__ inline att_group att_group_of(const bgk_heads &h, int kv_head)
{
    const int at = (h.kv_head0 + kv_head) * h.group - h.head0;
    const int first = max(at, 0), end = min(at + h.group, h.n_heads);
    return {first, max(end - first, 0)};
}

#endif
