/* backend/cuda/cuda.h - the CUDA backend's own types: one rank's state on one GPU.
 *
 * Everything here lives in libbatchgen_cuda.so, which the program loads when it is there and a GPU
 * is asked for; it finds bg_* functions in the program. */
#ifndef BG_BACKEND_CUDA_CUDA_H
#define BG_BACKEND_CUDA_CUDA_H

#include <cuda_runtime_api.h>

#include "backend/cpu/cpu.h"
#include "backend/device.h"
#include "backend/ops.h"
#include "backend/steps.h"
#include "bgk.h"

struct bg_linear {
    char *name;
    void *w; /* [n_rows, k_padded] */
    float *bias;
    int n_rows, k, k_padded;     /* n_rows: of all blocks */
    int n_blocks, x_stride;      /* n_blocks 0: not block-diagonal */
    int n_in;                    /* columns of the input */
    bgk_weights tiles;           /* tiled mode: instead of w and bias */
    void *half;                  /* fast.c: halves [n_rows, k_padded], bias beside; else NULL */
    uint64_t w_bytes, n_weights; /* bytes and number of the weights that a pass reads */
};

struct bg_router {
    bgk_router r;
    int d, n; /* n: rows, with the shared gate's */
    int n_parts;
    bgk_weights tiles;
    float *w; /* plain: [n, k_padded] */
    int k_padded;
};

struct bg_experts {
    char *name;
    int n_experts, n_used, n_shared, d, n_ff;
    bgk_act fn;
    bgk_weights gate_up, down; /* n_tiles: of one expert */
    bgk_plain_experts plain;
    double expert_bytes, shared_bytes; /* of one of them */
};

enum {
    BG_CUDA_STEPS = 4,   /* step descriptors on their way to the device */
    BG_CUDA_FLIGHTS = 3, /* steps whose tokens were not fetched yet */
    BG_CUDA_STAGES = 16, /* parts of the staging ring */
    BG_CUDA_BUCKETS = 20,
    BG_CUDA_FAST_ROWS = 256, /* from so many on, linears are the library's under --fast-math */
};

