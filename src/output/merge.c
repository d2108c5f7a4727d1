#include "output/merge.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/io.h"
#include "base/json.h"
#include "output/files.h"
#include "output/view.h"

enum { COMMIT_BYTES = 2 << 20 };

typedef struct shard {
    const char *path;
    bg_view v;
    int64_t index, count; /* 2/4: 1 and 4; count 0: it is no shard */
    int error_fd;         /* -1: none */
    char *error_path;
} shard;

typedef struct merge {
    shard *s;
    int n;
    int64_t count; /* of shards */
    bg_order *order;
    bg_merged *m;
} merge;

static bg_status no_memory(const char *path, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
}

/* ---- do they belong together?
 * ----------------------------------------------------------------------------- */

static const char *text_of(const json_t *object, const char *name)
{
    const char *s = json_string_value(json_object_get(object, name));
    return s ? s : "";
}

static bg_status check_one(shard *s, bg_error *err)
{
    const bg_view *v = &s->v;
    if (v->out_fd < 0) {
        errno = ENOENT;
        return bg_fail_os(err, "%s: cannot open", s->path);
    }
    if (v->why.status) return bg_fail(err, v->why.status, "%s", v->why.text);
    if (v->journal != BG_VIEW_GOOD)
        return bg_fail(err, BG_FORMAT,
                       "%s: has no journal, so nobody can say that it is complete; put it back, or "
                       "rebuild it with repair and start its job again",
                       s->path);
    if (v->rewrite || !v->end)
        return bg_fail(err, BG_BUSY,
                       "%s: is not finished: %lld records are done; start its job again first",
                       s->path, (long long)bg_ranges_count(v->done));
    const json_t *identity = bg_view_identity(v);
    if (!identity)
        return bg_fail(err, BG_ARG,
                       "%s: its journal was rebuilt and does not know its job; start its job again "
                       "first",
                       s->path);
    bool old;
    bg_status st = bg_view_is_old(v, &old, err);
    if (st) return st;
    if (old)
        return bg_fail(err, BG_FORMAT,
                       "%s: commits follow that its journal does not know; rebuild it with repair",
                       s->path);
    json_int_t records = json_integer_value(json_object_get(v->end, "records"));
    if (records != bg_ranges_count(v->done))
        return bg_fail(err, BG_FORMAT, "%s: its journal tells of %lld records, its end of %lld",
                       s->v.journal_path, (long long)bg_ranges_count(v->done), (long long)records);
    const char *name = text_of(identity, "shard");
    long long index, count;
    if (*name && (sscanf(name, "%lld/%lld", &index, &count) != 2 || index < 1 || index > count))
        return bg_fail(err, BG_FORMAT, "%s: \"%s\" is no shard", s->v.journal_path, name);
    s->index = *name ? index : 0;
    s->count = *name ? count : 0;
    return BG_OK;
}

