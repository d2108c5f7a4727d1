#include "output/view.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/io.h"
#include "output/journal.h"
#include "output/ranges.h"

enum { TRIES = 8, PIECE = 1 << 20 };

static bg_status no_memory(const bg_view *v, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", v->path ? v->path : "output");
}

/* ---- values of entries
 * ------------------------------------------------------------------------------------ */

static bool get_u64(const json_t *object, const char *name, uint64_t *out)
{
    const json_t *v = json_object_get(object, name);
    if (!json_is_integer(v) || json_integer_value(v) < 0) return false;
    *out = (uint64_t)json_integer_value(v);
    return true;
}

static bool get_i64(const json_t *object, const char *name, int64_t *out)
{
    uint64_t u;
    if (!get_u64(object, name, &u)) return false;
    *out = (int64_t)u;
    return true;
}

static bool get_hash(const json_t *object, const char *name, uint64_t *out)
{
    const char *s = json_string_value(json_object_get(object, name));
    if (!s || strlen(s) != 16 || strspn(s, "0123456789abcdef") != 16) return false;
    *out = strtoull(s, NULL, 16);
    return true;
}

int64_t bg_view_time(const char *text)
{
    struct tm tm = {0};
    int ms = 0;
    char z = 0;
    if (!text || sscanf(text, "%4d-%2d-%2dT%2d:%2d:%2d.%3d%c", &tm.tm_year, &tm.tm_mon, &tm.tm_mday,
                        &tm.tm_hour, &tm.tm_min, &tm.tm_sec, &ms, &z) != 8)
        return 0;
    if (z != 'Z' || tm.tm_year < 1970 || tm.tm_year > 2261) return 0;
    tm.tm_year -= 1900;
    tm.tm_mon -= 1;
    time_t s = timegm(&tm);
    return s > 0 ? (int64_t)s * 1000000000 + (int64_t)ms * 1000000 : 0;
}

/* ---- entries
 * --------------------------------------------------------------------------------------------- */

static bool bytes_of(const json_t *o, bg_reader_commit *c)
{
    return get_u64(o, "offset", &c->offset) && get_u64(o, "bytes", &c->bytes) &&
           get_hash(o, "hash", &c->hash) && c->offset + c->bytes >= c->offset;
}

static void take_tokens(const json_t *o, bg_view_commit *c)
{
    const json_t *t = json_object_get(o, "tokens");
    c->has_tokens = json_is_integer(json_array_get(t, 0)) && json_is_integer(json_array_get(t, 1));
    c->prompt_tokens = json_integer_value(json_array_get(t, 0));
    c->output_tokens = json_integer_value(json_array_get(t, 1));
}

static void take_input(bg_view *v, const json_t *o)
{
    bg_input_place p = {0};
    const json_t *in = json_object_get(o, "input");
    if (!get_u64(in, "end", &p.end) || !get_hash(in, "hash", &p.hash)) return;
    get_u64(in, "read", &p.read);
    get_u64(in, "total", &p.total);
    get_i64(in, "records", &p.records);
    v->input = p;
    v->has_input = true;
}

static bool take_keys(bg_view *v, const char *records, const char *hex, bool *nomem)
{
    bg_ranges *r = bg_ranges_new();
    bool ok = r && bg_ranges_read(r, records, strlen(records), nomem) &&
              bg_keys_read(v->keys, r, hex, strlen(hex), nomem);
    if (!r) *nomem = true;
    bg_ranges_free(r);
    return ok;
}

