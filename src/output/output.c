/* The output file and its journal, to the byte.
 *
 * PATH: commits one after another, nothing between them and nothing in front. With BG_OUT_LZ4 a
 * commit is one LZ4 frame (frames.h) of whole lines; with BG_OUT_PLAIN it is the lines. `lz4 -dc`
 * or cat reads it at any time. The error file, when the job has one, is made the same way.
 *
 * PATH.journal: entries as journal.h has them, in this order:
 *
 *     {"batchgen":1,"format":"lz4"|"plain"[,"errors":{"file":NAME,"format":F}],"identity":{...}}
 *                                                                first; made with the file
 *     {"run":{"pid":P,"host":H,"start":T}}                       at each start
 *     {"commit":{"n":N[,"folded":true],"offset":O,"bytes":B,"text":T,"hash":X
 *                [,"errors":{"offset":O,"bytes":B,"text":T,"hash":X}],"records":R,"failed":F
 *                ,"tokens":[P,G],"at":T[,"keys":K]
 *                [,"input":{"end":E,"hash":X,"read":I,"total":I,"records":I}][,"partial":[...]]}}
 *     {"end":{"commits":N,"bytes":B,"text":T[,"errors":{"bytes":B,"text":T}],"records":R
 *             ,"failed":F[,"selection":S][,"ordered":true]}}     last, once
 *     {"rewrite":{}}                                             in place of that: rewrite.c
 *
 * A commit: N counts from 0; the output's bytes O to O+B have the XXH3-64 X (16 hex digits) and
 * hold T bytes of text; errors is the same of the error file. Both together are the results of the
 * records R ("0-63,70"), F of which are errors; P prompt tokens and G generated ones went into
 * them. K: bg_done's key of each record, 16 hex digits, in ascending order of the records.
 * input: all input up to byte E was consumed, with that running hash; I bytes of so many were
 * read as they are stored, and I records. partial: partials.h. B is 0, and R empty, in a commit
 * that only saves partial tokens. In the end entry R is a count. An identity of null is repair's:
 * whose results these are is not known. A folded commit stands first, and for all before it
 * (fold.c).
 *
 * Order on disk: the commit's bytes, fdatasync, its entry, fdatasync; so an entry on disk means
 * that its bytes are. Recovery (recover.h) cuts the files after the last commit of which all is
 * whole. A failed call is final: the descriptor's state is unknown then (the kernel may have
 * dropped the pages and call the next sync a success), so nothing more is written, and the next
 * start recovers. */
#include "output/output.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "output/frames.h"
#include "output/journal.h"
#include "output/ranges.h"
#include "output/writer.h"

enum { COMMIT_BYTES = 512 << 10, FOLD_BYTES = 64 << 20, FOLD_AT_START = 1 << 20 };
#define COMMIT_NS INT64_C(5000000000)

bg_status bg_writer_ends(bg_writer *w, bg_status st, const bg_error *err)
{
    if (st && !w->why.status) w->why = *err;
    return st;
}

bg_status bg_writer_ended(const bg_writer *w, bg_error *err)
{
    if (w->why.status && !err->status) *err = w->why;
    return w->why.status;
}

static bg_status no_memory(const bg_writer *w, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", w->side[BG_SIDE_OUT].path);
}

/* ---- entries
 * --------------------------------------------------------------------------------------- */

static bg_status put_entry(bg_writer *w, bg_error *err)
{
    bg_journal_seal(&w->entry, 0);
    if (w->entry.failed) return bg_fail(err, BG_NOMEM, "%s: out of memory", w->journal_path);
    bg_status st = bg_out_append(&w->journal, w->entry.data, w->entry.len, err);
    if (!st) st = bg_out_sync(&w->journal, err);
    return st;
}

static bg_status put_run(bg_writer *w, bg_error *err)
{
    bg_buf_clear(&w->entry);
    bg_entry_put_run(&w->entry, w->start_wall_ns);
    return put_entry(w, err);
}

/* ---- opening
 * --------------------------------------------------------------------------------------- */

static bg_status open_errors(bg_writer *w, bool create, bg_error *err)
{
    bg_side *s = &w->side[BG_SIDE_ERRORS];
    bg_out_opened o;
    if (!s->path || s->f.fd >= 0) return BG_OK;
    bg_status st = bg_out_open(&o, s->path, create, w->sys, err);
    if (st) return st;
    free(s->real);
    s->real = o.real;
    s->f.fd = o.fd;
    s->f.end = o.size;
    if (o.fd < 0) return BG_OK;
    st = bg_out_flock(o.fd, s->path, err);
    if (!st && o.made) st = bg_out_sync_dir(w->sys, s->real, err);
    return st;
}

