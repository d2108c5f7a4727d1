#include "output/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/io.h"
#include "output/frames.h"

enum { PIECE = 1 << 20, LOOK = 1 << 16 };
#define LIMIT (UINT64_C(1) << 32)

static const unsigned char magic[4] = {0x04, 0x22, 0x4d, 0x18};

struct bg_reader {
    bg_reader_config c;
    char *path;
    int fd;
    bool close_fd;
    uint64_t size, end; /* end: of what is looked at */
    uint64_t at;        /* next frame; or of the bytes at raw.data[pos], plain */
    uint64_t whole;     /* everything before it is good */
    bool known_end, finished;
    bg_buf raw, text;
    size_t pos; /* in text (LZ4) or raw (plain) */
    uint64_t frame_at;
    size_t commit; /* the one that `hashed` ends in, or behind it */
    uint64_t hashed;
    bg_hasher *hasher;
    bg_error why; /* the failure that ended it; every later call returns it */
};

static bg_status no_memory(const char *name, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", name);
}

/* ---- lines
 * ------------------------------------------------------------------------------------------------
 */

static int64_t record_of_id(bg_slice id)
{
    static const char start[] = "\"batch_req_";
    size_t n = sizeof start - 1;
    if (!id.p || id.n < n + 2 || memcmp(id.p, start, n) != 0) return -1;
    return bg_lens_int((bg_slice){id.p + n, id.n - n - 1}, -1);
}

static bool named(bg_slice name, const char *text)
{
    return name.n == strlen(text) && memcmp(name.p, text, name.n) == 0;
}

bool bg_out_line_look(bg_out_line *line)
{
    bg_slice object, name, value, at;
    bg_slice id = {0}, custom_id = {0}, response = {0}, usage = {0};
    int64_t number = -1, record = -1;
    bool has_file = false, openai = false;
    line->record = -1;
    line->failed = false;
    line->id = (bg_slice){0};
    line->prompt_tokens = line->output_tokens = 0;
    const char *end = line->text + line->n, *p = bg_lens_skip(line->text, end, &object);
    if (!p || line->n == 0 || p != end - 1 || *p != '\n' || *object.p != '{') return false;
    for (at = object; bg_lens_next(&at, &name, &value);) {
        if (named(name, "line"))
            number = bg_lens_int(value, -1);
        else if (named(name, "record"))
            record = bg_lens_int(value, -1);
        else if (named(name, "file"))
            has_file = true;
        else if (named(name, "id"))
            id = value;
        else if (named(name, "custom_id"))
            custom_id = value;
        else if (named(name, "response"))
            response = value;
        else if (named(name, "usage"))
            usage = value;
        else if (named(name, "error"))
            line->failed = !bg_lens_is(value, "null");
    }
    openai = response.p != NULL;
    if (openai) {
        line->record = record_of_id(id);
        id = custom_id;
        usage = bg_lens_path(response, "body.usage");
    } else {
        /* a line number is a record number when there is one input */
        line->record = record >= 0 ? record : !has_file && number > 0 ? number - 1 : -1;
    }
    if (!bg_lens_is(id, "null")) line->id = id;
    line->prompt_tokens = bg_lens_int(bg_lens_member(usage, "prompt_tokens", 13), 0);
    line->output_tokens = bg_lens_int(bg_lens_member(usage, "completion_tokens", 17), 0);
    return openai || number > 0;
}

/* ---- frames
 * -----------------------------------------------------------------------------------------------
 */

typedef struct window { /* the file's bytes from a frame's start on, read as they are needed */
    int fd;
    const char *name;
    uint64_t offset, end;
    bg_buf *raw;
} window;

/* *got: the first n bytes are there. */
static bg_status need(window *w, size_t n, bool *got, bg_error *err)
{
    *got = w->raw->len >= n;
    if (*got) return BG_OK;
    uint64_t left = w->end - w->offset - w->raw->len;
    size_t more = n - w->raw->len;
    if (more > left) return BG_OK;
    if (more < LOOK) more = left < LOOK ? (size_t)left : LOOK;
    size_t read;
    if (!bg_buf_reserve(w->raw, more)) return no_memory(w->name, err);
    bg_status st = bg_pread_full(w->fd, w->raw->data + w->raw->len, more,
                                 (int64_t)(w->offset + w->raw->len), &read, w->name, err);
    w->raw->len += read;
    *got = !st && w->raw->len >= n;
    return st;
}

