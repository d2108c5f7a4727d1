/* kernels/experts.cu - the products of matmul.cu for all experts of a layer at once: what an item
 * of the plan (moe.cu) says, a block's place is an item and some rows of its expert.
 *
 * Requires: bgk.h; sm_90a (elsewhere the launcher says cudaErrorNotSupported).
 *
 * Launch: as matmul.cu; blocks go over places whose number they read on the device, so that a graph
 * serves any routing. The second product of few tokens and chunks: experts_few.cu.
 *
 * Order: as matmul.cu: the shape of the weights alone sets it.
 *
 * Traffic: an expert's weights once per item, rows of x once per block of rows.
 *
 * Proof: tests/gpu/test_moe.c. (EVERY_LANE: matmul.cuh.) */
#include "experts_few.cuh"
#include "matmul.cuh"

namespace
{

template <unsigned F>
cudaError_t launch_items(const args &a, int w_bytes, int n, cudaStream_t stream)
{
    constexpr bool MIXED = !single(F);
    constexpr int B2 = MIXED ? 1 : 2, RB = MIXED ? 1 : 2, FEW_B2 = F == ALL ? 1 : 2,
                  SC = MIXED ? 2 : 4;
    switch (n) {
    case 8:
        if (a.splits == 1 && a.n_tiles % 2 == 0 && a.token_blocks > 16)
            return launch<F, 8, 2, 1, SC, FEW_B2, 1, false, true>(a, w_bytes, stream);
        return launch_parts<F, 8, 3, true>(a, w_bytes, stream);
    /* Two tiles a block, which read x once, and parts of K in turn: blocks of one tile, with parts
     * side by side, leave two stages to each part. GLM-5's gate and up, of a rank of 8, took 273
     * us for 512 tokens that way, and take 193. */
    case 16:
        return launch_in_turn<F, 16, 2, FEW_B2, true>(a, w_bytes, stream);
    case 32:
        return launch_in_turn<F, 32, 2, FEW_B2, true>(a, w_bytes, stream);
    case 64:
        if (a.splits == 1)
            return launch < F, 64, 2, 1, 2, F == 1u << BGK_W16 ? 1 : B2, 1, false,
                   true > (a, w_bytes, stream);
        return launch<F, 64, 2, 1, 2, 1, 1, true, true>(a, w_bytes, stream);
    default:
        if (a.splits == 1 && a.n_tiles % 4 == 0)
            return launch<F, 128, 2, RB, 2, 1, 1, false, true>(a, w_bytes, stream);
        return launch_in_turn<F, 128, 2, 1, true>(a, w_bytes, stream);
    }
}

} // namespace

cudaError_t bgk_moe_matmul(const bgk_out *out, const bgk_weights *w, const bgk_out *h,
                           const bgk_out *x, const bgk_moe *m, bgk_act fn, bool list_done,
                           cudaStream_t stream)
{
    auto tiles = [](const bgk_out *o) {
        return o->layout == BGK_TILES && o->stride % BGK_TILE_ROWS == 0 &&
               (uintptr_t)o->data % 128 == 0;
    };
    if (w->n_tiles < 1 || w->n_chunks < 1 || !w->row_scale || w->n_first < 0 ||
        (w->n_first && !w->stack[0]) || (w->n_first < m->n_experts + m->n_shared && !w->stack[1]) ||
        (w->splits != 1 && w->splits != 2 && w->splits != 4) || !w->formats ||
        w->formats >> BGK_FORMATS || !tiles(x) || (h && !tiles(h)) || w->block_tiles ||
        m->tokens < 0 || (w->n_ff ? !tiles(out) : out->layout == BGK_TILES) ||
        (w->splits > 1 && w->n_chunks < 4 * w->splits) || (uintptr_t)w->row_scale % 16 ||
        (!w->n_ff && (w->n_out < 1 || w->n_out > w->n_tiles * 64)) ||
        (w->n_ff && (w->n_tiles % 2 || w->n_ff > w->n_tiles * 32)) ||
        m->n_experts + m->n_shared > 0xffff ||
        (m->n != 8 && m->n != 16 && m->n != 32 && m->n != 64 && m->n != 128) ||
        (h && (m->tokens + m->n - 1) / m->n * m->n > h->stride))
        return cudaErrorInvalidValue;
    if (!on_hopper()) return cudaErrorNotSupported;
    const int64_t most = bgk_moe_items(m);
    if (!m->tokens || !most) return cudaSuccess;
    if (most > INT32_MAX / w->n_tiles) return cudaErrorInvalidValue;
    if (!h) {
        const cudaError_t st = bgk_experts_few(out, w, x, m, list_done, stream);
        if (st != cudaErrorNotSupported) return st;
    }
    args a = stack_args(out, w, x, fn);
    a.h = h ? (const __half *)h->data : nullptr;
    a.h_stride = h ? h->stride : 0;
    a.items = m->items;
    a.n_items = m->n_items;
    a.second = !h;
    a.list_done = list_done;
    a.token_blocks = (int)most;
    const int w_bytes = largest_chunk(w->formats);
    return by_formats<W4, W6, W8, W16, W4 | W6, W4 | W8,
                      W6 | W8>(/* shared ones may be W8 */
                               w->formats, [&](auto f) {
                                   return launch_items<decltype(f)::value>(a, w_bytes, m->n,
                                                                           stream);
                               });
}