static bg_status open_journal(bg_writer *w, bool create, bg_error *err)
{
    bg_out_opened o;
    if (w->journal.fd >= 0) return BG_OK;
    free(w->journal_real);
    w->journal_real = NULL;
    bg_status st = bg_out_open(&o, w->journal_path, create, w->sys, err);
    if (st) return st;
    w->journal_real = o.real;
    w->journal.fd = o.fd;
    w->journal.end = o.size;
    return BG_OK;
}

bg_status bg_writer_open_files(bg_writer *w, bg_error *err)
{
    struct stat sb;
    bg_out_file *out = &w->side[BG_SIDE_OUT].f;
    out->fd = w->lock->fd;
    /* Its size only counts under the lock: the holder before us may just have written. */
    if (fstat(out->fd, &sb) != 0) return bg_fail_os(err, "%s: cannot stat", out->name);
    out->end = (uint64_t)sb.st_size;
    bg_status st = open_errors(w, false, err);
    if (!st) st = open_journal(w, false, err);
    return st;
}

void bg_writer_close_files(bg_writer *w)
{
    bg_side *s = &w->side[BG_SIDE_ERRORS];
    if (s->f.fd >= 0) close(s->f.fd);
    if (w->journal.fd >= 0) close(w->journal.fd);
    free(s->real);
    free(w->journal_real);
    s->real = w->journal_real = NULL;
    s->f.fd = w->journal.fd = -1;
}

static bg_status start_anew(bg_writer *w, bg_error *err)
{
    bg_status st = BG_OK;
    st = open_errors(w, true, err);
    if (!st) st = open_journal(w, true, err);
    /* The results go first: results without a journal would be refused, a journal without is begun
     * again. */
    for (int i = 0; i < BG_SIDES && !st; i++)
        if (w->side[i].f.fd >= 0 && w->side[i].f.end) st = bg_out_cut(&w->side[i].f, 0, err);
    if (!st && w->journal.end) st = bg_out_cut(&w->journal, 0, err);
    if (!st) st = bg_writer_remove_stale(w, err);
    if (st) return st;
    bg_buf_clear(&w->entry);
    bg_buf_str(&w->entry, w->first);
    st = put_entry(w, err);
    if (!st) st = bg_writer_sync_names(w, err);
    if (st) return st;
    w->lock->made = false;
    w->folded_end = w->journal.end;
    return put_run(w, err);
}

/* Whether what the journal could be made shorter by is worth it. */
static bool worth_folding(const bg_writer *w, uint64_t least)
{
    if (least > w->fold_bytes) least = w->fold_bytes;
    uint64_t grown = w->journal.end - w->folded_end;
    return grown >= least && grown >= w->folded_end;
}

static bg_status cut_tails(bg_writer *w, bg_error *err)
{
    bg_status st = BG_OK;
    /* The journal first: what it does not name is a tail, whatever is left of it. */
    if (w->journal.end > w->journal_cut) st = bg_out_cut(&w->journal, w->journal_cut, err);
    for (int i = 0; i < BG_SIDES && !st; i++)
        if (w->side[i].f.fd >= 0 && w->side[i].f.end > w->side_cut[i])
            st = bg_out_cut(&w->side[i].f, w->side_cut[i], err);
    return st;
}

static bg_status begin(bg_writer *w, bg_error *err)
{
    if (w->fresh) return start_anew(w, err);
    bg_status st = open_errors(w, true, err);
    if (!st) st = bg_writer_remove_stale(w, err);
    if (!st) st = cut_tails(w, err);
    /* A start before this one may have ended between a write or a new name and its sync. What was
     * read so far is relied on from here on, and told; and what is appended must not reach the disk
     * before it. */
    if (!st) st = bg_writer_sync_names(w, err);
    if (!st) st = bg_out_sync(&w->journal, err);
    if (st || w->finished) return st;
    if (w->adopted || w->differs || !worth_folding(w, FOLD_AT_START)) return put_run(w, err);
    const bg_manifest m = bg_writer_manifest(w);
    return bg_writer_fold(w, &m, err);
}

