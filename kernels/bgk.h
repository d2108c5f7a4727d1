/* kernels/bgk.h - launchers of the CUDA kernels: what src/backend/cuda may call, and nothing else.
 *
 * Every launcher checks what its kernel requires and returns cudaErrorInvalidValue where it is not
 * met; it starts work on `stream` and does not wait. No pointer may overlap another unless said.
 * Activations are float32, [rows, cols] with a stride of `..._cols` values; rows 0 is a no-op. A
 * row's bits depend on that row, never on how many there are or where it stands.
 *
 * C, so that the backend needs no C++. */
#ifndef BGK_H
#define BGK_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#include "shapes.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bgk_type { BGK_F32, BGK_F16, BGK_BF16, BGK_Q8 } bgk_type;
/* How activations lie in memory.
 * BGK_ROWS: float32 [rows, cols]; `stride` values from one row to the next.
 * BGK_TILES: halves, as linears read them: [cols in groups of 64][stride rows][64]. In its group's
 * 64 places, column c of row t (h = c % 64 / 32, i = c % 32) has place 2 i + h; and the 16-byte
 * piece p of those 64 places lies at piece p ^ (t % 8), against bank conflicts. `stride` is a
 * multiple of 256; the memory is 1024-byte aligned; columns that fill up the last group are 0.
 * Values are saturated at +-65504, NaN stays. See tiles.cuh.
 * BGK_HALF_ROWS: as BGK_ROWS, of 16-bit floats: queries, as attention on tensor cores reads them.
 */
typedef enum bgk_layout { BGK_ROWS, BGK_TILES, BGK_HALF_ROWS } bgk_layout;
typedef struct bgk_out { /* what a kernel writes */
    void *data;
    bgk_layout layout;
    int64_t stride;
} bgk_out;
enum { BGK_TILE_ROWS = 256, BGK_TILE_COLS = 64 };

/* BGK_SWIGLU_CLAMP takes both: min(g, 7) sigmoid(1.702 min(g, 7)) (clamp(u, -7, 7) + 1). */
typedef enum bgk_act { BGK_SILU, BGK_GELU_TANH, BGK_GELU_ERF, BGK_SWIGLU_CLAMP } bgk_act;

/* ---- step.cu ---------------------------------------------------------------------------------
 * ids[t] = history[slot_of_seq[seq[t]], pos[t]], 0 for slot -1; history [slots, stride]. */
cudaError_t bgk_gather_ids(int32_t *ids, const int32_t *history, int64_t stride,
                           const int32_t *slot_of_seq, const int32_t *seq, const int32_t *pos,
                           int rows, cudaStream_t stream);

/* ---- elementwise.cu -------------------------------------------------------------------------- */

/* out[t,:] = scale * table[ids[t],:]; table [vocab, cols] of type F32 or F16. */
cudaError_t bgk_embed(float *out, int64_t out_cols, const void *table, bgk_type type,
                      const int32_t *ids, float scale, int rows, int cols, cudaStream_t stream);
/* out = rms_norm(x) * w, in either layout; with y not NULL: x += y first. out == x is allowed
 * without y, as rows of the same stride. cols >= 1. */
cudaError_t bgk_rms_norm(const bgk_out *out, float *x, int64_t x_cols, const float *y,
                         int64_t y_cols, const float *w, float eps, int rows, int cols,
                         cudaStream_t stream);
/* y = rms_norm(y) * post, x += y, out = rms_norm(x) * w: the bits of these three. y's values are
 * undefined afterwards. */
cudaError_t bgk_norm_add_norm(const bgk_out *out, float *x, int64_t x_cols, float *y,
                              int64_t y_cols, const float *post, const float *w, float eps,
                              int rows, int cols, cudaStream_t stream);
cudaError_t bgk_add(float *x, int64_t x_cols, const float *y, int64_t y_cols, int rows, int cols,
                    cudaStream_t stream);
/* out[t,i] = fn(x[t,i]) * x[t,cols+i] */
cudaError_t bgk_glu(float *out, int64_t out_cols, const float *x, int64_t x_cols, bgk_act fn,
                    int rows, int cols, cudaStream_t stream);
/* out[j,:] = x[index[j],:] */
cudaError_t bgk_gather(float *out, int64_t out_cols, const float *x, int64_t x_cols,
                       const int32_t *index, int rows, int cols, cudaStream_t stream);
/* x = cap * tanh(x / cap) */
cudaError_t bgk_softcap(float *x, int64_t n, float cap, cudaStream_t stream);
/* NaN in the first `rows` rows, BGK_TILES: filling columns too. */
cudaError_t bgk_poison(const bgk_out *x, int64_t rows, int64_t cols, cudaStream_t stream);
/* *bad = the smallest row * C + col that is not finite (unchanged if all are); C is cols,
 * BGK_TILES: a multiple of 64, for filling columns are searched too. */
cudaError_t bgk_find_bad(unsigned long long *bad, const bgk_out *x, int64_t rows, int64_t cols,
                         cudaStream_t stream);

/* The device does nothing for so long: launches behind it gather meanwhile. */
cudaError_t bgk_pause(int64_t ns, cudaStream_t stream);

/* ---- linear.cu --------------------------------------------------------------------------------
 * out[t, n] = sum_k x[t, k] w[n, k] + bias[n] (NULL: none), for n in [0, n_rows). w: [n_rows,
 * k_padded], zero beyond k; k_padded is a multiple of 64; 16-byte aligned. One chain over k in
 * float32 for every output: the order depends on k alone.
 * F16: x is rounded to half, in scratch (tokens * k_padded halves, 16-byte aligned). F32: nothing
 * is, and scratch may be NULL. */
