/* All files replaced at once: results taken out, renumbered or sorted.
 *
 * The new ones are written beside the old, as PATH.rewrite, ERRORS.rewrite and
 * PATH.journal.rewrite, which is a folded one. When they and their names are on disk, the entry
 * {"rewrite":{}} goes to the end of the OLD journal: with it the rewrite counts, before it nothing
 * has changed. Then the new files take the old names, the journal last. So an old journal with that
 * entry says that what is still called .rewrite must take its place, whoever comes next; without
 * it such files are rubbish. The new output is locked before it has its name (lock.c). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/json.h"
#include "output/frames.h"
#include "output/journal.h"
#include "output/ranges.h"
#include "output/reader.h"
#include "output/renumber.h"
#include "output/writer.h"

enum { DROPPED_BYTES = 1 << 20 };

typedef struct target { /* a file being written, or nothing (fd -1) */
    bg_out_file f;
    char *path;
    bg_out_format format;
    size_t most; /* text that is held back */
    bg_buf text, frame;
    bg_hasher *hash;
    uint64_t text_bytes;
} target;

typedef struct rewrite {
    bg_writer *w;
    const bg_rewrite *how;
    target side[BG_SIDES], dropped;
    target journal; /* only f and path */
    bg_ranges *done;
    bg_keys *keys;
    int64_t n_failed, tokens[2];
    int64_t n_kept, n_dropped, n_changed;
    bg_buf line;
    bg_slice file; /* what file_name was made of; in file_text */
    bg_buf file_text;
    char *file_name;
    bool counts; /* the entry may be on disk: no way back */
} rewrite;

static char *beside(const char *path, const char *suffix)
{
    char *s;
    return asprintf(&s, "%s%s", path, suffix) < 0 ? NULL : s;
}

static bg_status no_memory(const bg_writer *w, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", w->side[BG_SIDE_OUT].path);
}

static const char *real_of(const bg_writer *w, int i)
{
    return i == BG_SIDE_OUT ? w->lock->real : w->side[i].real;
}

bg_status bg_writer_sync_names(const bg_writer *w, bg_error *err)
{
    bg_status st = bg_out_sync_dir(w->sys, w->journal_real, err);
    for (int i = 0; i < BG_SIDES && !st; i++)
        if (real_of(w, i)) st = bg_out_sync_dir(w->sys, real_of(w, i), err);
    return st;
}

/* ---- writing the new files
 * ------------------------------------------------------------------------------------- */

static bg_status flush(target *t, int level, bg_error *err)
{
    const bg_buf *data = &t->text;
    bg_status st = BG_OK;
    if (!t->text.len) return BG_OK;
    if (t->format == BG_OUT_LZ4) {
        bg_buf_clear(&t->frame);
        st = bg_frame_put(&t->frame, t->text.data, t->text.len, level, err);
        data = &t->frame;
    }
    if (!st) st = bg_out_append(&t->f, data->data, data->len, err);
    if (st) return st;
    if (t->hash) bg_hasher_add(t->hash, data->data, data->len);
    t->text_bytes += t->text.len;
    bg_buf_clear(&t->text);
    return BG_OK;
}

static bg_status put_line(const rewrite *r, target *t, const char *line, size_t n, bg_error *err)
{
    bg_buf_add(&t->text, line, n);
    if (t->text.failed) return no_memory(r->w, err);
    return t->text.len >= t->most ? flush(t, r->w->level, err) : BG_OK;
}

static bg_status make_side(rewrite *r, int i, bg_error *err)
{
    const bg_side *old = &r->w->side[i];
    target *t = &r->side[i];
    struct stat sb;
    if (old->f.fd < 0) return BG_OK;
    t->path = beside(real_of(r->w, i), ".rewrite");
    t->hash = bg_hasher_new();
    if (!t->path || !t->hash) return no_memory(r->w, err);
    t->f.name = t->path;
    t->format = old->format;
    t->most = r->w->commit_bytes;
    mode_t mode = fstat(old->f.fd, &sb) == 0 ? sb.st_mode : 0;
    bg_status st = bg_out_make(&t->f, mode, err);
    if (!st) st = bg_out_flock(t->f.fd, t->path, err);
    return st;
}

static bg_status open_dropped(rewrite *r, bg_error *err)
{
    bg_out_opened o;
    const char *path = r->how->dropped_path;
    bg_status st = bg_out_open(&o, path, true, r->w->sys, err);
    if (st) return st;
    r->dropped = (target){.f = {.sys = r->w->sys, .fd = o.fd, .name = path, .end = o.size},
                          .path = o.real,
                          .format = bg_out_format_of(path),
                          .most = DROPPED_BYTES};
    return BG_OK;
}

