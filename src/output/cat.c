#include "output/cat.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "output/view.h"

typedef struct cat {
    const bg_cat_config *c;
    bg_sink *sink;
    bg_view *views; /* of each path; open while lines are fetched from them */
    bg_order *order;
    int64_t n_lines;
    bg_buf line;
} cat;

static void note(const cat *x, const char *text)
{
    if (x->c->note) x->c->note(x->c->ctx, text);
}

/* ---- a line
 * -----------------------------------------------------------------------------------------------
 */

static bg_status put(cat *x, const char *text, size_t n, bg_error *err)
{
    x->n_lines++;
    if (!x->c->n_fields) return bg_sink_put(x->sink, text, n, err);
    bg_buf *b = &x->line;
    bg_slice line;
    bg_buf_clear(b);
    bg_lens_skip(text, text + n, &line);
    for (int i = 0; i < x->c->n_fields; i++) {
        const char *name = x->c->fields[i];
        bg_slice v = bg_lens_path(line, name);
        bg_buf_char(b, i ? ',' : '{');
        bg_buf_json(b, name, strlen(name));
        bg_buf_char(b, ':');
        if (v.p)
            bg_buf_add(b, v.p, v.n);
        else
            bg_buf_str(b, "null");
    }
    bg_buf_str(b, "}\n");
    if (b->failed) return bg_fail(err, BG_NOMEM, "out of memory for a line");
    return bg_sink_put(x->sink, b->data, b->len, err);
}

/* ---- a file
 * ------------------------------------------------------------------------------------------------
 */

static void tell_journal(const cat *x, const bg_view *v)
{
    char text[BG_ERROR_TEXT + 80];
    if (!v->why.status && !v->rewrite) return;
    snprintf(text, sizeof text, "%s; reading what the output itself verifies",
             v->why.status ? v->why.text : "a rewrite of it is not complete");
    note(x, text);
}

static void tell_tail(const cat *x, const bg_reader *r, const char *path)
{
    char text[BG_ERROR_TEXT];
    uint64_t torn = bg_reader_torn(r);
    if (!torn) return;
    snprintf(text, sizeof text, "%.300s: %" PRIu64 " bytes at the end are not committed: left out",
             path, torn);
    note(x, text);
}

static bg_status take(cat *x, int file, const bg_out_line *line, bg_error *err)
{
    if (!x->order) return put(x, line->text, line->n, err);
    if (line->record < 0)
        return bg_fail(err, BG_FORMAT,
                       "%s: byte %" PRIu64 ": a result without its record number cannot be put in "
                       "order",
                       x->c->paths[file], line->offset);
    if (!bg_order_add(x->order, file, line, 0))
        return bg_fail(err, BG_NOMEM, "%s: out of memory for the order of the results",
                       x->c->paths[file]);
    return BG_OK;
}

static bg_status read_file(cat *x, int file, bg_error *err)
{
    bg_view *v = &x->views[file];
    bg_reader *r = NULL;
    bg_reader_config c;
    bg_reader_commit *commits = NULL;
    bg_status st = bg_view_open(v, x->c->paths[file], false, err);
    if (st) return st;
    if (v->out_fd < 0) {
        errno = ENOENT;
        return bg_fail_os(err, "%s: cannot open", v->path);
    }
    tell_journal(x, v);
    if (v->rewrite) v->journal = BG_VIEW_NO_JOURNAL; /* it may be of the file before or after */
    if (!bg_view_reader(v, &c, &commits)) st = bg_fail(err, BG_NOMEM, "%s: out of memory", v->path);
    if (!st && x->order && bg_order_file(x->order, v->out_fd, v->path, v->format) != file)
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", v->path);
    if (!st) st = bg_reader_open(&r, &c, err);
    while (!st) {
        bg_out_line line;
        bool got;
        st = bg_reader_next(r, &line, &got, err);
        if (st || !got) break;
        st = take(x, file, &line, err);
    }
    bool old = false;
    if (!st) st = bg_view_is_old(v, &old, err);
    if (!st && old)
        st =
            bg_fail(err, BG_FORMAT,
                    "%s: byte %" PRIu64 ": commits follow that its journal does not know: it is an "
                    "older one, or another's; put the right one back, or rebuild it with repair",
                    v->path, v->out_end);
    if (!st) tell_tail(x, r, v->path);
    bg_reader_close(r);
    free(commits);
    if (!x->order) bg_view_release(v);
    return st;
}

bg_status bg_cat(const bg_cat_config *c, bg_sink *sink, int64_t *n_lines, bg_error *err)
{
    cat x = {.c = c, .sink = sink, .views = calloc((size_t)c->n_paths + 1, sizeof(bg_view))};
    bg_status st = BG_OK;
    if (c->ordered) x.order = bg_order_new(0);
    if (!x.views || (c->ordered && !x.order)) {
        free(x.views);
        bg_order_free(x.order);
        return bg_fail(err, BG_NOMEM, "out of memory");
    }
    for (int i = 0; !st && i < c->n_paths; i++)
        st = read_file(&x, i, err);
    if (x.order && !st) bg_order_sort(x.order);
    size_t n = x.order && !st ? bg_order_count(x.order) : 0;
    for (size_t i = 0; !st && i < n; i++) {
        const bg_place *p = &bg_order_places(x.order)[i];
        const char *text;
        st = bg_order_text(x.order, p, &text, err);
        if (!st) st = put(&x, text, p->n, err);
    }
    for (int i = 0; i < c->n_paths; i++)
        bg_view_release(&x.views[i]);
    free(x.views);
    bg_order_free(x.order);
    bg_buf_release(&x.line);
    *n_lines = x.n_lines;
    return st;
}
