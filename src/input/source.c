#include "input/source.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <lz4frame.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

enum { IN_BYTES = 1 << 18 };

typedef enum kind {
    START,    /* nothing seen yet: anything may come */
    BOUNDARY, /* a member or frame has ended: another one or the end must come */
    PLAIN,
    GZIP,
    ZSTD,
    LZ4,
    SKIP, /* inside a skippable frame */
} kind;

struct bg_source {
    char *name;
    int fd;
    kind kind;
    bool eof; /* of the file; what lies in `in` may remain */
    unsigned char *in;
    size_t in_pos, in_len;
    uint64_t in_start;   /* file offset of in[0] */
    uint64_t unit_start; /* file offset of the current member or frame, for messages */
    uint64_t skip;       /* bytes of a skippable frame still to come */
    bool z_ready;
    z_stream z;
    ZSTD_DStream *zstd;
    LZ4F_dctx *lz4;
};

static const char *kind_name(kind k)
{
    return k == GZIP ? "gzip member" : k == ZSTD ? "Zstandard frame" : "LZ4 frame";
}

bg_status bg_source_open(bg_source **out, const char *path, bg_error *err)
{
    *out = NULL;
    bg_status st = BG_OK;
    bool is_stdin = strcmp(path, "-") == 0;
    bg_source *s = calloc(1, sizeof *s);
    if (!s) return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    s->fd = -1;
    s->name = strdup(is_stdin ? "standard input" : path);
    s->in = malloc(IN_BYTES);
    if (!s->name || !s->in) {
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", path);
        goto out;
    }
    s->fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (s->fd < 0) {
        st = bg_fail_os(err, "%s: cannot open", path);
        goto out;
    }
    (void)posix_fadvise(s->fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* a hint; pipes refuse it */
    *out = s;
    s = NULL;
out:
    bg_source_close(s);
    return st;
}

void bg_source_close(bg_source *s)
{
    if (!s) return;
    if (s->z_ready) inflateEnd(&s->z);
    ZSTD_freeDStream(s->zstd);
    LZ4F_freeDecompressionContext(s->lz4);
    if (s->fd >= 0 && s->fd != STDIN_FILENO) close(s->fd);
    free(s->in);
    free(s->name);
    free(s);
}

uint64_t bg_source_stored(const bg_source *s)
{
    return s->in_start + s->in_pos;
}

static bg_status read_some(bg_source *s, void *to, size_t cap, size_t *got, bg_error *err)
{
    ssize_t r;
    do {
        r = read(s->fd, to, cap);
    } while (r < 0 && errno == EINTR);
    *got = 0;
    if (r < 0) return bg_fail_os(err, "%s: cannot read", s->name);
    if (r == 0) s->eof = true;
    *got = (size_t)r;
    return BG_OK;
}

/* Tries to have at least `need` unread bytes in s->in; fewer only at the end of the file. */
static bg_status fill(bg_source *s, size_t need, bg_error *err)
{
    if (s->in_len - s->in_pos >= need || s->eof) return BG_OK;
    memmove(s->in, s->in + s->in_pos, s->in_len - s->in_pos);
    s->in_start += s->in_pos;
    s->in_len -= s->in_pos;
    s->in_pos = 0;
    bg_status st = BG_OK;
    while (!st && !s->eof && s->in_len < need) {
        size_t got;
        st = read_some(s, s->in + s->in_len, IN_BYTES - s->in_len, &got, err);
        s->in_len += got;
    }
    return st;
}

static uint32_t le32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static const char *foreign(const unsigned char *p, size_t n)
{
    static const struct {
        const char *magic;
        size_t n;
        const char *name;
    } list[] = {{"\xfd"
                 "7zXZ",
                 5, "xz"},
                {"BZh", 3, "bzip2"},
                {"PK\3\4", 4, "zip"},
                {"\x02\x21\x4c\x18", 4, "the old LZ4 format"}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (n >= list[i].n && memcmp(p, list[i].magic, list[i].n) == 0) return list[i].name;
    return NULL;
}

static bg_status begin_gzip(bg_source *s, bg_error *err)
{
    int rc = s->z_ready ? inflateReset(&s->z) : inflateInit2(&s->z, 15 + 16);
    if (rc != Z_OK) return bg_fail(err, BG_NOMEM, "%s: out of memory", s->name);
    s->z_ready = true;
    s->kind = GZIP;
    return BG_OK;
}

static bg_status begin_zstd(bg_source *s, bg_error *err)
{
    if (!s->zstd) s->zstd = ZSTD_createDStream();
    /* The library's own limit on the window, 128 MiB, keeps a hostile frame from taking more. */
    if (!s->zstd || ZSTD_isError(ZSTD_initDStream(s->zstd)))
        return bg_fail(err, BG_NOMEM, "%s: out of memory", s->name);
    s->kind = ZSTD;
    return BG_OK;
}

static bg_status begin_lz4(bg_source *s, bg_error *err)
{
    if (!s->lz4 && LZ4F_isError(LZ4F_createDecompressionContext(&s->lz4, LZ4F_VERSION)))
        return bg_fail(err, BG_NOMEM, "%s: out of memory", s->name);
    LZ4F_resetDecompressionContext(s->lz4);
    s->kind = LZ4;
    return BG_OK;
}

/* At START or BOUNDARY: looks at the next bytes and sets the kind. */
static bg_status detect(bg_source *s, bg_error *err)
{
    bg_status st = fill(s, 8, err);
    if (st) return st;
    const unsigned char *p = s->in + s->in_pos;
    size_t n = s->in_len - s->in_pos;
    if (n == 0) return BG_OK;
    s->unit_start = s->in_start + s->in_pos;
    if (n >= 2 && p[0] == 0x1f && p[1] == 0x8b) return begin_gzip(s, err);
    if (n >= 4 && le32(p) == 0xFD2FB528u) return begin_zstd(s, err);
    if (n >= 4 && le32(p) == 0x184D2204u) return begin_lz4(s, err);
    if (n >= 4 && (le32(p) & 0xFFFFFFF0u) == 0x184D2A50u) {
        if (n < 8)
            return bg_fail(err, BG_FORMAT, "%s: cut short inside a skippable frame at byte %llu",
                           s->name, (unsigned long long)s->unit_start);
        s->skip = le32(p + 4);
        s->in_pos += 8;
        s->kind = SKIP;
        return BG_OK;
    }
    const char *other = foreign(p, n);
    if (other)
        return bg_fail(
            err, BG_FORMAT,
            "%s: compressed with %s, which is not read here; decompress it, or use gzip, "
            "zstd or lz4",
            s->name, other);
    if (s->kind == BOUNDARY)
        return bg_fail(err, BG_FORMAT,
                       "%s: byte %llu: neither a compressed frame nor the end of the file follows "
                       "the last frame",
                       s->name, (unsigned long long)s->unit_start);
    s->kind = PLAIN;
    return BG_OK;
}

static bg_status damaged(bg_source *s, const char *why, bg_error *err)
{
    return bg_fail(err, BG_FORMAT, "%s: damaged %s (which starts at byte %llu) near byte %llu: %s",
                   s->name, kind_name(s->kind), (unsigned long long)s->unit_start,
                   (unsigned long long)bg_source_stored(s), why);
}

static bg_status step_gzip(bg_source *s, char *out, size_t cap, size_t *got, bg_error *err)
{
    s->z.next_in = s->in + s->in_pos;
    s->z.avail_in = (uInt)(s->in_len - s->in_pos);
    s->z.next_out = (Bytef *)out;
    s->z.avail_out = (uInt)(cap < (1u << 30) ? cap : 1u << 30);
    uInt room = s->z.avail_out;
    int rc = inflate(&s->z, Z_NO_FLUSH);
    s->in_pos = s->in_len - s->z.avail_in;
    *got = room - s->z.avail_out;
    if (rc == Z_STREAM_END)
        s->kind = BOUNDARY;
    else if (rc == Z_MEM_ERROR)
        return bg_fail(err, BG_NOMEM, "%s: out of memory", s->name);
    else if (rc != Z_OK && rc != Z_BUF_ERROR) /* Z_BUF_ERROR: more input is needed */
        return damaged(s, s->z.msg ? s->z.msg : "invalid data", err);
    return BG_OK;
}

static bg_status step_zstd(bg_source *s, char *out, size_t cap, size_t *got, bg_error *err)
{
    ZSTD_inBuffer in = {s->in + s->in_pos, s->in_len - s->in_pos, 0};
    ZSTD_outBuffer o = {out, cap, 0};
    size_t rc = ZSTD_decompressStream(s->zstd, &o, &in);
    s->in_pos += in.pos;
    *got = o.pos;
    if (ZSTD_getErrorCode(rc) == ZSTD_error_memory_allocation)
        return bg_fail(err, BG_NOMEM, "%s: out of memory", s->name);
    if (ZSTD_isError(rc)) return damaged(s, ZSTD_getErrorName(rc), err);
    if (rc == 0) s->kind = BOUNDARY;
    return BG_OK;
}

static bg_status step_lz4(bg_source *s, char *out, size_t cap, size_t *got, bg_error *err)
{
    size_t n_out = cap, n_in = s->in_len - s->in_pos;
    size_t rc = LZ4F_decompress(s->lz4, out, &n_out, s->in + s->in_pos, &n_in, NULL);
    if (LZ4F_isError(rc) && strcmp(LZ4F_getErrorName(rc), "ERROR_allocation_failed") == 0)
        return bg_fail(err, BG_NOMEM, "%s: out of memory", s->name);
    if (LZ4F_isError(rc)) return damaged(s, LZ4F_getErrorName(rc), err);
    s->in_pos += n_in;
    *got = n_out;
    if (rc == 0) s->kind = BOUNDARY;
    return BG_OK;
}

static bg_status read_plain(bg_source *s, char *out, size_t cap, size_t *got, bg_error *err)
{
    size_t n = s->in_len - s->in_pos;
    if (n) { /* what detect() looked at */
        if (n > cap) n = cap;
        memcpy(out, s->in + s->in_pos, n);
        s->in_pos += n;
        *got = n;
        return BG_OK;
    }
    if (s->eof) return BG_OK;
    bg_status st = read_some(s, out, cap, got, err); /* straight to the caller: no copy */
    s->in_start += *got;
    return st;
}

bg_status bg_source_read(bg_source *s, char *out, size_t cap, size_t *got, bg_error *err)
{
    *got = 0;
    for (;;) {
        bg_status st = BG_OK;
        if (s->kind == START || s->kind == BOUNDARY) {
            kind before = s->kind;
            st = detect(s, err);
            if (st || s->kind == before) return st; /* unchanged: the end */
        }
        if (s->kind == PLAIN) return read_plain(s, out, cap, got, err);
        st = fill(s, 1, err);
        if (st) return st;
        size_t n = s->in_len - s->in_pos;
        if (s->kind == SKIP) {
            if (n == 0 && s->skip)
                return bg_fail(err, BG_FORMAT,
                               "%s: cut short inside a skippable frame that starts at byte %llu",
                               s->name, (unsigned long long)s->unit_start);
            if (n > s->skip) n = (size_t)s->skip;
            s->in_pos += n;
            s->skip -= n;
            if (!s->skip) s->kind = BOUNDARY;
            continue;
        }
        /* A decoder may still hold output when the file is at its end, so it runs before the check.
         */
        kind k = s->kind;
        st = k == GZIP   ? step_gzip(s, out, cap, got, err)
             : k == ZSTD ? step_zstd(s, out, cap, got, err)
                         : step_lz4(s, out, cap, got, err);
        if (st || *got) return st;
        if (s->kind == k && n == 0)
            return bg_fail(err, BG_FORMAT,
                           "%s: cut short at byte %llu, inside a %s that starts at byte %llu",
                           s->name, (unsigned long long)bg_source_stored(s), kind_name(k),
                           (unsigned long long)s->unit_start);
    }
}
