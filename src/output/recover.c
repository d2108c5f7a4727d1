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
#include "output/files.h"
#include "output/journal.h"
#include "output/ranges.h"
#include "output/reader.h"

enum { CHUNK = 1 << 20, VERSION = 1, MAX_CHECK = 64 << 20 };

typedef struct piece { /* a commit's bytes in one file */
    uint64_t offset, bytes, text, hash;
} piece;

typedef struct commit {
    uint64_t n;
    piece piece[BG_SIDES];
    bool folded; /* takes the place of all commits before it */
    int64_t failed;
    const char *records, *keys; /* keys: or NULL */
    size_t n_records, n_keys;
    const json_t *input, *partial, *tokens; /* or NULL */
} commit;

typedef struct walk {
    bg_recovery *r;
    const bg_recover_files *f;
    const bg_writer_config *c;
    bool torn;       /* a commit did not count: the rest is a tail */
    bool ended;      /* by an end entry, whether it counts or not */
    uint64_t next_n; /* of the next commit, counted or not */
    uint64_t next_offset[BG_SIDES];
    piece last[BG_SIDES]; /* of the last commit that counted and has bytes there, unless folded */
    char *chunk;
    bg_hasher *hasher, *whole[BG_SIDES]; /* whole: with the commit that is looked at */
} walk;

void bg_recovery_release(bg_recovery *r)
{
    for (int i = 0; i < BG_SIDES; i++)
        bg_hasher_free(r->side[i].whole);
    bg_ranges_free(r->done);
    bg_keys_free(r->keys);
    bg_partials_free(r->partials);
    *r = (bg_recovery){0};
}

static bg_status no_memory(const bg_recover_files *f, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", f->journal_name);
}

/* ---- identity
 * -------------------------------------------------------------------------------------- */

static const char *format_name(bg_out_format format)
{
    return format == BG_OUT_LZ4 ? "lz4" : "plain";
}

