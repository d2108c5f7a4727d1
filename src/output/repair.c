#include "output/repair.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/json.h"
#include "output/entries.h"
#include "output/frames.h"
#include "output/journal.h"
#include "output/lock.h"
#include "output/ranges.h"
#include "output/recover.h"
#include "output/view.h"

enum { PIECE = 1 << 20 };

typedef struct stretch {
    uint64_t offset, bytes;
} stretch;

typedef struct stretches {
    stretch *v;
    size_t n, cap;
} stretches;

typedef struct side {
    const char *path;
    char *real; /* behind links */
    int fd;     /* -1: there is no such file */
    int32_t no; /* in the order */
    bg_out_format format;
    uint64_t size, whole; /* whole: the good end; what is behind is a torn tail */
    stretches kept;       /* frames; or runs of lines */
    stretches bad;        /* damage before `whole` */
    bg_entry_piece piece; /* what the new journal says of it */
    char *fresh;          /* the file that takes its place; NULL: it stays */
    int fresh_fd;
} side;

typedef struct work {
    bg_view v;
    bool trusted; /* the old journal is this output's */
    side side[BG_SIDES];
    bg_order *order;
    bg_place *drop; /* of lines that are there twice; by file and place */
    size_t n_drop;
    bg_ranges *done;
    bg_keys *keys;
    int64_t tokens[2];
    int64_t agree, disagree; /* keys of the old journal with the ids found */
    bg_repaired *r;
    bg_buf raw, text;
    char *error_path;
    char *journal_real;
} work;

static bg_status no_memory(const char *path, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
}

/* Joins what touches when `join`. */
static bool add_stretch(stretches *s, uint64_t offset, uint64_t bytes, bool join)
{
    if (bytes == 0) return true;
    if (join && s->n && s->v[s->n - 1].offset + s->v[s->n - 1].bytes == offset) {
        s->v[s->n - 1].bytes += bytes;
        return true;
    }
    if (s->n == s->cap) {
        size_t cap = s->cap ? s->cap * 2 : 64;
        stretch *v = realloc(s->v, cap * sizeof *v);
        if (!v) return false;
        s->v = v;
        s->cap = cap;
    }
    s->v[s->n++] = (stretch){offset, bytes};
    return true;
}

/* ---- what is there
 * ------------------------------------------------------------------------------------------ */

static uint64_t id_key(const bg_out_line *line)
{
    if (!line->id.p) return 0;
    return bg_hash64(line->id.p, line->id.n, 0) & UINT64_C(0xffffffff00000000);
}

static bg_status take_line(work *w, side *s, const bg_out_line *line, bg_error *err)
{
    if (line->record < 0)
        return bg_fail(err, BG_FORMAT,
                       "%s: byte %" PRIu64 ": a result without its record number: no journal can "
                       "be made of it; nothing was changed",
                       s->path, line->offset);
    uint64_t key = id_key(line), old = bg_keys_get(w->v.keys, line->record);
    if (old && key) {
        w->agree += old >> 32 == key >> 32;
        w->disagree += old >> 32 != key >> 32;
    }
    if (!bg_order_add(w->order, s->no, line, key)) return no_memory(s->path, err);
    s->piece.text += line->n;
    w->tokens[0] += line->prompt_tokens;
    w->tokens[1] += line->output_tokens;
    return BG_OK;
}

static bg_status take_text(work *w, side *s, uint64_t offset, const bg_buf *text, bg_error *err)
{
    bg_status st = BG_OK;
    for (size_t at = 0; !st && at < text->len;) {
        const char *p = text->data + at, *lf = memchr(p, '\n', text->len - at);
        bg_out_line line = {.text = p,
                            .n = lf ? (size_t)(lf + 1 - p) : text->len - at,
                            .offset = offset,
                            .in_frame = at};
        if (!bg_out_line_look(&line))
            return bg_fail(err, BG_FORMAT,
                           "%s: byte %" PRIu64 ": a whole frame, but no results of batchgen in it; "
                           "nothing was changed",
                           s->path, offset);
        st = take_line(w, s, &line, err);
        at += line.n;
    }
    return st;
}

