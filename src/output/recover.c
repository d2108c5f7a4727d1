#include "output/recover.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/io.h"
#include "base/json.h"
#include "output/frames.h"
#include "output/journal.h"
#include "output/ranges.h"

enum { CHUNK = 1 << 20, VERSION = 1 };

typedef struct commit {
    uint64_t n, offset, bytes, text, hash;
    int64_t failed;
    const char *records;
    size_t n_records;
    const json_t *input, *partial; /* or NULL */
} commit;

typedef struct walk {
    bg_recovery *r;
    const bg_recover_files *f;
    bool lz4;
    bool torn;                    /* a commit did not count: the rest is a tail */
    uint64_t next_n, next_offset; /* of the next commit, counted or not */
    commit last;                  /* the last that counted and has bytes */
    char *chunk;
    bg_hasher *hasher;
} walk;

void bg_recovery_release(bg_recovery *r)
{
    bg_ranges_free(r->done);
    bg_partials_free(r->partials);
    *r = (bg_recovery){0};
}

/* ---- identity
 * -------------------------------------------------------------------------------------- */

static const char *format_name(const bg_writer_config *c)
{
    return c->format == BG_OUT_LZ4 ? "lz4" : "plain";
}

void bg_recover_identity(const bg_writer_config *c, bg_buf *out)
{
    char *text = c->identity ? bg_json_text(c->identity, JSON_COMPACT) : strdup("{}");
    if (!text) {
        out->failed = true;
        return;
    }
    bg_buf_printf(out, "{\"batchgen\":%d,\"format\":\"%s\",\"identity\":%s}", VERSION,
                  format_name(c), text);
    free(text);
}