typedef struct bg_cuda {
    bg_backend base;
    bg_backend_config config;
    int device;
    cudaStream_t stream;
    uint64_t bytes;
    void **memory; /* every allocation on the device */
    size_t n_memory, memory_cap;
    bg_linear **linears;
    size_t n_linears, linears_cap;
    bg_embedding **embeddings;
    size_t n_embeddings, embeddings_cap;
    void *scratch; /* halves of the widest input of a linear */
    size_t scratch_bytes;
    bgk_type weights; /* F16, or F32 in proof mode */
    bool tiled;       /* what linears read is BGK_TILES, and they are bgk_matmul's */

    bg_steps s;
    bool has_cache, sampled, has_logits;
    bgk_cache cache;
    int n_layers;
    /* step.c: the step on the device. One buffer, laid out by the numbers of rows, sequences and
     * outputs alone, so that a graph may hold its addresses; one copy brings it. */
    int32_t *step, *host_steps[BG_CUDA_STEPS];
    cudaEvent_t step_copied[BG_CUDA_STEPS];
    uint64_t n_steps;
    size_t step_ints;
    int32_t *pos, *seq;                     /* [rows] */
    int32_t *slot_of_seq, *block0;          /* [seqs]; slot -1: padding */
    int32_t *out_row, *out_slot;            /* [n_out]; slot -1: padding, nothing is sampled */
    int32_t *out_len, *out_gen;             /* [n_out] tokens in the slot's history; sampled ones */
    int32_t *att_plan;                      /* attention.c's work lists */
    int32_t *blocks;                        /* block tables; the first entry is block 0 */
    bgk_rows rows;                          /* of these */
    int32_t *ids;                           /* [rows] gathered on the device from histories */
    int32_t *history;                       /* [max_seqs, history_stride] */
    int64_t history_stride;                 /* max_ctx + 1 */
    char *stage;                            /* a ring of pinned memory for bg_cuda_upload() */
    cudaEvent_t stage_free[BG_CUDA_STAGES]; /* a part's copies have run */
    bool stage_used[BG_CUDA_STAGES];
    int stage_at;
    size_t stage_fill;

    /* graph.c: decode steps as graphs, and steps under way */
    int buckets[BG_CUDA_BUCKETS], n_buckets; /* ascending */
    cudaGraphExec_t graphs[BG_CUDA_BUCKETS]; /* NULL: steps of this size are not captured */
    uint64_t graph_bytes;
    bool capturing;
    bool ended; /* the present step is among the flights */
    bool timed; /* its first event was recorded */
    struct bg_cuda_flight {
        cudaEvent_t begin, done;
        int n_out;
        bool timed;     /* begin was recorded */
        int32_t *slots; /* [max_seqs] */
    } flights[BG_CUDA_FLIGHTS];
    uint64_t n_ended, n_fetched; /* flight number n is at n % BG_CUDA_FLIGHTS */
    int64_t work_ns, idle_ns;    /* of the steps fetched */

    struct { /* rotations' frequencies, by the host pointer that names them */
        const float *host;
        float *device;
        int n;
    } freqs[8];
    int n_freqs;

    float *logits; /* [max_out, vocab]; sampling changes them */
    unsigned long long *bad;
    struct bg_cuda_sampling {   /* sample.c */
        bgk_sampling *settings; /* [max_seqs] on the device, as these three */
        bgk_sampled *sampled;   /* [max_out] of the last step */
        bgk_top *tops;          /* [max_out, BGK_MAX_TOP] */
        void *scratch;
        struct bg_cuda_list { /* [max_seqs] a slot's biases and banned ids, on the device */
            char *device;
            size_t bytes;
        } * lists;
        struct { /* pinned */
            bgk_sampled *sampled;
            bgk_top *tops;
        } host[BG_CUDA_FLIGHTS];
    } sampling;

    struct {                   /* attention.c */
        bool fast;             /* the cache is one that attention on tensor cores reads */
        int n_single, n_tiles; /* of the step's plan: rows of their own, then tiles of rows */
        int n_sms;
        void *parts; /* of softmaxes, where few rows are spread over the GPU */
        size_t parts_bytes;
    } att;

    struct {         /* mla.c */
        bool latent; /* the cache is one of latents; parts and the plan are in att */
        bool fast;   /* that tensor cores read */
        /* Of few rows, mla_store waits for products of what it norms: one kernel does it all. */
        bool store_waits;
        bg_act *qa;
        const bg_act *in;
        bg_mla_in store;
        bgk_product products[BGK_STORE_PRODUCTS];
        int n_products;
        bgk_start start; /* of the next product of what the last mla_store normed */
        bool chooses;    /* the last kernel is the indexer's: mla_query need not wait for it */
        bool early;      /* the last kernel is mla_query's, which did not wait */
    } mla;
    struct bg_cuda_index { /* mla.c: the indexer; n_layers 0: none */
        int n_layers, dim, top_k, n_heads;
        void *keys;      /* [n_layers, n_blocks, block_tokens, dim] */
        int32_t *list;   /* [max_tokens, top_k] */
        int32_t *count;  /* [max_tokens] */
        float *scores;   /* of a slice of rows; NULL: no row sees more than top_k keys */
        uint32_t *words; /* of few rows, 0 between their uses; NULL: contexts are too long */
        void *q;         /* [max_tokens, n_heads * dim] */
        float *w;        /* [max_tokens, n_heads] */
    } index;

    struct bg_cuda_pick *picks; /* picks.c: [n_picks] of a tune table */
    int n_picks;

    struct bg_cuda_profile *profile; /* profile.c; NULL: nothing was timed yet */
    struct bg_cuda_comm *ranks;      /* comm.c: collectives; NULL: the only rank */
    struct bg_cuda_fault *fault;     /* fault.c; NULL: none is asked for */
    struct bg_cuda_loader *loader;   /* load.c; NULL: nothing is being loaded */
    struct bg_cuda_fast *fast;       /* fast.c; NULL: --fast-math is off */
    struct bg_cuda_moe *moe;         /* moe.c; NULL: no experts */
} bg_cuda;

