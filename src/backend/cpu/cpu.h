/* backend/cpu/cpu.h - the CPU backend's own types: one rank's state, and what its files share. */
#ifndef BG_BACKEND_CPU_CPU_H
#define BG_BACKEND_CPU_CPU_H

#include "backend/cpu/isa.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/linear.h"
#include "backend/cpu/moe.h"
#include "backend/cpu/pool.h"
#include "backend/ops.h"
#include "backend/steps.h"

struct bg_embedding {
    const char *data; /* in the file's mapping */
    uint32_t type;
    int64_t vocab, cols;
    size_t row_bytes;
};

typedef struct bg_cache { /* layout of a block: kernels.h, bg_attend */
    bg_cache_spec spec;
    int lanes, v_stride;
    size_t k_head_bytes, v_head_bytes; /* of one KV head in one block */
    char *k, *v;
    char *index; /* [n_index, n_blocks] blocks of [index_dim][lanes], as K */
    size_t index_block_bytes;
} bg_cache;

/* cos and sin of this step's rows for one rotation, made when an op first asks for it. */
typedef struct bg_rope_table {
    const float *freq; /* NULL: not made in this step */
    int n_rot;
    float mscale;
    float *cosine, *sine; /* [n_rows, n_rot/2] */
} bg_rope_table;

enum { BG_ROPE_TABLES = 4, BG_GATHER_ROWS = 16 };

/* Working memory of one thread. */
typedef struct bg_sampler { /* sample.c */
    float *logits;          /* [vocab] a row as penalties and biases leave it */
    float *chunk_max;       /* [vocab / BG_CHUNK_TOKENS] */
    uint64_t *keys;         /* [vocab] candidates */
    uint32_t *count;        /* [vocab] zero between rows */
} bg_sampler;

/* Samples one row of logits by the slot's settings and history. Changes neither. */
void bg_sample_row(bg_sampler *s, const bg_kernels *kernels, const float *logits, int vocab,
                   const bg_slot *slot, bg_sampled *out);

/* Working memory of one thread in op route, for the router with the most experts. */
typedef struct bg_route_scratch {
    float *choice, *group;    /* [n_experts] each */
    bool *taken, *group_used; /* the same */
} bg_route_scratch;

typedef struct bg_map {
    void *at;
    size_t bytes;
} bg_map;

typedef struct bg_cpu {
    bg_backend base;
    bg_backend_config config;
    bg_isa isa;
    const bg_kernels *kernels;
    bg_pool *pool;
    uint64_t bytes; /* memory() */

    bg_map *maps; /* all memory but linears and small heap objects */
    size_t n_maps, maps_cap;
    bg_linear **linears;
    size_t n_linears, linears_cap;
    bg_embedding **embeddings;
    size_t n_embeddings, embeddings_cap;
    bg_router **routers;
    size_t n_routers, routers_cap;
    bg_experts **experts;
    size_t n_experts, experts_cap;
    float *route_logits;             /* [max_tokens, most_experts] */
    bg_route_scratch *route_scratch; /* [n_threads] */
    int most_experts;                /* of a router */
    void *moe_scratch;
    size_t moe_scratch_bytes;
    void *linear_scratch;
    size_t linear_scratch_bytes;

    bg_cache cache;
    bool has_cache;
    float *attend_scratch; /* n_threads times attend_floats */
    size_t attend_floats;
    float *head_scratch; /* n_threads times head_floats: one K head */
    size_t head_floats;
    float *query_scratch; /* n_threads times query_floats: latent queries of an item */
    size_t query_floats;
    /* Chosen keys and values of a row, gathered: n_threads times a little cache of index_top_k. */
    char *chosen_k, *chosen_v;
    size_t chosen_k_bytes, chosen_v_bytes;
    int32_t *chosen_blocks; /* 0, 1, 2, ... */
    bg_rope_table rope[BG_ROPE_TABLES];
    int n_rope;

    /* What the step's last index op chose: selection_top_k positions a row, ascending, for the rows
     * that see more than that. */
    int32_t *selection;
    int selection_top_k;
    bool has_selection;
    float *index_scores; /* n_threads times index_score_floats: a row's, padded as blocks are */
    size_t index_score_floats;
    float *index_heads; /* n_threads times index_head_floats */
    size_t index_head_floats;
    int32_t *index_rows; /* [max_tokens] */

    bg_steps s; /* the slots and the step */
    bool sampled, has_logits;
    int32_t *work0; /* [max_seqs + 1] attention: first work item of each sequence */

    float *logits;        /* [max_out, vocab] */
    float *pack;          /* [BG_GATHER_ROWS, vocab] */
    float *gathered;      /* [n_ranks, BG_GATHER_ROWS, vocab] */
    bg_sampled *results;  /* [max_out] */
    bg_sampler *samplers; /* [n_threads] */
} bg_cpu;

/* Sum of squares to the factor of a norm. */
float bg_cpu_norm_factor(const bg_cpu *c, const float *x, int64_t n, float eps);

/* This step's table for a rotation, made at its first use. */
const bg_rope_table *bg_cpu_rope_table(bg_cpu *c, const bg_rope *rope);
/* Stores a row's key and value of a KV head at the row's position. */
void bg_cpu_store_kv(const bg_cpu *c, int layer, int row, int head, const float *key,
                     const float *value);
/* Working memory of a thread in op index. */
size_t bg_cpu_index_head_floats(const bg_cache *cache);
/* mla_attention, once its arguments are known to fit. */
void bg_cpu_attend_latent(bg_cpu *c, bg_act *out, const bg_act *q_lat, const bg_act *q,
                          const bg_mla *p, const bg_rope_table *table);

/* misc_ops.c, attend_ops.c, mla.c, index.c, route.c, moe.c: the vtable's functions that are loops
 * over rows. */
bg_status bg_cpu_embed(bg_backend *b, bg_act *out, const bg_embedding *e, float scale,
                       bg_error *err);
bg_status bg_cpu_rms_norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w, float eps,
                          int n_rows, bg_error *err);
bg_status bg_cpu_add(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err);
bg_status bg_cpu_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                              const bg_vec *w, float eps, bg_error *err);
bg_status bg_cpu_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn,
                     bg_error *err);
bg_status bg_cpu_gather_out(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err);
bg_status bg_cpu_rope_store(bg_backend *b, bg_act *q_out, const bg_act *qkv, const bg_attn_in *p,
                            bg_error *err);
bg_status bg_cpu_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                           bg_error *err);
bg_status bg_cpu_router_new(bg_router **r, const bg_router_spec *spec, size_t *bytes,
                            bg_error *err); /* ended by free() */
bg_status bg_cpu_route(bg_backend *b, bg_act *route, const bg_router *r, const bg_act *h,
                       bg_error *err);
bg_status bg_cpu_mla_store(bg_backend *b, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                           bg_error *err);
bg_status bg_cpu_mla_query(bg_backend *b, bg_act *q_lat, const bg_linear *k_b, const bg_act *q,
                           bg_error *err);
bg_status bg_cpu_mla_attention(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                               const bg_mla *p, bg_error *err);
bg_status bg_cpu_index(bg_backend *b, const bg_act *iq, const bg_act *ik, const bg_index *p,
                       bg_error *err);
void bg_cpu_mla_cost(const bg_backend *b, const bg_mla *p, bg_cost *cost);

#endif
