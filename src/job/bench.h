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
    double step_bytes;  /* decode: that linears, experts and attention move in a step; 0: unknown */
    int sums;           /* decode: all-reduces of a step */
    bool too_big;       /* no memory for its keys and values: nothing was measured */
} bg_bench_row;

typedef struct bg_bench {
    int prompt, gen, n_rows;
    bg_bench_row rows[BG_BENCH_MAX];
    double read_bandwidth; /* bytes/s, measured in the same run: all threads together; a GPU's
                              copies */
    uint64_t weight_bytes, memory; /* weights: as the file has them; with rank_of that rank's */
    uint64_t rank_memory;          /* of the fullest rank */
    int rank_of;                   /* 0: all ranks were run */
    int tp;
    bool gpu;
    double all_reduce_us; /* the stand-in's, with rank_of */
    bool skip_prefill;
    /* Rank 0's separate, timed runs. Prefill of the last row's batch; of each row one decode step,
     * as the mean of several. */
    bg_profile prefill, decode[BG_BENCH_MAX];
    bg_cost roofs;      /* per second; flops 0: not known */
    bg_load_times load; /* of rank 0 */
    double start_s;     /* until it was ready */
    bg_tune tune;       /* with --tune */
} bg_bench;

/* Measures; one rank in this process, or several in processes of their own, before this one has
 * threads. */
bg_status bg_bench_run(bg_bench *b, const bg_job *job, const bg_text_model *m, bg_error *err);
void bg_bench_release(bg_bench *b); /* also after a failure */

#endif