static uint64_t le(const char *p, int n)
{
    uint64_t v = 0;
    for (int i = n - 1; i >= 0; i--)
        v = v << 8 | (unsigned char)p[i];
    return v;
}

/* Follows the frame's blocks to its end, so that no more than the frame is read. The header's place
 * of each field: magic, FLG, BD, 8 bytes of size, header checksum. */
static bg_status extent(window *w, uint64_t limit, size_t *bytes, bg_found *found, bg_error *why,
                        bg_error *err)
{
    enum { HEADER = 15, SIZES = 0x5c, SIZES_MASK = 0xdf };
    bool got;
    *found = BG_FOUND_CUT;
    bg_status st = need(w, HEADER, &got, err);
    if (st) return st;
    const char *p = w->raw->data;
    if (!got) {
        if (w->raw->len == 0 || memcmp(p, magic, w->raw->len < 4 ? w->raw->len : 4) != 0)
            *found = BG_FOUND_BAD;
        bg_fail(why, BG_FORMAT, "the file ends inside a frame's header");
        return BG_OK;
    }
    *found = BG_FOUND_BAD;
    if (memcmp(p, magic, 4) != 0) {
        bg_fail(why, BG_FORMAT, "no LZ4 frame begins here");
        return BG_OK;
    }
    /* version 1, block checksums, size and checksum of the text, no dictionary */
    if ((p[4] & SIZES_MASK) != SIZES || (p[5] & 0x8f) || p[5] < 0x40) {
        bg_fail(why, BG_FORMAT,
                "an LZ4 frame that batchgen did not write: no size or no checksums");
        return BG_OK;
    }
    uint64_t size = le(p + 6, 8), most = UINT64_C(1) << (2 * (p[5] >> 4) + 8);
    uint64_t left = w->end - w->offset;
    /* LZ4 gains no more than 255 times */
    if (size == 0 || size > limit) {
        bg_fail(why, BG_FORMAT,
                "a frame claims to hold %" PRIu64 " bytes of text, %" PRIu64 " are allowed", size,
                limit);
        return BG_OK;
    }
    if (size / 256 > left) {
        *found = BG_FOUND_CUT;
        bg_fail(why, BG_FORMAT, "the file ends inside a frame");
        return BG_OK;
    }
    for (size_t at = HEADER;;) {
        st = need(w, at + 4, &got, err);
        if (st) return st;
        uint64_t block = got ? le(w->raw->data + at, 4) & 0x7fffffff : 0;
        bool last = got && le(w->raw->data + at, 4) == 0;
        if (got && block > most) {
            bg_fail(why, BG_FORMAT,
                    "a block of %" PRIu64 " bytes in a frame, %" PRIu64 " are allowed", block,
                    most);
            return BG_OK;
        }
        at += 4 + (size_t)block + 4; /* its checksum, or the text's after the last */
        if (got) st = need(w, at, &got, err);
        if (st) return st;
        if (!got) {
            *found = BG_FOUND_CUT;
            bg_fail(why, BG_FORMAT, "the file ends inside a frame");
            return BG_OK;
        }
        if (!last) continue;
        *bytes = at;
        *found = BG_FOUND_WHOLE;
        return BG_OK;
    }
}

bg_status bg_reader_frame(int fd, const char *name, uint64_t offset, uint64_t end, uint64_t limit,
                          bg_buf *raw, bg_buf *text, uint64_t *bytes, bg_found *found,
                          bg_error *why, bg_error *err)
{
    window w = {fd, name, offset, end, raw};
    size_t n = 0, used = 0;
    if (!limit) limit = LIMIT;
    *bytes = 0;
    bg_buf_clear(raw);
    bg_buf_clear(text);
    bg_status st = extent(&w, limit, &n, found, why, err);
    if (st || *found != BG_FOUND_WHOLE) return st;
    bg_error bad = {0};
    st = bg_frame_get(text, raw->data, n, (size_t)limit, &used, &bad);
    if (st == BG_NOMEM) return no_memory(name, err);
    if (!st && used == n) {
        *bytes = n;
        return BG_OK;
    }
    *found = BG_FOUND_BAD;
    bg_fail(why, BG_FORMAT, "%s", st ? bad.text : "a frame ends before its last block");
    return BG_OK;
}