enum { BGK_K_PAD = 64 };
cudaError_t bgk_linear(float *out, int64_t out_cols, const void *w, bgk_type type,
                       const float *bias, const float *x, int64_t x_cols, int tokens, int n_rows,
                       int k, int k_padded, void *scratch, cudaStream_t stream);

/* clang-format off */
/* ---- repack.cu, matmul.cu: quantised weights on Hopper's tensor cores ---------------------------
 * A weight tile is 64 output rows; it is stored as ceil(k / 64) chunks of 64 columns one after
 * another, each of bgk_chunk_bytes(format). A chunk is laid out for 128 threads, thread 32 w + lane
 * (w 0..3): its rows are r0 = 16 w + lane / 4 and r1 = r0 + 8, and for step s (0..3) its columns
 * i = 8 s + lane % 4 and i + 4, and 32 + those. As wgmma's A operand (m64k16, register form) that
 * is: register 0 of step s = (r0: i, 32 + i), 1 = (r1: i, 32 + i), 2 = (r0: i + 4, 36 + i), 3 = (r1:
 * i + 4, 36 + i), the first in the low half; so K order in a group of 64 columns is that of
 * BGK_TILES.
 *
 *   W4   0: uint4 a thread (at 16 thread), word s is step s: bits 0-3 q(r0,i), 4-7 q(r1,i), 8-11
 *        q(r0,i+4), 12-15 q(r1,i+4), and 16 bits higher the same with columns 32 further.
 *        2048: a row pair p = 8 w + lane / 4 has 16 bytes at 16 p: half2 s(r0), m(r0), s(r1), m(r1);
 *        low half for columns 0-31, high half for 32-63. value = s q + m. 2560 bytes.
 *   W5   as W4, and at 2560 a uint32 a thread (at 4 thread) with the fifth bits: of (r0,i) bit 4 +
 *        s, (r1,i) 8 + s, (r0,i+4) s, (r1,i+4) 12 + s; columns 32 further 16 bits higher. 3072 bytes.
 *   W6   quants' low four bits as W4; at 2048 16 bytes a row pair: half2 sa(r0), sb(r0), sa(r1),
 *        sb(r1): sa = (columns 0-15, 32-47), sb = (16-31, 48-63); at 2560 a uint2 a thread (at 8
 *        thread) with the upper two bits: word s / 2, e = 2 (s % 2): of (r0,i) bits 4 + e and 5 + e,
 *        (r1,i) 8 + e, (r0,i+4) e, (r1,i+4) 12 + e; columns 32 further 16 bits higher.
 *        value = s (q - 32). 3584 bytes.
 *   W8   u = q + 128; uint4 a thread at 16 thread (steps 0, 1) and at 2048 + 16 thread (steps 2, 3),
 *        two words a step: bytes (r0,i), (r1,i), (r0,32+i), (r1,32+i), then the same with i + 4.
 *        4096: 8 bytes a row pair: half2 s(r0), s(r1). value = s (u - 128). 4352 bytes.
 *   W16  halves; uint4 a thread at 2048 s + 16 thread: the four registers. 8192 bytes.
 *
 * A row has a scale 2^e of its own, undone after the sum: what is stored is s 2^-e 2^24 (in W4, W5 and
 * W6 for rows r1: 2^20, as their bits stand 4 higher: masked quants are read as half subnormals),
 * m 2^-e, and values 2^-e. e makes the largest |s| 2^24 2^-e of the row lie in (30000, 60000] (but m
 * at most 60000), W16: the largest |value| 2^-e in (128, 256]. All zero: e = 0; never below
 * -126.
 * Columns beyond k, and rows beyond n_rows, have s = m = 0 (W16: values 0).
 *
 * A linear's tiles: those of its first part, then of the next; each part is filled up to whole tiles
 * by itself. glu: gate and up in one: tile T holds n = 64 (T / 2) + 4 (4 (T % 2) + w) + (q < 4 ? q :
 * 28 + q), q 0..7: of column n, row 16 w + q is gate's and row 16 w + 8 + q up's row. */
/* clang-format on */
typedef enum bgk_format { BGK_W4, BGK_W5, BGK_W6, BGK_W8, BGK_W16, BGK_FORMATS } bgk_format;

static inline int bgk_chunk_bytes(bgk_format f)
{
    static const int bytes[BGK_FORMATS] = {2560, 3072, 3584, 4352, 8192};
    return bytes[f];
}

typedef struct bgk_wtile {
    const void *w;    /* its chunks, on the device, 128-byte aligned */
    int32_t format;   /* bgk_format */
    int32_t out0;     /* the output column of its first row; not with glu */
    int32_t n_rows;   /* 1 to 64 of them are written; not with glu */
    int32_t x_chunk0; /* the first 64-column group of x that it reads; see block_tiles */
} bgk_wtile;

typedef struct bgk_weights {
    const bgk_wtile *tiles;        /* on the device, [n_tiles] */
    const float *row_scale, *bias; /* on the device, [n_tiles * 64], in the order of the tiles'
                                      rows; row_scale = 2^e, bias NULL: none */
    int n_tiles, n_chunks;         /* n_chunks = ceil(k / 64) */
    int splits;       /* 1, 2 or 4: K is summed in so many parts, then these in order */
    unsigned formats; /* bit f: some tile has format f */
    int n_ff;         /* 0: no glu; else columns of its result */
    int n_out;        /* columns of the result; for BGK_TILES without glu */
    int block_tiles;  /* not 0: so many tiles at a time have the same x_chunk0 */
    uint8_t shape[BGK_TOKEN_CLASSES]; /* 1 + bgk_shape for so many tokens; 0: by a rule */
    bool idle; /* with few tokens blocks wait long for the kernel before, as on a rank of several,
                  where some are sums over ranks: so they rehearse (launch.cuh) */
    /* bgk_moe_matmul(), instead of `tiles`: those of experts [0, n_first), one after another, in a
     * format, and those of the experts behind in another stack. */
    const void *stack[2];
    bgk_format stack_format[2];
    int n_first;
} bgk_weights;

