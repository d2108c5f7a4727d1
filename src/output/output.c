/* The output file and its journal, to the byte.
 *
 * PATH: commits one after another, nothing between them and nothing in front. With BG_OUT_LZ4 a
 * commit is one LZ4 frame (frames.h) of whole lines; with BG_OUT_PLAIN it is the lines. `lz4 -dc`
 * or cat reads it at any time.
 *
 * PATH.journal: entries as journal.h has them, in this order:
 *
 *     {"batchgen":1,"format":"lz4"|"plain","identity":{...}}     first; made with the file
 *     {"run":{"pid":P,"host":H,"start":T}}                       at each start
 *     {"commit":{"n":N,"offset":O,"bytes":B,"text":T,"hash":X,"records":R,"failed":F
 *                [,"input":{"end":E,"hash":X}][,"partial":[...]]}}
 *     {"end":{"commits":N,"bytes":B,"text":T,"records":R,"failed":F}}   last, once
 *
 * A commit: N counts from 0; the output's bytes O to O+B have the XXH3-64 X (16 hex digits) and
 * hold T bytes of text: the results of the records R ("0-63,70"), F of which are errors. input: all
 * input up to byte E was consumed, with that running hash. partial: partials.h. B is 0, and R
 * empty, in a commit that only saves partial tokens. In the end entry R is a count.
 *
 * Order on disk: the commit's bytes, fdatasync, its entry, fdatasync; so an entry on disk means
 * that its bytes are. Recovery (recover.h) cuts both files after the last commit of which both are
 * whole. A failed call is final: the descriptor's state is unknown then (the kernel may have
 * dropped the pages and call the next sync a success), so nothing more is written, and the next
 * start recovers. */
#include "output/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/io.h"
#include "output/files.h"
#include "output/frames.h"
#include "output/journal.h"
#include "output/lock.h"
#include "output/ranges.h"
#include "output/recover.h"

enum { COMMIT_BYTES = 512 << 10 };
#define COMMIT_NS INT64_C(5000000000)

struct bg_writer {
    const bg_out_sys *sys;
    bg_out_lock *lock; /* has the output open */
    char *path, *journal_path;
    char *journal_real; /* behind links */
    bg_out_file out, journal;
    bg_out_format format;
    int level;
    size_t commit_bytes;
    int64_t commit_ns, last_commit_ns;
    bg_ranges *done;    /* committed or added */
    bg_ranges *pending; /* added since the last commit */
    bg_buf text;        /* their lines */
    bg_buf frame, entry;
    int64_t n_failed, pending_failed;
    uint64_t commits, text_bytes;
    bg_partials *partials;
    const bg_partial *(*get_partials)(void *ctx, int *n);
    void *get_ctx;
    void (*on_commit)(void *ctx);
    void *commit_ctx;
    bg_input_place input;
    bool input_moved; /* since the last commit */
    bool finished;
    bg_error why; /* the failure that ended it; every later call returns it */
};

/* Remembers a failure that leaves the files or the pending lines in doubt. */
static bg_status ends(bg_writer *w, bg_status st, const bg_error *err)
{
    if (st && !w->why.status) w->why = *err;
    return st;
}

static bg_status ended(const bg_writer *w, bg_error *err)
{
    if (w->why.status && !err->status) *err = w->why;
    return w->why.status;
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
    char host[256] = "", start[40];
    if (gethostname(host, sizeof host - 1) != 0) snprintf(host, sizeof host, "?");
    bg_format_time(bg_wall_ns(), start, sizeof start);
    bg_buf_clear(&w->entry);
    bg_buf_printf(&w->entry, "{\"run\":{\"pid\":%ld,\"host\":", (long)getpid());
    bg_buf_json(&w->entry, host, strlen(host));
    bg_buf_printf(&w->entry, ",\"start\":\"%s\"}}", start);
    return put_entry(w, err);
}