bg_status bg_reader_resync(int fd, const char *name, uint64_t from, uint64_t end, uint64_t limit,
                           bg_buf *raw, bg_buf *text, uint64_t *at, uint64_t *bytes, bool *got,
                           bg_error *err)
{
    *got = false;
    bg_status st = BG_OK;
    char *piece = malloc(LOOK);
    if (!piece) return no_memory(name, err);
    while (!st && !*got && end - from >= sizeof magic && from < end) {
        size_t n, want = end - from < LOOK ? (size_t)(end - from) : LOOK;
        st = bg_pread_full(fd, piece, want, (int64_t)from, &n, name, err);
        if (st || n < sizeof magic) break;
        size_t i = 0;
        for (const char *hit; !st && !*got && n - i >= sizeof magic; i++) {
            hit = memmem(piece + i, n - i, magic, sizeof magic);
            if (!hit) {
                i = n - sizeof magic + 1;
                break;
            }
            i = (size_t)(hit - piece);
            bg_found found;
            bg_error why = {0};
            st = bg_reader_frame(fd, name, from + i, end, limit, raw, text, bytes, &found, &why,
                                 err);
            *got = !st && found == BG_FOUND_WHOLE;
            *at = from + i;
        }
        from += i;
        if (n < want) break; /* it became shorter */
    }
    free(piece);
    return st;
}

/* ---- the reader
 * ------------------------------------------------------------------------------------------- */

bg_status bg_reader_guess(const char *path, bg_out_format *format, bg_error *err)
{
    char head[4];
    size_t n, len = strlen(path);
    *format = len > 4 && strcmp(path + len - 4, ".lz4") == 0 ? BG_OUT_LZ4 : BG_OUT_PLAIN;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return bg_fail_os(err, "%s: cannot open", path);
    bg_status st = bg_read_full(fd, head, sizeof head, &n, path, err);
    close(fd);
    if (!st && n == sizeof head && memcmp(head, magic, n) == 0)
        *format = BG_OUT_LZ4;
    else if (!st && n && head[0] == '{')
        *format = BG_OUT_PLAIN;
    return st;
}