/* out[t, tile's columns] = sum_k x[t, 64 x_chunk0 + k] w + bias for t in [0, tokens), in any layout
 * (BGK_HALF_ROWS: halves; both kinds of halves saturated); with n_ff the products fn(gate) * up,
 * BGK_TILES. Columns that fill up the last group of BGK_TILES are written as 0. x: BGK_TILES,
 * n_chunks groups from a tile's x_chunk0 on. A result's bits depend on its row of x, on w and on
 * splits alone. sm_90. */
cudaError_t bgk_matmul(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                       int tokens, bgk_act fn, cudaStream_t stream);
/* The shape that it takes for so many tokens. */
bgk_shape bgk_matmul_shape(const bgk_weights *w, int tokens);
/* The same in blocks of one's choice. */
cudaError_t bgk_matmul_as(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                          int tokens, bgk_act fn, bgk_shape shape, cudaStream_t stream);

/* When a product is at work. WAITS: after the kernel before, as every kernel. HOLDS: so too, and
 * the next kernel may start once x, and all that came before, is there. BESIDE: beside the last
 * kernel launched, which must let others start no sooner than x is there; what comes after it comes
 * after both. */
typedef enum bgk_start { BGK_WAITS, BGK_HOLDS, BGK_BESIDE } bgk_start;

/* The same; cudaErrorNotSupported: BGK_8W does nothing but wait. */
cudaError_t bgk_matmul_start(const bgk_out *out, const bgk_weights *w, const void *x,
                             int64_t x_stride, int tokens, bgk_act fn, bgk_start start,
                             cudaStream_t stream);

/* As BGK_BESIDE, for BGK_8W alone: when the next kernel starts the results are there.
 * cudaErrorNotSupported: not of so many tokens. */
cudaError_t bgk_matmul_early(const bgk_out *out, const bgk_weights *w, const void *x,
                             int64_t x_stride, int tokens, bgk_act fn, cudaStream_t stream);

/* ---- few.cu: bgk_matmul()'s BGK_8W; it has checked what that says ---- */
bool bgk_few_fits(const bgk_weights *w, int tokens);
cudaError_t bgk_few(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                    int tokens, bgk_act fn, cudaStream_t stream);
cudaError_t bgk_few_early(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                          int tokens, bgk_act fn, cudaStream_t stream);

/* ---- moe.cu, experts.cu: mixture of experts
 * ------------------------------------------------------
 */
enum { BGK_MAX_EXPERTS = 512, BGK_MAX_USED = 32, BGK_DIRECT = 8 };

typedef enum bgk_gating { BGK_GATE_SOFTMAX, BGK_GATE_SIGMOID, BGK_GATE_CHOSEN } bgk_gating;
typedef struct bgk_router { /* as bg_router_spec (backend/ops.h) says */
    int n_experts, n_used;
    bgk_gating gating;
    const float *bias, *choice_bias; /* on the device; NULL: none */
    int n_groups, n_groups_used;     /* n_groups <= 1: none */
    bool renormalise, shared_gate;
    float scale;
} bgk_router;
/* route[t] = n_used experts, best first, their weights, and the weight of what else is added:
 * sigmoid of the last product with shared_gate, or 1. Product i (of n = n_experts, one more with
 * shared_gate) is the sum of parts[t, p n + i] over p < n_parts, in order. n_experts <=
 * BGK_MAX_EXPERTS, n_used <= BGK_MAX_USED. A row with NaN gets experts too, and NaN as weights. */
cudaError_t bgk_route(float *route, int64_t route_cols, const float *parts, int64_t parts_cols,
                      int n_parts, const bgk_router *r, int tokens, cudaStream_t stream);

/* One piece of work of the grouped products: consecutive rows of one expert. */
typedef struct bgk_moe_item {
    int32_t expert; /* 0 .. 65535; bit 16: its rows are in h, in the order of tokens */
    int32_t x_row;  /* the first, in h or among the gathered rows */
    int32_t out_row, n;
} bgk_moe_item;

/* Who works on what. Result rows: of each of the n_shared experts (numbers n_experts and on) all
 * tokens, then of each expert the tokens that chose it, ascending; an expert's begin at multiples
 * of 8. Up to BGK_DIRECT tokens: each expert that somebody chose has all tokens, from h. */
typedef struct bgk_moe {
    int n_experts, n_used, n_shared, tokens;
    int n; /* tokens in an item: 8, 16, 32, 64 or 128; BGK_DIRECT tokens and fewer: 8 */
    const float *route;
    int64_t route_cols;
    int32_t *pos;        /* [tokens, n_used] result row of each token and choice */
    bgk_moe_item *items; /* 16-byte aligned, room for bgk_moe_items() */
    int32_t *n_items;    /* how many there are */
    int32_t *counts;     /* scratch, bgk_moe_counts() values */
} bgk_moe;
static inline int64_t bgk_moe_shared_rows(const bgk_moe *m)
{
    return (int64_t)m->n_shared * ((m->tokens + 7) / 8 * 8);
}
/* At most so many result rows, gathered rows (numbers 0 and on: result rows behind the shared
 * experts'), and items. */
