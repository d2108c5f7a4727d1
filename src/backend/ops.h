/* backend/ops.h - what one rank's device must be able to do: the contract of every backend.
 *
 * A forward pass (src/model/NAME.c) is plain C over the bg_op_* functions below. A backend (cpu,
 * cuda) implements struct bg_ops; bg_op_* adds what is the same for all: the --check poison and
 * verification, and timing by op.
 *
 * Rules that every backend keeps:
 *  - All buffers are made before the first step; nothing is allocated inside a step.
 *  - A row's result depends on that row alone (its own sequence, for attention), bit for bit: not
 * on n_rows, not on its place, not on what else is in the step, not on how a prompt was cut into
 *    chunks. Every sum has an order fixed by the shapes of weights and the position.
 *  - Nothing an op should write is left unwritten; nothing unwritten is read.
 *  - Ops are issued in order on one stream; begin_step .. sample .. fetch form a step.
 * Threads: one caller, the rank's own. */
#ifndef BG_BACKEND_OPS_H
#define BG_BACKEND_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/tune.h"
#include "base/error.h"
#include "comm/comm.h"
#include "gguf/gguf.h"

/* ---- settings ----------------------------------------------------------------------------------
 */

typedef enum bg_compute {
    BG_COMPUTE_NATIVE, /* the backend's fast arithmetic (CPU: activations in 8 bits) */
    BG_COMPUTE_F32,    /* proof mode: weights dequantised exactly, everything else float32 */
} bg_compute;

typedef enum bg_cache_type {
    BG_CACHE_F16,
    BG_CACHE_BF16,
    BG_CACHE_F32,
    BG_CACHE_Q8, /* int8 and a float32 scale for each token and head; CUDA only */
} bg_cache_type;

typedef struct bg_backend_config {
    bg_compute compute;
    int n_threads;   /* CPU: compute threads of this rank, >= 1, the caller's included */
    int first_cpu;   /* CPU: pin threads from this processor on; -1: do not pin */
    bool check;      /* poison before and verify after each op */
    bool profile;    /* time each op; see bg_profile_take() */
    bool eager;      /* GPU: decode steps as single launches, not as graphs */
    bool dummy;      /* GPU: weights are random, made on the device; their data is not read */
    bool fast_math;  /* GPU: a library's products for many rows; results depend on how many */
    bg_comm *comm;   /* NULL: the only rank. Not owned. */
    int max_tokens;  /* rows of the largest step */
    int max_seqs;    /* sequences in the largest step, and slots */
    int max_out;     /* rows of logits in the largest step */
    int max_ctx;     /* positions of the longest sequence */
    int vocab_size;  /* of the whole model */
    const char *isa; /* CPU: NULL = best; "plain", "avx2", "avx512", "avx512vnni": force (tests) */
    const char *tune_table; /* NULL: none; a file of shapes, where a GPU has that choice */
} bg_backend_config;

/* ---- objects ------------------------------------------------------------------------------------
 */

/* Activations: [max_rows, cols], in the backend's element type and layout (CPU: float32 rows). */
typedef struct bg_act {
    void *data;
    int64_t max_rows, cols;
    const char *name;
    int layout; /* the backend's own; 0: rows of float32, all others hold 2 bytes a value */
} bg_act;

/* A small parameter vector on the device: norm weights, rope factors; float32, n values. */
typedef struct bg_vec {
    float *data;
    int64_t n;
    const char *name;
} bg_vec;

typedef struct bg_linear bg_linear; /* opaque, the backend's; out = x W^T + bias */

/* One GGUF tensor's share in a fused linear: rows [row0, row0+n_rows) and columns [col0,
 * col0+n_cols) of a matrix with k_total columns and n_total rows stored at data in GGUF blocks. */
typedef struct bg_linear_part {
    const char *name; /* GGUF tensor, for messages */
    uint32_t type;    /* bg_qtype */
    const void *data;
    int64_t k_total, n_total;
    int64_t row0, n_rows; /* n_rows may be 0: this rank has none */
    int64_t col0,
        n_cols; /* both multiples of the type's block; the same n_cols in all parts; may be 0 */
    const float *bias; /* n_rows values for these rows, or NULL; copied */
} bg_linear_part;

/* Parts are in canonical order (q,k,v; gate,up): output columns of part 0 first, then part 1, ...
 */
