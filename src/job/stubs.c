/* TEMPORARY: until src/output has them. */
#include "output/output.h"
#define W __attribute__((weak))
W bg_status bg_out_lock_take(bg_out_lock **lock, const char *path, int64_t wait_ns, bool (*stop)(void *), void *ctx, bg_error *err)
{ (void)path; (void)wait_ns; (void)stop; (void)ctx; (void)err; *lock = NULL; return BG_OK; }
W void bg_out_lock_free(bg_out_lock *lock) { (void)lock; }
W uint64_t bg_writer_key(const bg_writer *w, int64_t record) { (void)w; (void)record; return 0; }
W bg_status bg_writer_rewrite(bg_writer *w, const bg_rewrite *how, int64_t *a, int64_t *b, bg_error *err)
{ (void)w; (void)how; (void)a; (void)b; return bg_fail(err, BG_INTERNAL, "not yet"); }