static inline int64_t bgk_moe_gathered(const bgk_moe *m)
{
    const int64_t all = (int64_t)m->tokens * m->n_used,
                  busy = all < m->n_experts ? all : m->n_experts;
    return m->tokens <= BGK_DIRECT ? 8 * busy : all + 7 * busy;
}
static inline int64_t bgk_moe_rows(const bgk_moe *m)
{
    return bgk_moe_shared_rows(m) + bgk_moe_gathered(m);
}
static inline int64_t bgk_moe_items(const bgk_moe *m)
{
    const int64_t all = (int64_t)m->tokens * m->n_used,
                  busy = all < m->n_experts ? all : m->n_experts;
    return (int64_t)m->n_shared * ((m->tokens + m->n - 1) / m->n) + busy + all / m->n;
}
static inline int64_t bgk_moe_counts(const bgk_moe *m)
{
    return (int64_t)((m->tokens + 1023) / 1024) * m->n_experts;
}
cudaError_t bgk_moe_plan(const bgk_moe *m, cudaStream_t stream);
/* x's rows become h's of `groups` groups of 64 columns, both BGK_TILES; nothing to do up to
 * BGK_DIRECT tokens. h was there before the kernel before this one let others start, as it is
 * right after bgk_moe_plan(). */
cudaError_t bgk_moe_gather(const bgk_out *x, const bgk_out *h, const bgk_moe *m, int groups,
                           cudaStream_t stream);
/* bgk_matmul() of each expert with its rows. w: n_tiles is one expert's, row_scale and bias are of
 * all one after another. The first product reads h and x, as items say; the second
 * (h NULL) reads x by result rows. Both may read n - 1 rows past the last, and write none.
 * list_done: the list was there before the kernel before this one let others start. out: BGK_TILES
 * with n_ff, else rows. */
cudaError_t bgk_moe_matmul(const bgk_out *out, const bgk_weights *w, const bgk_out *h,
                           const bgk_out *x, const bgk_moe *m, bgk_act fn, bool list_done,
                           cudaStream_t stream);
/* out[t, c] = sum over j, in order, of route[t]'s weight j times rows[pos[t, j], c], + the shared
 * experts' rows in order, + route's last weight times add[t, c] (NULL: nothing). rows: halves,
 * rows_cols of them from row to row. out == add is allowed. route and pos were there before the
 * kernel before this one let others start, as they are after bgk_moe_matmul() twice. */
cudaError_t bgk_moe_combine(float *out, int64_t out_cols, const void *rows, int64_t rows_cols,
                            const float *add, int64_t add_cols, const bgk_moe *m, int cols,
                            cudaStream_t stream);

/* ---- few_moe.cu: all of it for up to BGK_MOE_FEW tokens, bit for bit ----
 * (More would read experts that several of them chose again and again: with 4 tokens Qwen3-30B-A3B
 * makes 1,195 tokens/s this way and 1,249 by lists, with 2 783 and 766, with 1 451 and 440.)
 * Where experts come from: parts not NULL: what bgk_route() makes of them, in which r has no
 * groups; it is written to route. Else from route, of r.n_experts experts; complete before the
 * kernel before this lets the next one start, or that kernel's own work. */
enum { BGK_MOE_FEW = 2 };
typedef struct bgk_moe_choice {
    const float *parts;
    int64_t parts_cols;
    int n_parts;
    bgk_router r;
    float *route;
    int64_t route_cols;
} bgk_moe_choice;
bool bgk_moe_few_fits(const bgk_weights *gate_up, const bgk_weights *down, const bgk_moe *m);
/* out as bgk_moe_combine(). act: scratch, BGK_TILES of gate_up->n_ff columns and 8 (n_used +
 * n_shared) rows. Of m: n_experts, n_used, n_shared and tokens. */
cudaError_t bgk_moe_few(float *out, int64_t out_cols, const bgk_weights *gate_up,
                        const bgk_weights *down, const bgk_out *act, const bgk_out *h,
                        const bgk_moe_choice *choice, const float *add, int64_t add_cols,
                        const bgk_moe *m, bgk_act fn, cudaStream_t stream);

/* The plain form: weights [n_experts + n_shared, 2 n_ff, k_padded] (gate, up) and [.., cols,
 * ff_padded] of type F32 or F16, biases [.., 2 n_ff] and [.., cols] or NULL; x float32 [tokens, k].
 * act: scratch, tokens * (n_used + n_shared) * n_ff floats. n_ff 0: the biases of down alone. */
typedef struct bgk_plain_experts {
    const void *gate_up, *down;
    bgk_type type;
    const float *bias, *down_bias;
    int k, k_padded, n_ff, ff_padded, cols;
    bgk_act fn;
} bgk_plain_experts;
cudaError_t bgk_moe_plain(float *out, int64_t out_cols, const bgk_plain_experts *e, const float *x,
                          int64_t x_cols, const float *add, int64_t add_cols, const bgk_moe *m,
                          float *act, cudaStream_t stream);

/* ---- repack.cu -------------------------------------------------------------------------------
 * GGUF types that are read on the GPU, by their ids there. */
typedef enum bgk_block {
    BGK_GGUF_F32 = 0,
    BGK_GGUF_F16 = 1,
    BGK_Q4_0 = 2,
    BGK_Q4_1 = 3,
    BGK_Q5_0 = 6,
    BGK_Q5_1 = 7,
    BGK_Q8_0 = 8,
    BGK_Q3_K = 11,
    BGK_Q4_K = 12,
    BGK_Q5_K = 13,
    BGK_Q6_K = 14,
    BGK_IQ4_NL = 20,
    BGK_IQ4_XS = 23,
    BGK_GGUF_BF16 = 30,
    BGK_MXFP4 = 39
} bgk_block;