typedef struct bg_linear_spec {
    const char *name; /* "blk.3.attn_qkv" */
    int n_parts;
    bg_linear_part parts[4];
    bool glu; /* two parts, gate and up, that only bg_op_linear_glu reads */
    /* Not 0: block-diagonal, one block a head. parts[0] (the only one) is the first block; block i
     * lies i * block_bytes further in the file, reads columns [i * x_stride, + n_cols) of the input
     * and yields output columns [i * n_rows, + n_rows). */
    int n_blocks;
    int64_t block_bytes, x_stride;
} bg_linear_spec;

/* ---- mixture of experts ---- */

typedef enum bg_gating {
    BG_GATING_SOFTMAX, /* over all experts */
    BG_GATING_SIGMOID,
    BG_GATING_SOFTMAX_CHOSEN, /* the logits choose; softmax over those chosen */
} bg_gating;

/* How a layer chooses experts for a token. Host memory, copied. */
typedef struct bg_router_spec {
    const char *name;
    int n_experts, n_used, d_model;
    bg_gating gating;
    const float *weights; /* [n_experts, d_model] */
    const float *bias;    /* NULL, or [n_experts]: added to the logits */
    const float
        *choice_bias; /* NULL, or [n_experts]: added to probabilities, for the choice only */
    int n_groups,
        n_groups_used;        /* n_groups > 1: only the best groups of n_experts / n_groups
                                 consecutive experts; a group counts by the sum of its two largest */
    bool renormalise;         /* weights / max(their sum, 2^-14) */
    float scale;              /* then times this */
    const float *shared_gate; /* NULL, or [d_model]: sigmoid of its product with h is the weight
                                 of what bg_op_moe adds; else that is 1 */
} bg_router_spec;
typedef struct bg_router bg_router;

/* One layer's experts, gated FFNs of one width. Parts are those of expert 0, as in a linear (this
 * rank's rows of gate and up, its columns of down; bias NULL); expert e lies e * ..._stride bytes
 * further. n_shared more experts, every token's with weight 1, are in the shared_ parts: there
 * expert i has the rows (down: columns) that begin shared_step * i after the part's own. */
typedef struct bg_experts_spec {
    const char *name;
    int n_experts, n_used, n_shared;
    bg_linear_part gate, up, down;
    size_t gate_stride, up_stride, down_stride;
    bg_linear_part shared_gate, shared_up, shared_down;
    int64_t shared_step;
    const float *gate_bias, *up_bias; /* NULL, or [n_experts, gate.n_rows]; host, copied */
    const float *down_bias;           /* NULL, or [n_experts, down.n_rows]: inside the weighting */
    int fn;                           /* bg_act_fn */
} bg_experts_spec;
typedef struct bg_experts bg_experts;

/* A token embedding table: [vocab, d] rows in GGUF blocks, looked up by id. Replicated. */
typedef struct bg_embedding bg_embedding;

/* Where the time of loading went. Reading, copying and repacking overlap. */
typedef struct bg_load_times {
    int64_t bytes;              /* brought to the device */
    int64_t total_ns;           /* from the first weight to the last */
    int64_t read_ns;            /* from the file into pinned memory */
    int64_t wait_ns;            /* the reader had to wait for the device */
    int64_t copy_ns, repack_ns; /* the device was busy with it */
} bg_load_times;
/* "4.9 GB in 1.20 s (reading 0.91 s, waiting 0.08 s; the GPU: copies 0.31 s, repacking 0.12 s)"; ""
 * where nothing was measured. */
void bg_load_times_text(const bg_load_times *t, char *out, size_t size);

/* The KV cache of one rank: [n_layers, n_blocks, n_kv_heads, block_tokens, head_dim] for K and V.
 */
typedef struct bg_cache_spec {
    int n_layers, n_blocks, block_tokens; /* block 0 is scratch */
    int n_kv_heads;                       /* of this rank; may be 0 */
    int k_dim, v_dim;                     /* values of one head */
    bg_cache_type type;                   /* F32 compute uses BG_CACHE_F32 */
    /* Not 0: MLA. n_kv_heads is 1, a token has k_dim values, the first `latent` of them (normed)
     * are its value too; v_dim == latent. */
    int latent;
    /* Keys of indexers besides: one of index_dim values a token, in n_index layers. 0: none. */
    int n_index, index_dim;
    int index_top_k;
} bg_cache_spec;