bg_status bg_writer_begin(bg_writer *w, bg_error *err)
{
    bg_status st = bg_writer_ended(w, err);
    if (st || w->begun || w->side[BG_SIDE_OUT].f.stream) return st;
    w->begun = true;
    return bg_writer_ends(w, begin(w, err), err);
}

static bg_status go_on(bg_writer *w, bg_recovery *r, bg_recovered *rec, bg_error *err)
{
    rec->resumed = !r->finished;
    rec->finished = w->finished = r->finished;
    rec->differs = w->differs = r->differs;
    rec->adopted = w->adopted = r->adopted;
    rec->n_records = bg_ranges_count(r->done);
    rec->n_commits = r->commits;
    rec->lost = r->lost;
    rec->n_failed = w->n_failed = r->n_failed;
    rec->input_end = r->has_input ? r->input.end : 0;
    rec->input_hash = r->has_input ? r->input.hash : 0;
    w->input = r->input;
    w->has_input = r->has_input;
    w->commits = r->commits;
    w->folded_end = r->folded_end;
    memcpy(w->tokens, r->tokens, sizeof w->tokens);
    for (int i = 0; i < BG_SIDES; i++) {
        bg_side *s = &w->side[i];
        if (s->f.fd >= 0) rec->cut_bytes += s->f.end - r->side[i].end;
        w->side_cut[i] = r->side[i].end;
        s->text_bytes = r->side[i].text_bytes;
        bg_hasher_copy(s->whole, r->side[i].whole);
    }
    bg_ranges_free(w->done);
    bg_keys_free(w->keys);
    bg_partials_free(w->partials);
    w->done = r->done;
    w->keys = r->keys;
    w->partials = r->partials;
    r->done = NULL;
    r->keys = NULL;
    r->partials = NULL;
    if (!bg_partials_list(w->partials, &rec->partials, &rec->n_partials)) return no_memory(w, err);
    w->journal_cut = r->journal_end;
    w->lock->made = false;
    return BG_OK;
}

static bg_status recover(bg_writer *w, const bg_writer_config *c, bg_recovery *r, bg_error *err)
{
    bool rewritten;
    bg_recover_files f = {.journal_fd = w->journal.fd, .journal_name = w->journal_path};
    if (w->journal.fd < 0)
        return bg_fail(err, BG_FORMAT,
                       "%s: there are results, but no journal %s; put it back, rebuild it with "
                       "repair, name another output, or start anew with --overwrite",
                       w->side[BG_SIDE_OUT].path, w->journal_path);
    bg_status st = bg_recover_rewritten(w->journal.fd, w->journal_path, &rewritten, err);
    if (!st && rewritten) st = bg_writer_roll_forward(w, c, err);
    if (st) return st;
    f.journal_fd = w->journal.fd;
    for (int i = 0; i < BG_SIDES; i++) {
        const bg_side *s = &w->side[i];
        f.side[i].fd = s->f.fd;
        f.side[i].name = s->path;
        f.side[i].size = s->f.fd >= 0 ? s->f.end : 0;
        f.side[i].format = s->format;
    }
    return bg_recover(r, &f, c, err);
}

static bg_status open_file(bg_writer *w, const bg_writer_config *c, bg_recovered *rec,
                           bg_error *err)
{
    bg_recovery r = {0};
    bg_status st = BG_OK;
    if (!w->lock) st = bg_out_lock_take_on(&w->lock, c->path, 0, NULL, NULL, w->sys, err);
    if (!st) st = bg_writer_open_files(w, err);
    if (st) return st;
    bool fresh = c->overwrite || (w->side[BG_SIDE_OUT].f.end == 0 && w->journal.end == 0);
    if (!fresh) {
        st = recover(w, c, &r, err);
        fresh = r.fresh;
    }
    w->fresh = fresh;
    const bg_side *errors = &w->side[BG_SIDE_ERRORS];
    if (!st && fresh && !c->overwrite && errors->f.fd >= 0 && errors->f.end)
        st = bg_fail(err, BG_FORMAT,
                     "%s: is in the way: it holds something, but there are no results of this job "
                     "yet; move it, name another one, or start anew with --overwrite",
                     errors->path);
    if (!st && !fresh) st = go_on(w, &r, rec, err);
    bg_recovery_release(&r);
    return st;
}

/* No journal, no lock, and nothing to recover. */
static bg_status open_stream(bg_writer *w, const bg_writer_config *c, bg_error *err)
{
    bg_out_file *out = &w->side[BG_SIDE_OUT].f;
    if (c->error_path || c->ordered)
        return bg_fail(err, BG_ARG, "standard output: takes no %s; name an output file",
                       c->error_path ? "error file" : "order of records");
    out->fd = STDOUT_FILENO;
    out->stream = true;
    return BG_OK;
}