/* objects.c. What every file here uses: */
bg_status bg_cuda_fail(bg_error *err, cudaError_t e, const char *what);
bg_status bg_cuda_done(bg_error *err, cudaError_t e, const char *what); /* BG_OK for cudaSuccess */
/* Room for one more pointer in the array that *list points to. */
bg_status bg_cuda_grow(void *list, size_t n, size_t *cap, bg_error *err);
/* Device memory that is freed with the backend, into the pointer that p points to. BG_NOMEM. */
bg_status bg_cuda_take(bg_cuda *c, void *p, size_t bytes, const char *what, bg_error *err);
bg_status bg_cuda_put(void *to, const void *from, size_t bytes, const char *what, bg_error *err);
uint64_t bg_cuda_memory(const bg_backend *b);
bg_status bg_cuda_act_new(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                          int64_t cols, bg_error *err);
bg_status bg_cuda_act_input_new(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                                int64_t cols, bg_error *err);
/* BG_INTERNAL, naming the op, unless a has so many rows and columns. */
bg_status bg_cuda_fits(const bg_act *a, int64_t rows, int64_t cols, const char *op, bg_error *err);
bgk_out bg_cuda_out(const bg_act *a); /* the buffer as kernels take it */
bool bg_cuda_fuses_glu(const bg_backend *b);
bg_status bg_cuda_vec_new(bg_backend *b, bg_vec *v, const char *name, const float *host, int64_t n,
                          bg_error *err);
void bg_cuda_poison(bg_backend *b, bg_act *a, int64_t rows);
bool bg_cuda_all_finite(bg_backend *b, const bg_act *a, int64_t rows, int64_t cols, int64_t *row,
                        int64_t *col);
void bg_cuda_sync(bg_backend *b);

/* weights.c */
bg_status bg_cuda_linear_new(bg_backend *b, bg_linear **out, const bg_linear_spec *spec,
                             bg_error *err);
int64_t bg_cuda_linear_rows(const bg_linear *l);
bg_status bg_cuda_embedding_new(bg_backend *b, bg_embedding **e, const bg_tensor *t, bg_error *err);

/* Rows of a part as values of c->weights, [n_rows, k_padded], zero beyond its columns. */
bg_status bg_cuda_load_values(bg_cuda *c, void *to, const bg_linear_part *p, int64_t k_padded,
                              bg_error *err);

/* moe.c */
bg_status bg_cuda_router_new(bg_backend *b, bg_router **r, const bg_router_spec *spec,
                             bg_error *err);
bg_status bg_cuda_experts_new(bg_backend *b, bg_experts **e, const bg_experts_spec *spec,
                              bg_error *err);
bg_status bg_cuda_route(bg_backend *b, bg_act *route, const bg_router *r, const bg_act *h,
                        bg_error *err);
bg_status bg_cuda_moe(bg_backend *b, bg_act *out, const bg_experts *e, const bg_act *route,
                      const bg_act *h, const bg_act *add, bg_error *err);
/* bgk_moe's n for so many tokens: by how many an expert has on average, and since some have more,
 * well above that; where items become wider is measured (test_moe's bench, steps of GLM-5). */
int bg_cuda_item_tokens(int n_experts, int n_used, int tokens);
void bg_cuda_moe_cost(const bg_backend *b, const bg_experts *e, int64_t n_rows, bg_cost *cost);
void bg_cuda_moe_free(bg_cuda *c);

/* load.c */
/* How many rows a piece has that the loader's memory is made for: a multiple of 64. up: with a. */
int64_t bg_cuda_load_piece(const bg_linear_part *a, const bg_linear_part *up);
/* Rows [row0, row0 + n) of a's share (and of up's, if not NULL) as the file has them, on the
 * device, for kernels on c->stream; then bg_cuda_load_used() once these are enqueued. */
bg_status bg_cuda_load_rows(bg_cuda *c, const bg_linear_part *a, const bg_linear_part *up,
                            int64_t row0, int64_t n, bgk_source out[2], bg_error *err);
/* The same of rows of a stack of such matrices, each so many bytes after the one before in the
 * file. */