/* Precomputed rotation: angle of pair i at position p is p * freq[i]; cos and sin times mscale. */
typedef struct bg_rope {
    const float *freq; /* host, n_rot/2 values: s * b^(-2i/nr) / ff_i, YaRN applied */
    int n_rot;         /* leading elements of a head that rotate */
    bool neox;         /* pairs (i, i+n_rot/2); else (2i, 2i+1) */
    float mscale;
} bg_rope;

/* qkv -> rope -> cache: optional per-head norms, rotation, K and V stored, q left in q_out. */
typedef struct bg_attn_in {
    int layer;
    int n_heads, n_kv_heads; /* of this rank */
    int head_dim, v_dim;
    const bg_vec *q_norm, *k_norm; /* NULL: none; else RMS over each head's head_dim values */
    float norm_eps;
    const bg_rope *rope; /* NULL: no rotation */
} bg_attn_in;

typedef struct bg_attn {
    int layer;
    int n_heads, n_kv_heads; /* of this rank; may be 0 */
    int head0, kv_head0;     /* global number of this rank's first query head and KV head */
    int group;               /* global n_heads / n_kv_heads: head h reads KV head h / group */
    int head_dim, v_dim;
    float scale;
    float softcap;       /* 0: none */
    int window;          /* 0: none; else a query at p sees keys j with p - j < window */
    const bg_vec *sinks; /* NULL: none; else one per local head */
} bg_attn;

/* BG_SWIGLU_CLAMP: g' = min(g, 7), u' = clamp(u, -7, 7): g' sigmoid(1.702 g') (u' + 1); the others
 * are fn(g) u. */
typedef enum bg_act_fn { BG_SILU, BG_GELU_TANH, BG_GELU_ERF, BG_SWIGLU_CLAMP } bg_act_fn;

/* ---- multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), absorbed form ---- */

/* in[t] = [q latent (q_rank) | kv latent (kv_rank) | rope key (n_rot)], from one fused linear. */
typedef struct bg_mla_in {
    int layer;
    int q_rank; /* 0: the model has none */
    int kv_rank;
    const bg_vec *q_norm, *kv_norm; /* RMS; q_norm NULL with q_rank 0 */
    float norm_eps;
    const bg_rope *rope; /* of n_rot values */
} bg_mla_in;

typedef struct bg_mla {
    int layer;
    int n_heads;              /* of this rank; may be 0 */
    int kv_rank, nope, n_rot; /* q[t] = heads of nope + n_rot values, the latter not rotated yet */
    float scale;
    const bg_rope *rope;
    bool selected; /* only the keys that the last bg_op_index chose */
} bg_mla;

/* The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2-Exp). */
typedef struct bg_index {
    int index_layer; /* 0 .. n_index - 1 of the cache */
    int n_heads, dim, top_k;
    int64_t ik_col0; /* the key's first column in `ik`; behind its dim the heads' weights */
    const bg_vec *k_norm, *k_norm_b; /* LayerNorm of the key */
    float norm_eps;
    const bg_rope *rope; /* of the first rope->n_rot values of query heads and of the key */
    float scale;         /* on the heads' weights */
} bg_index;

/* ---- sampling ---------------------------------------------------------------------------------
 */

enum { BG_MAX_TOP_LOGPROBS = 20 };

typedef struct bg_logit_bias {
    int32_t token;
    float bias; /* added to the logit before everything else; -100 or less bans it */
} bg_logit_bias;

/* Order: logits + bias; banned ids (end-of-generation ids while fewer than min_tokens are out) get
 * -inf; penalties over the sequence's own history (repetition: prompt and output, as in CTRL,
 * arXiv:1909.05858; presence and frequency: output only); logprobs are taken here from the
 * log-softmax; temperature; then top_k, top_p and min_p over the tempered probabilities, in that
 * order, ties kept by lower id; then Gumbel-max with bg_sample_word(seed, n_generated, id).
 * temperature 0: the first largest logit after penalties. */
typedef struct bg_sampling {
    float temperature;                         /* 0: greedy */
    int32_t top_k;                             /* 0: off */
    float top_p;                               /* 1: off */
    float min_p;                               /* 0: off */
    float repetition_penalty;                  /* 1: off */
    float presence_penalty, frequency_penalty; /* 0: off */
    int32_t n_logprobs; /* -1: none; else the chosen token's and this many best, <= 20 */
    int32_t min_tokens;
    uint64_t seed;
    int32_t n_bias;
    const bg_logit_bias *bias; /* n_bias entries */
    int32_t n_stop_ids;
    const int32_t
        *stop_ids; /* ids banned until min_tokens: end-of-generation ids and the request's own */
} bg_sampling;

