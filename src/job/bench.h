/* job/bench.h - rates of a model on this machine. */
#ifndef BG_JOB_BENCH_H
#define BG_JOB_BENCH_H

#include "job/job.h"

enum { BG_BENCH_MAX = 16 };

typedef struct bg_bench_row {
    int batch;
    double prefill_s, decode_s;       /* of batch * prompt tokens; of batch * gen tokens */
    double prefill_rate, decode_rate; /* tokens/s */
    double floor_share; /* decode: time to read weights and KV once, over the step's time */
    double gmacs;       /* decode: multiply-adds of the weights, 1e9/s */
} bg_bench_row;

typedef struct bg_bench {
    int prompt, gen, n_rows;
    bg_bench_row rows[BG_BENCH_MAX];
    double read_bandwidth; /* bytes/s of all threads together, measured in the same run */
    uint64_t weight_bytes, memory;
    /* One rank: time by op of one prefill and one decode pass, in ns (separate, timed runs). */
    int64_t prefill_ns[BG_OP_KINDS], decode_ns[BG_BENCH_MAX][BG_OP_KINDS];
    bool has_ops;
} bg_bench;

/* Measures; one rank in this process, or several as a job would run them. */
bg_status bg_bench_run(bg_bench *b, const bg_job *job, const bg_text_model *m, bg_error *err);

#endif