bg_status bg_cuda_load_stack(bg_cuda *c, const bg_linear_part *a, const bg_linear_part *up,
                             size_t a_stride, size_t up_stride, int64_t row0, int64_t n,
                             bgk_source out[2], bg_error *err);
bg_status bg_cuda_load_used(bg_cuda *c, const char *what, bg_error *err);
bg_status bg_cuda_load_end(bg_backend *b, bg_load_times *times, bg_error *err);
void bg_cuda_load_free(bg_cuda *c);

/* fast.c: --fast-math. All of it does nothing where that is off. */
bg_status bg_cuda_fast_new(bg_cuda *c, bg_error *err); /* after the stream */
void bg_cuda_fast_free(bg_cuda *c);
/* Room for l's copy, l->half; then its rows [row0, row0 + rows->n_rows). */
bg_status bg_cuda_fast_linear_new(bg_cuda *c, bg_linear *l, bg_error *err);
bg_status bg_cuda_fast_rows(bg_cuda *c, const bg_linear *l, int64_t row0, const bgk_source *rows,
                            bg_error *err);
bg_status bg_cuda_fast_ready(bg_cuda *c, bg_error *err); /* once all linears are there */
/* Whether so many rows, to `out` (float32 rows, or NULL: gate and up), are for these two: */
bool bg_cuda_fast_serves(const bg_linear *l, const void *out, int n_rows);
bg_status bg_cuda_fast_linear(bg_cuda *c, float *out, int64_t out_cols, const bg_linear *l,
                              const bgk_out *x, int n_rows, bg_error *err);
bg_status bg_cuda_fast_linear_glu(bg_cuda *c, const bgk_out *out, const bg_linear *l,
                                  const bgk_out *x, bgk_act fn, int n_rows, bg_error *err);

/* step.c */
bg_status bg_cuda_step_new(bg_cuda *c, bg_error *err); /* once the cache is known */
bg_status bg_cuda_slot_seat(bg_backend *b, int slot, const bg_sampling *s, const int32_t *tokens,
                            int n_tokens, int n_generated, bg_error *err);
bg_status bg_cuda_begin_step(bg_backend *b, const bg_batch *batch, bg_error *err);
int bg_cuda_n_rows(const bg_backend *b);
int bg_cuda_n_out(const bg_backend *b);
/* On the stream, through pinned memory: `from` may change as soon as it returns, and the device
 * memory is written when all work before has run. Waits only while the ring is full. Not while
 * capturing. */
bg_status bg_cuda_upload(bg_cuda *c, void *to, const void *from, size_t bytes, bg_error *err);
/* Lays the step of c->s out for so many rows (at least its own; the rest is padding) and sends it.
 */
bg_status bg_cuda_send_step(bg_cuda *c, int rows, int seqs, int outs, bg_error *err);
bg_status bg_cuda_gather_ids(bg_cuda *c, bg_error *err); /* c->ids of the rows */
void bg_cuda_step_free(bg_cuda *c);

/* graph.c */
bg_status bg_cuda_flights_new(bg_cuda *c, bg_error *err);
void bg_cuda_flights_free(bg_cuda *c);
bg_status bg_cuda_prepare(bg_backend *b, bg_forward *forward, void *ctx, bg_error *err);
bg_status bg_cuda_step(bg_backend *b, const bg_batch *batch, bg_forward *forward, void *ctx,
                       bg_error *err);
bool bg_cuda_ready(bg_backend *b);
void bg_cuda_device_times(const bg_backend *b, int64_t *work_ns, int64_t *idle_ns);
bg_status bg_cuda_sample(bg_backend *b, bg_error *err);
bg_status bg_cuda_fetch(bg_backend *b, bg_sampled *out, int *n, bg_error *err);

/* attention.c */
bg_status bg_cuda_cache_new(bg_backend *b, const bg_cache_spec *spec, bg_error *err);
bg_status bg_cuda_rope_store(bg_backend *b, bg_act *q_out, const bg_act *qkv, const bg_attn_in *p,
                             bg_error *err);