typedef struct bg_top {
    int32_t token;
    float logprob;
} bg_top;

typedef struct bg_sampled {
    int32_t slot;
    int32_t token;
    float logprob; /* NaN when n_logprobs < 0 */
    int32_t n_top;
    bg_top top[BG_MAX_TOP_LOGPROBS]; /* best first, ties by lower id */
} bg_sampled;

/* ---- a step -----------------------------------------------------------------------------------
 */

/* A slot is a seat of a sequence on the rank: its token history, sampling settings and random
 * state. The tokens of a step come from the slot's history, so the host need not know them: a
 * decode row's token may have been sampled one step before and never left the device. */
typedef struct bg_seq_step {
    int32_t slot;
    int32_t pos0;     /* first position computed in this step */
    int32_t n_tokens; /* positions pos0 .. pos0 + n_tokens - 1 */
    int32_t n_blocks; /* entries in its block table: at least those that cover the last position */
    const int32_t *blocks;
    bool sample; /* the last row yields logits and a sampled token, appended to the history */
} bg_seq_step;

typedef struct bg_batch {
    int n_seqs;
    const bg_seq_step *seqs;
    bool all_logits; /* every row yields logits (bench, goldens); no sampling then */
} bg_batch;

/* ---- the vtable ---------------------------------------------------------------------------------
 */

typedef struct bg_backend bg_backend;
/* Memory traffic and arithmetic of an op by itself: what it reads and writes, once. (Traffic
 * between ranks is not counted.) */
typedef struct bg_cost {
    double bytes, flops;
} bg_cost;
typedef bg_status bg_forward(void *ctx, bg_error *err); /* a forward pass: ops, ending in logits */

