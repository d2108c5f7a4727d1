/* Attention in portable C, and what all instruction sets share. */
#define ATTEND       bg_cpu_attend_plain
#define INDEX_SCORES bg_cpu_index_scores_plain
#include "backend/cpu/attention_body.h"

static size_t round_up(size_t n)
{
    return (n + BG_LANES - 1) / BG_LANES * BG_LANES;
}

size_t bg_attend_scratch(int block_tokens, int head_dim, int v_dim)
{
    const size_t lanes = round_up((size_t)block_tokens), v_stride = round_up((size_t)v_dim);
    const size_t dim = (size_t)head_dim;
    return dim * lanes + (size_t)block_tokens * v_stride +
           (size_t)BG_ATTEND_ROWS * (round_up(dim) + lanes + v_stride + BG_LANES + 2);
}