static bg_status scan_frames(work *w, side *s, bg_error *err)
{
    bg_status st = BG_OK;
    for (uint64_t at = 0; !st && at < s->size;) {
        bg_found found;
        bg_error why = {0};
        uint64_t bytes, next = s->size;
        st = bg_reader_frame(s->fd, s->path, at, s->size, 0, &w->raw, &w->text, &bytes, &found,
                             &why, err);
        if (st) return st;
        if (found != BG_FOUND_WHOLE) {
            bool got;
            st = bg_reader_resync(s->fd, s->path, at + 1, s->size, 0, &w->raw, &w->text, &next,
                                  &bytes, &got, err);
            if (st || !got) return st;
            if (!add_stretch(&s->bad, at, next - at, true)) return no_memory(s->path, err);
            at = next;
        }
        st = take_text(w, s, at, &w->text, err);
        if (!st && !add_stretch(&s->kept, at, bytes, false)) st = no_memory(s->path, err);
        at += bytes;
        s->whole = at;
    }
    return st;
}

/* Lines from `from` to `to`, of which those that are none are damage. */
static bg_status scan_lines(work *w, side *s, uint64_t from, uint64_t to, bg_error *err)
{
    bg_buf b = {0};
    bg_status st = BG_OK;
    uint64_t at = from; /* of b's first byte */
    while (!st && at < to) {
        const char *lf = b.len ? memchr(b.data, '\n', b.len) : NULL;
        uint64_t left = to - at - b.len;
        if (!lf && left) {
            size_t got, want = left < PIECE ? (size_t)left : PIECE;
            if (!bg_buf_reserve(&b, want)) {
                st = no_memory(s->path, err);
                break;
            }
            st = bg_pread_full(s->fd, b.data + b.len, want, (int64_t)(at + b.len), &got, s->path,
                               err);
            b.len += got;
            if (got < want) to = at + b.len;
            if (!b.len || b.data[0] == '{') continue;
            lf = memchr(b.data, '\n', b.len); /* noise is not held until its line ends */
            if (!lf && left > want) lf = b.data + b.len - 1;
        }
        /* all the lines in it */
        size_t pos = 0;
        for (; !st && lf; lf = memchr(b.data + pos, '\n', b.len - pos)) {
            bg_out_line line = {
                .text = b.data + pos, .n = (size_t)(lf + 1 - (b.data + pos)), .offset = at + pos};
            if (bg_out_line_look(&line)) {
                bool ok = add_stretch(&s->bad, s->whole, line.offset - s->whole, true) &&
                          add_stretch(&s->kept, line.offset, line.n, true);
                st = ok ? take_line(w, s, &line, err) : no_memory(s->path, err);
                s->whole = line.offset + line.n;
            }
            pos += line.n;
            if (pos == b.len) break;
        }
        if (!pos) break; /* the end, without a line end */
        memmove(b.data, b.data + pos, b.len - pos);
        b.len -= pos;
        at += pos;
    }
    bg_buf_release(&b);
    return st;
}

static bg_status hash_of(const side *s, uint64_t offset, uint64_t bytes, uint64_t *hash,
                         bg_error *err)
{
    bg_status st = BG_OK;
    char *piece = malloc(PIECE);
    bg_hasher *h = bg_hasher_new();
    if (!piece || !h) st = no_memory(s->path, err);
    for (uint64_t at = 0; !st && at < bytes;) {
        size_t got, want = bytes - at < PIECE ? (size_t)(bytes - at) : PIECE;
        st = bg_pread_full(s->fd, piece, want, (int64_t)(offset + at), &got, s->path, err);
        if (!st) bg_hasher_add(h, piece, got);
        at += want;
    }
    if (!st) *hash = bg_hasher_value(h);
    bg_hasher_free(h);
    free(piece);
    return st;
}

static const bg_reader_commit *commit_of(const work *w, int i, size_t k)
{
    return i == BG_SIDE_OUT ? &w->v.commits[k].out : &w->v.commits[k].errors;
}

/* How many of the old journal's commits have their bytes in this file. fits[k]: whether the k-th
 * has. */
static bg_status verify_commits(work *w, int i, bool *fits, size_t *n_good, bg_error *err)
{
    const side *s = &w->side[i];
    bg_status st = BG_OK;
    *n_good = 0;
    for (size_t k = 0; !st && k < w->v.n_commits; k++) {
        const bg_reader_commit *c = commit_of(w, i, k);
        fits[k] = false;
        if (!c->bytes || c->offset + c->bytes > s->size) continue;
        uint64_t hash = 0;
        st = hash_of(s, c->offset, c->bytes, &hash, err);
        fits[k] = !st && hash == c->hash;
        *n_good += fits[k];
    }
    return st;
}