/* *fits: it agrees with the entries before it. */
static bg_status take_commit(bg_view *v, const json_t *o, bool *fits, bg_error *err)
{
    bg_view_commit c = {.at_ns = bg_view_time(json_string_value(json_object_get(o, "at")))};
    const json_t *errors = json_object_get(o, "errors"), *partial = json_object_get(o, "partial");
    const char *records = json_string_value(json_object_get(o, "records"));
    const char *hex = json_string_value(json_object_get(o, "keys"));
    bool nomem = false;
    *fits = false;
    if (!bytes_of(o, &c.out) || !get_u64(o, "text", &c.text) || !get_i64(o, "failed", &c.failed) ||
        !records || c.out.offset != v->out_end)
        return BG_OK;
    if (errors && (!bytes_of(errors, &c.errors) || c.errors.offset != v->errors_end)) return BG_OK;
    c.folded = json_is_true(json_object_get(o, "folded"));
    int64_t before = bg_ranges_count(v->done);
    if (!bg_ranges_read(v->done, records, strlen(records), &nomem))
        return nomem ? no_memory(v, err) : BG_OK;
    c.n_records = bg_ranges_count(v->done) - before;
    if (hex && v->keys && !take_keys(v, records, hex, &nomem))
        return nomem ? no_memory(v, err) : BG_OK;
    if (partial && !bg_partials_replay(v->partials, partial, &nomem))
        return nomem ? no_memory(v, err) : BG_OK;
    bg_partials_drop(v->partials, v->done);
    take_tokens(o, &c);
    take_input(v, o);
    if (v->n_commits == v->cap_commits) {
        size_t cap = v->cap_commits ? v->cap_commits * 2 : 64;
        bg_view_commit *p = realloc(v->commits, cap * sizeof *p);
        if (!p) return no_memory(v, err);
        v->commits = p;
        v->cap_commits = cap;
    }
    v->commits[v->n_commits++] = c;
    v->n_failed += c.failed;
    v->out_end += c.out.bytes;
    v->errors_end += c.errors.bytes;
    v->text_bytes += c.text;
    *fits = true;
    return BG_OK;
}

static bg_status take_run(bg_view *v, const json_t *o, bg_error *err)
{
    bg_view_run r = {.first_commit = v->n_commits};
    const char *host = json_string_value(json_object_get(o, "host"));
    const char *start = json_string_value(json_object_get(o, "start"));
    get_i64(o, "pid", &r.pid);
    snprintf(r.host, sizeof r.host, "%s", host ? host : "?");
    snprintf(r.start, sizeof r.start, "%s", start ? start : "?");
    r.start_ns = bg_view_time(start);
    if (v->n_runs == v->cap_runs) {
        size_t cap = v->cap_runs ? v->cap_runs * 2 : 4;
        bg_view_run *p = realloc(v->runs, cap * sizeof *p);
        if (!p) return no_memory(v, err);
        v->runs = p;
        v->cap_runs = cap;
    }
    v->runs[v->n_runs++] = r;
    return BG_OK;
}

static bg_status take_first(bg_view *v, const json_t *o)
{
    const json_t *version = json_object_get(o, "batchgen");
    const char *format = json_string_value(json_object_get(o, "format"));
    if (!json_is_integer(version) || json_integer_value(version) != 1 || !format) {
        v->journal = BG_VIEW_NOT_A_JOURNAL;
        bg_fail(&v->why, BG_FORMAT, "%s: %s", v->journal_path,
                version ? "written by another version of batchgen" : "not a journal of batchgen");
        return BG_OK;
    }
    v->journal = BG_VIEW_GOOD;
    v->format = strcmp(format, "lz4") == 0 ? BG_OUT_LZ4 : BG_OUT_PLAIN;
    return BG_OK;
}

static void damaged(bg_view *v, uint64_t at, const char *what)
{
    v->journal = BG_VIEW_DAMAGED;
    bg_fail(&v->why, BG_FORMAT, "%s: byte %" PRIu64 ": %s", v->journal_path, at, what);
}

static bg_status take_entry(bg_view *v, const bg_journal_entry *e, bg_error *err)
{
    const json_t *commit = json_object_get(e->object, "commit"),
                 *run = json_object_get(e->object, "run");
    json_t *end = json_object_get(e->object, "end");
    bool fits = true;
    bg_status st = BG_OK;
    if (!v->first) {
        st = take_first(v, e->object);
        v->first = json_incref(e->object);
        return st;
    }
    if (json_object_get(e->object, "rewrite")) {
        v->rewrite = true;
    } else if (v->rewrite || v->end) {
        fits = false;
    } else if (commit) {
        st = take_commit(v, commit, &fits, err);
    } else if (run) {
        st = take_run(v, run, err);
    } else if (end) {
        v->end = json_incref(end);
    }
    if (!st && !fits) damaged(v, e->start, "an entry contradicts those before it");
    return st;
}

