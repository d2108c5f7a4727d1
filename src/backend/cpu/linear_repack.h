/* backend/cpu/linear_repack.h - from GGUF rows to tiles (linear_kernels.h has the layout). */
#ifndef BG_BACKEND_CPU_LINEAR_REPACK_H
#define BG_BACKEND_CPU_LINEAR_REPACK_H

#include "backend/cpu/linear_kernels.h"

lin_format lin_format_of(uint32_t type); /* LIN_RAW: no tile layout */
/* Bytes of a group's quants, and of a whole group: a multiple of 64. Not for LIN_RAW. */
size_t lin_quants_bytes(lin_format format, int64_t n_cols);
size_t lin_group_bytes(lin_format format, int64_t n_cols);
/* Writes row r (0..15) of the group at dst; the caller zeroes a group that it does not fill. src:
 * n_cols columns in GGUF blocks, of any alignment. */
void lin_repack_row(lin_format format, uint8_t *dst, int r, const uint8_t *src, int64_t n_cols);

#endif