/* The narrowest format that holds a type's values; BGK_FORMATS: the type is not read here. Types of
 * W4 also fit W5, and all of them W16. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline bgk_format
    bgk_format_of(int type)
{
    switch (type) {
    case BGK_Q4_0:
    case BGK_Q4_1:
    case BGK_Q4_K:
        return BGK_W4;
    case BGK_Q5_0:
    case BGK_Q5_1:
    case BGK_Q5_K:
        return BGK_W5;
    case BGK_Q3_K:
    case BGK_Q6_K:
        return BGK_W6;
    case BGK_Q8_0:
    case BGK_IQ4_NL:
    case BGK_IQ4_XS:
    case BGK_MXFP4:
        return BGK_W8;
    case BGK_GGUF_F32:
    case BGK_GGUF_F16:
    case BGK_GGUF_BF16:
        return BGK_W16;
    default:
        return BGK_FORMATS;
    }
}

typedef struct bgk_source { /* rows as the file has them, on the device */
    const void *rows; /* the first column that is wanted, the start of a block, of the first */
    int type;         /* bgk_block */
    int n_rows;
    int64_t row_bytes; /* from one row to the next */
} bgk_source;

/* Rows to tiles: ceil(n_rows / 64) of them at `chunks`, or with up (as many rows, of a type that
 * fits the format too) 2 ceil(n_rows / 64) of glu. k: a multiple of the types' blocks. row_scale:
 * 64 values a tile. */
cudaError_t bgk_repack(void *chunks, float *row_scale, bgk_format format, const bgk_source *rows,
                       const bgk_source *up, int k, cudaStream_t stream);
/* The same of a stack of matrices with `each` rows, one after another: each is filled up to whole
 * tiles by itself. */
cudaError_t bgk_repack_stack(void *chunks, float *row_scale, bgk_format format,
                             const bgk_source *rows, const bgk_source *up, int each, int k,
                             cudaStream_t stream);
/* Rows to values: out [n_rows, k_padded] of type F32 or F16 (rounded), 0 from k on. */
cudaError_t bgk_dequant(void *out, bgk_type type, const bgk_source *rows, int k, int64_t k_padded,
                        cudaStream_t stream);
/* Fills n_blocks blocks of a type that is read here with what decodes to random values: mean about
 * 0, deviation about std, bits a function of seed and the block's number, block0 and on. */
cudaError_t bgk_random_blocks(void *blocks, int type, int64_t n_blocks, uint64_t seed,
                              uint64_t block0, float std, cudaStream_t stream);
/* Fills n_rows rows of n values, each row_bytes (a multiple of 16) after the one before, with
 * values uniform in mid +- spread, rounded to the type (Q8: int8, no scales); what lies between
 * rows stays. Bits are a function of seed and place. |mid| + spread: at most 127 (Q8) or 65504.
 * `to`: 16-byte aligned. */
cudaError_t bgk_random_values(void *to, bgk_type type, int64_t n_rows, int64_t n, int64_t row_bytes,
                              float mid, float spread, uint64_t seed, cudaStream_t stream);

/* ---- fast.cu: around library products of halves -------------------------------------------------
 * out[t, c] = x[t, c], halves [rows, stride], for c < cols, a multiple of 64. stride is a multiple
 * of 8, out 16-byte aligned. x: BGK_TILES. */
cudaError_t bgk_tiles_to_rows(void *out, int64_t stride, const bgk_out *x, int rows, int cols,
                              cudaStream_t stream);
/* out[t, i] = fn(x[t, i] + bias[i]) * (x[t, cols + i] + bias[cols + i]), i < cols; bias NULL: none.
 * x: halves, x_stride of them from row to row; out: BGK_TILES, columns that fill up its last group
 * become 0. */
cudaError_t bgk_glu_halves(const bgk_out *out, const void *x, int64_t x_stride, const float *bias,
                           bgk_act fn, int rows, int cols, cudaStream_t stream);

/* ---- rope.cu, attention.cu, attention_mma.cu ---------------------------------------------------
 * The cache: K [n_layers, n_blocks, n_kv_heads, block_tokens, k_dim], V with v_dim; of `type`. Q8:
 * int8 values, which times the scale of their token and head, [n_layers, n_blocks, n_kv_heads,
 * block_tokens], are K and V. */
typedef struct bgk_cache {
    void *k, *v;
    bgk_type type;
    int n_blocks, n_kv_heads, block_tokens, k_dim, v_dim;
    float *k_scale, *v_scale; /* Q8 */
} bgk_cache;

typedef struct bgk_rows {  /* of the step, on the device */
    const int32_t *pos;    /* [rows] */
    const int32_t *seq;    /* [rows] */
    const int32_t *blocks; /* block tables, one after another */
    const int32_t *block0; /* [seqs] where a sequence's begins */
    int rows;
} bgk_rows;

/* Which of them attend to what, and how. Head h reads KV head (head0 + h) / group - kv_head0. */
typedef struct bgk_heads {
    int layer, n_heads, head0, kv_head0, group;
    float scale, softcap; /* softcap 0: none */
    int window;           /* 0: all keys; else a query at p sees keys j with p - j < window */
    const float *sinks;   /* NULL: none; else [n_heads] */
} bgk_heads;

/* qkv[t] = q heads, k heads, v heads. Norms (NULL: none) over each head's k_dim values, rotation by
 * pos * freq[i] (freq NULL: none) of the leading n_rot values, pairs (i, i + n_rot/2) if neox, else
 * (2i, 2i+1); cos and sin times mscale. q_out: [rows, n_heads * k_dim] floats, or with q_half
 * 16-bit floats: bf16 where the cache is, else half; q_cols of them from row to row. k_dim, v_dim
 * <= 512, multiples of 4. 16-bit and Q8 values saturate. A row at pos < 0 is left out. */
