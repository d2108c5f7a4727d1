/* tools/mkmodel.h - what the parts of mkmodel share.
 *
 * mkmodel writes synthetic GGUF models: random weights of sane size under a real architecture's
 * names, with a complete working vocabulary. mkmodel.c: options and files; mkmodel_arch.c: shapes,
 * metadata, tensors; mkmodel_fill.c: random blocks; mkmodel_vocab.c: tokenizers. */
#ifndef MKMODEL_H
#define MKMODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "gguf/gguf.h"

/* The numbers of a model. 0: not there. Names as in the GGUF keys and the model's papers. */
typedef struct shape {
    const char *name, *arch, *tok;
    int n_layers, d_model, d_ff, n_heads, n_kv_heads, head_dim, vocab, context;
    int rope_dim; /* 0: head_dim */
    float rope_base, rope_base_swa, eps;
    bool tied;         /* the output matrix is the embedding */
    bool rope_ramp;    /* a tensor of factors for the rotary frequencies */
    float rope_linear; /* factor of linear scaling */
    float yarn_factor, yarn_log;
    int yarn_context;
    int window, window_period;
    bool no_qk_norm; /* of an architecture that may have them */
    int n_experts, top_k, n_shared, n_dense, n_groups, n_groups_used;
    int d_ff_expert;     /* 0: d_ff */
    int d_ff_shared;     /* 0: n_shared times an expert's */
    float gate_scale;    /* what the experts' weights are multiplied by */
    bool softmax_router; /* of an architecture whose routers are sigmoids else */
    int qk_nope, qk_rope, v_dim, q_lora, kv_lora; /* MLA */
    bool legacy_kv_b;                             /* keys' and values' matrices in one, attn_kv_b */
    int idx_heads, idx_dim, idx_top_k;            /* sparse-attention indexer */
    int n_mtp;                                    /* draft layers behind the model's own */
} shape;

typedef enum fill { FILL_WEIGHT, FILL_NORM, FILL_RAMP } fill;

typedef struct tensor {
    char name[64];
    uint32_t type;
    int n_dims;
    int64_t ne[4];
    fill fill;
    float size; /* standard deviation; of norms the mean, of ramps the last value */
} tensor;

typedef struct tensor_list {
    tensor *t;
    int64_t n, cap;
    bool failed; /* out of memory */
} tensor_list;

typedef struct mix mix; /* which tensor gets which quant type */

const mix *find_mix(const char *name); /* NULL: no such */
const char *mix_name(int i);           /* NULL: no more */

extern const shape presets[];
extern const int n_presets;

/* The preset of that name; of "tiny" the small one of arch. NULL: none. */
const shape *find_preset(const char *name, const char *arch);
/* NULL, or why a model of this shape cannot be. */
const char *check_shape(const shape *s);
/* Appends all tensors in the order of their use. */
void list_tensors(const shape *s, const mix *m, tensor_list *list);
/* Everything of the metadata but the vocabulary. */
void put_metadata(bg_gguf_writer *w, const shape *s, const mix *m);

/* Vocabulary, special tokens and chat template. NULL, or what is wrong with tok or vocab. */
const char *put_vocab(bg_gguf_writer *w, const char *tok, int vocab);
const char *tok_name(int i); /* NULL: no more */

/* How blocks of a type are made so large as wanted: measured once. False: no maker for the type. */
bool can_fill(uint32_t type);
/* Random blocks [first, first + n) of a tensor: a function of seed and position only. size is the
 * standard deviation. first is a multiple of 8. */
void fill_blocks(uint32_t type, float size, uint64_t seed, int64_t first, int64_t n, uint8_t *out);

#endif