static void add_difference(bg_buf *b, const char *name, const json_t *a, const json_t *c)
{
    char *x = a ? bg_json_text(a, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    char *y = c ? bg_json_text(c, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    bg_buf_printf(b, "%s%s is %.80s and %.80s", b->len ? "; " : "", name, x ? x : "not set",
                  y ? y : "not set");
    free(x);
    free(y);
}

static bool may_differ(const char *name)
{
    return strcmp(name, "shard") == 0;
}

static bg_status check_pair(const shard *a, const shard *b, bg_error *err)
{
    json_t *x = (json_t *)(uintptr_t)bg_view_identity(&a->v), *value; /* its loops take no const */
    json_t *y = (json_t *)(uintptr_t)bg_view_identity(&b->v);
    const char *name;
    bg_buf diff = {0};
    json_object_foreach(x, name, value)
    {
        json_t *other = json_object_get(y, name);
        if (!may_differ(name) && (!other || !json_equal(value, other)))
            add_difference(&diff, name, value, other);
    }
    json_object_foreach(y, name, value)
    {
        if (!may_differ(name) && !json_object_get(x, name))
            add_difference(&diff, name, NULL, value);
    }
    const char *sel_a = text_of(a->v.end, "selection"), *sel_b = text_of(b->v.end, "selection");
    if (strcmp(sel_a, sel_b) != 0)
        bg_buf_printf(&diff, "%sthe selected part is \"%.80s\" and \"%.80s\"", diff.len ? "; " : "",
                      sel_a, sel_b);
    const bg_input_place *p = &a->v.input, *q = &b->v.input;
    if (a->v.has_input && b->v.has_input && p->end == q->end && p->hash != q->hash)
        bg_buf_printf(&diff, "%sthe inputs have other bytes", diff.len ? "; " : "");
    bg_status st = BG_OK;
    if (diff.failed)
        st = no_memory(a->path, err);
    else if (diff.len)
        st = bg_fail(err, BG_ARG, "%s and %s are of different jobs: %s", a->path, b->path,
                     diff.data);
    bg_buf_release(&diff);
    return st;
}

/* Every shard once. */
static bg_status check_set(merge *x, bg_error *err)
{
    x->count = x->s[0].count;
    for (int i = 0; i < x->n; i++) {
        const shard *s = &x->s[i];
        if (!s->count && x->n > 1)
            return bg_fail(err, BG_ARG,
                           "%s: is the output of a whole job, not of a shard; batchgen cat joins "
                           "the results of different jobs",
                           s->path);
        if (s->count != x->count)
            return bg_fail(err, BG_ARG, "%s is shard %lld of %lld, but %s shard %lld of %lld",
                           x->s[0].path, (long long)x->s[0].index, (long long)x->count, s->path,
                           (long long)s->index, (long long)s->count);
        for (int k = 0; k < i; k++)
            if (s->count && x->s[k].index == s->index)
                return bg_fail(err, BG_ARG, "%s and %s are both shard %lld of %lld", x->s[k].path,
                               s->path, (long long)s->index, (long long)s->count);
    }
    if (x->count <= x->n) return BG_OK;
    bg_buf missing = {0};
    for (int64_t want = 1; want <= x->count && missing.len < 200; want++) {
        bool there = false;
        for (int i = 0; i < x->n && !there; i++)
            there = x->s[i].index == want;
        if (!there) bg_buf_printf(&missing, "%s%lld", missing.len ? ", " : "", (long long)want);
    }
    bg_status st = missing.failed ? no_memory(x->s[0].path, err)
                                  : bg_fail(err, BG_ARG, "shard %s of %lld is missing",
                                            missing.data ? missing.data : "?", (long long)x->count);
    bg_buf_release(&missing);
    return st;
}

/* ---- reading
 * -----------------------------------------------------------------------------------------------
 */

static bg_status take(merge *x, const shard *s, int32_t file, const char *name,
                      const bg_out_line *line, bg_error *err)
{
    if (line->record < 0)
        return bg_fail(err, BG_FORMAT, "%s: byte %" PRIu64 ": a result without its record number",
                       name, line->offset);
    if (!bg_ranges_has(s->v.done, line->record))
        return bg_fail(err, BG_FORMAT,
                       "%s: byte %" PRIu64 ": a result of record %lld, which is not in its journal",
                       name, line->offset, (long long)line->record);
    if (s->count && line->record % s->count != s->index - 1)
        return bg_fail(err, BG_FORMAT,
                       "%s: byte %" PRIu64 ": a result of record %lld, which is not in shard "
                       "%lld/%lld",
                       name, line->offset, (long long)line->record, (long long)s->index,
                       (long long)s->count);
    if (!bg_order_add(x->order, file, line, bg_keys_get(s->v.keys, line->record)))
        return no_memory(name, err);
    return BG_OK;
}

static bg_status read_with(merge *x, const shard *s, const bg_reader_config *c, int64_t *n,
                           bg_error *err)
{
    bg_reader *r;
    int32_t file = bg_order_file(x->order, c->fd, c->path, c->format);
    if (file < 0) return no_memory(c->path, err);
    bg_status st = bg_reader_open(&r, c, err);
    while (!st) {
        bg_out_line line;
        bool got;
        st = bg_reader_next(r, &line, &got, err);
        if (st || !got) break;
        st = take(x, s, file, c->path, &line, err);
        ++*n;
    }
    bg_reader_close(r);
    return st;
}

static bg_status open_errors(shard *s, bg_error *err)
{
    bg_status st = bg_view_error_path(&s->v, &s->error_path, err);
    if (st) return st;
    s->error_fd = open(s->error_path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (s->error_fd < 0)
        return bg_fail_os(err,
                          "%s: cannot open %s, its error file; put it beside the output, and it is "
                          "found",
                          s->path, s->error_path);
    return BG_OK;
}

static bg_status read_errors(merge *x, shard *s, int64_t *n, bg_error *err)
{
    if (!bg_view_has_errors(&s->v) || !s->v.errors_end) return BG_OK;
    bg_reader_commit *commits = calloc(s->v.n_commits + 1, sizeof *commits);
    if (!commits) return no_memory(s->path, err);
    size_t n_commits = 0;
    for (size_t i = 0; i < s->v.n_commits; i++)
        if (s->v.commits[i].errors.bytes) commits[n_commits++] = s->v.commits[i].errors;
    bg_status st = open_errors(s, err);
    if (!st) {
        const bg_reader_config c = {.path = s->error_path,
                                    .fd = s->error_fd,
                                    .format = bg_out_format_of(s->error_path),
                                    .end = s->v.errors_end,
                                    .commits = commits,
                                    .n_commits = n_commits};
        int64_t before = *n;
        st = read_with(x, s, &c, n, err);
        x->m->n_from_errors += *n - before;
    }
    free(commits);
    return st;
}

static bg_status read_shard(merge *x, shard *s, bg_error *err)
{
    bg_reader_config c;
    bg_reader_commit *commits;
    int64_t n = 0, done = bg_ranges_count(s->v.done);
    if (!bg_view_reader(&s->v, &c, &commits)) return no_memory(s->path, err);
    bg_status st = read_with(x, s, &c, &n, err);
    free(commits);
    if (!st) st = read_errors(x, s, &n, err);
    if (!st && n != done)
        st = bg_fail(err, BG_FORMAT, "%s: has %lld results, but its journal tells of %lld", s->path,
                     (long long)n, (long long)done);
    return st;
}

/* ---- writing
 * -----------------------------------------------------------------------------------------------
 */

static bg_status put_all(merge *x, bg_writer *w, bg_error *err)
{
    bg_place *p = bg_order_places(x->order);
    size_t n = bg_order_count(x->order);
    bg_status st = BG_OK;
    for (size_t i = 0; !st && i < n; i++) {
        if (i && p[i].record == p[i - 1].record)
            return bg_fail(err, BG_FORMAT, "record %lld has two results", (long long)p[i].record);
        bg_out_line line = {.n = p[i].n};
        st = bg_order_text(x->order, &p[i], &line.text, err);
        if (st) break;
        bg_out_line_look(&line);
        st = bg_writer_add(w,
                           &(bg_done){.record = p[i].record,
                                      .key = p[i].key,
                                      .failed = p[i].failed,
                                      .prompt_tokens = line.prompt_tokens,
                                      .output_tokens = line.output_tokens},
                           line.text, line.n, err);
        x->m->n_failed += p[i].failed;
    }
    x->m->n_records = (int64_t)n;
    return st;
}

/* The place that is furthest in the input. */
static void put_input(const merge *x, bg_writer *w)
{
    const bg_view *far = NULL;
    for (int i = 0; i < x->n; i++)
        if (x->s[i].v.has_input && (!far || x->s[i].v.input.end > far->input.end)) far = &x->s[i].v;
    if (far) bg_writer_input(w, &far->input);
}

static json_t *whole_identity(const merge *x)
{
    json_t *o = json_copy((json_t *)(uintptr_t)bg_view_identity(&x->s[0].v));
    if (!o) return NULL;
    bool ok = true;
    if (json_object_get(o, "shard")) ok = json_object_set_new(o, "shard", json_string("")) == 0;
    if (ok) return o;
    json_decref(o);
    return NULL;
}

/* When the first of them began. */
static int64_t started(const merge *x)
{
    int64_t first = 0;
    for (int i = 0; i < x->n; i++) {
        int64_t s = json_integer_value(json_object_get(x->s[i].v.first, "started"));
        if (s && (!first || s < first)) first = s;
    }
    return first;
}

static bg_status write_part(merge *x, const char *part, const char *out, bg_writer **w,
                            bg_error *err)
{
    bg_recovered rec;
    json_t *identity = whole_identity(x);
    if (!identity) return no_memory(out, err);
    const bg_writer_config c = {.path = part,
                                .format = bg_out_format_of(out),
                                .identity = identity,
                                .started_s = started(x),
                                .selection = text_of(x->s[0].v.end, "selection"),
                                .overwrite = true,
                                .ordered = true,
                                .commit_bytes = COMMIT_BYTES,
                                .commit_ns = INT64_MAX};
    bg_status st = bg_writer_open(w, &c, &rec, err);
    if (!st) {
        put_input(x, *w);
        st = put_all(x, *w, err);
    }
    uint64_t commits;
    if (!st) st = bg_writer_finish(*w, err);
    if (!st) bg_writer_sizes(*w, &x->m->text_bytes, &x->m->bytes, &commits);
    json_decref(identity);
    return st;
}

static bool there(const char *path)
{
    struct stat sb;
    return lstat(path, &sb) == 0;
}

static bg_status write_out(merge *x, const char *out, bg_error *err)
{
    char *part = NULL, *part_journal = NULL, *journal = NULL;
    bg_writer *w = NULL;
    bool ours = false;
    bg_status st = BG_OK;
    if (asprintf(&part, "%s.part.%ld", out, (long)getpid()) < 0) part = NULL;
    if (part && asprintf(&part_journal, "%s.journal", part) < 0) part_journal = NULL;
    if (asprintf(&journal, "%s.journal", out) < 0) journal = NULL;
    if (!part || !part_journal || !journal) {
        st = no_memory(out, err);
        goto done;
    }
    const char *const names[] = {out, journal, part, part_journal};
    for (int i = 0; i < 4 && !st; i++)
        if (there(names[i]))
            st = bg_fail(err, BG_ARG, "%s: is there already; name another -o, or remove it",
                         names[i]);
    if (st) goto done;
    ours = true;
    st = write_part(x, part, out, &w, err);
    /* The writer keeps the lock of what gets the name, so nobody can begin to write it between the
     * two; and results without a journal are refused by every command but repair. */
    if (!st && renameat2(AT_FDCWD, part, AT_FDCWD, out, RENAME_NOREPLACE) != 0) {
        bool plain = errno == EINVAL || errno == ENOSYS; /* a file system that cannot */
        if (!plain || there(out) || rename(part, out) != 0)
            st = bg_fail_os(err, "%s: cannot put in place", out);
    }
    if (!st) {
        ours = false;
        if (rename(part_journal, journal) != 0)
            st = bg_fail_os(err, "%s: cannot put in place", journal);
    }
    if (!st) st = bg_sync_dir_of(out, err);
done:
    if (ours) {
        unlink(part);
        unlink(part_journal);
    }
    bg_writer_close(w);
    free(part);
    free(part_journal);
    free(journal);
    return st;
}

bg_status bg_merge(const char *const *paths, int n_paths, const char *out, bg_merged *m,
                   bg_error *err)
{
    *m = (bg_merged){.n_shards = n_paths};
    merge x = {.s = calloc((size_t)n_paths + 1, sizeof(shard)), .order = bg_order_new(0), .m = m};
    bg_status st = BG_OK;
    if (!x.s || !x.order) {
        free(x.s);
        bg_order_free(x.order);
        return no_memory(out, err);
    }
    for (int i = 0; !st && i < n_paths; i++) {
        shard *s = &x.s[x.n];
        *s = (shard){.path = paths[i], .error_fd = -1};
        st = bg_view_open(&s->v, paths[i], true, err);
        if (st) break;
        x.n++;
        st = check_one(s, err);
        if (!st && i) st = check_pair(&x.s[0], s, err);
    }
    if (!st) st = check_set(&x, err);
    for (int i = 0; !st && i < x.n; i++)
        st = read_shard(&x, &x.s[i], err);
    if (!st) {
        bg_order_sort(x.order);
        st = write_out(&x, out, err);
    }
    bg_order_free(x.order);
    for (int i = 0; i < x.n; i++) {
        bg_view_release(&x.s[i].v);
        if (x.s[i].error_fd >= 0) close(x.s[i].error_fd);
        free(x.s[i].error_path);
    }
    free(x.s);
    return st;
}