static bool set_up(bg_writer *w, const bg_writer_config *c, bool is_stdout)
{
    bg_buf first = {0};
    w->done = bg_ranges_new();
    w->pending = bg_ranges_new();
    w->keys = bg_keys_new();
    w->partials = bg_partials_new();
    bool ok = w->done && w->pending && w->keys && w->partials;
    const char *paths[BG_SIDES] = {is_stdout ? "standard output" : c->path, c->error_path};
    for (int i = 0; i < BG_SIDES; i++) {
        bg_side *s = &w->side[i];
        s->path = paths[i] ? strdup(paths[i]) : NULL;
        s->whole = bg_hasher_new();
        s->f.name = s->path;
        ok = ok && s->whole && !s->path == !paths[i];
    }
    w->side[BG_SIDE_OUT].format = c->format;
    if (c->error_path) w->side[BG_SIDE_ERRORS].format = bg_out_format_of(c->error_path);
    if (asprintf(&w->journal_path, "%s.journal", c->path) < 0) w->journal_path = NULL;
    w->journal.name = w->journal_path;
    w->selection = c->selection ? strdup(c->selection) : NULL;
    bg_recover_identity(c, &first);
    w->first = bg_buf_take(&first);
    bg_buf_release(&first);
    return ok && w->journal_path && w->first && !w->selection == !c->selection;
}

bg_status bg_writer_open_on(bg_writer **out, const bg_writer_config *c, const bg_out_sys *sys,
                            bg_recovered *rec, bg_error *err)
{
    *out = NULL;
    *rec = (bg_recovered){0};
    bg_status st = BG_OK;
    bool is_stdout = strcmp(c->path, "-") == 0;
    bg_writer *w = calloc(1, sizeof *w);
    if (!w) {
        bg_out_lock_free(c->take_lock);
        return bg_fail(err, BG_NOMEM, "%s: out of memory", c->path);
    }
    w->lock = c->take_lock;
    w->sys = sys;
    for (int i = 0; i < BG_SIDES; i++)
        w->side[i].f = (bg_out_file){.sys = sys, .fd = -1};
    w->journal = (bg_out_file){.sys = sys, .fd = -1};
    w->level = c->level;
    w->ordered = c->ordered;
    w->commit_bytes = c->commit_bytes ? c->commit_bytes : COMMIT_BYTES;
    w->commit_ns = c->commit_ns ? c->commit_ns : COMMIT_NS;
    w->fold_bytes = c->fold_bytes ? c->fold_bytes : FOLD_BYTES;
    w->last_commit_ns = bg_now_ns();
    w->start_wall_ns = bg_wall_ns();
    if (!set_up(w, c, is_stdout)) {
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", c->path);
        goto out;
    }
    st = is_stdout ? open_stream(w, c, err) : open_file(w, c, rec, err);
    if (st) goto out;
    *out = w;
    w = NULL;
out:
    if (st) *rec = (bg_recovered){0};
    bg_writer_close(w);
    return st;
}

bg_status bg_writer_open(bg_writer **w, const bg_writer_config *c, bg_recovered *rec, bg_error *err)
{
    return bg_writer_open_on(w, c, &bg_out_real, rec, err);
}

void bg_writer_close(bg_writer *w)
{
    if (!w) return;
    bg_writer_close_files(w);
    bg_out_lock_free(w->lock); /* and with it the output */
    bg_ranges_free(w->done);
    bg_ranges_free(w->pending);
    bg_keys_free(w->keys);
    bg_partials_free(w->partials);
    for (int i = 0; i < BG_SIDES; i++) {
        bg_side *s = &w->side[i];
        bg_hasher_free(s->whole);
        bg_buf_release(&s->text);
        bg_buf_release(&s->frame);
        free(s->path);
    }
    bg_buf_release(&w->entry);
    free(w->journal_path);
    free(w->first);
    free(w->selection);
    free(w);
}

/* ---- writing
 * --------------------------------------------------------------------------------------- */

bool bg_writer_done(const bg_writer *w, int64_t record)
{
    return bg_ranges_has(w->done, record);
}

int64_t bg_writer_count(const bg_writer *w, int64_t *n_failed)
{
    *n_failed = w->n_failed;
    return bg_ranges_count(w->done);
}

