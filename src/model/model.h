/* model/model.h - architectures: checked hyper-parameters, what each rank holds, the forward pass.
 *
 * bg_desc is what the coordinator needs to know of a model (numbers only); bg_model is one rank's
 * share of the weights on its backend, and its forward pass. A family is one C file over
 * backend/ops.h, found through registry.c by general.architecture. */
#ifndef BG_MODEL_MODEL_H
#define BG_MODEL_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/ops.h"
#include "base/error.h"
#include "gguf/gguf.h"

typedef struct bg_arch bg_arch; /* a row of the registry */

/* How positions become angles; resolved from rope.scaling.* by hparams.c, used by rope.c. */
typedef struct bg_rope_scaling {
    bool yarn, longrope;
    float factor;      /* 1: none */
    int n_orig;        /* context before the extension */
    float attn_factor; /* on cos and sin, before YaRN's own */
    float ext_factor, beta_fast, beta_slow;
    float log_mul; /* YaRN's log multiplier; < 0: the key is absent */
    float mul;     /* of the magnitude that log_mul's is divided into; 1 unless the family says */
} bg_rope_scaling;

typedef struct bg_desc {
    const bg_arch *arch;
    char arch_name[32];
    char name[128]; /* general.name, or the file's */
    int n_layers;   /* that run */
    int n_mtp;      /* blocks after them, which predict further tokens: skipped */
    int d_model, d_ff /* of dense layers; 0: none */, vocab_size, n_ctx_train;
    int n_heads, n_kv_heads, head_dim, v_dim, n_rot;
    /* Mixture of experts, in layers from n_dense on; n_experts 0: none. Shared experts are every
     * token's: one FFN of d_ff_shared columns. */
    int n_experts, n_used, n_shared, n_dense, d_ff_expert, d_ff_shared;
    int n_groups, n_groups_used; /* 1: experts are chosen among all */
    bg_gating gating;
    bool renormalise;
    float expert_scale;
    /* Multi-head latent attention; kv_rank 0: none. Heads have head_dim = nope + n_rot values for
     * scores and v_dim for values; all share the cache's one row of kv_rank + n_rot values. */
    int kv_rank, q_rank /* 0: q comes from h itself */, nope;
    bool kv_b; /* the file has k_b and v_b as one matrix, attn_kv_b */
    /* Sparse attention: an indexer chooses index_top_k keys; index_heads 0: none. Layers without an
     * indexer of their own use what the nearest one below chose. */
    int index_heads, index_dim, index_top_k;
    uint64_t index_layers[8]; /* one bit a layer: has an indexer */
    float eps;
    float attn_scale; /* resolved: never 0 */
    float attn_softcap, final_softcap;
    float embed_scale; /* 1 unless the family scales embeddings */
    float rope_base, rope_base_swa;
    float rope_scale, rope_scale_swa; /* s: angles are multiplied by it */
    bg_rope_scaling rope_scaling;     /* of the layers without a window */
    bool rope_neox;
    bool rope_swa_own; /* windowed layers rotate with rope_base_swa and rope_scale_swa, no YaRN */
    bool tied;         /* output is token_embd */
    bg_act_fn act_fn;
    int window, window_period; /* layer l is windowed iff window && l % period < period - 1 */
    uint64_t window_layers[8]; /* one bit a layer, resolved from the period or the array */
    uint64_t n_params, weight_bytes;
    int64_t n_unused;     /* tensors of the file that the architecture does not use */
    char unused_name[96]; /* the first of them */
} bg_desc;

/* Reads and checks hyper-parameters and every tensor's presence and shape. BG_FORMAT: damaged;
 * BG_ARG: an architecture or feature we do not have (named, with the list we have). Tensors the
 * plan does not use are counted in n_unused: worth a warning by the caller. */
bg_status bg_desc_read(bg_desc *d, const bg_gguf *g, bg_error *err);
bool bg_layer_windowed(const bg_desc *d, int layer);
bool bg_layer_moe(const bg_desc *d, int layer);
bool bg_layer_indexed(const bg_desc *d, int layer); /* has an indexer of its own */
/* Takes from a description what runs of at most max_ctx positions do not need: an indexer that
 * could only choose all of them. Its tensors are not loaded then. bg_model_load() does it too. */