cudaError_t bgk_rope_store(void *q_out, bool q_half, int64_t q_cols, const float *qkv,
                           int64_t qkv_cols, const bgk_cache *cache, const bgk_rows *r, int layer,
                           int n_heads, const float *q_norm, const float *k_norm, float eps,
                           const float *freq, int n_rot, bool neox, float mscale,
                           cudaStream_t stream);
/* Causal attention, float32 q and sums; k_dim <= 512, v_dim <= 512, both multiples of 4; not Q8.
 * Keys are taken 32 at a time from position 0 on, chunk c by warp c mod 4, and the four are merged
 * in order. */
cudaError_t bgk_attention(const bgk_out *out, const float *q, int64_t q_cols,
                          const bgk_cache *cache, const bgk_rows *r, const bgk_heads *heads,
                          cudaStream_t stream);

/* The same on tensor cores, from q in 16 bits: for caches of 8 or 16 bits with k_dim == v_dim in
 * {64, 96, 128, 256}. Keys are taken in units of 64 from position 0 on: a unit has its own largest
 * score, sum and values (P in 16 bits), and units are merged in float32 in their order; so both of
 * these, however the work is spread, give a row the same bits. */
bool bgk_attention_fits(const bgk_cache *cache);
typedef struct bgk_item { /* consecutive tokens of one sequence */
    int32_t row0, pos0;   /* row and position of the first */
    int32_t block0;       /* where its block table begins */
    int32_t n;            /* a tile: tokens, at most BGK_TILE_TOKENS. One token: parts before it */
} bgk_item;
enum { BGK_TILE_TOKENS = 128, BGK_UNIT = 64 };
typedef struct bgk_att { /* what both kernels take */
    const void *q;
    int64_t q_cols;
    bgk_cache cache;
    const int32_t *blocks; /* as in bgk_rows */
    bgk_heads heads;
} bgk_att;
/* n items of one token each. Few of them are spread over n_sms processors through `parts`, room for
 * parts_bytes, zero before the first use: item i has pos / 64 + 1 parts, whose numbers begin at
 * items[i].n. An item whose parts have no room (n_heads * (v_dim + 2) floats each) is not spread.
 * The grid depends on n alone. */
cudaError_t bgk_attention_single(const bgk_out *out, const bgk_att *a, const bgk_item *items, int n,
                                 void *parts, size_t parts_bytes, int n_sms, cudaStream_t stream);
cudaError_t bgk_attention_tiles(const bgk_out *out, const bgk_att *a, const bgk_item *items, int n,
                                cudaStream_t stream);

/* ---- mla*.cu, index.cu: multi-head latent attention, absorbed -----------------------------------
 * The cache is a bgk_cache of one KV head without v: a token has k_dim values, [latent (v_dim) |
 * rope key (k_dim - v_dim)]. How a KV block lies in memory depends on bgk_mla_fits(): mla.cuh.
 * Q8 only where that is true: the latent in int8 with a scale, the rope key in halves. */
bool bgk_mla_fits(const bgk_cache *cache); /* on tensor cores: 512 + 64, 8 or 16 bits, sm_90 */
size_t bgk_mla_block_bytes(const bgk_cache *cache);

typedef struct bgk_rotation { /* of n_rot values: pairs (i, i + n_rot/2) if neox, else (2i, 2i+1) */
    const float *freq;        /* on the device, [n_rot / 2] */
    int n_rot;
    bool neox;
    float mscale; /* times cos and sin */
} bgk_rotation;

/* in[t] = [q latent (q_rank) | kv latent | rope key]. qa = rms_norm(q latent) (NULL with q_rank 0);
 * the cache gets rms_norm(kv latent) and the rotated rope key at pos[t]; pos < 0: not. in_cols and
 * q_rank are multiples of 4. */
cudaError_t bgk_mla_store(const bgk_out *qa, const float *in, int64_t in_cols,
                          const bgk_cache *cache, const bgk_rows *r, int layer, int q_rank,
                          const float *q_norm, const float *kv_norm, float eps,
                          const bgk_rotation *rope, cudaStream_t stream);

/* With up to BGK_STORE_PRODUCTS products out = qa w^T, as bgk_matmul(), for up to BGK_STORE_LINEAR
 * rows in one launch: the same bits. in and qa as there; qa is BGK_TILES. */
enum { BGK_STORE_LINEAR = 4, BGK_STORE_PRODUCTS = 2 };
typedef struct bgk_product {
    bgk_out out;
    const bgk_weights *w;
} bgk_product;
bool bgk_mla_store_linear_fits(const bgk_weights *w, const bgk_cache *cache, int q_rank, int rows);
cudaError_t bgk_mla_store_linear(const bgk_product *products, int n, const bgk_out *qa,
                                 const float *in, int64_t in_cols, const bgk_cache *cache,
                                 const bgk_rows *r, int layer, int q_rank, const float *q_norm,
                                 const float *kv_norm, float eps, const bgk_rotation *rope,
                                 cudaStream_t stream);

typedef struct bgk_mla {
    bgk_out q_lat; /* [rows, n_heads * v_dim] */
    bgk_out q;     /* [rows, n_heads * (nope + n_rot)], the last n_rot of a head not rotated yet */
    int layer, n_heads, nope;
    float scale;
    bgk_rotation rope;
    bgk_cache cache;
    int max_keys; /* no row sees more; 0: unknown */
    bool early;   /* q_lat is there when the kernel starts, by bgk_matmul_early(), and q */
} bgk_mla;
typedef struct bgk_selected { /* by bgk_index_select(); list NULL: all keys */
    const int32_t *list;      /* [rows, top_k] positions, ascending */
    const int32_t *count;     /* [rows]; -1: all keys up to the row's position */
    int top_k;
} bgk_selected;

