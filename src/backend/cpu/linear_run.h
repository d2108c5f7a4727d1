/* backend/cpu/linear_run.h - a linear from within, for callers that share its work out themselves:
 * linear.c, and the experts (moe.c), which are one linear of many blocks and choose a block for
 * each row. All of it runs on the calling thread. */
#ifndef BG_BACKEND_CPU_LINEAR_RUN_H
#define BG_BACKEND_CPU_LINEAR_RUN_H

#include "backend/cpu/linear.h"
#include "backend/cpu/linear_kernels.h"

typedef struct lin_part {
    uint32_t type;
    lin_format format;
    bool integer;         /* runs on quantised activations */
    int64_t n_rows;       /* of a block */
    int64_t block_groups; /* groups of a block; a block begins a group of its own */
    int64_t n_groups;     /* of all blocks */
    int64_t col0;         /* first output column */
    int64_t group0;       /* number of the first group, over all parts */
    size_t row_bytes;
    size_t group_bytes;
    size_t scales_offset; /* in a group; not of LIN_RAW */
    uint8_t *data;
    float *bias; /* n_groups * LIN_ROWS values, padded with 0; NULL: none */
} lin_part;

/* What quantised activations must hold for some set of parts. */
typedef struct lin_kinds {
    bool integer;            /* any at all */
    bool ds_halves;          /* some part needs them */
    bool starts[LIN_STARTS]; /* which kinds the parts need */
} lin_kinds;

struct bg_linear {
    int64_t n_rows, n_cols, n_groups; /* n_cols: of a block */
    int n_blocks;                     /* >= 1; more than one: one part */
    int64_t x_stride;                 /* from the input of a block to the next's */
    int n_parts;
    lin_part parts[4];
    const lin_isa *isa;
    uint64_t bytes;
    lin_kinds kinds;
};

void lin_add_kinds(lin_kinds *to, const lin_kinds *more);
/* Lays the activations of n_rows rows of n_cols columns out at base (64-byte aligned); returns the
 * bytes they take. */
size_t lin_lay_out(const lin_kinds *k, int64_t n_cols, lin_acts *a, uintptr_t base, int64_t n_rows);
/* The part of them that belongs to the tile that begins at row t. */
lin_acts lin_tile_acts(const lin_acts *all, int64_t n_cols, int64_t t);
/* out[t * out_stride + r] for the rows r of group g (over all blocks) of a part, for n_rows rows of
 * its block's input: those of acts from row acts_row on, in tiles of LIN_MAX_TILE, or x. */
void lin_run_group(const bg_linear *l, const lin_part *p, int64_t g, float *out, int64_t out_stride,
                   const lin_acts *acts, int64_t acts_row, const float *x, int64_t x_stride,
                   int n_rows);

#endif