static bg_status begin(rewrite *r, bg_error *err)
{
    bg_writer *w = r->w;
    r->done = bg_ranges_new();
    r->keys = bg_keys_new();
    r->journal.path = beside(w->journal_real, ".rewrite");
    if (!r->done || !r->keys || !r->journal.path) return no_memory(w, err);
    r->journal.f.name = r->journal.path;
    bg_status st = bg_writer_remove_stale(w, err);
    for (int i = 0; i < BG_SIDES && !st; i++)
        st = make_side(r, i, err);
    return st;
}

static void end_target(target *t)
{
    if (t->f.fd >= 0) close(t->f.fd);
    free(t->path);
    bg_buf_release(&t->text);
    bg_buf_release(&t->frame);
    bg_hasher_free(t->hash);
    *t = (target){.f.fd = -1};
}

static void end(rewrite *r)
{
    const bg_out_sys *sys = r->w->sys;
    for (int i = 0; i < BG_SIDES; i++) {
        if (!r->counts && r->side[i].f.fd >= 0) sys->unlink(sys->ctx, r->side[i].path);
        end_target(&r->side[i]);
    }
    if (!r->counts && r->journal.f.fd >= 0) sys->unlink(sys->ctx, r->journal.path);
    end_target(&r->journal);
    end_target(&r->dropped);
    bg_ranges_free(r->done);
    bg_keys_free(r->keys);
    bg_buf_release(&r->line);
    bg_buf_release(&r->file_text);
    free(r->file_name);
}

/* ---- what stays
 * ------------------------------------------------------------------------------------- */

/* The name that the line has for its input; NULL: none. */
static bg_status file_name_of(rewrite *r, bg_slice file, const char **name, bg_error *err)
{
    *name = NULL;
    if (!file.p) return BG_OK;
    if (r->file_name && file.n == r->file_text.len &&
        memcmp(file.p, r->file_text.data, file.n) == 0) {
        *name = r->file_name;
        return BG_OK;
    }
    bool nomem = false;
    json_t *v = bg_json_load(file.p, file.n, JSON_DECODE_ANY, NULL, &nomem);
    free(r->file_name);
    r->file_name = json_is_string(v) ? strdup(json_string_value(v)) : NULL;
    json_decref(v);
    bg_buf_clear(&r->file_text);
    bg_buf_add(&r->file_text, file.p, file.n);
    *name = r->file_name;
    if (!*name || r->file_text.failed) return no_memory(r->w, err);
    return BG_OK;
}

static bg_status keep_line(rewrite *r, int i, const bg_out_line *line, bg_error *err)
{
    const char *path = r->w->side[i].path;
    int64_t record = line->record, number;
    const char *name, *text = line->text;
    size_t n = line->n;
    bg_result_parts parts;
    if (!bg_result_take_apart(line->text, line->n, &parts))
        return bg_fail(err, BG_FORMAT,
                       "%s: byte %llu: the result of record %lld was not written "
                       "by this program; nothing was changed",
                       path, (unsigned long long)line->offset, (long long)record);
    bg_status st = file_name_of(r, parts.file, &name, err);
    if (st) return st;
    number = parts.line;
    const char *new_name = name;
    const bg_done old = {.record = record,
                         .key = bg_keys_get(r->w->keys, record),
                         .failed = line->failed,
                         .prompt_tokens = line->prompt_tokens,
                         .output_tokens = line->output_tokens};
    if (!r->how->keep(r->how->ctx, &old, &record, &number, &new_name)) {
        r->n_dropped++;
        if (line->failed || !r->how->dropped_path) return BG_OK;
        if (r->dropped.f.fd < 0) st = open_dropped(r, err);
        return st ? st : put_line(r, &r->dropped, text, n, err);
    }
    bool same_name = name && new_name ? strcmp(name, new_name) == 0 : name == new_name;
    if (record != old.record || number != parts.line || !same_name) {
        bg_buf_clear(&r->line);
        bg_result_renumber(&parts, record, number, new_name, &r->line);
        if (r->line.failed) return no_memory(r->w, err);
        text = r->line.data;
        n = r->line.len;
        r->n_changed++;
    }
    if (record < 0 || bg_ranges_has(r->done, record))
        return bg_fail(err, record == old.record ? BG_FORMAT : BG_INTERNAL,
                       "%s: byte %llu: a second result of record %lld; nothing was changed", path,
                       (unsigned long long)line->offset, (long long)record);
    if (!bg_ranges_add(r->done, record, record) ||
        (old.key && !bg_keys_set(r->keys, record, old.key)))
        return no_memory(r->w, err);
    r->n_kept++;
    r->n_failed += old.failed;
    r->tokens[0] += old.prompt_tokens;
    r->tokens[1] += old.output_tokens;
    return put_line(r, &r->side[i], text, n, err);
}

