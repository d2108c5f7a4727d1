/* job/floors.h - where a model's bytes lie, and what a rank must read and compute in a decode step.
 *
 * Numbers only, as the file stores them: a device that stores weights in another form reads more
 * or less. The floor of a step is the longer of reading and computing; what ranks say to each other
 * and what starts each piece of work comes on top. */
#ifndef BG_JOB_FLOORS_H
#define BG_JOB_FLOORS_H

#include "job/job.h"

typedef enum bg_kind {
    BG_KIND_EMBEDDING, /* looked up by token */
    BG_KIND_ATTENTION,
    BG_KIND_INDEXER,
    BG_KIND_FFN,
    BG_KIND_ROUTER,
    BG_KIND_EXPERTS,
    BG_KIND_SHARED, /* experts of every token */
    BG_KIND_HEAD,
    BG_KIND_OTHER,   /* norms, rotary factors */
    BG_KIND_SKIPPED, /* blocks that predict further tokens, and what the architecture does not use
                      */
    BG_N_KINDS
} bg_kind;

const char *bg_kind_name(int kind);
bg_kind bg_tensor_kind(const bg_tensor *t); /* by its name; of tensors that are used */

/* Of a whole model, or of one rank's share. */
typedef struct bg_kind_sums {
    uint64_t params[BG_N_KINDS], bytes[BG_N_KINDS];
    /* Of the bytes without embedding: what each rank of the replica has whole, and what is
     * dealt out; experts are neither. */
    uint64_t replicated, sharded;
} bg_kind_sums;

/* What s has of m (everything, where it is the only rank). The table of a tied model counts as
 * embedding and as head. What is not used is counted as it is in the file. */
void bg_kinds_sum(bg_kind_sums *sums, const bg_text_model *m, const bg_shard *s);
/* Parameters that one token is multiplied with; without the indexer. */
double bg_active_params(const bg_desc *d, const bg_kind_sums *sums);

/* What the times are made of: a device's memory bandwidth and matrix rate, per second. */
typedef struct bg_roof {
    double bytes, flops;
} bg_roof;

typedef struct bg_floor {
    double experts; /* distinct ones that a layer's tokens choose, if they choose evenly */
    double weight_bytes, kv_bytes, flops;
    double seconds;
} bg_floor;

/* A decode step of batch sequences, each with ctx tokens before it, on the rank whose share sums
 * is. */
bg_floor bg_floor_of(const bg_desc *d, const bg_shard *s, const bg_kind_sums *sums,
                     bg_cache_type cache, const bg_roof *roof, int batch, int ctx);

#endif