static void add_difference(bg_buf *b, const char *name, const json_t *was, const json_t *now)
{
    char *w = was ? bg_json_text(was, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    char *n = now ? bg_json_text(now, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    bg_buf_printf(b, "%s%s was %.80s, is now %.80s", b->len ? "; " : "", name,
                  was ? (w ? w : "?") : "not set", now ? (n ? n : "?") : "not set");
    free(w);
    free(n);
}

/* Each name that differs, with both values. */
static void differences(const json_t *entry, const bg_writer_config *c, bg_buf *b)
{
    json_t *was = json_object_get(entry, "identity"), *v;
    json_t *now = (json_t *)(uintptr_t)c->identity; /* jansson's loops take no const */
    json_t *format = json_object_get(entry, "format");
    const char *key;
    if (!json_is_string(format) || strcmp(json_string_value(format), format_name(c)) != 0) {
        json_t *ours = json_string(format_name(c));
        add_difference(b, "output format", format, ours);
        json_decref(ours);
    }
    json_object_foreach(was, key, v)
    {
        const json_t *n = json_object_get(now, key);
        if (!n || !json_equal(v, n)) add_difference(b, key, v, n);
    }
    json_object_foreach(now, key, v)
    {
        if (!json_object_get(was, key)) add_difference(b, key, NULL, v);
    }
}

/* ---- entries
 * --------------------------------------------------------------------------------------- */

static bool get_u64(const json_t *object, const char *name, uint64_t *out)
{
    const json_t *v = json_object_get(object, name);
    if (!json_is_integer(v) || json_integer_value(v) < 0) return false;
    *out = (uint64_t)json_integer_value(v);
    return true;
}

static bool get_hash(const json_t *object, const char *name, uint64_t *out)
{
    const char *s = json_string_value(json_object_get(object, name));
    if (!s || strlen(s) != 16 || strspn(s, "0123456789abcdef") != 16) return false;
    *out = strtoull(s, NULL, 16);
    return true;
}

static bool get_commit(const json_t *o, commit *c)
{
    uint64_t failed;
    const json_t *records = json_object_get(o, "records");
    if (!get_u64(o, "n", &c->n) || !get_u64(o, "offset", &c->offset) ||
        !get_u64(o, "bytes", &c->bytes) || !get_u64(o, "text", &c->text) ||
        !get_hash(o, "hash", &c->hash) || !get_u64(o, "failed", &failed) ||
        !json_is_string(records) || c->offset + c->bytes < c->offset)
        return false;
    c->failed = (int64_t)failed;
    c->records = json_string_value(records);
    c->n_records = json_string_length(records);
    c->input = json_object_get(o, "input");
    c->partial = json_object_get(o, "partial");
    return true;
}

/* Whether the output has the bytes that the commit names. */
static bg_status verify(walk *w, const commit *c, bool *good, bg_error *err)
{
    *good = false;
    if (c->offset + c->bytes > w->f->out_size) return BG_OK;
    bg_hasher_reset(w->hasher);
    for (uint64_t at = 0; at < c->bytes;) {
        size_t want = c->bytes - at < CHUNK ? (size_t)(c->bytes - at) : CHUNK, got;
        bg_status st = bg_pread_full(w->f->out_fd, w->chunk, want, (int64_t)(c->offset + at), &got,
                                     w->f->out_name, err);
        if (st) return st;
        if (got < want) return BG_OK;
        bg_hasher_add(w->hasher, w->chunk, got);
        at += got;
    }
    *good = bg_hasher_value(w->hasher) == c->hash;
    return BG_OK;
}

static bg_status broken(const walk *w, uint64_t at, const char *what, bg_error *err)
{
    return bg_fail(err, BG_FORMAT,
                   "%s: byte %" PRIu64
                   ": %s; nothing was changed; rebuild the journal with repair, or "
                   "start anew with --overwrite",
                   w->f->journal_name, at, what);
}

static bg_status count_commit(walk *w, const commit *c, uint64_t at, bg_error *err)
{
    bg_recovery *r = w->r;
    bg_ranges *records = bg_ranges_new();
    if (!records) return bg_fail(err, BG_NOMEM, "%s: out of memory", w->f->journal_name);
    bg_status st = BG_OK;
    int64_t before = bg_ranges_count(r->done);
    bool nomem = false;
    bool read = bg_ranges_read(records, c->records, c->n_records, &nomem) &&
                bg_ranges_read(r->done, c->records, c->n_records, &nomem);
    if (nomem) {
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", w->f->journal_name);
        goto out;
    }
    if (!read || bg_ranges_count(r->done) != before + bg_ranges_count(records) ||
        c->failed > bg_ranges_count(records) || (c->bytes > 0) != (bg_ranges_count(records) > 0)) {
        st = broken(w, at, "a commit's records contradict the commits before it", err);
        goto out;
    }
    uint64_t end, hash;
    if (c->input && get_u64(c->input, "end", &end) && get_hash(c->input, "hash", &hash)) {
        r->input_end = end;
        r->input_hash = hash;
    }
    if (c->partial && !bg_partials_replay(r->partials, c->partial, &nomem)) {
        st = nomem ? bg_fail(err, BG_NOMEM, "%s: out of memory", w->f->journal_name)
                   : broken(w, at, "a commit's partial tokens are malformed", err);
        goto out;
    }
    bg_partials_drop(r->partials, r->done);
    r->n_failed += c->failed;
    r->text_bytes += c->text;
    r->out_end = c->offset + c->bytes;
    r->commits++;
    if (c->bytes) {
        w->last = *c;
        w->last.records = NULL; /* they belong to the entry */
        w->last.input = w->last.partial = NULL;
    }
out:
    bg_ranges_free(records);
    return st;
}

static bg_status take_commit(walk *w, const json_t *o, const bg_journal_entry *e, bg_error *err)
{
    commit c;
    if (!get_commit(o, &c) || c.n != w->next_n || c.offset != w->next_offset)
        return broken(w, e->start, "a commit entry contradicts the one before it", err);
    w->next_n++;
    w->next_offset += c.bytes;
    bool good;
    bg_status st = verify(w, &c, &good, err);
    if (st) return st;
    if (w->torn) {
        if (!good || !c.bytes) return BG_OK;
        return bg_fail(err, BG_FORMAT,
                       "%s: damaged at byte %" PRIu64
                       ", but whole again after it; nothing was changed; "
                       "restore the file, or start anew with --overwrite",
                       w->f->out_name, w->r->out_end);
    }
    if (!good) {
        w->torn = true;
        return BG_OK;
    }
    return count_commit(w, &c, e->start, err);
}

static bg_status take_entry(walk *w, const bg_journal_entry *e, bg_error *err)
{
    const json_t *o = json_object_get(e->object, "commit"),
                 *end = json_object_get(e->object, "end");
    if (w->r->finished) return broken(w, e->start, "an entry follows the end of the job", err);
    bg_status st = BG_OK;
    if (o)
        st = take_commit(w, o, e, err);
    else if (end && !w->torn)
        w->r->finished = true;
    if (!st && !w->torn) w->r->journal_end = e->end;
    return st;
}

/* ---- the whole
 * --------------------------------------------------------------------------------------- */

/* What a crash can leave of the very first write: its beginning, or zeros in place of it. */
static bg_status torn_start(const bg_recover_files *f, bool *yes, bg_error *err)
{
    static const char start[] = "{\"batchgen\":";
    char head[sizeof start - 1];
    size_t n;
    bg_status st = bg_pread_full(f->journal_fd, head, sizeof head, 0, &n, f->journal_name, err);
    *yes = n == 0 || head[0] == 0 || memcmp(head, start, n) == 0;
    return st;
}

static bg_status first_entry(walk *w, bg_journal_reader *reader, const bg_writer_config *c,
                             bg_error *err)
{
    const bg_recover_files *f = w->f;
    bg_journal_entry e;
    bool got;
    bg_status st = bg_journal_next(reader, &e, &got, err);
    if (st) return st;
    if (!e.object) {
        bool torn;
        st = torn_start(f, &torn, err);
        if (st) return st;
        if (f->out_size == 0 && torn) {
            w->r->fresh = true;
            return BG_OK;
        }
        if (f->out_size == 0)
            return bg_fail(
                err, BG_FORMAT,
                "%s: is in the way: it is no journal of batchgen; move it, or name another "
                "output",
                f->journal_name);
        return bg_fail(
            err, BG_FORMAT,
            "%s: there are results, but their journal %s is %s; put it back, rebuild it with "
            "repair, name another output, or start anew with --overwrite",
            f->out_name, f->journal_name, got ? "damaged at its start" : "missing");
    }
    const json_t *version = json_object_get(e.object, "batchgen");
    if (!json_is_integer(version) || json_integer_value(version) != VERSION) {
        st = bg_fail(err, BG_FORMAT, "%s: %s", f->journal_name,
                     version ? "written by another version of batchgen"
                             : "not a journal of batchgen");
    } else {
        bg_buf b = {0};
        differences(e.object, c, &b);
        if (b.failed)
            st = bg_fail(err, BG_NOMEM, "%s: out of memory", f->journal_name);
        else if (b.len && f->out_size == 0)
            w->r->fresh = true; /* no result is lost */
        else if (b.len)
            st = bg_fail(err, BG_ARG,
                         "%s: belongs to another job; name another output, or start anew with "
                         "--overwrite. %s",
                         f->out_name, b.data);
        bg_buf_release(&b);
    }
    w->r->journal_end = e.end;
    json_decref(e.object);
    return st;
}

/* The last commit once more, as a reader of the output sees it. */
static bg_status check_last(walk *w, bg_error *err)
{
    const commit *c = &w->last;
    if (!c->bytes) return BG_OK;
    char *data = malloc((size_t)c->bytes);
    if (!data) return bg_fail(err, BG_NOMEM, "%s: out of memory", w->f->out_name);
    bg_buf text = {0};
    size_t got, used = 0;
    bg_error why = {0};
    bg_status st = bg_pread_full(w->f->out_fd, data, (size_t)c->bytes, (int64_t)c->offset, &got,
                                 w->f->out_name, err);
    bool ok = !st && got == c->bytes;
    if (ok && w->lz4)
        ok = !bg_frame_get(&text, data, got, (size_t)c->text, &used, &why) && used == got &&
             text.len == c->text && text.data[text.len - 1] == '\n';
    else if (ok)
        ok = data[got - 1] == '\n';
    if (!st && why.status == BG_NOMEM)
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", w->f->out_name);
    if (!st && !ok)
        st = bg_fail(err, BG_FORMAT,
                     "%s: byte %" PRIu64 ": the journal's last commit is not what it "
                     "says: %s",
                     w->f->out_name, c->offset, why.status ? why.text : "not whole lines");
    bg_buf_release(&text);
    free(data);
    return st;
}

bg_status bg_recover(bg_recovery *r, const bg_recover_files *f, const bg_writer_config *c,
                     bg_error *err)
{
    *r = (bg_recovery){.done = bg_ranges_new(), .partials = bg_partials_new()};
    walk w = {.r = r, .f = f, .lz4 = c->format == BG_OUT_LZ4};
    bg_journal_reader reader = {.fd = f->journal_fd, .name = f->journal_name};
    bg_status st = BG_OK;
    w.chunk = malloc(CHUNK);
    w.hasher = bg_hasher_new();
    if (!w.chunk || !w.hasher || !r->done || !r->partials) {
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", f->out_name);
        goto out;
    }
    st = first_entry(&w, &reader, c, err);
    if (st || r->fresh) goto out;
    bool damaged = false;
    uint64_t damaged_at = 0;
    for (;;) {
        bg_journal_entry e;
        bool got;
        st = bg_journal_next(&reader, &e, &got, err);
        if (st || !got) break;
        if (!e.object) {
            if (!damaged) damaged_at = e.start;
            damaged = true;
            if (!e.hides_whole) continue;
        }
        if (damaged)
            st = broken(&w, damaged_at, "damaged, but whole again after it", err);
        else
            st = take_entry(&w, &e, err);
        json_decref(e.object);
        if (st) break;
    }
    if (!st) st = check_last(&w, err);
out:
    bg_journal_reader_release(&reader);
    bg_hasher_free(w.hasher);
    free(w.chunk);
    return st;
}

void bg_recover_holder(const char *journal_name, char *out, size_t size)
{
    out[0] = 0;
    bg_error err = {0};
    bg_journal_reader reader = {.fd = open(journal_name, O_RDONLY | O_CLOEXEC),
                                .name = journal_name};
    if (reader.fd < 0) return;
    bg_journal_entry e;
    bool got;
    while (!bg_journal_next(&reader, &e, &got, &err) && got) {
        const json_t *run = json_object_get(e.object, "run");
        const char *host = json_string_value(json_object_get(run, "host"));
        const char *start = json_string_value(json_object_get(run, "start"));
        if (host && start)
            snprintf(out, size, "pid %lld on %.60s, since %.40s",
                     (long long)json_integer_value(json_object_get(run, "pid")), host, start);
        json_decref(e.object);
    }
    bg_journal_reader_release(&reader);
    close(reader.fd);
}