static bg_status read_journal(bg_view *v, bg_error *err)
{
    bg_journal_reader reader = {.fd = v->journal_fd, .name = v->journal_path};
    bg_status st = BG_OK;
    uint64_t bad_at = UINT64_MAX;
    v->journal = BG_VIEW_NO_JOURNAL;
    for (;;) {
        bg_journal_entry e;
        bool got;
        st = bg_journal_next(&reader, &e, &got, err);
        if (st || !got) break;
        v->journal_size = e.end;
        if (!e.object && bad_at == UINT64_MAX) bad_at = e.start;
        if (bad_at == UINT64_MAX) {
            st = take_entry(v, &e, err);
        } else if (e.object || e.hides_whole) {
            damaged(v, bad_at, "damaged, but whole again after it");
        }
        json_decref(e.object);
        if (st || v->journal == BG_VIEW_DAMAGED || v->journal == BG_VIEW_NOT_A_JOURNAL) break;
    }
    v->journal_torn = bad_at == UINT64_MAX ? 0 : v->journal_size - bad_at;
    bg_journal_reader_release(&reader);
    return st;
}

/* ---- both files
 * ------------------------------------------------------------------------------------------- */

static bg_status open_one(int *fd, const char *path, struct stat *sb, bg_error *err)
{
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0 && errno == ENOENT) return BG_OK;
    if (*fd < 0 || fstat(*fd, sb) != 0) return bg_fail_os(err, "%s: cannot open", path);
    if (!S_ISREG(sb->st_mode)) return bg_fail(err, BG_ARG, "%s: not a regular file", path);
    return BG_OK;
}

