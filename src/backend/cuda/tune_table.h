/* backend/cuda/tune_table.h - how linears are multiplied, by the shape of their weights: what was
 * measured. Plain C without CUDA's headers. */
#ifndef BG_BACKEND_CUDA_TUNE_TABLE_H
#define BG_BACKEND_CUDA_TUNE_TABLE_H

#include <stdint.h>

#include "shapes.h"

/* In how many parts K is summed. A result's bits depend on it: so by the shape alone. */
int bg_cuda_splits(int64_t n_tiles, int64_t k);

/* 1 + the bgk_shape that an H200 was fastest with; 0: the table does not have it. formats: as in
 * bgk_weights. */
int bg_cuda_table_pick(int n_tiles, int n_chunks, int splits, unsigned formats, int token_class);

/* "64x2" */
const char *bg_cuda_shape_name(bgk_shape shape);

#endif
