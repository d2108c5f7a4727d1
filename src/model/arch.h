/* model/arch.h - what the files of this folder share: tensor roles, the registry's rows, a model.
 *
 * A role is a tensor an architecture may have. Its shape is named by dimensions of the model
 * (bg_dim), and how a rank's share is cut follows from them: a matrix whose rows are DIM_Q is cut
 * by query heads, one whose columns are DIM_FF by the FFN's width, and so on (plan.c). */
#ifndef BG_MODEL_ARCH_H
#define BG_MODEL_ARCH_H

#include "model/model.h"

enum { BG_MAX_LAYERS = 512 };

typedef enum bg_dim {
    DIM_NONE,  /* second dimension of a vector */
    DIM_MODEL, /* d_model */
    DIM_Q,     /* n_heads * head_dim, cut by query heads */
    DIM_K,     /* n_kv_heads * head_dim, cut by KV heads */
    DIM_V,     /* n_kv_heads * v_dim, cut by KV heads */
    DIM_QKV,   /* DIM_Q + DIM_K + DIM_V: three ranges, never one */
    DIM_ATT,   /* n_heads * v_dim, cut by query heads */
    DIM_FF,    /* d_ff, cut in quant blocks */
    DIM_VOCAB, /* vocabulary, cut by rows */
    DIM_IDS,   /* vocabulary, held by every rank */
    DIM_HEAD,  /* head_dim */
    DIM_PAIRS, /* n_rot / 2 */
    DIM_HEADS, /* n_heads */
    DIM_FF2,   /* gate and up in one: two ranges of DIM_FF */
    DIM_EXPERTS,
    DIM_FFE,  /* an expert's width, cut in quant blocks */
    DIM_FFE2, /* two ranges of DIM_FFE */
    DIM_FFS,  /* width of the shared experts' FFN, cut in quant blocks */
    DIM_Q_RANK,
    DIM_KV_RANK,
    DIM_KV_A, /* kv_rank + n_rot */
    DIM_NOPE,
    DIM_V_HEAD, /* v_dim */
    DIM_KV_B,   /* n_heads * (nope + v_dim), cut by query heads */
    DIM_INDEX_Q,
    DIM_INDEX,
    DIM_INDEX_HEADS,
} bg_dim;

typedef enum bg_role {
    ROLE_TOKEN_EMBD,
    ROLE_OUTPUT_NORM,
    ROLE_OUTPUT,
    ROLE_OUTPUT_B,
    ROLE_ROPE_FREQS,
    ROLE_ROPE_LONG,
    ROLE_ROPE_SHORT,
    ROLE_ATTN_NORM, /* from here on one a layer */
    ROLE_Q,
    ROLE_K,
    ROLE_V,
    ROLE_QKV, /* instead of the three */
    ROLE_Q_B,
    ROLE_K_B,
    ROLE_V_B,
    ROLE_QKV_B,
    ROLE_Q_NORM,
    ROLE_K_NORM,
    ROLE_O,
    ROLE_O_B,
    ROLE_POST_ATTN_NORM,
    ROLE_FFN_NORM,
    ROLE_GATE,
    ROLE_UP,
    ROLE_DOWN,
    ROLE_GATE_B,
    ROLE_UP_B,
    ROLE_DOWN_B,
    ROLE_POST_FFN_NORM,
    ROLE_FFN_NORM_2, /* before the FFN, in families that name it post_attention_norm */
    ROLE_GATE_UP,    /* ffn_up of families that hold both in it */
    ROLE_SINKS,
    ROLE_ROUTER,
    ROLE_ROUTER_B,
    ROLE_CHOICE_B,
    ROLE_GATE_EXPS,
    ROLE_UP_EXPS,
    ROLE_DOWN_EXPS,
    ROLE_GATE_UP_EXPS, /* instead of the two */
    ROLE_GATE_EXPS_B,
    ROLE_UP_EXPS_B,
    ROLE_DOWN_EXPS_B,
    ROLE_GATE_SHEXP,
    ROLE_UP_SHEXP,
    ROLE_DOWN_SHEXP,
    ROLE_ROUTER_SHEXP,
    ROLE_Q_A,
    ROLE_Q_A_NORM,
    ROLE_Q_B_LORA, /* attn_q_b */
    ROLE_KV_A,
    ROLE_KV_A_NORM,
    ROLE_K_B_MLA, /* attn_k_b */
    ROLE_V_B_MLA, /* attn_v_b */
    ROLE_KV_B,    /* instead of the two */
    ROLE_INDEX_Q,
    ROLE_INDEX_K,
    ROLE_INDEX_K_NORM,
    ROLE_INDEX_K_NORM_B,
    ROLE_INDEX_PROJ,
    N_ROLES
} bg_role;
_Static_assert((int)N_ROLES <= 64, "a set of roles is 64 bits");

