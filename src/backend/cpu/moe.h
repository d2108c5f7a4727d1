/* backend/cpu/moe.h - one layer's experts on the CPU: y[t] = sum over the experts of token t.
 *
 * All experts of a matrix are one linear of many blocks. A run sorts (token, expert) pairs by
 * expert, quantises each token once, and then shares out pieces of (expert, columns) among all
 * threads, twice: gate, up and activation; down. What the experts give is added for each token in
 * the order of its route. A token's bits depend on itself alone. */
#ifndef BG_BACKEND_CPU_MOE_H
#define BG_BACKEND_CPU_MOE_H

#include "backend/cpu/kernels.h"
#include "backend/cpu/linear.h"

/* As bg_cpu_linear_new(). */
bg_status bg_cpu_experts_new(bg_experts **e, const bg_experts_spec *spec, bg_compute compute,
                             bg_isa isa, bg_pool *pool, bg_error *err);
void bg_cpu_experts_free(bg_experts *e);            /* NULL is allowed */
uint64_t bg_cpu_experts_bytes(const bg_experts *e); /* memory held */
int64_t bg_cpu_experts_cols(const bg_experts *e);   /* columns of h, and of out */
int bg_cpu_experts_used(const bg_experts *e);
void bg_cpu_experts_cost(const bg_experts *e, int64_t n_rows, bg_cost *cost);
/* Scratch that a run of up to max_rows rows needs. */
size_t bg_cpu_experts_scratch(const bg_experts *e, int64_t max_rows, int n_threads);

typedef struct bg_moe_run {
    const bg_experts *e;
    float *out;
    const float *route, *h, *add; /* add may be NULL, or out */
    int64_t out_stride, route_stride, h_stride, add_stride;
    int n_rows;
    void *scratch; /* 64-byte aligned */
    const bg_kernels *kernels;
    bg_pool *pool;
} bg_moe_run;

/* False: a row of route (*bad_row) names an expert that does not exist; nothing is computed. */
bool bg_cpu_experts_run(const bg_moe_run *run, int *bad_row);

#endif