/* out[t, h v_dim ..] = sum_j softmax_j(scale (q_lat_h . c_j + turned q_h . kr_j)) c_j. Any cache
 * but Q8, where not bgk_mla_fits(); float32. */
cudaError_t bgk_mla_plain(const bgk_out *out, const bgk_mla *a, const bgk_rows *r,
                          const bgk_selected *s, cudaStream_t stream);
/* On tensor cores, where bgk_mla_fits(): q_lat BGK_HALF_ROWS, q BGK_TILES. Keys (those of the list)
 * are taken in units of 64 from the first on, each with its own softmax; units are merged in their
 * order. So all of these, however work is spread, give a row the same bits.
 * _single: n items of one token, as bgk_attention_single() has them, but for n, which is not looked
 * at; parts: parts_bytes of scratch of one stream, all zero before the first use and after every
 * one. Keys before an item's position, tables and items were there before the kernel before this
 * one let others start. Of a row that sees more than a->max_keys (not 0), keys may be left out.
 * _tiles: items of up to BGK_MLA_TOKENS tokens. _selected: all rows of r, one by one.
 * Grids depend on n, r->rows, n_sms and a->max_keys. */
enum { BGK_MLA_UNIT = 64, BGK_MLA_TOKENS = 128 };
cudaError_t bgk_mla_single(const bgk_out *out, const bgk_mla *a, const int32_t *blocks,
                           const bgk_item *items, int n, void *parts, size_t parts_bytes, int n_sms,
                           cudaStream_t stream);
cudaError_t bgk_mla_tiles(const bgk_out *out, const bgk_mla *a, const int32_t *blocks,
                          const bgk_item *items, int n, cudaStream_t stream);
cudaError_t bgk_mla_selected(const bgk_out *out, const bgk_mla *a, const bgk_rows *r,
                             const bgk_selected *s, void *parts, size_t parts_bytes, int n_sms,
                             cudaStream_t stream);

/* The lightning indexer. Its keys: [layers, n_blocks, block_tokens, dim] of `type`; dim <= 128. */
typedef struct bgk_index {
    void *keys;
    bgk_type type; /* F32, F16 or BF16 */
    int n_blocks, block_tokens;
    int layer, n_heads, dim;
    const float *k_norm, *k_norm_b; /* of the key's LayerNorm */
    float eps;
    bgk_rotation rope; /* of the first n_rot values of a head and of the key */
    float scale;       /* on the heads' weights */
} bgk_index;
/* ik[t] = [key (dim) | the heads' weights]; iq: n_heads of dim values. Keys go to their places, q
 * (of `type`, [rows, n_heads * dim]) and w ([rows, n_heads],
 * times scale) to where bgk_index_scores() reads them. */
cudaError_t bgk_index_store(const bgk_index *a, void *q, float *w, const bgk_out *iq,
                            const float *ik, int64_t ik_cols, const bgk_rows *r,
                            cudaStream_t stream);
/* scores[t - row0, j] = sum_h w_h relu(q_h . key_j) for rows [row0, row0 + n) whose position is
 * top_k or beyond, and j up to it. In half or bf16 on tensor cores where dim is 64 or 128 and
 * n_heads a multiple of 16. The grid depends on n and max_ctx. */
cudaError_t bgk_index_scores(float *scores, int64_t stride, const bgk_index *a, const void *q,
                             const float *w, const bgk_rows *r, int row0, int n, int top_k,
                             int max_ctx, int n_sms, cudaStream_t stream);
/* The top_k largest of each row, equal ones by lower position, ascending; count[t]: top_k, or -1
 * where there are no more. */
cudaError_t bgk_index_select(int32_t *list, int32_t *count, const float *scores, int64_t stride,
                             const bgk_rows *r, int row0, int n, int top_k, cudaStream_t stream);
/* All three for rows [row0, row0 + n), each the only one of its sequence in the step: the same
 * bits. scores: as above, left as it is by rows that do without. words: for a few rows of few keys,
 * BGK_INDEX_FEW x BGK_INDEX_FEW_KEYS of them, 0 before the first use; NULL: it does without.
 * cudaErrorNotSupported where it is not there: before compute capability 9.0, where scores are not
 * on tensor cores, iq not BGK_ROWS. The next kernel may start when those before are done. */
enum { BGK_INDEX_FEW = 8, BGK_INDEX_FEW_KEYS = 8192 };
cudaError_t bgk_index_rows(int32_t *list, int32_t *count, float *scores, int64_t stride,
                           uint32_t *words, const bgk_index *a, const bgk_out *iq, const float *ik,
                           int64_t ik_cols, const bgk_rows *r, int row0, int n, int top_k,
                           int max_ctx, int n_sms, cudaStream_t stream);
/* index_few.cu: bgk_index_rows() of few rows; it has checked the rest. cudaErrorNotSupported: there
 * is no room for a block. */
bool bgk_index_few_fits(int n, int max_ctx, int n_sms);
cudaError_t bgk_index_few(int32_t *list, int32_t *count, uint32_t *words, const bgk_index *a,
                          const bgk_out *iq, const float *ik, int64_t ik_cols, const bgk_rows *r,
                          int row0, int n, int top_k, int max_ctx, cudaStream_t stream);

/* ---- sample.cu -------------------------------------------------------------------------------
 * A slot's bg_sampling (backend/ops.h), on the device. */