void bg_recover_identity(const bg_writer_config *c, bg_buf *out)
{
    char *text = c->identity ? bg_json_text(c->identity, JSON_COMPACT) : strdup("{}");
    if (!text) {
        out->failed = true;
        return;
    }
    bg_buf_printf(out, "{\"batchgen\":%d,\"format\":\"%s\"", VERSION, format_name(c->format));
    if (c->error_path) {
        const char *slash = strrchr(c->error_path, '/'), *name = slash ? slash + 1 : c->error_path;
        bg_buf_str(out, ",\"errors\":{\"file\":");
        bg_buf_json(out, name, strlen(name));
        bg_buf_printf(out, ",\"format\":\"%s\"}", format_name(bg_out_format_of(name)));
    }
    if (c->started_s) bg_buf_printf(out, ",\"started\":%lld", (long long)c->started_s);
    bg_buf_str(out, ",\"identity\":");
    bg_buf_str(out, text);
    bg_buf_char(out, '}');
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

static bool same_text(const json_t *v, const char *text)
{
    return json_is_string(v) && strcmp(json_string_value(v), text) == 0;
}

/* The formats: what the files themselves look like. */
static void file_differences(const json_t *entry, const bg_writer_config *c, bg_buf *b)
{
    const json_t *format = json_object_get(entry, "format");
    const json_t *errors = json_object_get(entry, "errors");
    const json_t *error_format = json_object_get(errors, "format");
    if (!same_text(format, format_name(c->format))) {
        json_t *ours = json_string(format_name(c->format));
        add_difference(b, "output format", format, ours);
        json_decref(ours);
    }
    if (!errors != !c->error_path) {
        json_t *ours = c->error_path ? json_string(c->error_path) : NULL;
        add_difference(b, "error file", json_object_get(errors, "file"), ours);
        json_decref(ours);
    } else if (errors && !same_text(error_format, format_name(bg_out_format_of(c->error_path)))) {
        json_t *ours = json_string(format_name(bg_out_format_of(c->error_path)));
        add_difference(b, "format of the error file", error_format, ours);
        json_decref(ours);
    }
}

/* Each name that differs, with both values; but only *told of the one that may. */
static void differences(const json_t *entry, const bg_writer_config *c, bg_buf *b, bool *told)
{
    json_t *was = json_object_get(entry, "identity"), *v;
    json_t *now = (json_t *)(uintptr_t)c->identity; /* jansson's loops take no const */
    const char *key;
    json_object_foreach(was, key, v)
    {
        const json_t *n = json_object_get(now, key);
        bool may = c->may_differ && strcmp(key, c->may_differ) == 0;
        if (n && json_equal(v, n)) continue;
        if (may)
            *told = true;
        else
            add_difference(b, key, v, n);
    }
    json_object_foreach(now, key, v)
    {
        if (json_object_get(was, key)) continue;
        if (c->may_differ && strcmp(key, c->may_differ) == 0)
            *told = true;
        else
            add_difference(b, key, NULL, v);
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

static bool get_piece(const json_t *o, piece *p)
{
    return get_u64(o, "offset", &p->offset) && get_u64(o, "bytes", &p->bytes) &&
           get_u64(o, "text", &p->text) && get_hash(o, "hash", &p->hash) &&
           p->offset + p->bytes >= p->offset;
}

static bool get_commit(const json_t *o, const walk *w, commit *c)
{
    uint64_t failed;
    const json_t *records = json_object_get(o, "records"), *keys = json_object_get(o, "keys");
    const json_t *errors = json_object_get(o, "errors");
    *c = (commit){0};
    c->piece[BG_SIDE_ERRORS].offset = w->next_offset[BG_SIDE_ERRORS];
    if (!get_u64(o, "n", &c->n) || !get_piece(o, &c->piece[BG_SIDE_OUT]) ||
        (errors && !get_piece(errors, &c->piece[BG_SIDE_ERRORS])) ||
        !get_u64(o, "failed", &failed) || !json_is_string(records) ||
        (keys && !json_is_string(keys)))
        return false;
    c->failed = (int64_t)failed;
    c->folded = json_is_true(json_object_get(o, "folded"));
    c->records = json_string_value(records);
    c->n_records = json_string_length(records);
    c->keys = json_string_value(keys);
    c->n_keys = json_string_length(keys);
    c->input = json_object_get(o, "input");
    c->partial = json_object_get(o, "partial");
    c->tokens = json_object_get(o, "tokens");
    return true;
}

/* Whether a file has the bytes that the commit names. */
static bg_status verify(walk *w, int i, const piece *p, bool *good, bg_error *err)
{
    const bg_recover_files *f = w->f;
    *good = p->bytes == 0;
    bg_hasher_copy(w->whole[i], w->r->side[i].whole);
    if (p->bytes == 0 || p->offset + p->bytes > f->side[i].size) return BG_OK;
    bg_hasher_reset(w->hasher);
    for (uint64_t at = 0; at < p->bytes;) {
        size_t want = p->bytes - at < CHUNK ? (size_t)(p->bytes - at) : CHUNK, got;
        bg_status st = bg_pread_full(f->side[i].fd, w->chunk, want, (int64_t)(p->offset + at), &got,
                                     f->side[i].name, err);
        if (st) return st;
        if (got < want) return BG_OK;
        bg_hasher_add(w->hasher, w->chunk, got);
        bg_hasher_add(w->whole[i], w->chunk, got);
        at += got;
    }
    *good = bg_hasher_value(w->hasher) == p->hash;
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

static bg_status damaged(const walk *w, int i, const piece *p, bg_error *err)
{
    const char *name = w->f->side[i].name;
    uint64_t end = p->offset + p->bytes, size = w->f->side[i].size;
    if (w->f->side[i].fd < 0)
        return bg_fail(err, BG_FORMAT,
                       "%s: is missing, but the journal %s tells of %" PRIu64
                       " bytes in it; nothing was changed; put it back, or start anew with "
                       "--overwrite",
                       name, w->f->journal_name, end);
    if (size < end)
        return bg_fail(err, BG_FORMAT,
                       "%s: is %" PRIu64 " bytes long, but the journal %s tells of %" PRIu64
                       "; nothing was changed; put it back, rebuild the journal with repair, or "
                       "start anew with --overwrite",
                       name, size, w->f->journal_name, end);
    return bg_fail(err, BG_FORMAT,
                   "%s: damaged somewhere in bytes %" PRIu64 " to %" PRIu64
                   "; nothing was changed; restore the file, rebuild the journal with repair, or "
                   "start anew with --overwrite",
                   name, p->offset, end);
}

static bool get_tokens(const json_t *list, int64_t tokens[2])
{
    for (size_t i = 0; i < 2; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 ||
            json_integer_value(v) > INT64_MAX / 2 - tokens[i])
            return false;
        tokens[i] += json_integer_value(v);
    }
    return true;
}

static void get_input(const json_t *o, bg_recovery *r)
{
    bg_input_place in = {0};
    uint64_t records = 0;
    if (!get_u64(o, "end", &in.end) || !get_hash(o, "hash", &in.hash)) return;
    get_u64(o, "read", &in.read);
    get_u64(o, "total", &in.total);
    get_u64(o, "records", &records);
    in.records = (int64_t)records;
    r->input = in;
    r->has_input = true;
}

static bg_status count_commit(walk *w, const commit *c, uint64_t at, bg_error *err)
{
    bg_recovery *r = w->r;
    bg_ranges *records = bg_ranges_new();
    if (!records) return no_memory(w->f, err);
    bg_status st = BG_OK;
    int64_t before = bg_ranges_count(r->done);
    bool nomem = false;
    bool read = bg_ranges_read(records, c->records, c->n_records, &nomem) &&
                bg_ranges_read(r->done, c->records, c->n_records, &nomem);
    if (nomem) {
        st = no_memory(w->f, err);
        goto out;
    }
    int64_t n = bg_ranges_count(records);
    bool any = c->piece[BG_SIDE_OUT].bytes || c->piece[BG_SIDE_ERRORS].bytes, lengths = true;
    for (int i = 0; i < BG_SIDES; i++)
        lengths = lengths &&
                  (w->f->side[i].format == BG_OUT_LZ4 || c->piece[i].text == c->piece[i].bytes);
    if (!read || bg_ranges_count(r->done) != before + n || c->failed > n || any != (n > 0) ||
        !lengths) {
        st = broken(w, at, "a commit's records contradict the commits before it", err);
        goto out;
    }
    if (c->keys && !bg_keys_read(r->keys, records, c->keys, c->n_keys, &nomem)) {
        st = nomem ? no_memory(w->f, err) : broken(w, at, "a commit's keys are malformed", err);
        goto out;
    }
    if (c->tokens && !get_tokens(c->tokens, r->tokens)) {
        st = broken(w, at, "a commit's numbers of tokens are malformed", err);
        goto out;
    }
    get_input(c->input, r);
    if (c->partial && !bg_partials_replay(r->partials, c->partial, &nomem)) {
        st = nomem ? no_memory(w->f, err)
                   : broken(w, at, "a commit's partial tokens are malformed", err);
        goto out;
    }
    bg_partials_drop(r->partials, r->done);
    r->n_failed += c->failed;
    r->commits = c->n + 1;
    for (int i = 0; i < BG_SIDES; i++) {
        const piece *p = &c->piece[i];
        r->side[i].text_bytes += p->text;
        r->side[i].end = p->offset + p->bytes;
        bg_hasher_copy(r->side[i].whole, w->whole[i]);
        if (p->bytes && !c->folded) w->last[i] = *p;
    }
out:
    bg_ranges_free(records);
    return st;
}

static bg_status count_lost(walk *w, const commit *c, bg_error *err)
{
    bool nomem = false;
    bg_ranges *records = bg_ranges_new();
    if (records && bg_ranges_read(records, c->records, c->n_records, &nomem))
        w->r->lost += bg_ranges_count(records);
    nomem = nomem || !records;
    bg_ranges_free(records);
    return nomem ? no_memory(w->f, err) : BG_OK;
}

static bg_status take_commit(walk *w, const json_t *o, const bg_journal_entry *e, bg_error *err)
{
    commit c;
    bool first = w->next_n == 0, good[BG_SIDES];
    if (!get_commit(o, w, &c) || (c.n != w->next_n && !(first && c.folded)) ||
        (c.folded && !first) || c.n == UINT64_MAX)
        return broken(w, e->start, "a commit entry contradicts the one before it", err);
    w->next_n = c.n + 1;
    if (first) w->r->folded_end = e->end;
    for (int i = 0; i < BG_SIDES; i++) {
        if (c.piece[i].offset != w->next_offset[i])
            return broken(w, e->start, "a commit entry contradicts the one before it", err);
        w->next_offset[i] += c.piece[i].bytes;
        bg_status st = verify(w, i, &c.piece[i], &good[i], err);
        if (st) return st;
    }
    const piece *errors = &c.piece[BG_SIDE_ERRORS];
    if (w->torn) {
        if (!good[BG_SIDE_OUT] || !good[BG_SIDE_ERRORS] || !c.piece[BG_SIDE_OUT].bytes)
            return count_lost(w, &c, err);
        return bg_fail(err, BG_FORMAT,
                       "%s: damaged at byte %" PRIu64
                       ", but whole again after it; nothing was changed; "
                       "restore the file, rebuild the journal with repair, or start anew with "
                       "--overwrite",
                       w->f->side[BG_SIDE_OUT].name, w->r->side[BG_SIDE_OUT].end);
    }
    for (int i = 0; i < BG_SIDES && c.folded; i++)
        if (!good[i]) return damaged(w, i, &c.piece[i], err);
    /* Both files' bytes were on disk before the entry, and no crash takes them back. */
    if (good[BG_SIDE_OUT] && errors->offset + errors->bytes > w->f->side[BG_SIDE_ERRORS].size)
        return damaged(w, BG_SIDE_ERRORS, errors, err);
    for (int i = 0; i < BG_SIDES; i++) {
        const piece *p = &c.piece[i];
        if (good[i]) continue;
        /* All of them were on disk before the entry: other bytes there are no crash's work. */
        if (p->offset + p->bytes <= w->f->side[i].size) return damaged(w, i, p, err);
        w->torn = true;
    }
    if (w->torn) return count_lost(w, &c, err);
    return count_commit(w, &c, e->start, err);
}

static bool end_counts(const walk *w, const json_t *end)
{
    const char *was = json_string_value(json_object_get(end, "selection"));
    const char *now = w->c->selection;
    if (w->r->differs || strcmp(was ? was : "", now ? now : "") != 0) return false;
    return !w->c->ordered || json_is_true(json_object_get(end, "ordered"));
}

static bg_status take_entry(walk *w, const bg_journal_entry *e, bg_error *err)
{
    const json_t *o = json_object_get(e->object, "commit"),
                 *end = json_object_get(e->object, "end");
    if (w->ended) return broken(w, e->start, "an entry follows the end of the job", err);
    bg_status st = BG_OK;
    if (o)
        st = take_commit(w, o, e, err);
    else if (end && !w->torn) {
        w->ended = true;
        w->r->finished = end_counts(w, end);
        if (!w->r->finished) return BG_OK; /* it is cut off, and the job goes on */
    }
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
    *yes = !st && (n == 0 || head[0] == 0 || memcmp(head, start, n) == 0);
    return st;
}

static bg_status compare(walk *w, const json_t *entry, bg_error *err)
{
    const bg_recover_files *f = w->f;
    const json_t *version = json_object_get(entry, "batchgen");
    if (!json_is_integer(version) || json_integer_value(version) != VERSION)
        return bg_fail(err, BG_FORMAT, "%s: %s", f->journal_name,
                       version ? "written by another version of batchgen"
                               : "not a journal of batchgen");
    bg_buf b = {0};
    bg_status st = BG_OK;
    w->r->adopted = json_is_null(json_object_get(entry, "identity"));
    file_differences(entry, w->c, &b);
    if (!w->r->adopted) differences(entry, w->c, &b, &w->r->differs);
    if (b.failed)
        st = no_memory(f, err);
    else if (b.len && f->side[BG_SIDE_OUT].size == 0 && f->side[BG_SIDE_ERRORS].size == 0)
        w->r->fresh = true; /* no result is lost */
    else if (b.len)
        st = bg_fail(err, BG_ARG,
                     "%s: belongs to another job; name another output, or start anew with "
                     "--overwrite. %s",
                     f->side[BG_SIDE_OUT].name, b.data);
    bg_buf_release(&b);
    return st;
}

static bg_status first_entry(walk *w, bg_journal_reader *reader, bg_error *err)
{
    const bg_recover_files *f = w->f;
    uint64_t size = f->side[BG_SIDE_OUT].size;
    bg_journal_entry e;
    bool got;
    bg_status st = bg_journal_next(reader, &e, &got, err);
    if (st) return st;
    if (e.object) {
        st = compare(w, e.object, err);
        w->r->journal_end = w->r->folded_end = e.end;
        json_decref(e.object);
        return st;
    }
    bool torn;
    st = torn_start(f, &torn, err);
    if (st) return st;
    if (size == 0 && torn) {
        w->r->fresh = true;
        return BG_OK;
    }
    if (size == 0)
        return bg_fail(err, BG_FORMAT,
                       "%s: is in the way: it is no journal of batchgen; move it, or name another "
                       "output",
                       f->journal_name);
    return bg_fail(
        err, BG_FORMAT,
        "%s: there are results, but their journal %s is %s; put it back, rebuild it with "
        "repair, name another output, or start anew with --overwrite",
        f->side[BG_SIDE_OUT].name, f->journal_name, got ? "damaged at its start" : "missing");
}

/* The last commit once more, as a reader of the file sees it. A folded one may be all of the file,
 * and was looked at so when it was not folded yet. */
static bg_status check_last(walk *w, int i, bg_error *err)
{
    const piece *p = &w->last[i];
    const char *name = w->f->side[i].name;
    int fd = w->f->side[i].fd;
    uint64_t end = p->offset + p->bytes, text_bytes = 0, bytes;
    if (!p->bytes || p->bytes > MAX_CHECK) return BG_OK;
    bg_status st = BG_OK;
    bg_error why = {0};
    bg_buf raw = {0}, text = {0};
    bool ok = true;
    if (w->f->side[i].format == BG_OUT_PLAIN) {
        char last = 0;
        size_t got;
        st = bg_pread_full(fd, &last, 1, (int64_t)end - 1, &got, name, err);
        ok = got == 1 && last == '\n' && p->text == p->bytes;
    }
    for (uint64_t at = p->offset; w->f->side[i].format == BG_OUT_LZ4 && !st && ok && at < end;) {
        bg_found found;
        st = bg_reader_frame(fd, name, at, end, p->text, &raw, &text, &bytes, &found, &why, err);
        ok = !st && found == BG_FOUND_WHOLE && text.data[text.len - 1] == '\n';
        at += bytes;
        text_bytes += text.len;
    }
    if (w->f->side[i].format == BG_OUT_LZ4) ok = ok && text_bytes == p->text;
    if (!st && !ok)
        st = bg_fail(err, BG_FORMAT,
                     "%s: byte %" PRIu64 ": the journal's last commit is not what it "
                     "says: %s",
                     name, p->offset, why.status ? why.text : "not whole lines");
    bg_buf_release(&raw);
    bg_buf_release(&text);
    return st;
}

/* A crash leaves one commit at most that no entry names. More of them mean that the journal is an
 * older copy, and cutting would lose what a newer one has. Lines of a plain file do not tell where
 * a commit ends. */
static bg_status check_tail(walk *w, int i, bg_error *err)
{
    static const unsigned char magic[4] = {0x04, 0x22, 0x4d, 0x18};
    const char *name = w->f->side[i].name;
    uint64_t at = w->r->side[i].end, size = w->f->side[i].size, bytes = 0;
    if (w->f->side[i].format != BG_OUT_LZ4 || size <= at) return BG_OK;
    bg_error why = {0};
    bg_buf raw = {0}, text = {0};
    bg_found found;
    char next[sizeof magic] = {0};
    size_t got = 0;
    bg_status st = bg_reader_frame(w->f->side[i].fd, name, at, size, MAX_CHECK, &raw, &text, &bytes,
                                   &found, &why, err);
    if (!st && found == BG_FOUND_WHOLE)
        st = bg_pread_full(w->f->side[i].fd, next, sizeof next, (int64_t)(at + bytes), &got, name,
                           err);
    if (!st && got == sizeof next && memcmp(next, magic, sizeof magic) == 0)
        st = bg_fail(err, BG_FORMAT,
                     "%s: byte %" PRIu64
                     ": several commits follow that %s does not know: it is an older one, or "
                     "another's; nothing was changed; put the right one back, or rebuild it with "
                     "repair",
                     name, at, w->f->journal_name);
    bg_buf_release(&raw);
    bg_buf_release(&text);
    return st;
}

static bg_status start(bg_recovery *r, walk *w, bg_error *err)
{
    *r = (bg_recovery){
        .done = bg_ranges_new(), .keys = bg_keys_new(), .partials = bg_partials_new()};
    w->chunk = malloc(CHUNK);
    w->hasher = bg_hasher_new();
    bool ok = w->chunk && w->hasher && r->done && r->keys && r->partials;
    for (int i = 0; i < BG_SIDES; i++) {
        w->whole[i] = bg_hasher_new();
        r->side[i].whole = bg_hasher_new();
        ok = ok && w->whole[i] && r->side[i].whole;
    }
    return ok ? BG_OK : no_memory(w->f, err);
}

static void stop(walk *w)
{
    for (int i = 0; i < BG_SIDES; i++)
        bg_hasher_free(w->whole[i]);
    bg_hasher_free(w->hasher);
    free(w->chunk);
}

bg_status bg_recover(bg_recovery *r, const bg_recover_files *f, const bg_writer_config *c,
                     bg_error *err)
{
    walk w = {.r = r, .f = f, .c = c};
    bg_journal_reader reader = {.fd = f->journal_fd, .name = f->journal_name};
    bg_status st = start(r, &w, err);
    if (!st) st = first_entry(&w, &reader, err);
    if (st || r->fresh) goto out;
    bool damaged_line = false;
    uint64_t damaged_at = 0;
    for (;;) {
        bg_journal_entry e;
        bool got;
        st = bg_journal_next(&reader, &e, &got, err);
        if (st || !got) break;
        if (!e.object) {
            if (!damaged_line) damaged_at = e.start;
            damaged_line = true;
            if (!e.hides_whole) continue;
        }
        if (damaged_line)
            st = broken(&w, damaged_at, "damaged, but whole again after it", err);
        else
            st = take_entry(&w, &e, err);
        json_decref(e.object);
        if (st) break;
    }
    for (int i = 0; i < BG_SIDES && !st; i++)
        st = check_last(&w, i, err);
    for (int i = 0; i < BG_SIDES && !st; i++)
        st = check_tail(&w, i, err);
    if (!st && r->lost && f->side[BG_SIDE_OUT].size == 0)
        st = bg_fail(err, BG_FORMAT,
                     "%s: is empty or was removed, but %s has %lld results of it; put it back, or "
                     "start anew with --overwrite",
                     f->side[BG_SIDE_OUT].name, f->journal_name, (long long)r->lost);
    if (!st && r->differs) { /* by which record is it known what they belong to? */
        r->has_input = false;
        bg_partials_clear(r->partials);
    }
out:
    bg_journal_reader_release(&reader);
    stop(&w);
    return st;
}

bg_status bg_recover_fits(const bg_recover_files *f, const bg_writer_config *c, bg_error *err)
{
    bg_recovery r = {0};
    walk w = {.r = &r, .f = f, .c = c};
    bg_journal_reader reader = {.fd = f->journal_fd, .name = f->journal_name};
    bg_status st = first_entry(&w, &reader, err);
    if (!st && r.fresh)
        st = bg_fail(err, BG_FORMAT,
                     "%s: damaged at its start; rebuild it with repair, or start "
                     "anew with --overwrite",
                     f->journal_name);
    bg_journal_reader_release(&reader);
    return st;
}

bg_status bg_recover_rewritten(int journal_fd, const char *journal_name, bool *yes, bg_error *err)
{
    bg_buf entry = {0};
    bg_status st = BG_OK;
    *yes = false;
    bg_buf_char(&entry, '\n');
    bg_buf_str(&entry, BG_JOURNAL_REWRITE);
    bg_journal_seal(&entry, 1);
    char *chunk = malloc(CHUNK);
    if (!chunk || entry.failed) st = bg_fail(err, BG_NOMEM, "%s: out of memory", journal_name);
    size_t keep = entry.len - 1; /* an entry may lie across two pieces */
    for (int64_t at = 0; chunk && !st && !*yes;) {
        size_t got;
        st = bg_pread_full(journal_fd, chunk, CHUNK, at, &got, journal_name, err);
        *yes = !st && memmem(chunk, got, entry.data, entry.len) != NULL;
        if (got < CHUNK) break;
        at += (int64_t)(CHUNK - keep);
    }
    free(chunk);
    bg_buf_release(&entry);
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

bg_status bg_out_first(const char *path, json_t **identity, int64_t *started_s, bg_error *err)
{
    *identity = NULL;
    *started_s = 0;
    char *name;
    if (asprintf(&name, "%s.journal", path) < 0)
        return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    bg_journal_reader reader = {.fd = open(name, O_RDONLY | O_CLOEXEC), .name = name};
    bg_journal_entry e = {0};
    bool got = false;
    bg_status st = BG_OK;
    if (reader.fd >= 0) st = bg_journal_next(&reader, &e, &got, err);
    if (!st && got && e.object) {
        json_t *id = json_object_get(e.object, "identity");
        if (json_is_object(id)) *identity = json_incref(id);
        *started_s = json_integer_value(json_object_get(e.object, "started"));
    }
    json_decref(e.object);
    bg_journal_reader_release(&reader);
    if (reader.fd >= 0) close(reader.fd);
    free(name);
    return st;
}