void bg_desc_limit(bg_desc *d, int max_ctx);
/* Names of the supported architectures, NULL-terminated. */
const char *const *bg_arch_names(void);

/* What one rank of a replica of tp ranks holds. */
typedef struct bg_shard {
    int rank, tp;
    int head0, n_heads;       /* query heads [head0, head0 + n_heads); may be none */
    int kv_head0, n_kv_heads; /* KV heads those read; shared heads are held by several ranks */
    int ff0, n_ff;            /* rows of gate and up, columns of down */
    int ffe0, n_ffe;          /* the same of every expert */
    int ffs0, n_ffs;          /* the same of the shared experts' FFN; unused if merged */
    bool merged;              /* shared experts are cut and computed as experts are */
    int64_t vocab0, n_vocab;  /* rows of the output matrix */
    uint64_t weight_bytes;    /* as stored in the file */
} bg_shard;

/* The plan. Splits of K fall on quant blocks and may be uneven; every T from 1 to 8 (and more)
 * gives a valid plan, if need be with ranks that have no heads or no FFN columns. BG_ARG: tp < 1 or
 * rank. */
bg_status bg_shard_plan(bg_shard *s, const bg_desc *d, const bg_gguf *g, int rank, int tp,
                        bg_error *err);

/* n matrices of rows x cols: a rank's share of a tensor. */
typedef struct bg_part {
    int64_t rows, cols, n;
} bg_part;
/* false: the model does not use this tensor of the file. The head of a tied model is not counted.
 */
bool bg_shard_part(const bg_shard *s, const bg_desc *d, const bg_gguf *g, const bg_tensor *t,
                   bg_part *part);

/* Bytes of K and V (MLA: of its latent row, and an indexer's keys) of one token on this rank. */
uint64_t bg_kv_bytes_per_token(const bg_desc *d, const bg_shard *s, bg_cache_type type);
/* Bytes of activations (rough) for the backend's configuration. */
uint64_t bg_act_bytes(const bg_desc *d, const bg_shard *s, const bg_backend_config *c);
/* The same on a GPU, logits included; tiled: linears' inputs are halves in tiles. */
uint64_t bg_gpu_act_bytes(const bg_desc *d, const bg_shard *s, const bg_backend_config *c,
                          bool tiled);
/* Multiply-adds of one token's forward pass without attention, of the whole model: of experts those
 * that it uses. */
uint64_t bg_macs_per_token(const bg_desc *d);

typedef struct bg_model bg_model;

typedef struct bg_model_config {
    int rank, tp;
    int n_blocks, block_tokens; /* KV blocks, scratch included */
    bg_cache_type cache_type;
    const bg_backend_config *backend; /* max_tokens, max_out ... as given to the backend */
    void (*progress)(void *ctx, uint64_t done, uint64_t total); /* bytes of weights; NULL: none */
    void *ctx;
} bg_model_config;

/* Loads this rank's weights onto b and makes every buffer. g and b outlive the model: embedding
 * rows are looked up in the file's mapping. BG_ARG, BG_NOMEM, BG_FORMAT. */
bg_status bg_model_load(bg_model **m, const bg_gguf *g, const bg_desc *d, bg_backend *b,
                        const bg_model_config *config, bg_error *err);
void bg_model_free(bg_model *m);
/* All zero on a backend that does not say. */
const bg_load_times *bg_model_load_times(const bg_model *m);

/* One forward pass of the step that bg_model_begin() announced; leaves logits on the backend. */
bg_status bg_model_begin(bg_model *m, const bg_batch *batch, bg_error *err);
bg_status bg_model_forward(bg_model *m, bg_error *err);

/* Steps as jobs run them: forward pass and sampling. Once, before the first of them: */
bg_status bg_model_prepare(bg_model *m, bg_error *err);
/* Starts a step. On a GPU it returns at once, and BG_STEPS_AHEAD steps may be under way; elsewhere
 * the step is computed when it returns, and fetched before the next. */
enum { BG_STEPS_AHEAD = 2 };
bg_status bg_model_step(bg_model *m, const bg_batch *batch, bg_error *err);
bool bg_model_ready(bg_model *m); /* bg_model_fetch() would not wait */
/* The tokens of the oldest step under way, in the order of its sequences; out has max_out places.
 * Waits for them. */
bg_status bg_model_fetch(bg_model *m, bg_sampled *out, int *n, bg_error *err);

#endif
