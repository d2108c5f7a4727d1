/* kernels/step.cu - what a step begins with: the token ids of its rows, from the histories that the
 * sampler writes to.
 *
 *   requires  what bgk.h says
 *   launch    a thread a row; graph-capturable, after the kernel before it
 *   proof     tests/gpu/test_step */
#include "bgk.h"
#include "launch.cuh"

namespace
{

constexpr int BLOCK = 256;

__global__ void gather_ids(int32_t *ids, const int32_t *history, int64_t stride,
                           const int32_t *slot_of_seq, const int32_t *seq, const int32_t *pos,
                           int rows)
{
    const int t = blockIdx.x * BLOCK + threadIdx.x;
    ptx_wait_prior();
    ptx_let_next_start();
    if (t >= rows) return;
    const int slot = slot_of_seq[seq[t]];
    ids[t] = slot < 0 ? 0 : history[slot * stride + pos[t]];
}

} // namespace

cudaError_t bgk_gather_ids(int32_t *ids, const int32_t *history, int64_t stride,
                           const int32_t *slot_of_seq, const int32_t *seq, const int32_t *pos,
                           int rows, cudaStream_t stream)
{
    if (rows < 0 || stride < 1) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    return launch_after(gather_ids, dim3((rows + BLOCK - 1) / BLOCK), dim3(BLOCK), 0, stream, ids,
                        history, stride, slot_of_seq, seq, pos, rows);
}