/* Each line of a file, in its order. */
static bg_status each_line(rewrite *r, int i, int64_t *n_lines, bg_order *order, bg_error *err)
{
    bg_side *old = &r->w->side[i];
    const bg_reader_config c = {
        .path = old->path, .fd = old->f.fd, .format = old->format, .end = old->f.end};
    bg_reader *reader;
    bg_status st = bg_reader_open(&reader, &c, err);
    for (bool got = !st; got && !st;) {
        bg_out_line line;
        st = bg_reader_next(reader, &line, &got, err);
        if (st || !got) break;
        ++*n_lines;
        if (!bg_ranges_has(r->w->done, line.record))
            st = bg_fail(err, BG_FORMAT,
                         "%s: byte %llu: a result that the journal does not tell of; nothing was "
                         "changed; rebuild the journal with repair",
                         old->path, (unsigned long long)line.offset);
        else if (!order)
            st = keep_line(r, i, &line, err);
        else if (!bg_order_add(order, 0, &line, 0))
            st = no_memory(r->w, err);
    }
    bg_reader_close(reader);
    return st;
}

static bg_status sort_side(rewrite *r, int i, int64_t *n_lines, bg_error *err)
{
    const bg_side *old = &r->w->side[i];
    bg_order *order = bg_order_new(0);
    if (!order || bg_order_file(order, old->f.fd, old->path, old->format) < 0) {
        bg_order_free(order);
        return no_memory(r->w, err);
    }
    bg_status st = each_line(r, i, n_lines, order, err);
    if (!st) bg_order_sort(order);
    const bg_place *places = bg_order_places(order);
    for (size_t k = 0; k < bg_order_count(order) && !st; k++) {
        const char *text;
        st = bg_order_text(order, &places[k], &text, err);
        if (!st) st = put_line(r, &r->side[i], text, places[k].n, err);
    }
    bg_order_free(order);
    return st;
}

static bg_status fill(rewrite *r, bg_error *err)
{
    int64_t n_lines = 0, want = bg_ranges_count(r->w->done);
    bg_status st = BG_OK;
    for (int i = 0; i < BG_SIDES && !st; i++) {
        if (r->w->side[i].f.fd < 0) continue;
        st = r->how->keep ? each_line(r, i, &n_lines, NULL, err) : sort_side(r, i, &n_lines, err);
        if (!st) st = flush(&r->side[i], r->w->level, err);
    }
    if (!st && n_lines != want)
        st = bg_fail(err, BG_FORMAT,
                     "%s: holds %lld results, but the journal tells of %lld; nothing was changed; "
                     "rebuild the journal with repair",
                     r->w->side[BG_SIDE_OUT].path, (long long)n_lines, (long long)want);
    if (!st && r->dropped.f.fd >= 0) st = flush(&r->dropped, r->w->level, err);
    return st;
}

/* ---- making it count
 * ------------------------------------------------------------------------------------- */

static bg_manifest manifest(const rewrite *r, bool with_end)
{
    bg_manifest m = bg_writer_manifest(r->w);
    if (r->how->keep) {
        m.done = r->done;
        m.keys = r->keys;
        m.n_failed = r->n_failed;
        memcpy(m.tokens, r->tokens, sizeof m.tokens);
    }
    m.partials = (!r->how->keep || r->how->same_input) && !with_end;
    m.end = with_end;
    m.ordered = with_end && r->how->sort;
    for (int i = 0; i < BG_SIDES; i++)
        if (r->side[i].f.fd >= 0)
            m.piece[i] = (bg_entry_piece){.bytes = r->side[i].f.end,
                                          .text = r->side[i].text_bytes,
                                          .hash = bg_hasher_value(r->side[i].hash)};
    return m;
}

static bg_status put_files(rewrite *r, bool with_end, bg_error *err)
{
    bg_status st = BG_OK;
    for (int i = 0; i < BG_SIDES && !st; i++)
        if (r->side[i].f.fd >= 0) st = bg_out_sync(&r->side[i].f, err);
    if (!st && r->dropped.f.fd >= 0) {
        st = bg_out_sync(&r->dropped.f, err);
        if (!st) st = bg_out_sync_dir(r->w->sys, r->dropped.path, err);
    }
    const bg_manifest m = manifest(r, with_end);
    if (!st) st = bg_writer_put_manifest(r->w, &m, &r->journal.f, err);
    if (!st) st = bg_writer_sync_names(r->w, err);
    return st;
}