typedef struct bg_ops {
    const char *name;
    void (*free)(bg_backend *b); /* and everything made from it */

    bg_status (*act_new)(bg_backend *b, bg_act *a, const char *name, int64_t max_rows, int64_t cols,
                         bg_error *err);
    /* NULL: as act_new. What only linears read (and one op writes): in the layout they want. */
    bg_status (*act_input_new)(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                               int64_t cols, bg_error *err);
    /* NULL or false: linear_glu is a linear into a buffer of its own and a glu. */
    bool (*fuses_glu)(const bg_backend *b);
    bg_status (*vec_new)(bg_backend *b, bg_vec *v, const char *name, const float *host, int64_t n,
                         bg_error *err);
    bg_status (*linear_new)(bg_backend *b, bg_linear **l, const bg_linear_spec *spec,
                            bg_error *err);
    bg_status (*embedding_new)(bg_backend *b, bg_embedding **e, const bg_tensor *t, bg_error *err);
    bg_status (*router_new)(bg_backend *b, bg_router **r, const bg_router_spec *spec,
                            bg_error *err);
    bg_status (*experts_new)(bg_backend *b, bg_experts **e, const bg_experts_spec *spec,
                             bg_error *err);
    /* NULL: nothing to do. After the last of the weights: waits for what is still on its way, and
     * frees what loading alone needed. */
    bg_status (*load_end)(bg_backend *b, bg_load_times *times, bg_error *err);
    bg_status (*cache_new)(bg_backend *b, const bg_cache_spec *spec, bg_error *err);

    /* tokens: the whole history so far (prompt, then n_generated output tokens at its end). */
    bg_status (*slot_seat)(bg_backend *b, int slot, const bg_sampling *s, const int32_t *tokens,
                           int n_tokens, int n_generated, bg_error *err);
    bg_status (*begin_step)(bg_backend *b, const bg_batch *batch, bg_error *err); /* copies batch */
    int (*n_rows)(const bg_backend *b); /* tokens in the step */
    int (*n_out)(const bg_backend *b);  /* rows that yield logits */

    bg_status (*embed)(bg_backend *b, bg_act *out, const bg_embedding *e, float scale,
                       bg_error *err);
    bg_status (*rms_norm)(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w, float eps,
                          int n_rows, bg_error *err);
    bg_status (*add)(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err);
    bg_status (*add_rms_norm)(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                              const bg_vec *w, float eps, bg_error *err);
    /* NULL: rms_norm and add_rms_norm. y's values are undefined after it. */
    bg_status (*norm_add_norm)(bg_backend *b, bg_act *out, bg_act *x, bg_act *y, const bg_vec *post,
                               const bg_vec *w, float eps, bg_error *err);
    /* NULL: all_reduce and add_rms_norm; as where fuses_sum() says no, for the present step. */
    bool (*fuses_sum)(const bg_backend *b, const bg_act *out, const bg_act *y);
    bg_status (*all_reduce_norm)(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                                 const bg_vec *w, float eps, bg_error *err);
    bg_status (*linear)(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x, int n_rows,
                        bg_error *err);
    bg_status (*rope_store)(bg_backend *b, bg_act *q_out, const bg_act *qkv, const bg_attn_in *p,
                            bg_error *err);
    bg_status (*attention)(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                           bg_error *err);
    bg_status (*glu)(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn,
                     bg_error *err);
    bg_status (*linear_glu)(bg_backend *b, bg_act *out, const bg_linear *gate_up, const bg_act *x,
                            bg_act_fn fn, bg_error *err); /* where fuses_glu() */
    bg_status (*route)(bg_backend *b, bg_act *route, const bg_router *r, const bg_act *h,
                       bg_error *err);
    bg_status (*moe)(bg_backend *b, bg_act *out, const bg_experts *e, const bg_act *route,
                     const bg_act *h, const bg_act *add, bg_error *err);
    bg_status (*mla_store)(bg_backend *b, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                           bg_error *err);
    bg_status (*mla_query)(bg_backend *b, bg_act *q_lat, const bg_linear *k_b, const bg_act *q,
                           bg_error *err);
    bg_status (*mla_attention)(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                               const bg_mla *p, bg_error *err);
    bg_status (*index)(bg_backend *b, const bg_act *iq, const bg_act *ik, const bg_index *p,
                       bg_error *err);
    bg_status (*all_reduce)(bg_backend *b, bg_act *x, bg_error *err);
    bg_status (*gather_out)(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err);
    bg_status (*logits)(bg_backend *b, const bg_linear *head, const bg_act *x,
                        const int64_t *rank_rows, float softcap, bg_error *err);
    bg_status (*sample)(bg_backend *b, bg_error *err);
    bg_status (*fetch)(bg_backend *b, bg_sampled *out, int *n, bg_error *err);
    /* NULL: a step is what its ops do, done when they return. Else: step() begins a step and starts
     * forward and sampling - these ops, or a graph of them - and returns; ready(): fetch, which
     * gives the oldest of such steps, would not wait. prepare(): once, before the first step. */
    bg_status (*prepare)(bg_backend *b, bg_forward *forward, void *ctx, bg_error *err);
    bg_status (*step)(bg_backend *b, const bg_batch *batch, bg_forward *forward, void *ctx,
                      bg_error *err);
    bool (*ready)(bg_backend *b);
    bg_status (*fetch_logits)(bg_backend *b, float *out, bg_error *err);

    void (*poison)(bg_backend *b, bg_act *a, int64_t rows); /* NaN in all columns */
    /* Over the first cols columns of the first rows; false: the first place that is not finite. */
    bool (*all_finite)(bg_backend *b, const bg_act *a, int64_t rows, int64_t cols, int64_t *row,
                       int64_t *col);
    void (*sync)(bg_backend *b);
    /* NULL: unknown. Of the steps fetched so far: time at work, and time between them in which the
     * device had nothing to do. */
    void (*device_times)(const bg_backend *b, int64_t *work_ns, int64_t *idle_ns);
    int64_t (*linear_rows)(const bg_linear *l); /* N: columns that the op linear writes */

    uint64_t (*memory)(const bg_backend *b); /* bytes held on the device */

    /* Around every op, profiled or not: ranges for tracers, and with profile marks in the stream;
     * op_times adds what lies between these to op_ns and op_calls, and waits for it. NULL:
     * profiling syncs after each op and reads the host's clock. */
    void (*op_begin)(bg_backend *b, int kind);
    void (*op_end)(bg_backend *b, int kind);
    void (*op_times)(bg_backend *b);
    /* Weights read once, and products; without activations. NULL: not counted. */
    void (*linear_cost)(const bg_backend *b, const bg_linear *l, int64_t n_rows, bg_cost *cost);
    /* The same of bg_op_moe: each expert's weights times the share of steps of n_rows rows that
     * reads it if all are as likely. NULL: not counted. */
    void (*moe_cost)(const bg_backend *b, const bg_experts *e, int64_t n_rows, bg_cost *cost);
    void (*mla_cost)(const bg_backend *b, const bg_mla *p, bg_cost *cost); /* as attention_cost */
    /* Keys and values of the present step's sequences read once, and products. NULL: not counted.
     */
    void (*attention_cost)(const bg_backend *b, const bg_attn *p, bg_cost *cost);
    /* What the device can do in a second, measured where that is quick; 0: not known. NULL: the
     * host's memory. */
    void (*roofs)(bg_backend *b, bg_cost *per_second);
    /* NULL: there is nothing to choose. Once all weights are loaded, before prepare(): tries how
     * each linear is multiplied fastest and does so from then on; the same results. */
    bg_status (*tune)(bg_backend *b, bg_tune *report, bg_error *err);
} bg_ops;

