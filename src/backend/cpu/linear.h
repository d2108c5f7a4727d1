/* backend/cpu/linear.h - out = x W^T + bias on quantised weights, on the CPU.
 *
 * At load each part's rows are repacked into tiles that the kernels read in order (the bytes stay
 * those of the file, give or take padding of the last tile). At run x is quantised once, to 8 bits
 * in blocks of 32, by all threads; then tiles of rows are shared out among them. A row's bits
 * depend neither on n_rows nor on the number of threads. BG_COMPUTE_F32: weights dequantised
 * exactly, products and sums in float32, x as it is. */
#ifndef BG_BACKEND_CPU_LINEAR_H
#define BG_BACKEND_CPU_LINEAR_H

#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/isa.h"
#include "backend/cpu/pool.h"
#include "backend/ops.h"

/* A block-diagonal linear's bias has n_rows values for each block.
 * Checks the spec (block borders, sizes), repacks with all threads. The file's bytes are not needed
 * afterwards. BG_ARG, BG_NOMEM. */
bg_status bg_cpu_linear_new(bg_linear **l, const bg_linear_spec *spec, bg_compute compute,
                            bg_isa isa, bg_pool *pool, bg_error *err);
void bg_cpu_linear_free(bg_linear *l);
int64_t bg_cpu_linear_rows(const bg_linear *l);   /* output columns, over all parts and blocks */
int64_t bg_cpu_linear_cols(const bg_linear *l);   /* input columns of an output column */
int64_t bg_cpu_linear_reach(const bg_linear *l);  /* input columns that the last of them ends at */
uint64_t bg_cpu_linear_bytes(const bg_linear *l); /* memory held */
/* Scratch that bg_cpu_linear_run needs for up to max_rows rows. */
size_t bg_cpu_linear_scratch(const bg_linear *l, int64_t max_rows);
/* out[t * out_stride + o], x[t * x_stride + i], strides in floats. scratch is 64-byte aligned. */
void bg_cpu_linear_run(const bg_linear *l, float *out, int64_t out_stride, const float *x,
                       int64_t x_stride, int n_rows, void *scratch, bg_pool *pool);

#endif