/* Plain text has no checksums but those in the journal: where one tells of other bytes, none of the
 * commit's lines is believed. */
static bg_status scan_plain(work *w, int i, const bool *fits, bool any, bg_error *err)
{
    side *s = &w->side[i];
    bg_status st = BG_OK;
    uint64_t at = 0;
    if (!any) w->r->unverified = true;
    for (size_t k = 0; any && !st && k < w->v.n_commits; k++) {
        const bg_reader_commit *c = commit_of(w, i, k);
        uint64_t end = c->offset + c->bytes < s->size ? c->offset + c->bytes : s->size;
        if (end <= at) continue;
        if (fits[k]) st = scan_lines(w, s, c->offset, end, err);
        at = end;
    }
    if (!st) st = scan_lines(w, s, at, s->size, err);
    return st;
}

static bg_status scan(work *w, int i, bg_error *err)
{
    side *s = &w->side[i];
    size_t n_good = 0;
    if (s->fd < 0) return BG_OK;
    bool *fits = calloc(w->v.n_commits + 1, sizeof *fits);
    s->no = bg_order_file(w->order, s->fd, s->path, s->format);
    if (!fits || s->no < 0) {
        free(fits);
        return no_memory(s->path, err);
    }
    bg_status st = verify_commits(w, i, fits, &n_good, err);
    if (n_good) w->trusted = true;
    if (!st) {
        st = s->format == BG_OUT_LZ4 ? scan_frames(w, s, err)
                                     : scan_plain(w, i, fits, n_good > 0, err);
    }
    free(fits);
    return st;
}

/* ---- the old journal
 * ---------------------------------------------------------------------------------------- */

static bg_status try_side(const work *w, int i, int64_t *n, bool *good, bg_error *err)
{
    const side *s = &w->side[i];
    uint64_t end = i == BG_SIDE_OUT ? w->v.out_end : w->v.errors_end;
    if (s->fd < 0) {
        *good = *good && end == 0;
        return BG_OK;
    }
    bg_reader_commit *commits = calloc(w->v.n_commits + 1, sizeof *commits);
    if (!commits) return no_memory(s->path, err);
    size_t n_commits = 0;
    for (size_t k = 0; k < w->v.n_commits; k++)
        if (commit_of(w, i, k)->bytes) commits[n_commits++] = *commit_of(w, i, k);
    const bg_reader_config c = {.path = s->path,
                                .fd = s->fd,
                                .format = s->format,
                                .end = end,
                                .commits = commits,
                                .n_commits = n_commits};
    bg_reader *r;
    bg_error why = {0};
    bg_status st = bg_reader_open(&r, &c, err);
    bool got = !st;
    while (got && !st) {
        bg_out_line line;
        st = bg_reader_next(r, &line, &got, &why);
        *n += got;
    }
    bg_reader_close(r);
    free(commits);
    if (st == BG_FORMAT) {
        *good = false;
        return BG_OK;
    }
    if (st && !err->status) *err = why;
    return st;
}

/* Whether journal and files fit, so that there is nothing to do. */
static bg_status try_old(work *w, bool *good, bg_error *err)
{
    int64_t n = 0;
    bool has_errors = json_object_get(w->v.first, "errors") != NULL;
    *good = w->v.journal == BG_VIEW_GOOD && has_errors == (w->side[BG_SIDE_ERRORS].path != NULL);
    bg_status st = BG_OK;
    for (int i = 0; i < BG_SIDES && !st && *good; i++)
        st = try_side(w, i, &n, good, err);
    bool old = false;
    if (!st && *good) st = bg_view_is_old(&w->v, &old, err);
    *good = *good && !st && !old && n == bg_ranges_count(w->v.done);
    if (!*good || st) return st;
    w->r->good = w->r->known = true;
    w->r->n_records = n;
    w->r->n_failed = w->v.n_failed;
    return BG_OK;
}

