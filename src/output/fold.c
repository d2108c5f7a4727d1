/* The journal made short: identity, run, one commit that stands for all, the partial tokens that
 * are still in flight, and the end when the job has one.
 *
 * It is written beside the journal as PATH.journal.new and takes its place by a rename. Until that
 * is on disk the old journal says the same. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output/journal.h"
#include "output/writer.h"

bg_manifest bg_writer_manifest(const bg_writer *w)
{
    bg_manifest m = {.done = w->done,
                     .keys = w->keys,
                     .n_failed = w->n_failed,
                     .tokens = {w->tokens[0], w->tokens[1]},
                     .partials = true};
    for (int i = 0; i < BG_SIDES; i++) {
        const bg_side *s = &w->side[i];
        m.piece[i] = (bg_entry_piece){
            .bytes = s->f.end, .text = s->text_bytes, .hash = bg_hasher_value(s->whole)};
    }
    return m;
}

static bg_status put(bg_writer *w, bg_out_file *f, size_t start, bool last, bg_error *err)
{
    bg_journal_seal(&w->entry, start);
    if (!last) return BG_OK;
    if (w->entry.failed) return bg_fail(err, BG_NOMEM, "%s: out of memory", f->name);
    bg_status st = bg_out_append(f, w->entry.data, w->entry.len, err);
    if (!st) st = bg_out_sync(f, err);
    return st;
}

static bg_status put_commit(bg_writer *w, const bg_manifest *m, bg_out_file *f, bg_error *err)
{
    bg_buf *b = &w->entry;
    size_t start = b->len;
    const bg_entry_commit c = {.n = w->commits - 1,
                               .folded = true,
                               .out = m->piece[BG_SIDE_OUT],
                               .errors = bg_writer_has_errors(w) ? &m->piece[BG_SIDE_ERRORS] : NULL,
                               .records = m->done,
                               .keys = m->keys,
                               .failed = m->n_failed,
                               .tokens = {m->tokens[0], m->tokens[1]},
                               .input = w->has_input ? &w->input : NULL};
    bg_entry_put_commit(b, &c);
    size_t before = b->len;
    bool any = false;
    bg_buf_str(b, ",\"partial\":[");
    if (m->partials && !bg_partials_print(w->partials, b, &any))
        return bg_fail(err, BG_NOMEM, "%s: out of memory", f->name);
    if (any)
        bg_buf_char(b, ']');
    else
        b->len = before;
    bg_buf_str(b, "}}");
    return put(w, f, start, !m->end, err);
}

bg_status bg_writer_put_manifest(bg_writer *w, const bg_manifest *m, bg_out_file *f, bg_error *err)
{
    struct stat sb;
    mode_t mode = w->journal.fd >= 0 && fstat(w->journal.fd, &sb) == 0 ? sb.st_mode : 0;
    bg_buf *b = &w->entry;
    const bg_entry_piece *errors = bg_writer_has_errors(w) ? &m->piece[BG_SIDE_ERRORS] : NULL;
    bg_status st = bg_out_make(f, mode, err);
    if (st) return st;
    bg_buf_clear(b);
    bg_buf_str(b, w->first);
    st = put(w, f, 0, false, err);
    size_t start = b->len;
    bg_entry_put_run(b, w->start_wall_ns);
    if (!st) st = put(w, f, start, !m->end && !w->commits, err);
    if (!st && w->commits) st = put_commit(w, m, f, err);
    if (st || !m->end) return st;
    start = b->len;
    const bg_entry_end e = {.commits = w->commits,
                            .out = m->piece[BG_SIDE_OUT],
                            .errors = errors,
                            .records = bg_ranges_count(m->done),
                            .failed = m->n_failed,
                            .selection = w->selection,
                            .ordered = m->ordered};
    bg_entry_put_end(b, &e);
    return put(w, f, start, true, err);
}

static char *new_path(const bg_writer *w)
{
    char *path;
    return asprintf(&path, "%s.new", w->journal_real) < 0 ? NULL : path;
}

bg_status bg_writer_fold(bg_writer *w, const bg_manifest *m, bg_error *err)
{
    char *path = new_path(w);
    if (!path) return bg_fail(err, BG_NOMEM, "%s: out of memory", w->journal_path);
    bg_out_file f = {.sys = w->sys, .fd = -1, .name = path};
    bg_status st = bg_out_remove(w->sys, path, err);
    if (!st) st = bg_writer_put_manifest(w, m, &f, err);
    if (!st) st = bg_out_rename(w->sys, path, w->journal_real, err);
    if (st && f.fd >= 0) w->sys->unlink(w->sys->ctx, path); /* its room may be what is missing */
    if (!st) st = bg_out_sync_dir(w->sys, w->journal_real, err);
    if (st) {
        if (f.fd >= 0) close(f.fd);
        free(path);
        return st;
    }
    close(w->journal.fd);
    w->journal.fd = f.fd;
    w->journal.end = w->folded_end = f.end;
    free(path);
    return BG_OK;
}