enum { BG_OP_KINDS = 24 };

struct bg_backend { /* the head of every backend's own struct */
    const bg_ops *ops;
    bool check, profile;
    int64_t op_ns[BG_OP_KINDS];
    int64_t op_calls[BG_OP_KINDS];
    bg_cost op_cost[BG_OP_KINDS]; /* with profile */
    double logits_bytes;          /* of the last op logits */
};

typedef struct bg_profile {
    int64_t ns[BG_OP_KINDS], calls[BG_OP_KINDS];
    bg_cost cost[BG_OP_KINDS];
} bg_profile;

/* What ops took and cost since the last call, with b->profile set. Waits for them. */
void bg_profile_take(bg_backend *b, bg_profile *p);

/* The embedded default. Fails with BG_NOMEM, or BG_ARG for an isa this processor lacks. */
bg_status bg_cpu_backend_new(bg_backend **b, const bg_backend_config *config, bg_error *err);
void bg_backend_free(bg_backend *b); /* NULL is allowed */

/* ---- ops as models call them
 * --------------------------------------------------------------------- n_rows below is the step's
 * token count unless given. `out` never overlaps an input unless said. */

/* out[t,:] = scale * E[token of row t] */
bg_status bg_op_embed(bg_backend *b, bg_act *out, const bg_embedding *e, float scale,
                      bg_error *err);
/* out[t,i] = x[t,i] / sqrt(mean_j x[t,j]^2 + eps) * w[i] for n_rows rows (the step's tokens, or
 * n_out after gather_out). out == x allowed. */
bg_status bg_op_rms_norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w, float eps,
                         int n_rows, bg_error *err);
/* x += y */
bg_status bg_op_add(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err);
/* x += y; out = rms_norm(x) */
bg_status bg_op_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                             const bg_vec *w, float eps, bg_error *err);
/* x += rms_norm(y) with weights post; out = rms_norm(x) with weights w. y's values are undefined
 * after it. */
bg_status bg_op_norm_add_norm(bg_backend *b, bg_act *out, bg_act *x, bg_act *y, const bg_vec *post,
                              const bg_vec *w, float eps, bg_error *err);
/* out[t, 0..N) = x[t, 0..K) W^T + bias, N the sum of the parts' rows; out.cols >= N, x.cols >= K,
 * rows strided by cols. n_cols == 0: out = bias or 0. */
bg_status bg_op_linear(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x, int n_rows,
                       bg_error *err);
/* qkv[t] = q heads, k heads, v heads (this rank's). Writes K and V of every row at its position
 * into the cache and the rotated q into q_out [t, n_heads*head_dim]. */
bg_status bg_op_rope_store(bg_backend *b, bg_act *q_out, const bg_act *qkv, const bg_attn_in *p,
                           bg_error *err);
/* Causal attention over the cache (this step's own keys were stored before):
 * out[t, h*v_dim..] = sum_j softmax_j(scale * q.k_j [softcap]) v_j. Float32 arithmetic. */
bg_status bg_op_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                          bg_error *err);
/* out[t,i] = fn(gate_up[t,i]) * gate_up[t, F+i], F = out.cols (this rank's) */
bg_status bg_op_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn, bg_error *err);
/* The two together: out = fn(x Wgate^T) * (x Wup^T); gate_up is where the linear writes, unless the
 * backend fuses them and needs none (gate_up.max_rows 0). */
bg_status bg_op_linear_glu(bg_backend *b, bg_act *out, bg_act *gate_up, const bg_linear *l,
                           const bg_act *x, bg_act_fn fn, bg_error *err);