static bg_status find_errors(work *w, const char *path, const char *error_path, bg_error *err)
{
    if (error_path) {
        w->error_path = strdup(error_path);
        return w->error_path ? BG_OK : no_memory(path, err);
    }
    bg_status st = bg_view_error_path(&w->v, &w->error_path, err);
    if (st || !w->error_path || access(w->error_path, F_OK) == 0) return st;
    return bg_fail(
        err, BG_ARG,
        "%s: its error file %s is not here; put it back, or name the file that its error "
        "results are in: repair OUTPUT ERRORFILE",
        path, w->error_path);
}

/* ---- records
 * ------------------------------------------------------------------------------------------------
 */

static int by_place(const void *x, const void *y)
{
    const bg_place *a = x, *b = y;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return a->in_frame < b->in_frame ? -1 : a->in_frame > b->in_frame;
}

static side *side_of(work *w, int32_t file)
{
    bool errors = w->side[BG_SIDE_ERRORS].fd >= 0 && file == w->side[BG_SIDE_ERRORS].no;
    return &w->side[errors ? BG_SIDE_ERRORS : BG_SIDE_OUT];
}

static bg_status drop_twin(work *w, const bg_place *a, const bg_place *b, bg_error *err)
{
    const char *text = NULL;
    bg_buf first = {0};
    bg_status st = bg_order_text(w->order, a, &text, err);
    if (!st) bg_buf_add(&first, text, a->n);
    if (!st) st = bg_order_text(w->order, b, &text, err);
    bool same = !st && !first.failed && a->n == b->n && memcmp(first.data, text, a->n) == 0;
    bg_out_line line = {.text = text, .n = b->n};
    if (same && bg_out_line_look(&line)) {
        side_of(w, b->file)->piece.text -= b->n;
        w->tokens[0] -= line.prompt_tokens;
        w->tokens[1] -= line.output_tokens;
    }
    bg_buf_release(&first);
    if (st) return st;
    if (!same)
        return bg_fail(err, BG_FORMAT,
                       "record %lld has two different results: %s, byte %" PRIu64 ", and %s, byte "
                       "%" PRIu64 "; nothing was changed. Take one of them out, or start anew with "
                       "--overwrite",
                       (long long)a->record, side_of(w, a->file)->path, a->offset,
                       side_of(w, b->file)->path, b->offset);
    bg_place *d = realloc(w->drop, (w->n_drop + 1) * sizeof *d);
    if (!d) return no_memory(w->v.path, err);
    w->drop = d;
    d[w->n_drop++] = *b;
    return BG_OK;
}

static bg_status count_records(work *w, bg_error *err)
{
    bg_place *p = bg_order_places(w->order);
    size_t n = bg_order_count(w->order);
    bg_status st = BG_OK;
    bg_order_sort(w->order);
    for (size_t i = 0, first = 0; !st && i < n; i++) {
        if (i && p[i].record == p[first].record) {
            st = drop_twin(w, &p[first], &p[i], err);
            continue;
        }
        first = i;
        uint64_t old = w->trusted ? bg_keys_get(w->v.keys, p[i].record) : 0;
        if (!bg_ranges_add(w->done, p[i].record, p[i].record) ||
            !bg_keys_set(w->keys, p[i].record, old ? old : p[i].key))
            st = no_memory(w->v.path, err);
        w->r->n_failed += p[i].failed;
    }
    if (w->n_drop) qsort(w->drop, w->n_drop, sizeof *w->drop, by_place);
    w->r->n_duplicates = (int64_t)w->n_drop;
    w->r->n_records = bg_ranges_count(w->done);
    return st;
}

/* Records that the old journal has and that were not found. */
static bg_status count_lost(work *w, bg_error *err)
{
    bg_ranges *lost = bg_ranges_new();
    bool ok = lost != NULL;
    int64_t first, last;
    for (size_t i = 0; ok && w->trusted && bg_ranges_at(w->v.done, i, &first, &last); i++)
        for (int64_t r = first; ok && r <= last; r++)
            if (!bg_ranges_has(w->done, r)) ok = bg_ranges_add(lost, r, r);
    if (ok) w->r->n_lost = bg_ranges_count(lost);
    if (ok && w->r->n_lost) ok = bg_ranges_print(lost, &w->r->lost);
    bg_ranges_free(lost);
    return ok ? BG_OK : no_memory(w->v.path, err);
}

/* ---- writing
 * ------------------------------------------------------------------------------------------------
 */

