/* backend/cpu/linear_kernels.h - what linear.c and the kernels of each instruction set share.
 *
 * Weights are handled in groups of LIN_ROWS rows, columns in blocks of LIN_BLOCK. A part whose
 * format has a tile layout is stored group after group, each padded to 64 bytes:
 *
 *     quants [n_blocks][quant_bytes], then scales [n_cols / scale_cols][scale_bytes]
 *
 * A block's 32 columns are 8 steps of 4: step s is columns 4s..4s+3 of 16 rows in 64 bytes, byte
 * 4r + c for row r and column c. A block is, by format,
 *
 * - bytes: step 0, step 1, ...
 * - nibbles: 4 x 64 bytes, in number j step j in the low nibbles, step 4 + j in the high ones
 * - nibbles with fifth bits: then 64 bytes, bit s of a byte for step s
 * - nibbles with pairs (6 bits): then 2 x 64 bytes, in number p bits 2i, 2i+1 for step 4p + i
 * - pairs (2 bits): only these 2 x 64 bytes
 *
 * Scales are arrays of 16 rows, see enum lin_format. Rows past the last of a part are all 0 bits.
 * Plain float formats are [column][16 rows] of their own type, without scales.
 *
 * Activations are quantised in tiles of w = 1..LIN_MAX_TILE tokens, each block with its scale:
 *
 *     q [n_blocks][w][32] int8,  d, ds [n_blocks][w] float,  start [n_blocks][w] int32
 *     d = max|x| / 127, q = round to nearest even(x * (127 / max|x|)), ds = d * sum q
 *     ds_halves [n_blocks][2][w] float: d * sum q over the first and the last 16 columns
 *
 * Every kernel of every instruction set gives the same bits: integer sums are exact, and float sums
 * are chains of fused multiply-adds in an order set by the columns alone:
 *
 *   32-column scales   acc = fma(float(isum), dw * d, acc), and with minima acc = fma(mw, ds, acc)
 *   256-column scales  n = chain over blocks fma(float(mn), ds, n)      acc = fma(n, -dmin, acc)
 *                      e = chain over blocks fma(float(isum*sc), d, e)  acc = fma(e, dw, acc)
 *
 * with isum over the block of (signed weight quant) * q. Halved formats have an sc (and mn) for 16
 * columns: isum*sc is summed over the halves in integers, n has a term for each. All these integers
 * are below 2^24, so their floats are exact. */
#ifndef BG_BACKEND_CPU_LINEAR_KERNELS_H
#define BG_BACKEND_CPU_LINEAR_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/isa.h"

enum {
    LIN_ROWS = 16,    /* weight rows of a group: the float lanes of a 512-bit register */
    LIN_BLOCK = 32,   /* columns that share an activation scale */
    LIN_SUPER = 256,  /* columns of a K-quant block */
    LIN_CHUNK = 256,  /* columns unpacked to float at a time; a multiple of every block size */
    LIN_MAX_TILE = 8, /* tokens that one kernel call handles at most */
};

/* How a part is stored, and which kernel runs it. */
typedef enum lin_format {
    LIN_RAW, /* rows as in the file, dequantised by bg_dequant_row() */
    LIN_F32,
    LIN_F16,
    LIN_BF16,
    LIN_Q4_0,   /* scales of a block: d f16[16] */
    LIN_Q4_1,   /* d f16[16], m f16[16] */
    LIN_Q5_0,   /* d */
    LIN_Q5_1,   /* d, m */
    LIN_Q8_0,   /* d; quants + 128 */
    LIN_IQ4_NL, /* d */
    LIN_MXFP4,  /* e u8[16] */
    LIN_Q4_K,   /* scales of 256 columns: the 12 packed bytes of Q4_K as u8[12][16], d, dmin */
    LIN_Q5_K,   /* the same */
    LIN_Q6_K,   /* sc i8[16][16], d */
    LIN_IQ4_XS, /* sc i8[8][16] with 32 taken off, d */
    LIN_Q3_K,   /* as Q6_K; quants as nibbles, 3 bits each */
    LIN_Q2_K,   /* u8[16][16], low nibble sc, high mn; d, dmin */
    LIN_FORMATS,
} lin_format;

/* What a kernel with unsigned weight quants adds to its sum to make them signed: -offset * sum q,
 * over the block or each half of it ([n_blocks][2][w]). */
typedef enum lin_start {
    LIN_START_NONE,
    LIN_START_8,
    LIN_START_16,
    LIN_START_128,
    LIN_START_32_HALVES,
    LIN_START_4_HALVES,
    LIN_STARTS
} lin_start;

typedef struct lin_format_info {
    uint32_t type;   /* bg_qtype */
    bool integer;    /* has an integer kernel */
    int quant_bytes; /* of a block in a group; plain floats: of 32 columns */
    int scale_cols;  /* 32 or 256 */
    int scale_bytes; /* of scale_cols columns in a group */
    lin_start start;
} lin_format_info;

extern const lin_format_info lin_formats[LIN_FORMATS];

/* A group of weights times a tile of tokens. */
typedef struct lin_tile {
    const uint8_t *quants, *scales; /* 64-byte aligned */
    const int8_t *q;
    const float *d, *ds, *ds_halves;
    const int32_t *start; /* of the format's kind; NULL for LIN_START_NONE */
    int64_t n_blocks;
    float *out; /* out[t * out_stride + r], r < n_rows, = sum + bias[r]; of any alignment */
    int64_t out_stride;
    int n_rows;        /* of the group that exist, 1..LIN_ROWS */
    const float *bias; /* LIN_ROWS values, 64-byte aligned */
} lin_tile;

typedef void lin_tile_fn(const lin_tile *a, int w);

/* sum[t][r] = chain over k = 0..n-1, from 0, of fma(panel[k][r], x[t * x_stride + k], .)
 * for w tokens (1..LIN_MAX_TILE). panel and sum are 64-byte aligned. */
typedef void lin_fma_fn(float (*sum)[LIN_ROWS], const float (*panel)[LIN_ROWS], const float *x,
                        int64_t x_stride, int w, int n);

/* panel[k][r] for n columns (at most LIN_CHUNK) of a group, exactly as bg_dequant_row() has them;
 * quants and scales point at the first of them, a multiple of LIN_CHUNK. */
typedef void lin_unpack_fn(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *quants,
                           const uint8_t *scales, int n);

/* The quantised activations of a tile of w tokens. */
typedef struct lin_acts {
    int8_t *q;
    float *d, *ds;
    float *ds_halves;           /* NULL: not wanted */
    int32_t *start[LIN_STARTS]; /* the same */
} lin_acts;

/* Blocks [b0, b1) of a tile of w tokens; x points at column 0 of the first of them. */
typedef void lin_quantize_fn(const lin_acts *a, const float *x, int64_t x_stride, int w, int64_t b0,
                             int64_t b1);

typedef struct lin_isa {
    lin_fma_fn *fma;
    lin_unpack_fn *unpack;
    lin_quantize_fn *quantize;
    lin_tile_fn *tile[LIN_FORMATS]; /* NULL: no integer kernel */
} lin_isa;

lin_fma_fn lin_fma_avx512;
lin_unpack_fn lin_unpack_avx512;
lin_quantize_fn lin_quantize_avx512;

const lin_isa *lin_isa_plain(void);
const lin_isa *lin_isa_avx2(void);
const lin_isa *lin_isa_avx512(void);
const lin_isa *lin_isa_vnni(void);

#endif