static bg_status put_entry(rewrite *r, bg_error *err)
{
    bg_writer *w = r->w;
    bg_buf_clear(&w->entry);
    bg_buf_str(&w->entry, BG_JOURNAL_REWRITE);
    bg_journal_seal(&w->entry, 0);
    if (w->entry.failed) return no_memory(w, err);
    r->counts = true; /* even if this fails: then it may be there or not */
    bg_status st = bg_out_append(&w->journal, w->entry.data, w->entry.len, err);
    if (!st) st = bg_out_sync(&w->journal, err);
    return st;
}

static bg_status take_names(rewrite *r, bg_error *err)
{
    bg_writer *w = r->w;
    bg_status st = BG_OK;
    for (int i = 0; i < BG_SIDES && !st; i++)
        if (r->side[i].f.fd >= 0) st = bg_out_rename(w->sys, r->side[i].path, real_of(w, i), err);
    if (!st)
        st = bg_writer_sync_names(w, err); /* the journal must not be the first to have its name */
    if (!st) st = bg_out_rename(w->sys, r->journal.path, w->journal_real, err);
    if (!st) st = bg_out_sync_dir(w->sys, w->journal_real, err);
    return st;
}

/* The writer goes on with the new files. */
static void take_over(rewrite *r)
{
    bg_writer *w = r->w;
    for (int i = 0; i < BG_SIDES; i++) {
        bg_side *s = &w->side[i];
        target *t = &r->side[i];
        if (t->f.fd < 0) continue;
        close(s->f.fd);
        s->f.fd = t->f.fd;
        s->f.end = t->f.end;
        s->text_bytes = t->text_bytes;
        bg_hasher_copy(s->whole, t->hash);
        t->f.fd = -1;
    }
    w->lock->fd = w->side[BG_SIDE_OUT].f.fd;
    close(w->journal.fd);
    w->journal.fd = r->journal.f.fd;
    w->journal.end = w->folded_end = r->journal.f.end;
    r->journal.f.fd = -1;
    if (!r->how->keep) return;
    bg_ranges_free(w->done);
    bg_keys_free(w->keys);
    w->done = r->done;
    w->keys = r->keys;
    w->n_failed = r->n_failed;
    memcpy(w->tokens, r->tokens, sizeof w->tokens);
    r->done = NULL;
    r->keys = NULL;
}

static bg_status fold_only(bg_writer *w, bool with_end, bg_error *err)
{
    bg_manifest m = bg_writer_manifest(w);
    m.partials = !with_end;
    m.end = with_end;
    m.ordered = with_end && w->ordered;
    return bg_writer_fold(w, &m, err);
}

/* One pass: either keep or sort. */
static bg_status pass(bg_writer *w, const bg_rewrite *how, bool with_end, int64_t *n_kept,
                      int64_t *n_dropped, bg_error *err)
{
    rewrite r = {.w = w, .how = how};
    for (int i = 0; i < BG_SIDES; i++)
        r.side[i].f = (bg_out_file){.sys = w->sys, .fd = -1};
    r.journal.f = r.dropped.f = (bg_out_file){.sys = w->sys, .fd = -1};
    bg_status st = begin(&r, err);
    if (!st) st = fill(&r, err);
    if (!st && how->keep) {
        /* Whatever was in flight may be another record now, or be of another text. */
        if (!how->same_input) bg_partials_clear(w->partials);
        w->has_input = w->input_moved = false;
    }
    bool same = how->keep && !r.n_dropped && !r.n_changed;
    if (!st && same) {
        st = fold_only(w, with_end, err);
    } else if (!st) {
        st = put_files(&r, with_end, err);
        if (!st) st = put_entry(&r, err);
        if (!st) st = take_names(&r, err);
        if (!st) take_over(&r);
    }
    if (how->keep) {
        *n_kept = r.n_kept;
        *n_dropped = r.n_dropped;
    }
    end(&r);
    return st;
}

static bg_status rewrite_all(bg_writer *w, const bg_rewrite *how, int64_t *n_kept,
                             int64_t *n_dropped, bg_error *err)
{
    bg_status st = BG_OK;
    bool was_finished = w->finished;
    *n_kept = bg_ranges_count(w->done);
    *n_dropped = 0;
    if (!*n_kept || (!how->keep && !how->sort))
        st = fold_only(w, was_finished && !how->keep, err);
    else if (how->keep)
        st = pass(w, how, false, n_kept, n_dropped, err);
    if (!st && how->keep) w->finished = false;
    if (!st && how->sort && *n_kept) {
        const bg_rewrite sort = {.sort = true};
        st = pass(w, &sort, w->finished, n_kept, n_dropped, err);
    }
    if (!st) w->differs = false;
    return st;
}