/* The first line at or behind `offset` that is to go; NULL: none in this file. */
static const bg_place *next_dropped(const work *w, const side *s, uint64_t offset, size_t in_frame)
{
    const bg_place at = {.file = s->no, .offset = offset, .in_frame = in_frame};
    size_t lo = 0, hi = w->n_drop;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (by_place(&w->drop[mid], &at) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < w->n_drop && w->drop[lo].file == s->no ? &w->drop[lo] : NULL;
}

static bool has_dropped(const work *w, const side *s, const stretch *k)
{
    const bg_place *d = next_dropped(w, s, k->offset, 0);
    return d && d->offset < k->offset + k->bytes;
}

static bg_status append(bg_out_file *f, bg_hasher *h, const void *data, size_t n, bg_error *err)
{
    if (h) bg_hasher_add(h, data, n);
    return bg_out_append(f, data, n, err);
}

static bg_status copy(const side *s, bg_out_file *f, bg_hasher *h, const stretch *k, bg_error *err)
{
    bg_status st = BG_OK;
    char *piece = malloc(PIECE);
    if (!piece) return no_memory(s->path, err);
    for (uint64_t at = 0; !st && at < k->bytes;) {
        size_t got, want = k->bytes - at < PIECE ? (size_t)(k->bytes - at) : PIECE;
        st = bg_pread_full(s->fd, piece, want, (int64_t)(k->offset + at), &got, s->path, err);
        if (!st) st = append(f, h, piece, got, err);
        at += want;
    }
    free(piece);
    return st;
}

/* A run of lines without those that are elsewhere already. */
static bg_status copy_lines(work *w, const side *s, bg_out_file *f, bg_hasher *h, const stretch *k,
                            bg_error *err)
{
    uint64_t at = k->offset, end = k->offset + k->bytes;
    bg_status st = BG_OK;
    while (!st && at < end) {
        const bg_place *d = next_dropped(w, s, at, 0);
        uint64_t upto = d && d->offset < end ? d->offset : end;
        st = copy(s, f, h, &(stretch){at, upto - at}, err);
        at = upto < end ? upto + d->n : end;
    }
    return st;
}

/* A frame made anew without such lines; nothing, when no other is in it. */
static bg_status copy_frame(work *w, const side *s, bg_out_file *f, bg_hasher *h, const stretch *k,
                            bg_error *err)
{
    bg_found found;
    bg_error why = {0};
    uint64_t bytes;
    bg_buf rest = {0}, frame = {0};
    bg_status st = bg_reader_frame(s->fd, s->path, k->offset, k->offset + k->bytes, 0, &w->raw,
                                   &w->text, &bytes, &found, &why, err);
    for (size_t at = 0; !st && at < w->text.len;) {
        const char *p = w->text.data + at, *lf = memchr(p, '\n', w->text.len - at);
        size_t n = lf ? (size_t)(lf + 1 - p) : w->text.len - at;
        const bg_place *d = next_dropped(w, s, k->offset, at);
        if (!d || d->offset != k->offset || d->in_frame != at) bg_buf_add(&rest, p, n);
        at += n;
    }
    if (!st && rest.failed) st = no_memory(s->path, err);
    if (!st && rest.len) st = bg_frame_put(&frame, rest.data, rest.len, 0, err);
    if (!st && frame.len) st = append(f, h, frame.data, frame.len, err);
    bg_buf_release(&rest);
    bg_buf_release(&frame);
    return st;
}

static bg_status save_damage(work *w, side *s, bg_error *err)
{
    if (!s->bad.n) return BG_OK;
    bg_buf *path = &w->r->damaged_path;
    size_t before = path->len;
    if (before) bg_buf_str(path, " and ");
    size_t start = path->len;
    bg_buf_printf(path, "%s.damaged", s->path);
    if (path->failed) return no_memory(s->path, err);
    bg_out_opened o;
    bg_status st = bg_out_open(&o, path->data + start, true, &bg_out_real, err);
    if (st) return st;
    bg_out_file f = {.sys = &bg_out_real, .fd = o.fd, .name = path->data + start, .end = o.size};
    for (size_t i = 0; !st && i < s->bad.n; i++) {
        st = copy(s, &f, NULL, &s->bad.v[i], err);
        w->r->damaged_bytes += s->bad.v[i].bytes;
    }
    w->r->n_damaged += (int64_t)s->bad.n;
    if (!st) st = bg_out_sync(&f, err);
    close(o.fd);
    free(o.real);
    return st;
}

/* The file that takes the side's place, with what is kept. */
static bg_status write_fresh(work *w, side *s, bg_error *err)
{
    struct stat sb;
    if (asprintf(&s->fresh, "%s.repair", s->real) < 0) s->fresh = NULL;
    bg_hasher *h = bg_hasher_new();
    bg_status st = s->fresh && h ? BG_OK : no_memory(s->path, err);
    bg_out_file f = {.sys = &bg_out_real, .fd = -1, .name = s->fresh};
    if (!st) st = bg_out_remove(&bg_out_real, s->fresh, err);
    if (!st) st = bg_out_make(&f, fstat(s->fd, &sb) == 0 ? sb.st_mode : 0, err);
    s->fresh_fd = f.fd;
    for (size_t i = 0; !st && i < s->kept.n; i++) {
        const stretch *k = &s->kept.v[i];
        if (!has_dropped(w, s, k))
            st = copy(s, &f, h, k, err);
        else if (s->format == BG_OUT_LZ4)
            st = copy_frame(w, s, &f, h, k, err);
        else
            st = copy_lines(w, s, &f, h, k, err);
    }
    if (!st) st = bg_out_sync(&f, err);
    if (!st) {
        s->piece.bytes = f.end;
        s->piece.hash = bg_hasher_value(h);
    }
    bg_hasher_free(h);
    return st;
}

static bg_status prepare_side(work *w, side *s, bg_error *err)
{
    bool drops = false;
    if (s->fd < 0) return BG_OK;
    for (size_t i = 0; i < w->n_drop; i++)
        drops = drops || w->drop[i].file == s->no;
    w->r->cut_bytes += s->size - s->whole;
    if (!s->bad.n && !drops) {
        s->piece.bytes = s->whole;
        return hash_of(s, 0, s->whole, &s->piece.hash, err);
    }
    bg_status st = save_damage(w, s, err);
    if (!st) st = write_fresh(w, s, err);
    return st;
}

static const char *format_name(bg_out_format f)
{
    return f == BG_OUT_LZ4 ? "lz4" : "plain";
}

static bool put_first(const work *w, bg_buf *b)
{
    const json_t *identity = w->trusted ? bg_view_identity(&w->v) : NULL;
    const side *errors = &w->side[BG_SIDE_ERRORS];
    char *text = identity ? bg_json_text(identity, JSON_COMPACT) : strdup("null");
    if (!text) return false;
    w->r->known = identity != NULL;
    bg_buf_printf(b, "{\"batchgen\":1,\"format\":\"%s\"", format_name(w->side[0].format));
    if (errors->path) {
        const char *slash = strrchr(errors->path, '/'), *name = slash ? slash + 1 : errors->path;
        bg_buf_str(b, ",\"errors\":{\"file\":");
        bg_buf_json(b, name, strlen(name));
        bg_buf_printf(b, ",\"format\":\"%s\"}", format_name(errors->format));
    }
    json_int_t started = json_integer_value(json_object_get(w->v.first, "started"));
    if (w->trusted && started) bg_buf_printf(b, ",\"started\":%lld", (long long)started);
    bg_buf_str(b, ",\"identity\":");
    bg_buf_str(b, text);
    bg_buf_char(b, '}');
    free(text);
    bg_journal_seal(b, 0);
    return !b->failed;
}

static bg_status write_journal(work *w, char **name, bg_error *err)
{
    struct stat sb;
    bg_buf b = {0};
    bg_status st = BG_OK;
    if (asprintf(name, "%s.new", w->journal_real) < 0) *name = NULL;
    if (!*name || !put_first(w, &b)) st = no_memory(w->v.journal_path, err);
    size_t start = b.len;
    bg_entry_put_run(&b, bg_wall_ns());
    bg_journal_seal(&b, start);
    start = b.len;
    const bg_entry_commit c = {
        .folded = true,
        .out = w->side[BG_SIDE_OUT].piece,
        .errors = w->side[BG_SIDE_ERRORS].path ? &w->side[BG_SIDE_ERRORS].piece : NULL,
        .records = w->done,
        .keys = w->keys,
        .failed = w->r->n_failed,
        .tokens = {w->tokens[0], w->tokens[1]},
        .input = w->trusted && w->v.has_input ? &w->v.input : NULL};
    bg_entry_put_commit(&b, &c);
    bg_buf_str(&b, "}}");
    bg_journal_seal(&b, start);
    if (b.failed && !st) st = no_memory(w->v.journal_path, err);
    bg_out_file f = {.sys = &bg_out_real, .fd = -1, .name = *name};
    if (!st) st = bg_out_remove(&bg_out_real, *name, err);
    if (!st) st = bg_out_make(&f, fstat(w->side[BG_SIDE_OUT].fd, &sb) == 0 ? sb.st_mode : 0, err);
    if (!st) st = bg_out_append(&f, b.data, b.len, err);
    if (!st) st = bg_out_sync(&f, err);
    if (f.fd >= 0) close(f.fd);
    bg_buf_release(&b);
    return st;
}

static bg_status set_aside(work *w, bg_error *err)
{
    bg_buf *bad = &w->r->bad_path;
    struct stat sb;
    if (w->v.journal_fd < 0) return BG_OK;
    for (int i = 1;; i++) {
        bg_buf_clear(bad);
        bg_buf_printf(bad, i > 1 ? "%s.bad.%d" : "%s.bad", w->journal_real, i);
        if (bad->failed) return no_memory(w->v.journal_path, err);
        if (lstat(bad->data, &sb) != 0) break;
    }
    bg_status st = bg_out_rename(&bg_out_real, w->journal_real, bad->data, err);
    if (!st) st = bg_out_sync_dir(&bg_out_real, w->journal_real, err);
    return st;
}

/* Every name, one after the other on the disk, the journal last. */
static bg_status put_in_place(work *w, const char *new_journal, bg_error *err)
{
    bg_status st = set_aside(w, err);
    for (int i = BG_SIDES - 1; i >= 0 && !st; i--) {
        side *s = &w->side[i];
        if (!s->fresh) continue;
        if (i == BG_SIDE_OUT) st = bg_out_flock(s->fresh_fd, s->fresh, err);
        if (!st) st = bg_out_rename(&bg_out_real, s->fresh, s->real, err);
        if (!st) st = bg_out_sync_dir(&bg_out_real, s->real, err);
        if (st) break;
        free(s->fresh);
        s->fresh = NULL;
    }
    if (!st) st = bg_out_rename(&bg_out_real, new_journal, w->journal_real, err);
    if (!st) st = bg_out_sync_dir(&bg_out_real, w->journal_real, err);
    for (int i = 0; i < BG_SIDES && !st; i++) {
        side *s = &w->side[i];
        if (s->fd < 0 || s->fresh_fd >= 0 || s->whole == s->size) continue;
        bg_out_file f = {.sys = &bg_out_real, .fd = s->fd, .name = s->path};
        st = bg_out_cut(&f, s->whole, err);
    }
    return st;
}

/* ---- the whole
 * ---------------------------------------------------------------------------------------------- */

static bg_status rebuild(work *w, bg_error *err)
{
    const char *path = w->side[BG_SIDE_OUT].path;
    char *new_journal = NULL;
    bg_status st = BG_OK;
    for (int i = 0; i < BG_SIDES && !st; i++)
        st = scan(w, i, err);
    if (st) return st;
    if (w->agree && !w->disagree) w->trusted = true;
    if (w->disagree) w->trusted = false;
    if (!bg_order_count(w->order))
        return bg_fail(err, BG_FORMAT,
                       "%s: there is no whole result of batchgen in it; nothing was changed", path);
    st = count_records(w, err);
    if (!st) st = count_lost(w, err);
    for (int i = 0; i < BG_SIDES && !st; i++)
        st = prepare_side(w, &w->side[i], err);
    if (!st) st = write_journal(w, &new_journal, err);
    if (!st) st = put_in_place(w, new_journal, err);
    if (st && new_journal) unlink(new_journal);
    free(new_journal);
    return st;
}

/* Without a journal the format shows in the first byte; when that is damaged, in what follows. */
static bg_status find_format(work *w, side *s, bg_error *err)
{
    char first;
    size_t n;
    bool got = false;
    uint64_t at, bytes;
    s->format = w->v.format;
    if (w->v.first || s->format == BG_OUT_LZ4) return BG_OK;
    bg_status st = bg_pread_full(s->fd, &first, 1, 0, &n, s->path, err);
    if (!st && n && first != '{')
        st = bg_reader_resync(s->fd, s->path, 0, s->size, 0, &w->raw, &w->text, &at, &bytes, &got,
                              err);
    if (got) s->format = BG_OUT_LZ4;
    return st;
}

/* The files, under the lock. */
static bg_status open_all(work *w, const bg_out_lock *lock, const char *path,
                          const char *error_path, bg_error *err)
{
    bg_out_opened o;
    struct stat sb;
    side *out = &w->side[BG_SIDE_OUT], *errors = &w->side[BG_SIDE_ERRORS];
    bg_status st = bg_view_open(&w->v, path, true, err);
    if (st) return st;
    if (w->v.journal == BG_VIEW_NOT_A_JOURNAL)
        return bg_fail(err, BG_FORMAT, "%s; move it away if the results shall have a new one",
                       w->v.why.text);
    if (w->v.rewrite)
        return bg_fail(err, BG_ARG,
                       "%s: a rewrite of it is not complete; start the same command again: it goes "
                       "on with it",
                       path);
    st = bg_out_open(&o, w->v.journal_path, false, &bg_out_real, err);
    if (st) return st;
    if (o.fd >= 0) close(o.fd);
    w->journal_real = o.real;
    out->path = path;
    out->fd = dup(lock->fd);
    out->real = strdup(lock->real);
    if (out->fd < 0 || fstat(out->fd, &sb) != 0) return bg_fail_os(err, "%s: cannot open", path);
    if (!out->real) return no_memory(path, err);
    out->size = (uint64_t)sb.st_size;
    st = find_format(w, out, err);
    if (!st) st = find_errors(w, path, error_path, err);
    if (st || !w->error_path) return st;
    st = bg_out_open(&o, w->error_path, false, &bg_out_real, err);
    if (st) return st;
    errors->path = w->error_path;
    errors->fd = o.fd;
    errors->real = o.real;
    errors->size = o.size;
    errors->format = bg_out_format_of(w->error_path);
    if (o.fd >= 0) return BG_OK;
    errno = ENOENT;
    return bg_fail_os(err, "%s: cannot open", w->error_path);
}

static void end_work(work *w)
{
    for (int i = 0; i < BG_SIDES; i++) {
        side *s = &w->side[i];
        if (s->fresh) unlink(s->fresh);
        if (s->fd >= 0) close(s->fd);
        if (s->fresh_fd >= 0) close(s->fresh_fd);
        free(s->fresh);
        free(s->real);
        free(s->kept.v);
        free(s->bad.v);
    }
    bg_view_release(&w->v);
    bg_order_free(w->order);
    bg_ranges_free(w->done);
    bg_keys_free(w->keys);
    bg_buf_release(&w->raw);
    bg_buf_release(&w->text);
    free(w->drop);
    free(w->error_path);
    free(w->journal_real);
}

bg_status bg_repair(const char *path, const char *error_path, bg_repaired *r, bg_error *err)
{
    *r = (bg_repaired){0};
    bg_out_lock *lock;
    if (access(path, F_OK) != 0) return bg_fail_os(err, "%s: cannot open", path);
    bg_status st = bg_out_lock_take(&lock, path, 0, NULL, NULL, err);
    if (st) return st;
    work w = {.r = r,
              .order = bg_order_new(0),
              .done = bg_ranges_new(),
              .keys = bg_keys_new(),
              .v = {.out_fd = -1, .journal_fd = -1}};
    for (int i = 0; i < BG_SIDES; i++)
        w.side[i].fd = w.side[i].fresh_fd = -1;
    bool good = false;
    if (!w.order || !w.done || !w.keys) st = no_memory(path, err);
    if (!st) st = open_all(&w, lock, path, error_path, err);
    if (!st) st = try_old(&w, &good, err);
    if (!st && !good) st = rebuild(&w, err);
    end_work(&w);
    bg_out_lock_free(lock);
    return st;
}

void bg_repaired_release(bg_repaired *r)
{
    bg_buf_release(&r->lost);
    bg_buf_release(&r->damaged_path);
    bg_buf_release(&r->bad_path);
}