uint64_t bg_writer_key(const bg_writer *w, int64_t record)
{
    return bg_keys_get(w->keys, record);
}

void bg_writer_on_partials(bg_writer *w, const bg_partial *(*get)(void *ctx, int *n), void *ctx)
{
    w->get_partials = get;
    w->get_ctx = ctx;
}

void bg_writer_input(bg_writer *w, const bg_input_place *place)
{
    if (w->has_input && w->input.end == place->end && w->input.hash == place->hash) return;
    w->input = *place;
    w->has_input = w->input_moved = true;
}

void bg_writer_on_commit(bg_writer *w, void (*done)(void *ctx), void *ctx)
{
    w->on_commit = done;
    w->commit_ctx = ctx;
}

void bg_writer_sizes(const bg_writer *w, uint64_t *text_bytes, uint64_t *file_bytes,
                     uint64_t *commits)
{
    *text_bytes = *file_bytes = 0;
    for (int i = 0; i < BG_SIDES; i++) {
        *text_bytes += w->side[i].text_bytes;
        *file_bytes += w->side[i].f.end;
    }
    *commits = w->commits;
}

/* What a commit puts into one file. */
typedef struct part {
    const char *data;
    bg_entry_piece piece;
} part;

static bg_status make_part(bg_side *s, int level, part *p, bg_error *err)
{
    bg_status st = BG_OK;
    size_t n = s->text.len;
    p->data = s->text.data;
    if (n && s->format == BG_OUT_LZ4) {
        bg_buf_clear(&s->frame);
        st = bg_frame_put(&s->frame, s->text.data, s->text.len, level, err);
        p->data = s->frame.data;
        n = s->frame.len;
    }
    if (!st)
        p->piece = (bg_entry_piece){.offset = s->f.end,
                                    .bytes = n,
                                    .text = s->text.len,
                                    .hash = bg_hash64(n ? p->data : "", n, 0)};
    return st;
}

/* The "partial" list of the entry being made, when there is something to say. */
static bg_status add_partials(bg_writer *w, bool *any, bg_error *err)
{
    *any = false;
    if (w->side[BG_SIDE_OUT].f.stream || !w->get_partials) return BG_OK;
    int n = 0;
    const bg_partial *list = w->get_partials(w->get_ctx, &n);
    size_t before = w->entry.len;
    bg_buf_str(&w->entry, ",\"partial\":[");
    if (!bg_partials_gain(w->partials, list, n, w->done, &w->entry, any))
        return bg_fail(err, BG_NOMEM, "%s: out of memory", w->journal_path);
    if (*any)
        bg_buf_char(&w->entry, ']');
    else
        w->entry.len = before;
    return BG_OK;
}

static bg_status make_entry(bg_writer *w, const part parts[BG_SIDES], bool *any, bg_error *err)
{
    const bg_entry_commit c = {
        .n = w->commits,
        .out = parts[BG_SIDE_OUT].piece,
        .errors = parts[BG_SIDE_ERRORS].piece.bytes ? &parts[BG_SIDE_ERRORS].piece : NULL,
        .records = w->pending,
        .keys = w->keys,
        .failed = w->pending_failed,
        .tokens = {w->pending_tokens[0], w->pending_tokens[1]},
        .input = w->input_moved ? &w->input : NULL};
    bg_buf_clear(&w->entry);
    bg_entry_put_commit(&w->entry, &c);
    bg_status st = add_partials(w, any, err);
    bg_buf_str(&w->entry, "}}");
    return st;
}

static void committed(bg_writer *w, const part parts[BG_SIDES])
{
    for (int i = 0; i < BG_SIDES; i++) {
        bg_side *s = &w->side[i];
        bg_hasher_add(s->whole, parts[i].data, (size_t)parts[i].piece.bytes);
        s->text_bytes += s->text.len;
        bg_buf_clear(&s->text);
    }
    w->commits++;
    for (int i = 0; i < 2; i++)
        w->tokens[i] += w->pending_tokens[i];
    w->pending_failed = w->pending_tokens[0] = w->pending_tokens[1] = 0;
    w->input_moved = false;
    bg_partials_drop(w->partials, w->pending);
    bg_ranges_clear(w->pending);
}

