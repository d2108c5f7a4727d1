/* backend/tune.h - what a backend found out when it tried how to multiply (bg_ops.tune). */
#ifndef BG_BACKEND_TUNE_H
#define BG_BACKEND_TUNE_H

#include <stdint.h>

enum { BG_TUNE_PARTS = 3 };

typedef struct bg_tune_row {    /* linears of one size, with so many tokens */
    char name[48];              /* of the first of them */
    int n_linears, parts;       /* parts: in how many K is summed */
    int tiles, chunks, formats; /* their size and kind, as the backend's */
    int from, to, tokens;       /* it stands for steps of from to `to` tokens; measured: tokens */
    double bytes, flops;        /* of one call */
    char best[8], before[8];    /* shapes: the fastest, and what was taken without this */
    double us, before_us;
    /* K in 1, 2 and 4 parts: the fastest shape. 0 us: not tried. Advice alone: parts make bits. */
    char part_best[BG_TUNE_PARTS][8];
    double part_us[BG_TUNE_PARTS];
} bg_tune_row;

typedef struct bg_tune {
    bg_tune_row *rows; /* the caller frees them, also after a failure */
    int n;
    double seconds;
} bg_tune;

#endif
