/* kernels/experts_few.cuh - experts_few.cu's launcher, for experts.cu alone. */
#ifndef BGK_EXPERTS_FEW_CUH
#define BGK_EXPERTS_FEW_CUH

#include "bgk.h"

/* The second product of bgk_moe_matmul(), whose arguments these are, checked by it: the same bits.
 * cudaErrorNotSupported, with nothing started, where it does not fit: items of more than 32 tokens,
 * more than 8 chunks, fewer than 3 tiles, parts of K, results that are no BGK_HALF_ROWS that
 * begin at multiples of 16 bytes. */
cudaError_t bgk_experts_few(const bgk_out *out, const bgk_weights *w, const bgk_out *x,
                            const bgk_moe *m, bool list_done, cudaStream_t stream);

#endif
