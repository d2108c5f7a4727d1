#include "output/writer.h"

bg_status bg_writer_remove_stale(const bg_writer *w, bg_error *err)
{
    (void)w, (void)err;
    return BG_OK;
}

bg_status bg_writer_roll_forward(bg_writer *w, const bg_writer_config *c, bg_error *err)
{
    (void)w, (void)err, (void)c;
    return BG_OK;
}

bg_status bg_writer_sort(bg_writer *w, bg_error *err)
{
    return bg_fail(err, BG_INTERNAL, "%s: cannot sort yet", w->side[0].path);
}

bg_status bg_writer_rewrite(bg_writer *w, const bg_rewrite *how, int64_t *n_kept,
                            int64_t *n_dropped, bg_error *err)
{
    (void)how;
    *n_kept = *n_dropped = 0;
    return bg_fail(err, BG_INTERNAL, "%s: cannot rewrite yet", w->side[0].path);
}