#define ROLE(r)      (UINT64_C(1) << (r))
#define ROLES_GLOBAL (ROLE(ROLE_TOKEN_EMBD) | ROLE(ROLE_OUTPUT_NORM))
#define ROLES_QKV    (ROLE(ROLE_Q) | ROLE(ROLE_K) | ROLE(ROLE_V))
#define ROLES_QKV_B  (ROLE(ROLE_Q_B) | ROLE(ROLE_K_B) | ROLE(ROLE_V_B))
#define ROLES_ATTN   (ROLE(ROLE_ATTN_NORM) | ROLES_QKV | ROLE(ROLE_O))
#define ROLES_FFN    (ROLE(ROLE_GATE) | ROLE(ROLE_UP) | ROLE(ROLE_DOWN))
#define ROLES_DENSE  (ROLES_ATTN | ROLE(ROLE_FFN_NORM))
#define ROLES_MOE \
    (ROLE(ROLE_ROUTER) | ROLE(ROLE_GATE_EXPS) | ROLE(ROLE_UP_EXPS) | ROLE(ROLE_DOWN_EXPS))
#define ROLES_SHARED (ROLE(ROLE_GATE_SHEXP) | ROLE(ROLE_UP_SHEXP) | ROLE(ROLE_DOWN_SHEXP))
#define ROLES_MLA_KV (ROLE(ROLE_K_B_MLA) | ROLE(ROLE_V_B_MLA))
#define ROLES_MLA_Q  (ROLE(ROLE_Q_A) | ROLE(ROLE_Q_A_NORM) | ROLE(ROLE_Q_B_LORA))
#define ROLES_MLA                                                                                 \
    (ROLE(ROLE_ATTN_NORM) | ROLES_MLA_Q | ROLE(ROLE_KV_A) | ROLE(ROLE_KV_A_NORM) | ROLES_MLA_KV | \
     ROLE(ROLE_O) | ROLE(ROLE_FFN_NORM))
#define ROLES_INDEX                                                      \
    (ROLE(ROLE_INDEX_Q) | ROLE(ROLE_INDEX_K) | ROLE(ROLE_INDEX_K_NORM) | \
     ROLE(ROLE_INDEX_K_NORM_B) | ROLE(ROLE_INDEX_PROJ))

/* Roles of a layer. Matrices that a file may hold in another form (attn_qkv; ffn_gate_up_exps;
 * attn_kv_b; attn_q without q_a) are named in their first form. */
struct bg_arch {
    const char *name;
    uint64_t need, may;           /* in every layer; and global ones */
    uint64_t dense, may_dense;    /* besides, in layers with a dense FFN */
    uint64_t experts, may_expert; /* in the others; 0: the architecture has no experts */
    bool always_experts;          /* a file without experts is none of its */
    bool mla;
    /* Sets what differs from the common defaults; the common part of *d has been read. */
    bg_status (*read)(bg_desc *d, const bg_gguf *g, bg_error *err);
    bg_status (*forward)(bg_model *m, bg_error *err);
};

extern const bg_arch bg_arch_llama, bg_arch_qwen2, bg_arch_qwen3, bg_arch_gemma3, bg_arch_qwen2moe,
    bg_arch_qwen3moe, bg_arch_glm4, bg_arch_glm4moe, bg_arch_gpt_oss, bg_arch_deepseek2,
    bg_arch_glm_dsa;

const bg_arch *bg_arch_find(const char *name, size_t n); /* NULL: not one of ours */

/* ---- metadata (hparams.c): keys are given without "ARCH." ----------------------------------- */

/* Values outside lo..hi, and a missing key when def is below lo: BG_FORMAT, naming the key. A key
 * that may be an array with one element a layer must have the same value in all of them. */
bg_status bg_hparam_int(const bg_desc *d, const bg_gguf *g, const char *key, int64_t def,
                        int64_t lo, int64_t hi, int *v, bg_error *err);
bg_status bg_hparam_float(const bg_desc *d, const bg_gguf *g, const char *key, double def,
                          double lo, double hi, float *v, bg_error *err);
bg_status bg_hparam_bool(const bg_desc *d, const bg_gguf *g, const char *key, bool def, bool *v,
                         bg_error *err);
/* One value a layer, true or not, into a set like window_layers. *found: the key is there. */
bg_status bg_hparam_layers(const bg_desc *d, const bg_gguf *g, const char *key, uint64_t *set,
                           bool *found, bg_error *err);
/* attention.sliding_window_pattern: a period or one value a layer. Sets window_layers. */
bg_status bg_hparam_windows(bg_desc *d, const bg_gguf *g, int default_period, bg_error *err);

/* experts.c: what the expert_* keys say, checked; gating is SOFTMAX, renormalise as its key says.
 */
bg_status bg_experts_read(bg_desc *d, const bg_gguf *g, bg_error *err);
/* expert_feed_forward_length; def 0: the key must be there. Shared experts get n_shared times it.
 */
bg_status bg_expert_width(bg_desc *d, const bg_gguf *g, int def, bg_error *err);
bg_status bg_hparam_gating(bg_desc *d, const bg_gguf *g, bg_gating def, bg_error *err);
/* mla.c: what rope.dimension_count and the *_lora_rank and *_mla keys say. */
bg_status bg_mla_read(bg_desc *d, const bg_gguf *g, bg_error *err);
/* After rope and the family's own: q_rank by the tensors that exist, attn_scale. */
bg_status bg_mla_resolve(bg_desc *d, const bg_gguf *g, bg_error *err);