static bg_status commit(bg_writer *w, bg_error *err)
{
    bool any, has_text = false;
    part parts[BG_SIDES] = {0};
    bg_status st = BG_OK;
    for (int i = 0; i < BG_SIDES && !st; i++) {
        st = make_part(&w->side[i], w->level, &parts[i], err);
        has_text = has_text || parts[i].piece.bytes;
    }
    if (!st) st = make_entry(w, parts, &any, err);
    if (st || (!has_text && !any)) return st;
    for (int i = 0; i < BG_SIDES && !st; i++) {
        bg_out_file *f = &w->side[i].f;
        if (!parts[i].piece.bytes) continue;
        st = bg_out_append(f, parts[i].data, (size_t)parts[i].piece.bytes, err);
        if (!st) st = bg_out_sync(f, err); /* the entry must never reach the disk before */
    }
    bool stream = w->side[BG_SIDE_OUT].f.stream;
    if (!st && !stream) st = put_entry(w, err);
    if (st) return st;
    committed(w, parts);
    if (!stream && worth_folding(w, UINT64_MAX)) {
        const bg_manifest m = bg_writer_manifest(w);
        st = bg_writer_fold(w, &m, err);
    }
    if (!st && w->on_commit) w->on_commit(w->commit_ctx);
    return st;
}

bg_status bg_writer_commit(bg_writer *w, bg_error *err)
{
    bg_status st = bg_writer_begin(w, err);
    if (st || w->finished) return st;
    int64_t start = bg_now_ns(), start_cpu = bg_cpu_ns();
    st = bg_writer_ends(w, commit(w, err), err);
    w->last_commit_ns = bg_now_ns();
    w->committing_ns += w->last_commit_ns - start;
    w->committing_cpu_ns += bg_cpu_ns() - start_cpu;
    return st;
}

int64_t bg_writer_commit_ns(const bg_writer *w, int64_t *cpu_ns)
{
    *cpu_ns = w->committing_cpu_ns;
    return w->committing_ns;
}

bg_status bg_writer_add(bg_writer *w, const bg_done *what, const char *line, size_t n,
                        bg_error *err)
{
    int64_t record = what->record;
    const char *path = w->side[BG_SIDE_OUT].path;
    bg_status st = bg_writer_begin(w, err);
    if (st) return st;
    if (w->finished || w->differs)
        return bg_fail(err, BG_INTERNAL, "%s: record %lld comes %s", path, (long long)record,
                       w->finished ? "after the end" : "before the output was rewritten");
    if (n == 0 || line[n - 1] != '\n')
        return bg_fail(err, BG_INTERNAL, "%s: the result of record %lld is no whole line", path,
                       (long long)record);
    if (record < 0 || bg_ranges_has(w->done, record))
        return bg_fail(err, BG_INTERNAL, "%s: record %lld has a result already", path,
                       (long long)record);
    bg_side *s = &w->side[what->failed && bg_writer_has_errors(w) ? BG_SIDE_ERRORS : BG_SIDE_OUT];
    bg_buf_add(&s->text, line, n);
    if (s->text.failed || !bg_ranges_add(w->pending, record, record) ||
        !bg_ranges_add(w->done, record, record) ||
        (what->key && !bg_keys_set(w->keys, record, what->key)))
        return bg_writer_ends(w, no_memory(w, err), err);
    if (what->failed) {
        w->n_failed++;
        w->pending_failed++;
    }
    w->pending_tokens[0] += what->prompt_tokens;
    w->pending_tokens[1] += what->output_tokens;
    size_t pending = w->side[BG_SIDE_OUT].text.len + w->side[BG_SIDE_ERRORS].text.len;
    return pending >= w->commit_bytes ? bg_writer_commit(w, err) : BG_OK;
}

bg_status bg_writer_tick(bg_writer *w, bg_error *err)
{
    bg_status st = bg_writer_ended(w, err);
    if (st || bg_now_ns() - w->last_commit_ns < w->commit_ns) return st;
    return bg_writer_commit(w, err);
}

bg_status bg_writer_finish(bg_writer *w, bg_error *err)
{
    bg_status st = bg_writer_commit(w, err);
    if (st || w->finished) return st;
    if (w->side[BG_SIDE_OUT].f.stream) {
        w->finished = true;
        return BG_OK;
    }
    if (w->ordered && bg_ranges_count(w->done)) {
        st = bg_writer_sort(w, err);
    } else {
        bg_manifest m = bg_writer_manifest(w);
        m.partials = false;
        m.end = true;
        m.ordered = w->ordered;
        st = bg_writer_fold(w, &m, err);
    }
    if (!st) w->finished = true;
    return bg_writer_ends(w, st, err);
}