static void commit_entry(bg_writer *w, uint64_t offset, const char *data, size_t n)
{
    bg_buf *b = &w->entry;
    char hex[17];
    bg_hex64(bg_hash64(data, n, 0), hex);
    bg_buf_clear(b);
    bg_buf_printf(
        b, "{\"commit\":{\"n\":%llu,\"offset\":%llu,\"bytes\":%zu,\"text\":%zu,\"hash\":\"%s\"",
        (unsigned long long)w->commits, (unsigned long long)offset, n, w->text.len, hex);
    bg_buf_str(b, ",\"records\":\"");
    bg_ranges_print(w->pending, b);
    bg_buf_printf(b, "\",\"failed\":%lld", (long long)w->pending_failed);
    if (w->input_moved) {
        bg_hex64(w->input.hash, hex);
        bg_buf_printf(b, ",\"input\":{\"end\":%llu,\"hash\":\"%s\"}",
                      (unsigned long long)w->input.end, hex);
    }
}

/* ---- opening
 * --------------------------------------------------------------------------------------- */

static bg_status lock_out(bg_writer *w, bg_error *err)
{
    struct stat sb;
    bg_status st = BG_OK;
    if (!w->lock) st = bg_out_lock_take_on(&w->lock, w->path, 0, NULL, NULL, w->sys, err);
    if (st) return st;
    w->out.fd = w->lock->fd;
    /* Its size only counts from here on: the holder before us may just have written. */
    if (fstat(w->out.fd, &sb) != 0) return bg_fail_os(err, "%s: cannot stat", w->path);
    w->out.end = (uint64_t)sb.st_size;
    return BG_OK;
}

/* The journal as it is; fd -1 when there is none. */
static bg_status open_journal(bg_writer *w, bool create, bg_error *err)
{
    bg_out_opened o;
    bg_status st = bg_out_open(&o, w->journal_path, create, w->sys, err);
    if (st) return st;
    free(w->journal_real);
    w->journal_real = o.real;
    w->journal.fd = o.fd;
    w->journal.end = o.size;
    return BG_OK;
}

static bg_status start_anew(bg_writer *w, const bg_writer_config *c, bg_error *err)
{
    bg_status st = BG_OK;
    if (w->journal.fd < 0) st = open_journal(w, true, err);
    /* The results go first: results without a journal would be refused, a journal without is begun
     * again. */
    if (!st && w->out.end) st = bg_out_cut(&w->out, 0, err);
    if (!st && w->journal.end) st = bg_out_cut(&w->journal, 0, err);
    if (st) return st;
    bg_buf_clear(&w->entry);
    bg_recover_identity(c, &w->entry);
    st = put_entry(w, err);
    if (!st) st = bg_out_sync_dir(w->sys, w->lock->real, err);
    if (!st) st = bg_out_sync_dir(w->sys, w->journal_real, err);
    if (!st) w->lock->made = false;
    return st;
}

static bg_status go_on(bg_writer *w, bg_recovery *r, bg_recovered *rec, bg_error *err)
{
    bg_status st = BG_OK;
    rec->resumed = !r->finished;
    rec->finished = w->finished = r->finished;
    rec->n_records = bg_ranges_count(r->done);
    rec->n_failed = w->n_failed = r->n_failed;
    rec->input_end = r->input_end;
    rec->input_hash = r->input_hash;
    rec->cut_bytes = w->out.end - r->out_end;
    w->commits = r->commits;
    w->text_bytes = r->text_bytes;
    bg_ranges_free(w->done);
    bg_partials_free(w->partials);
    w->done = r->done;
    w->partials = r->partials;
    r->done = NULL;
    r->partials = NULL;
    if (!bg_partials_list(w->partials, &rec->partials, &rec->n_partials))
        return bg_fail(err, BG_NOMEM, "%s: out of memory", w->path);
    if (w->out.end > r->out_end) st = bg_out_cut(&w->out, r->out_end, err);
    if (!st && w->journal.end > r->journal_end) st = bg_out_cut(&w->journal, r->journal_end, err);
    return st;
}