typedef struct bgk_bias {
    int32_t token;
    float bias;
} bgk_bias;
typedef struct bgk_sampling {
    float temperature, top_p, min_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
    int32_t top_k, n_logprobs, min_tokens, n_bias, n_stop, unused;
    uint64_t seed;
    const bgk_bias *bias; /* by token; those of one token in the order in which they are added */
    const int32_t *stop;
} bgk_sampling;

enum { BGK_MAX_TOP = 20 };
typedef struct bgk_top {
    int32_t token;
    float logprob;
} bgk_top;
typedef struct bgk_sampled { /* the head of a bg_sampled */
    int32_t slot, token;
    float logprob; /* NaN: none asked for */
    int32_t n_top;
} bgk_sampled;

typedef struct bgk_sample_args {  /* all on the device */
    float *logits;                /* [n_rows, vocab]; penalties and biases change them in place */
    int n_rows, max_rows, vocab;  /* vocab <= 2^21; scratch is for max_rows */
    const int32_t *slot;          /* [n_rows]; < 0: nothing is read or written for the row */
    const int32_t *len;           /* [n_rows] tokens in the slot's history */
    const int32_t *generated;     /* [n_rows] the last of them, that were sampled */
    const bgk_sampling *settings; /* [slots] */
    int32_t *history;             /* [slots, history_stride]; the token is put down at len */
    int64_t history_stride;
    bgk_sampled *sampled; /* [n_rows] */
    bgk_top *tops;        /* [n_rows, BGK_MAX_TOP], n_top of each written */
    void *scratch; /* bgk_sample_scratch() bytes, 256-byte aligned, zero before its first use */
} bgk_sample_args;

size_t bgk_sample_scratch(int max_rows, int vocab);
/* A token for each row; what it is depends on the row's logits, settings and history alone. */
cudaError_t bgk_sample(const bgk_sample_args *a, cudaStream_t stream);

/* ---- comm.cu: around collectives ----------------------------------------------------------------
 */

enum { BGK_MAX_RANKS = 64 };
/* out[i] = parts[i] + parts[part + i] + parts[2 part + i] + ... over n_ranks parts, i < n. part >=
 * n. out may be one of the parts (element i is read and written by one thread). */
cudaError_t bgk_sum_ranks(float *out, const float *parts, int64_t part, int n_ranks, int64_t n,
                          cudaStream_t stream);
/* out[t, start_r + j] = in[r][t][j] for j < widths[r] (host), start_r the sum of the widths before;
 * in: [n_ranks, rows, shard_cols]. only >= 0: in is [rows, shard_cols], rank `only`'s, and stands
 * for all. */
cudaError_t bgk_place_shards(float *out, int64_t out_cols, const float *in, int64_t shard_cols,
                             const int64_t *widths, int n_ranks, int only, int rows,
                             cudaStream_t stream);
/* Sums over the ranks of GPUs that can read and write each other's memory. */
enum {
    BGK_MAX_PEERS = 8,
    BGK_PEER_FLOATS = 1 << 21, /* of a sum */
    BGK_LINE_FLOATS = 1 << 15, /* with BGK_SUM_LINES */
    BGK_PEER_BLOCKS = 96,      /* of a launch */
};
typedef struct bgk_peers {
    /* By rank: bgk_peer_bytes(), 256-byte aligned, zero before the first call. [rank] is this one's
     * own, the others' is mapped. */
    void *memory[BGK_MAX_PEERS];
    int rank, n_ranks;
} bgk_peers;
size_t bgk_peer_bytes(void);
typedef enum bgk_sum {
    BGK_SUM_LINES, /* everyone writes to everyone, with flags among the values: the quickest */
    BGK_SUM_ONCE,  /* everyone reads from everyone */
    BGK_SUM_TWICE, /* everyone adds a slice, and reads the others': the least traffic */
} bgk_sum;
bgk_sum bgk_sum_way(int64_t n, int n_ranks); /* likely the fastest */
/* x = the sum over ranks in rank order, in float32: the same bits on every rank, and whatever the
 * way. 1 <= n <= BGK_PEER_FLOATS, n % 4 == 0, x 16-byte aligned. All ranks call it in the same
 * order with the same n and way; it waits on the device for the others, for ever if one never
 * comes. */
cudaError_t bgk_sum_peers(float *x, int64_t n, const bgk_peers *p, bgk_sum way,
                          cudaStream_t stream);
/* s = the sum over ranks of y, by lines; x += s; out = rms_norm(x): the bits of bgk_sum_peers() and
 * bgk_rms_norm(). For few rows, on compute capability 9.0 and later, out in BGK_TILES, cols and
 * strides multiples of 4, pointers 16-byte aligned; else cudaErrorInvalidValue. y stays. */
bool bgk_sum_peers_norm_fits(int rows, int cols);
cudaError_t bgk_sum_peers_norm(const bgk_out *out, float *x, int64_t x_cols, const float *y,
                               int64_t y_cols, const float *w, float eps, int rows, int cols,
                               const bgk_peers *p, cudaStream_t stream);
/* Takes so long on the stream, and does nothing. */
cudaError_t bgk_stand_in(int64_t ns, cudaStream_t stream);
/* bgk_sum_peers_norm() of a rank that is alone: waits so long for n_ranks - 1 others, who add
 * nothing. */
cudaError_t bgk_stand_in_norm(const bgk_out *out, float *x, int64_t x_cols, const float *y,
                              int64_t y_cols, const float *w, float eps, int rows, int cols,
                              int n_ranks, int64_t ns, cudaStream_t stream);
/* For tests of failures: a kernel that writes to an address that is none, or (hang) one that runs
 * until *never is not 0. */
cudaError_t bgk_fault(bool hang, const int *never, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