/* Whether path still names what was opened under it. */
static bool same(int fd, const char *path)
{
    struct stat a, b;
    bool there = stat(path, &b) == 0;
    if (fd < 0 || !there) return fd < 0 && !there;
    return fstat(fd, &a) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static void forget(bg_view *v)
{
    if (v->path && v->out_fd >= 0) close(v->out_fd);
    if (v->path && v->journal_fd >= 0) close(v->journal_fd);
    bg_keys_free(v->keys);
    free(v->commits);
    free(v->runs);
    json_decref(v->first);
    json_decref(v->end);
    bg_ranges_free(v->done);
    bg_partials_free(v->partials);
    char *path = v->path, *journal_path = v->journal_path;
    *v = (bg_view){.path = path, .journal_path = journal_path, .out_fd = -1, .journal_fd = -1};
}

void bg_view_release(bg_view *v)
{
    if (v->path) forget(v);
    free(v->path);
    free(v->journal_path);
    *v = (bg_view){0};
}

static bg_status look(bg_view *v, bool keys, bg_error *err)
{
    struct stat sb = {0};
    v->done = bg_ranges_new();
    v->partials = bg_partials_new();
    if (keys) v->keys = bg_keys_new();
    if (!v->done || !v->partials || (keys && !v->keys)) return no_memory(v, err);
    bg_status st = open_one(&v->out_fd, v->path, &sb, err);
    if (!st) st = open_one(&v->journal_fd, v->journal_path, &sb, err);
    if (!st && v->journal_fd >= 0) st = read_journal(v, err);
    /* after the journal: what its entries tell of was there before them */
    if (!st && v->out_fd >= 0 && fstat(v->out_fd, &sb) != 0)
        st = bg_fail_os(err, "%s: cannot stat", v->path);
    v->out_size = v->out_fd >= 0 && !st ? (uint64_t)sb.st_size : 0;
    return st;
}

bg_status bg_view_open(bg_view *v, const char *path, bool keys, bg_error *err)
{
    *v = (bg_view){.out_fd = -1, .journal_fd = -1, .path = strdup(path)};
    if (asprintf(&v->journal_path, "%s.journal", path) < 0) v->journal_path = NULL;
    if (!v->path || !v->journal_path) {
        bg_status st = no_memory(v, err);
        bg_view_release(v);
        return st;
    }
    bg_status st = BG_OK;
    for (int i = 0; i < TRIES; i++) {
        forget(v);
        st = look(v, keys, err);
        if (st || (same(v->out_fd, v->path) && same(v->journal_fd, v->journal_path))) break;
    }
    if (!st && v->journal != BG_VIEW_GOOD && v->out_fd >= 0)
        st = bg_reader_guess(path, &v->format, err);
    if (st) bg_view_release(v);
    return st;
}

const json_t *bg_view_identity(const bg_view *v)
{
    const json_t *o = json_object_get(v->first, "identity");
    return json_is_object(o) ? o : NULL;
}

static const char *error_name(const bg_view *v)
{
    return json_string_value(json_object_get(json_object_get(v->first, "errors"), "file"));
}

bool bg_view_has_errors(const bg_view *v)
{
    return error_name(v) != NULL;
}

bg_status bg_view_error_path(const bg_view *v, char **path, bg_error *err)
{
    const char *name = error_name(v), *slash = strrchr(v->path, '/');
    *path = NULL;
    if (!name) return BG_OK;
    if (asprintf(path, "%.*s%s", slash ? (int)(slash + 1 - v->path) : 0, v->path, name) < 0) {
        *path = NULL;
        return no_memory(v, err);
    }
    if (access(*path, F_OK) == 0 || access(name, F_OK) != 0) return BG_OK;
    free(*path);
    *path = strdup(name);
    return *path ? BG_OK : no_memory(v, err);
}

bool bg_view_reader(const bg_view *v, bg_reader_config *c, bg_reader_commit **commits)
{
    *commits = NULL;
    *c = (bg_reader_config){
        .path = v->path, .fd = v->out_fd, .format = v->format, .end = BG_READER_NO_END};
    if (v->journal != BG_VIEW_GOOD) return true;
    *commits = calloc(v->n_commits + 1, sizeof **commits);
    if (!*commits) return false;
    for (size_t i = 0; i < v->n_commits; i++)
        (*commits)[i] = v->commits[i].out;
    c->commits = *commits;
    c->n_commits = v->n_commits;
    c->end = v->out_end;
    return true;
}

bg_status bg_view_check_last(const bg_view *v, uint64_t most, bool *good, bg_error *err)
{
    *good = v->out_size >= v->out_end;
    size_t i = v->n_commits;
    while (i && v->commits[i - 1].out.bytes == 0)
        i--;
    if (!i || !*good || v->commits[i - 1].out.bytes > most) return BG_OK;
    const bg_reader_commit *c = &v->commits[i - 1].out;
    bg_status st = BG_OK;
    char *piece = malloc(PIECE);
    bg_hasher *h = bg_hasher_new();
    if (!piece || !h) st = no_memory(v, err);
    for (uint64_t at = 0; !st && at < c->bytes;) {
        size_t got, want = c->bytes - at < PIECE ? (size_t)(c->bytes - at) : PIECE;
        st = bg_pread_full(v->out_fd, piece, want, (int64_t)(c->offset + at), &got, v->path, err);
        if (!st) bg_hasher_add(h, piece, got);
        at += want;
    }
    if (!st) *good = bg_hasher_value(h) == c->hash;
    bg_hasher_free(h);
    free(piece);
    return st;
}

/* One whole frame behind the committed ones, and the beginning of another. */
static bg_status more_behind(const bg_view *v, bool *yes, bg_error *err)
{
    static const unsigned char magic[4] = {0x04, 0x22, 0x4d, 0x18};
    bg_buf raw = {0}, text = {0};
    bg_found found;
    bg_error why = {0};
    uint64_t bytes;
    char next[sizeof magic] = {0};
    size_t got = 0;
    bg_status st = bg_reader_frame(v->out_fd, v->path, v->out_end, v->out_size, 0, &raw, &text,
                                   &bytes, &found, &why, err);
    if (!st && found == BG_FOUND_WHOLE && v->out_end + bytes + sizeof next <= v->out_size)
        st = bg_pread_full(v->out_fd, next, sizeof next, (int64_t)(v->out_end + bytes), &got,
                           v->path, err);
    *yes = !st && got == sizeof next && memcmp(next, magic, sizeof magic) == 0;
    bg_buf_release(&raw);
    bg_buf_release(&text);
    return st;
}

bg_status bg_view_is_old(const bg_view *v, bool *yes, bg_error *err)
{
    *yes = false;
    if (v->journal != BG_VIEW_GOOD || v->format != BG_OUT_LZ4 || v->rewrite || v->out_fd < 0 ||
        v->out_size <= v->out_end)
        return BG_OK;
    bg_status st = more_behind(v, yes, err);
    if (st || !*yes) return st;
    bg_view now; /* a run may have committed since the journal was read */
    st = bg_view_open(&now, v->path, false, err);
    if (st) return st;
    *yes = now.out_end == v->out_end && now.n_commits == v->n_commits;
    bg_view_release(&now);
    return BG_OK;
}