bg_status bg_reader_open(bg_reader **out, const bg_reader_config *c, bg_error *err)
{
    *out = NULL;
    struct stat sb;
    bg_status st = BG_OK;
    bg_reader *r = calloc(1, sizeof *r);
    if (!r) return no_memory(c->path, err);
    r->c = *c;
    if (!r->c.limit) r->c.limit = LIMIT;
    r->fd = c->fd;
    r->path = strdup(c->path);
    r->hasher = bg_hasher_new();
    if (!r->path || !r->hasher) {
        st = no_memory(c->path, err);
        goto out;
    }
    if (r->fd < 0) {
        r->fd = open(c->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        r->close_fd = r->fd >= 0;
    }
    if (r->fd < 0 || fstat(r->fd, &sb) != 0) {
        st = bg_fail_os(err, "%s: cannot open", c->path);
        goto out;
    }
    if (!S_ISREG(sb.st_mode)) {
        st = bg_fail(err, BG_ARG, "%s: not a regular file", c->path);
        goto out;
    }
    r->size = (uint64_t)sb.st_size;
    r->known_end = c->end != BG_READER_NO_END;
    r->end = r->known_end ? c->end : r->size;
    *out = r;
    r = NULL;
out:
    bg_reader_close(r);
    return st;
}

void bg_reader_close(bg_reader *r)
{
    if (!r) return;
    if (r->close_fd) close(r->fd);
    bg_hasher_free(r->hasher);
    bg_buf_release(&r->raw);
    bg_buf_release(&r->text);
    free(r->path);
    free(r);
}

uint64_t bg_reader_whole(const bg_reader *r)
{
    return r->whole;
}

uint64_t bg_reader_size(const bg_reader *r)
{
    return r->size;
}

uint64_t bg_reader_torn(const bg_reader *r)
{
    return r->size - r->whole;
}

static bg_status damaged(const bg_reader *r, uint64_t at, const char *what, bg_error *err)
{
    return bg_fail(err, BG_FORMAT, "%s: damaged at byte %" PRIu64 ": %s", r->path, at, what);
}

static bg_status too_short(const bg_reader *r, bg_error *err)
{
    return bg_fail(err, BG_FORMAT,
                   "%s: damaged at byte %" PRIu64 ": the file ends after %" PRIu64
                   " bytes, but its journal tells of %" PRIu64,
                   r->path, r->at, r->size, r->end);
}

/* A frame's bytes go into the hash of the commit that they are in. */
static bg_status hash_frame(bg_reader *r, const char *data, uint64_t n, bg_error *err)
{
    while (r->commit < r->c.n_commits && r->c.commits[r->commit].bytes == 0)
        r->commit++;
    if (r->commit >= r->c.n_commits) return BG_OK;
    const bg_reader_commit *c = &r->c.commits[r->commit];
    uint64_t end = c->offset + c->bytes;
    if (r->hashed + n > end)
        return damaged(r, r->hashed, "a frame goes past the end of its commit", err);
    bg_hasher_add(r->hasher, data, (size_t)n);
    r->hashed += n;
    if (r->hashed < end) return BG_OK;
    if (bg_hasher_value(r->hasher) != c->hash)
        return damaged(r, c->offset, "these are not the bytes that the journal tells of", err);
    bg_hasher_reset(r->hasher);
    r->commit++;
    return BG_OK;
}

static bg_status next_frame(bg_reader *r, bool *got, bg_error *err)
{
    bg_found found;
    bg_error why = {0};
    uint64_t bytes;
    *got = false;
    if (r->at == r->end) return BG_OK;
    bg_status st = bg_reader_frame(r->fd, r->path, r->at, r->end, r->c.limit, &r->raw, &r->text,
                                   &bytes, &found, &why, err);
    if (st) return st;
    bool lines = found == BG_FOUND_WHOLE && r->text.data[r->text.len - 1] == '\n';
    if (lines) {
        st = hash_frame(r, r->raw.data, bytes, err);
        r->frame_at = r->at;
        r->at += bytes;
        r->pos = 0;
        *got = !st;
        return st;
    }
    if (found == BG_FOUND_WHOLE) return damaged(r, r->at, "a frame does not hold whole lines", err);
    if (r->known_end && r->end > r->size) return too_short(r, err);
    if (r->known_end) return damaged(r, r->at, why.text, err);
    uint64_t next;
    bool again;
    st = bg_reader_resync(r->fd, r->path, r->at + 1, r->end, r->c.limit, &r->raw, &r->text, &next,
                          &bytes, &again, err);
    if (!st && again) {
        char what[BG_ERROR_TEXT];
        snprintf(what, sizeof what, "%.300s; whole again at byte %" PRIu64, why.text, next);
        return damaged(r, r->at, what, err);
    }
    r->finished = true;
    return st;
}

/* Plain bytes have no checksum of their own, so a commit is hashed before its first line is given.
 */
static bg_status hash_commits_to(bg_reader *r, uint64_t upto, bg_error *err)
{
    bg_status st = BG_OK;
    char *piece = NULL;
    while (!st && r->commit < r->c.n_commits && r->hashed < upto) {
        const bg_reader_commit *c = &r->c.commits[r->commit++];
        if (!piece && !(piece = malloc(PIECE))) return no_memory(r->path, err);
        bg_hasher_reset(r->hasher);
        for (uint64_t at = 0; !st && at < c->bytes;) {
            size_t got, want = c->bytes - at < PIECE ? (size_t)(c->bytes - at) : PIECE;
            st = bg_pread_full(r->fd, piece, want, (int64_t)(c->offset + at), &got, r->path, err);
            if (!st && got < want) st = too_short(r, err);
            bg_hasher_add(r->hasher, piece, got);
            at += got;
        }
        r->hashed = c->offset + c->bytes;
        if (!st && bg_hasher_value(r->hasher) != c->hash)
            st = damaged(r, c->offset, "these are not the bytes that the journal tells of", err);
    }
    free(piece);
    return st;
}

/* The line at raw.data[pos]; *n 0: no LF before the end of the file. */
static bg_status plain_line(bg_reader *r, size_t *n, bg_error *err)
{
    *n = 0;
    size_t looked = 0;
    for (;;) {
        size_t have = r->raw.len - r->pos;
        const char *lf =
            have > looked ? memchr(r->raw.data + r->pos + looked, '\n', have - looked) : NULL;
        if (lf) {
            *n = (size_t)(lf + 1 - (r->raw.data + r->pos));
            return BG_OK;
        }
        looked = have;
        uint64_t left = r->end - r->at - have;
        if (left == 0) return BG_OK;
        if (have > PIECE && r->raw.data[r->pos] != '{') { /* no line of ours: not worth holding */
            *n = have;
            return BG_OK;
        }
        if (have > r->c.limit) return damaged(r, r->at, "a line that never ends", err);
        if (r->pos) {
            memmove(r->raw.data, r->raw.data + r->pos, have);
            r->raw.len = have;
            r->pos = 0;
        }
        size_t got, want = left < PIECE ? (size_t)left : PIECE;
        if (!bg_buf_reserve(&r->raw, want)) return no_memory(r->path, err);
        bg_status st = bg_pread_full(r->fd, r->raw.data + have, want, (int64_t)(r->at + have), &got,
                                     r->path, err);
        if (st) return st;
        r->raw.len += got;
        if (got < want) {
            if (r->known_end) return too_short(r, err);
            r->end = r->at + have + got;
        }
    }
}

static bg_status next_plain(bg_reader *r, bg_out_line *line, bool *got, bg_error *err)
{
    *got = false;
    bg_status st = BG_OK;
    uint64_t bad_at = r->at;
    bool bad = false;
    for (size_t n; !st; r->pos += n, r->at += n) {
        st = plain_line(r, &n, err);
        if (st || n == 0) break;
        st = hash_commits_to(r, r->at + n, err);
        if (st) break;
        *line = (bg_out_line){.text = r->raw.data + r->pos, .n = n, .offset = r->at};
        if (bg_out_line_look(line)) {
            if (bad) return damaged(r, bad_at, "no result line, and whole ones follow", err);
            r->pos += n;
            r->at += n;
            *got = true;
            return BG_OK;
        }
        if (r->known_end) return damaged(r, r->at, "no result line", err);
        bad = true; /* a torn tail, unless a whole line follows */
    }
    if (!st && r->known_end && r->at < r->end)
        return damaged(r, r->at, "the last line is not whole", err);
    r->finished = !st;
    return st;
}

static bg_status next_line(bg_reader *r, bg_out_line *line, bool *got, bg_error *err)
{
    bg_status st = BG_OK;
    if (r->c.format == BG_OUT_PLAIN) {
        st = next_plain(r, line, got, err);
        if (*got) r->whole = r->at;
        return st;
    }
    if (r->pos == r->text.len) {
        bool more;
        st = next_frame(r, &more, err);
        if (st || !more) return st;
        r->whole = r->at;
    }
    const char *p = r->text.data + r->pos, *lf = memchr(p, '\n', r->text.len - r->pos);
    *line = (bg_out_line){
        .text = p, .n = (size_t)(lf + 1 - p), .offset = r->frame_at, .in_frame = r->pos};
    r->pos += line->n;
    if (!bg_out_line_look(line))
        return damaged(r, r->frame_at, "a frame holds a line that is no result", err);
    *got = true;
    return BG_OK;
}

bg_status bg_reader_next(bg_reader *r, bg_out_line *line, bool *got, bg_error *err)
{
    *got = false;
    *line = (bg_out_line){0};
    if (r->why.status) {
        if (!err->status) *err = r->why;
        return r->why.status;
    }
    if (r->finished) return BG_OK;
    bg_status st = next_line(r, line, got, err);
    if (st) {
        r->why = *err;
        *got = false;
        *line = (bg_out_line){0};
    }
    return st;
}

/* ---- lines in order
 * --------------------------------------------------------------------------------------- */

typedef struct source {
    int fd;
    const char *name;
    bg_out_format format;
} source;

typedef struct cached {
    int32_t file;
    uint64_t offset, used; /* used: when, counted in requests */
    bg_buf text;
} cached;

enum { CACHED = 256 };

struct bg_order {
    bg_place *places;
    size_t n, cap;
    source *sources;
    int32_t n_sources;
    cached frames[CACHED];
    size_t cache_bytes, held;
    uint64_t now;
    bg_buf raw, text;
};

bg_order *bg_order_new(size_t cache_bytes)
{
    bg_order *o = calloc(1, sizeof *o);
    if (o) o->cache_bytes = cache_bytes ? cache_bytes : (size_t)64 << 20;
    return o;
}

void bg_order_free(bg_order *o)
{
    if (!o) return;
    for (int i = 0; i < CACHED; i++)
        bg_buf_release(&o->frames[i].text);
    bg_buf_release(&o->raw);
    bg_buf_release(&o->text);
    free(o->sources);
    free(o->places);
    free(o);
}

int32_t bg_order_file(bg_order *o, int fd, const char *name, bg_out_format format)
{
    source *s = realloc(o->sources, ((size_t)o->n_sources + 1) * sizeof *s);
    if (!s) return -1;
    o->sources = s;
    s[o->n_sources] = (source){fd, name, format};
    return o->n_sources++;
}

bool bg_order_add(bg_order *o, int32_t file, const bg_out_line *line, uint64_t key)
{
    if (o->n == o->cap) {
        size_t cap = o->cap ? o->cap + o->cap / 2 : 1024;
        bg_place *p = realloc(o->places, cap * sizeof *p);
        if (!p) return false;
        o->places = p;
        o->cap = cap;
    }
    o->places[o->n++] = (bg_place){.record = line->record,
                                   .offset = line->offset,
                                   .key = key,
                                   .in_frame = line->in_frame,
                                   .n = line->n,
                                   .file = file,
                                   .failed = line->failed};
    return true;
}

static int compare(const void *x, const void *y)
{
    const bg_place *a = x, *b = y;
    if (a->record != b->record) return a->record < b->record ? -1 : 1;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return a->in_frame < b->in_frame ? -1 : a->in_frame > b->in_frame;
}

void bg_order_sort(bg_order *o)
{
    if (o->n) qsort(o->places, o->n, sizeof *o->places, compare);
}

size_t bg_order_count(const bg_order *o)
{
    return o->n;
}

bg_place *bg_order_places(bg_order *o)
{
    return o->places;
}

/* An empty slot: those used longest ago make room. */
static cached *room(bg_order *o)
{
    for (;;) {
        cached *oldest = NULL, *empty = NULL;
        for (int i = 0; i < CACHED; i++) {
            cached *c = &o->frames[i];
            if (!c->text.data)
                empty = c;
            else if (!oldest || c->used < oldest->used)
                oldest = c;
        }
        if (empty && (o->held < o->cache_bytes || !oldest)) return empty;
        o->held -= oldest->text.cap;
        bg_buf_release(&oldest->text);
    }
}

static bg_status frame_text(bg_order *o, const bg_place *p, const bg_buf **text, bg_error *err)
{
    const source *s = &o->sources[p->file];
    o->now++;
    for (int i = 0; i < CACHED; i++) {
        cached *c = &o->frames[i];
        if (!c->text.data || c->file != p->file || c->offset != p->offset) continue;
        c->used = o->now;
        *text = &c->text;
        return BG_OK;
    }
    cached *c = room(o);
    bg_found found;
    bg_error why = {0};
    uint64_t bytes;
    bg_status st = bg_reader_frame(s->fd, s->name, p->offset, UINT64_MAX / 2, 0, &o->raw, &c->text,
                                   &bytes, &found, &why, err);
    if (!st && found != BG_FOUND_WHOLE)
        st = bg_fail(err, BG_FORMAT, "%s: damaged at byte %" PRIu64 ": %s", s->name, p->offset,
                     why.text);
    if (st) {
        bg_buf_release(&c->text);
        return st;
    }
    c->file = p->file;
    c->offset = p->offset;
    c->used = o->now;
    o->held += c->text.cap;
    *text = &c->text;
    return BG_OK;
}

bg_status bg_order_text(bg_order *o, const bg_place *p, const char **text, bg_error *err)
{
    const source *s = &o->sources[p->file];
    if (s->format == BG_OUT_LZ4) {
        const bg_buf *frame;
        bg_status st = frame_text(o, p, &frame, err);
        if (st) return st;
        if (p->in_frame + p->n <= frame->len) {
            *text = frame->data + p->in_frame;
            return BG_OK;
        }
    } else {
        size_t got;
        bg_buf_clear(&o->text);
        if (!bg_buf_reserve(&o->text, p->n)) return no_memory(s->name, err);
        bg_status st =
            bg_pread_full(s->fd, o->text.data, p->n, (int64_t)p->offset, &got, s->name, err);
        if (st) return st;
        bg_out_line again = {.text = o->text.data, .n = got};
        if (got == p->n && bg_out_line_look(&again) && again.record == p->record) {
            *text = o->text.data;
            return BG_OK;
        }
    }
    return bg_fail(err, BG_FORMAT, "%s: byte %" PRIu64 ": it changed while it was read", s->name,
                   p->offset);
}