static bg_status open_file(bg_writer *w, const bg_writer_config *c, bg_recovered *rec,
                           bg_error *err)
{
    bg_recovery r = {0};
    bg_status st = lock_out(w, err);
    if (!st) st = open_journal(w, false, err);
    if (st) return st;
    bool fresh = c->overwrite || (w->out.end == 0 && w->journal.end == 0);
    if (!fresh) {
        bg_recover_files f = {w->out.fd,       w->journal.fd, w->path,
                              w->journal_path, w->out.end,    w->journal.end};
        if (w->journal.fd < 0)
            st = bg_fail(
                err, BG_FORMAT,
                "%s: there are results, but no journal %s; put it back, rebuild it with repair, "
                "name another output, or start anew with --overwrite",
                w->path, w->journal_path);
        else
            st = bg_recover(&r, &f, c, err);
        fresh = r.fresh;
    }
    if (!st) st = fresh ? start_anew(w, c, err) : go_on(w, &r, rec, err);
    if (!st && !w->finished) st = put_run(w, err);
    bg_recovery_release(&r);
    return st;
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
    w->out.fd = w->journal.fd = -1;
    w->out.sys = w->journal.sys = sys;
    w->format = c->format;
    w->level = c->level;
    w->commit_bytes = c->commit_bytes ? c->commit_bytes : COMMIT_BYTES;
    w->commit_ns = c->commit_ns ? c->commit_ns : COMMIT_NS;
    w->last_commit_ns = bg_now_ns();
    w->done = bg_ranges_new();
    w->pending = bg_ranges_new();
    w->partials = bg_partials_new();
    w->path = strdup(is_stdout ? "standard output" : c->path);
    if (asprintf(&w->journal_path, "%s.journal", c->path) < 0) w->journal_path = NULL;
    w->out.name = w->path;
    w->journal.name = w->journal_path;
    if (!w->done || !w->pending || !w->partials || !w->path || !w->journal_path) {
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", c->path);
        goto out;
    }
    if (is_stdout) {
        w->out.fd = STDOUT_FILENO;
        w->out.stream = true;
    } else {
        st = open_file(w, c, rec, err);
        if (st) goto out;
    }
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
    if (w->journal.fd >= 0) close(w->journal.fd);
    bg_out_lock_free(w->lock); /* and with it the output */
    free(w->journal_real);
    bg_ranges_free(w->done);
    bg_ranges_free(w->pending);
    bg_partials_free(w->partials);
    bg_buf_release(&w->text);
    bg_buf_release(&w->frame);
    bg_buf_release(&w->entry);
    free(w->path);
    free(w->journal_path);
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

void bg_writer_on_partials(bg_writer *w, const bg_partial *(*get)(void *ctx, int *n), void *ctx)
{
    w->get_partials = get;
    w->get_ctx = ctx;
}

void bg_writer_input(bg_writer *w, const bg_input_place *place)
{
    if (w->input.end == place->end && w->input.hash == place->hash) return;
    w->input = *place;
    w->input_moved = true;
}

void bg_writer_on_commit(bg_writer *w, void (*done)(void *ctx), void *ctx)
{
    w->on_commit = done;
    w->commit_ctx = ctx;
}

void bg_writer_sizes(const bg_writer *w, uint64_t *text_bytes, uint64_t *file_bytes,
                     uint64_t *commits)
{
    *text_bytes = w->text_bytes;
    *file_bytes = w->out.end;
    *commits = w->commits;
}

/* The "partial" list of the entry being made, when there is something to say. */
static bg_status add_partials(bg_writer *w, bool *any, bg_error *err)
{
    *any = false;
    if (w->out.stream || !w->get_partials) return BG_OK;
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

static bg_status commit(bg_writer *w, bg_error *err)
{
    bool any;
    const char *data = w->text.data;
    size_t n = w->text.len;
    bg_status st = BG_OK;
    if (n && w->format == BG_OUT_LZ4) {
        bg_buf_clear(&w->frame);
        st = bg_frame_put(&w->frame, w->text.data, w->text.len, w->level, err);
        data = w->frame.data;
        n = w->frame.len;
    }
    uint64_t offset = w->out.end;
    if (!st) commit_entry(w, offset, data, n);
    if (!st) st = add_partials(w, &any, err);
    if (st || (!n && !any)) return st;
    bg_buf_str(&w->entry, "}}");
    if (n) {
        st = bg_out_append(&w->out, data, n, err);
        if (!st) st = bg_out_sync(&w->out, err); /* the entry must never reach the disk before */
    }
    if (!st && !w->out.stream) st = put_entry(w, err);
    if (st) return st;
    w->commits++;
    w->text_bytes += w->text.len;
    w->pending_failed = 0;
    w->input_moved = false;
    bg_partials_drop(w->partials, w->pending);
    bg_ranges_clear(w->pending);
    bg_buf_clear(&w->text);
    if (w->on_commit) w->on_commit(w->commit_ctx);
    return BG_OK;
}

bg_status bg_writer_commit(bg_writer *w, bg_error *err)
{
    bg_status st = ended(w, err);
    if (st || w->finished) return st;
    st = ends(w, commit(w, err), err);
    w->last_commit_ns = bg_now_ns();
    return st;
}

bg_status bg_writer_add(bg_writer *w, const bg_done *what, const char *line, size_t n,
                        bg_error *err)
{
    int64_t record = what->record;
    bg_status st = ended(w, err);
    if (st) return st;
    if (w->finished)
        return bg_fail(err, BG_INTERNAL, "%s: record %lld comes after the end", w->path,
                       (long long)record);
    if (n == 0 || line[n - 1] != '\n')
        return bg_fail(err, BG_INTERNAL, "%s: the result of record %lld is no whole line", w->path,
                       (long long)record);
    if (record < 0 || bg_ranges_has(w->done, record))
        return bg_fail(err, BG_INTERNAL, "%s: record %lld has a result already", w->path,
                       (long long)record);
    bg_buf_add(&w->text, line, n);
    if (w->text.failed || !bg_ranges_add(w->pending, record, record) ||
        !bg_ranges_add(w->done, record, record))
        return ends(w, bg_fail(err, BG_NOMEM, "%s: out of memory", w->path), err);
    if (what->failed) {
        w->n_failed++;
        w->pending_failed++;
    }
    return w->text.len >= w->commit_bytes ? bg_writer_commit(w, err) : BG_OK;
}

bg_status bg_writer_tick(bg_writer *w, bg_error *err)
{
    bg_status st = ended(w, err);
    if (st || bg_now_ns() - w->last_commit_ns < w->commit_ns) return st;
    return bg_writer_commit(w, err);
}

bg_status bg_writer_finish(bg_writer *w, bg_error *err)
{
    bg_status st = bg_writer_commit(w, err);
    if (st || w->finished) return st;
    if (!w->out.stream) {
        bg_buf_clear(&w->entry);
        bg_buf_printf(&w->entry,
                      "{\"end\":{\"commits\":%llu,\"bytes\":%llu,\"text\":%llu,\"records\":%lld,"
                      "\"failed\":%lld}}",
                      (unsigned long long)w->commits, (unsigned long long)w->out.end,
                      (unsigned long long)w->text_bytes, (long long)bg_ranges_count(w->done),
                      (long long)w->n_failed);
        st = ends(w, put_entry(w, err), err);
    }
    if (!st) w->finished = true;
    return st;
}

uint64_t bg_writer_key(const bg_writer *w, int64_t record)
{
    (void)w;
    (void)record;
    return 0;
}

bg_status bg_writer_rewrite(bg_writer *w, const bg_rewrite *how, int64_t *n_kept,
                            int64_t *n_dropped, bg_error *err)
{
    (void)how;
    *n_kept = *n_dropped = 0;
    return bg_fail(err, BG_INTERNAL, "%s: cannot rewrite yet", w->path);
}