bg_status bg_writer_rewrite(bg_writer *w, const bg_rewrite *how, int64_t *n_kept,
                            int64_t *n_dropped, bg_error *err)
{
    *n_kept = *n_dropped = 0;
    bg_status st = bg_writer_begin(w, err);
    if (st) return st;
    if (w->side[BG_SIDE_OUT].f.stream || bg_ranges_count(w->pending))
        return bg_fail(err, BG_INTERNAL, "%s: cannot be rewritten now", w->side[BG_SIDE_OUT].path);
    return bg_writer_ends(w, rewrite_all(w, how, n_kept, n_dropped, err), err);
}

bg_status bg_writer_sort(bg_writer *w, bg_error *err)
{
    const bg_rewrite how = {.sort = true};
    int64_t kept, dropped;
    return pass(w, &how, true, &kept, &dropped, err);
}

/* ---- what a run before has left
 * ------------------------------------------------------------------------------------- */

bg_status bg_writer_remove_stale(const bg_writer *w, bg_error *err)
{
    const struct {
        const char *path, *suffix;
    } list[] = {{w->lock->real, ".rewrite"},
                {w->side[BG_SIDE_ERRORS].real, ".rewrite"},
                {w->journal_real, ".rewrite"},
                {w->journal_real, ".new"}};
    bg_status st = BG_OK;
    for (size_t i = 0; i < sizeof list / sizeof *list && !st; i++) {
        if (!list[i].path) continue;
        char *path = beside(list[i].path, list[i].suffix);
        if (!path) return no_memory(w, err);
        st = bg_out_remove(w->sys, path, err);
        free(path);
    }
    return st;
}

/* Gives one file its name, if it does not have it. */
static bg_status roll_side(bg_writer *w, int i, bg_error *err)
{
    bg_out_opened o;
    if (!real_of(w, i)) return BG_OK;
    char *path = beside(real_of(w, i), ".rewrite");
    if (!path) return no_memory(w, err);
    bg_status st = bg_out_open(&o, path, false, w->sys, err);
    if (!st && o.fd >= 0) {
        st = bg_out_flock(o.fd, path, err);
        if (!st) st = bg_out_rename(w->sys, path, real_of(w, i), err);
        if (!st && i == BG_SIDE_OUT) {
            close(w->lock->fd);
            w->lock->fd = w->side[i].f.fd = o.fd;
            o.fd = -1;
        }
        if (o.fd >= 0) close(o.fd);
    }
    free(o.real);
    free(path);
    return st;
}

static bg_status check_new_journal(const bg_writer *w, const char *path, const bg_writer_config *c,
                                   bg_error *err)
{
    bg_out_opened o;
    bg_status st = bg_out_open(&o, path, false, w->sys, err);
    if (st) return st;
    if (o.fd < 0) {
        st = bg_fail(err, BG_FORMAT,
                     "%s: is missing: the journal %s says that it takes its place; nothing was "
                     "changed; put it back, rebuild the journal with repair, or start anew with "
                     "--overwrite",
                     path, w->journal_path);
    } else {
        const bg_recover_files f = {
            .side = {{.fd = -1, .name = w->side[BG_SIDE_OUT].path, .size = 1}, {.fd = -1}},
            .journal_fd = o.fd,
            .journal_name = path};
        st = bg_recover_fits(&f, c, err);
        close(o.fd);
    }
    free(o.real);
    return st;
}

bg_status bg_writer_roll_forward(bg_writer *w, const bg_writer_config *c, bg_error *err)
{
    char *path = beside(w->journal_real, ".rewrite");
    if (!path) return no_memory(w, err);
    w->lock->made = false;
    bg_status st = check_new_journal(w, path, c, err);
    /* Its run may have been killed before it could sync the entry. */
    if (!st) st = bg_out_sync(&w->journal, err);
    for (int i = 0; i < BG_SIDES && !st; i++)
        st = roll_side(w, i, err);
    if (!st) st = bg_writer_sync_names(w, err);
    if (!st) st = bg_out_rename(w->sys, path, w->journal_real, err);
    if (!st) st = bg_out_sync_dir(w->sys, w->journal_real, err);
    free(path);
    if (st) return st;
    bg_writer_close_files(w);
    return bg_writer_open_files(w, err);
}