bg_status bg_cuda_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                            bg_error *err);
/* A rotation's frequencies on the device, brought there at their first use. */
bg_status bg_cuda_freq(bg_cuda *c, const bg_rope *rope, const float **out, bg_error *err);
/* Its part of the step's buffer, c->att_plan. */
size_t bg_cuda_attention_ints(const bg_cuda *c, int rows, int seqs); /* grows with both */
/* For the step of c->s, padded to rows and seqs; host has that many ints. */
void bg_cuda_attention_plan(bg_cuda *c, int32_t *host, int rows, int seqs);

/* mla.c */
bg_status bg_cuda_latent_new(bg_cuda *c, const bg_cache_spec *spec, bg_error *err);
/* Called by every linear. Where mla_store waits and the linear is of what it norms, it waits too
 * (*done); else what waits is done. Of many rows with an indexer it is two linears that read what
 * mla_store norms: they are done here (*done), the second beside the first. */
bg_status bg_cuda_mla_stored(bg_cuda *c, const bgk_out *out, const bg_linear *l, const bg_act *x,
                             int n_rows, bool *done, bg_error *err);
/* What waits is done: called by every other op, and at the end of a step. */
bg_status bg_cuda_flush(bg_cuda *c, bg_error *err);
void bg_cuda_forget(bg_cuda *c); /* what waits, after a step that failed */
bg_status bg_cuda_mla_store(bg_backend *b, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                            bg_error *err);
bg_status bg_cuda_mla_query(bg_backend *b, bg_act *q_lat, const bg_linear *k_b, const bg_act *q,
                            bg_error *err);
bg_status bg_cuda_mla_attention(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                                const bg_mla *p, bg_error *err);
bg_status bg_cuda_index(bg_backend *b, const bg_act *iq, const bg_act *ik, const bg_index *p,
                        bg_error *err);
void bg_cuda_mla_cost(const bg_backend *b, const bg_mla *p, bg_cost *cost);

/* ops.c */
bg_status bg_cuda_embed(bg_backend *b, bg_act *out, const bg_embedding *e, float scale,
                        bg_error *err);
bg_status bg_cuda_rms_norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w, float eps,
                           int n_rows, bg_error *err);
bg_status bg_cuda_add(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err);
bg_status bg_cuda_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                               const bg_vec *w, float eps, bg_error *err);
bg_status bg_cuda_norm_add_norm(bg_backend *b, bg_act *out, bg_act *x, bg_act *y,
                                const bg_vec *post, const bg_vec *w, float eps, bg_error *err);
bg_status bg_cuda_linear(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x,
                         int n_rows, bg_error *err);
/* out = l x: sizes fit, and nothing waits. */
bg_status bg_cuda_run_linear(bg_cuda *c, const bgk_out *out, const bg_linear *l, const bg_act *x,
                             int n_rows, bg_error *err);
bgk_act bg_cuda_act_fn(bg_act_fn fn);
bg_status bg_cuda_linear_glu(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x,
                             bg_act_fn fn, bg_error *err);
bg_status bg_cuda_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn,
                      bg_error *err);
bg_status bg_cuda_all_reduce(bg_backend *b, bg_act *x, bg_error *err);
bg_status bg_cuda_gather_out(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err);
bg_status bg_cuda_logits(bg_backend *b, const bg_linear *head, const bg_act *x,
                         const int64_t *rank_rows, float softcap, bg_error *err);

/* sample.c */
bg_status bg_cuda_sampling_new(bg_cuda *c, bg_error *err);
void bg_cuda_sampling_free(bg_cuda *c);
/* The settings of c->s.slots[slot] go to the device, by bg_cuda_upload(). */
bg_status bg_cuda_sample_seat(bg_cuda *c, int slot, bg_error *err);
/* Samples the step's outputs and appends to histories, on the device; only launches. */
bg_status bg_cuda_sample_enqueue(bg_cuda *c, bg_error *err);
/* The first n results go to pinned buffer 0 .. BG_CUDA_FLIGHTS-1, on the stream; and from there to
 * out, once they have come. */