/* route[t] = the n_used experts chosen for h[t], best first (their numbers, as floats), then their
 * n_used weights, then the weight of bg_op_moe's `add`: cols >= 2 n_used + 1. Choice by value,
 * equal ones by lower number; float32, so all ranks of a replica choose the same. h: an input
 * buffer. Without --check a backend may leave it to moe, which comes next. */
bg_status bg_op_route(bg_backend *b, bg_act *route, const bg_router *r, const bg_act *h,
                      bg_error *err);
/* out[t] = sum over the chosen, in the order of route, of weight * (down_e(fn(gate_e h) * up_e h) +
 * down_bias_e), + the shared experts', + route's last weight * add[t] (add NULL: nothing). The sums
 * of this rank's columns alone. out == add is allowed. */
bg_status bg_op_moe(bg_backend *b, bg_act *out, const bg_experts *e, const bg_act *route,
                    const bg_act *h, const bg_act *add, bg_error *err);
/* qa[t] = rms(q latent) (an input buffer; NULL with q_rank 0); the cache gets [rms(kv latent) |
 * rope key, rotated] of every row at its position. Without --check a backend may leave it, and one
 * linear of something else behind it, to the linear of qa, which comes next. */
bg_status bg_op_mla_store(bg_backend *b, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                          bg_error *err);
/* q_lat[t, h * kv_rank ..] = k_b's block h times q's head h (its first nope values). q and q_lat
 * are input buffers (only linears and MLA read them). */
bg_status bg_op_mla_query(bg_backend *b, bg_act *q_lat, const bg_linear *k_b, const bg_act *q,
                          bg_error *err);
/* out[t, h * kv_rank ..] = sum_j softmax_j(scale (q_lat_h . c_j + rope(q_h's last n_rot) . kr_j))
 * c_j over the cache's rows [c_j | kr_j], causal. out: an input buffer. */
bg_status bg_op_mla_attention(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                              const bg_mla *p, bg_error *err);
/* iq[t] = n_heads heads of dim values; ik[t] = [ik_col0 others | key (dim) | the heads' weights
 * (n_heads)]. Stores rope(layer_norm(key)) in the cache; for each row the top_k positions by
 *     score(j) = sum_heads scale * weight * relu(rope(iq_head) . key_j),  j <= position,
 * equal ones by lower position, are what bg_op_mla_attention with `selected` sees from now on (all,
 * where there are no more than top_k). */
bg_status bg_op_index(bg_backend *b, const bg_act *iq, const bg_act *ik, const bg_index *p,
                      bg_error *err);
/* Sum over the replica's ranks, in rank order; nothing to do without a comm. */
bg_status bg_op_all_reduce(bg_backend *b, bg_act *x, bg_error *err);
/* y = its sum over ranks; x += y; out = rms_norm(x): all_reduce and add_rms_norm, bit for bit. y's
 * values are undefined after it. */
bg_status bg_op_all_reduce_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, bg_act *y,
                                        const bg_vec *w, float eps, bg_error *err);
/* out[j,:] = x[row of output j,:] for the n_out rows that yield logits */
bg_status bg_op_gather_out(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err);
/* logits[n_out, vocab] = x head^T; head holds this rank's rank_rows[rank] rows of the vocabulary
 * (NULL: all of them); gathered over ranks in rank order; softcap as in attention (0: none). Kept
 * by the backend. */
bg_status bg_op_logits(bg_backend *b, const bg_linear *head, const bg_act *x,
                       const int64_t *rank_rows, float softcap, bg_error *err);
/* Samples each out row for its slot (settings: bg_sampling) and appends it to the slot's history.
 */
bg_status bg_op_sample(bg_backend *b, bg_error *err);
/* The step's sampled tokens in the order of its sequences: waits for them. out has max_out places.
 */
bg_status bg_op_fetch(bg_backend *b, bg_sampled *out, int *n, bg_error *err);
/* The step's logits, n_out * vocab floats. */
bg_status bg_op_fetch_logits(bg_backend *b, float *out, bg_error *err);

const char *bg_op_kind_name(int kind); /* NULL past the last; bench prints by these */
typedef enum bg_op_group {
    BG_OPS_GEMM,
    BG_OPS_ATTENTION,
    BG_OPS_COLLECTIVES,
    BG_OPS_OTHER
} bg_op_group;
bg_op_group bg_op_kind_group(int kind);

#endif