/* ---- tensors (tensors.c) -------------------------------------------------------------------- */

typedef struct bg_role_info {
    const char *name; /* after "blk.N." where one a layer */
    bg_dim in, out;   /* ne[0] and ne[1] */
    bg_dim depth;     /* ne[2] */
} bg_role_info;

const bg_role_info *bg_role_get(bg_role r);
int64_t bg_dim_size(const bg_desc *d, bg_dim dim);
/* The tensor of a role; layer is ignored for global roles. NULL: the file has none. */
const bg_tensor *bg_role_tensor(const bg_gguf *g, bg_role r, int layer);
/* The roles that a layer has in this file, each looked up already: need, and those it may have. */
typedef struct bg_layer_roles {
    uint64_t need, may;
    uint64_t wrong;   /* of the other form than the layer's: no tensor may have them */
    uint64_t ignored; /* tensors that some files have and no run uses */
} bg_layer_roles;
bg_layer_roles bg_roles_of(const bg_desc *d, const bg_gguf *g, int layer);
/* What a tensor of the file is used as; N_ROLES: it is not. known: but we know what it is. */
bg_role bg_tensor_role(const bg_desc *d, const bg_gguf *g, const bg_tensor *t, bool *known);
bg_status bg_tensors_check(bg_desc *d, const bg_gguf *g, bg_error *err);

/* ---- what a rank holds (plan.c) ------------------------------------------------------------- */

typedef struct bg_range {
    int64_t at, n;
} bg_range;

bg_range bg_shard_range(const bg_shard *s, const bg_desc *d, bg_dim dim);
/* Rows of the vocabulary that a rank holds. */
bg_range bg_vocab_range(const bg_desc *d, int rank, int tp);

/* ---- rotation (rope.c) ---------------------------------------------------------------------- */

/* freq: n_rot/2 values for layers with (windowed) or without a window; factors: NULL or n_rot/2. */
void bg_rope_table(const bg_desc *d, bool windowed, const float *factors, float *freq,
                   float *mscale);

/* ---- a loaded model ------------------------------------------------------------------------- */

typedef struct bg_layer {
    bg_vec attn_norm, post_attn_norm, ffn_norm, post_ffn_norm;
    bg_vec q_norm, k_norm, sinks;
    bg_linear *qkv, *gate_up; /* NULL: this rank has no rows of them */
    bg_linear *o, *down;
    bg_router *router; /* NULL: the layer's FFN is dense */
    bg_experts *experts;
    bg_linear *shared_gate_up, *shared_down; /* NULL: no shared experts, or merged ones */
    /* MLA */
    bg_linear *qkv_a; /* q_a, kv_a; of a layer with an indexer its k and its heads' weights */
    bg_linear *q, *k_b, *v_b;
    bg_vec q_a_norm, kv_a_norm;
    int index; /* number of its indexer; -1: none of its own */
    bg_linear *index_q;
    bg_vec index_norm, index_norm_b;
} bg_layer;

struct bg_model {
    bg_desc d;
    bg_shard s;
    bg_backend *b;
    bg_layer *layers; /* n_layers */
    bg_embedding *embedding;
    bg_vec output_norm;
    bg_linear *head;
    int64_t *rank_rows; /* rows of the head on each rank */
    bg_load_times load_times;
    float *freq[2];  /* of rope[0], rope[1] */
    bg_rope rope[2]; /* without and with a window */
    struct {
        bg_act x; /* the residual stream */
        bg_act h; /* normed x: what a branch reads */
        bg_act y; /* what a branch adds */
        bg_act qkv, q, att;
        bg_act gate_up, ff;
        bg_act route, shared_gate_up, shared_ff;
        bg_act q_a, q_lat, att_lat;
        bg_act index_q;
        bg_act out, out_h; /* rows that yield logits; their norm */
    } a;
};

bg_status bg_buffers_new(bg_model *m, const bg_backend_config *c, bg_error *err); /* buffers.c */

/* ---- pieces of a forward pass (layers.c) ---------------------------------------------------- */

/* h -> y, this rank's part of the sum */
bg_status bg_attention_branch(bg_model *m, int layer, bg_error *err);
bg_status bg_ffn_branch(bg_model *m, int layer, bg_error *err);
bg_status bg_head(bg_model *m, bg_error *err); /* x -> logits */
/* The same with latent attention (mla.c) and with experts (experts.c), where a layer has them. */
bg_status bg_mla_branch(bg_model *m, int layer, bg_error *err);
bg_status bg_experts_branch(bg_model *m, int layer, bg_error *err);
/* The whole pass of families that norm before each branch and nowhere else. */
bg_status bg_prenorm_forward(bg_model *m, bg_error *err);
/* ... before and after each branch. */
bg_status bg_sandwich_forward(bg_model *m, bg_error *err);

#endif