bg_status bg_cuda_results_copy(bg_cuda *c, int buffer, int n, bg_error *err);
void bg_cuda_results_read(bg_cuda *c, int buffer, int n, bg_sampled *out);
bg_status bg_cuda_fetch_logits(bg_backend *b, float *out, bg_error *err);

/* comm.c. After the stream is there; waits for the other ranks. */
bg_status bg_cuda_comm_new(bg_cuda *c, bg_error *err);
void bg_cuda_comm_free(bg_cuda *c);
/* Whether sums go through each other's memory, as they do where that works. */
bool bg_cuda_comm_peers(const bg_cuda *c);
/* For tests: sums go that way, where it can be gone (peers: where bg_cuda_comm_peers()). */
typedef enum bg_cuda_sums {
    BG_CUDA_SUMS_AUTO,
    BG_CUDA_SUMS_LIBRARY, /* NCCL's own, in its order */
    BG_CUDA_SUMS_NCCL,    /* NCCL's moves, added here */
    BG_CUDA_SUMS_LINES,   /* these three by peers, of any length */
    BG_CUDA_SUMS_ONCE,
    BG_CUDA_SUMS_TWICE,
} bg_cuda_sums;
void bg_cuda_comm_force(bg_cuda *c, bg_cuda_sums sums);
/* x = the sum over ranks, in rank order, of the first rows; nothing to do for the only rank. */
bg_status bg_cuda_all_reduce_rows(bg_cuda *c, bg_act *x, int64_t rows, bg_error *err);
/* Sum, residual and norm in one kernel, for few rows. */
bool bg_cuda_fuses_sum(const bg_backend *b, const bg_act *out, const bg_act *y);
bg_status bg_cuda_all_reduce_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                                  const bg_vec *w, float eps, bg_error *err);
/* c->logits holds this rank's share, [n_out, bg_cuda_shard_cols()], of which rank_rows[rank]
 * columns count; becomes [n_out, vocab]. */
int64_t bg_cuda_shard_cols(const bg_cuda *c);
bg_status bg_cuda_gather_logits(bg_cuda *c, int n_out, const int64_t *rank_rows, bg_error *err);

/* fault.c: failures for tests, by BATCHGEN_TEST_GPU_FAULT. Once a step, outside captures. */
bg_status bg_cuda_fault_new(bg_cuda *c, bg_error *err);
bg_status bg_cuda_fault_step(bg_cuda *c, bg_error *err);
bool bg_cuda_fault_capture(const bg_cuda *c); /* whether taking a graph shall fail */
void bg_cuda_fault_free(bg_cuda *c);

/* tune.c */
void bg_cuda_pick_shapes(const bg_cuda *c, bgk_weights *w); /* those of the table */
bg_status bg_cuda_tune(bg_backend *b, bg_tune *report, bg_error *err);

/* picks.c. A tune table, before the linears are loaded; it is freed with c. */
bg_status bg_cuda_picks_read(bg_cuda *c, const char *path, bg_error *err);
int bg_cuda_picked(const bg_cuda *c, const bgk_weights *w, int token_class); /* as table_pick() */

/* profile.c */
void bg_cuda_op_begin(bg_backend *b, int kind);
void bg_cuda_op_end(bg_backend *b, int kind);
void bg_cuda_op_times(bg_backend *b);
void bg_cuda_linear_cost(const bg_backend *b, const bg_linear *l, int64_t n_rows, bg_cost *cost);
void bg_cuda_attention_cost(const bg_backend *b, const bg_attn *p, bg_cost *cost);
void bg_cuda_roofs(bg_backend *b, bg_cost *per_second);
void bg_cuda_profile_free(bg_cuda *c);

/* What device.c looks up by name. */
#define BG_EXPORT __attribute__((visibility("default")))
BG_EXPORT bg_status bg_cuda_backend_new(bg_backend **b, const bg_backend_config *config, int device,
                                        bg_error *err);
BG_EXPORT int bg_cuda_abi(void); /* BG_CUDA_ABI */
BG_EXPORT bg_status bg_cuda_gpus(bg_gpu *list, int cap, int *n, bg_error *err);

#endif
