/* backend/cpu/linear_kernels.h - what linear.c and the kernels of each instruction set share.
 *
 * Weights are handled in groups of LIN_ROWS rows, columns in chunks of LIN_CHUNK (float kernels).
 * Every kernel of every instruction set gives the same bits: integer sums are exact, and float sums
 * are chains of fused multiply-adds in an order set by the columns alone. */
#ifndef BG_BACKEND_CPU_LINEAR_KERNELS_H
#define BG_BACKEND_CPU_LINEAR_KERNELS_H

#include <stdint.h>

#include "backend/cpu/isa.h"

enum {
    LIN_ROWS = 16,    /* weight rows of a group: the float lanes of a 512-bit register */
    LIN_CHUNK = 256,  /* columns unpacked to float at a time; a multiple of every block size */
    LIN_MAX_TILE = 8, /* tokens that one kernel call handles at most */
};

/* sum[t][r] = chain over k = 0..n-1, from 0, of fma(panel[k][r], x[t * x_stride + k], .)
 * for w tokens (1..LIN_MAX_TILE). panel and sum are 64-byte aligned. */
typedef void lin_fma_fn(float (*sum)[LIN_ROWS], const float (*panel)[LIN_ROWS], const float *x,
                        int64_t x_stride, int w, int n);

typedef struct lin_isa {
    lin_fma_fn *fma;
} lin_isa;

const lin_isa *lin_isa_plain(void);
const lin_isa *lin_isa_avx2(void);
const lin_isa *lin_isa_avx512(void);

#endif
