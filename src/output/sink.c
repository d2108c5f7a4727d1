#include "output/sink.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <zlib.h>
#include <zstd.h>

#include "base/io.h"
#include "output/frames.h"

enum { BLOCK = 512 << 10, GZIP_WINDOW = 15 + 16 };

typedef enum kind { PLAIN, GZ, ZST, LZ4 } kind;

struct bg_sink {
    kind kind;
    char *path, *part; /* part NULL: written in place */
    int fd;
    bg_buf in, out; /* in: waits until it is a block */
    z_stream gz;
    bool gz_ready;
    ZSTD_CCtx *zst;
};

static kind kind_of(const char *path)
{
    static const char *const suffixes[] = {[GZ] = ".gz", [ZST] = ".zst", [LZ4] = ".lz4"};
    size_t n = strlen(path);
    for (int k = GZ; k <= LZ4; k++) {
        size_t len = strlen(suffixes[k]);
        if (n > len && strcmp(path + n - len, suffixes[k]) == 0) return (kind)k;
    }
    return PLAIN;
}

static bg_status no_memory(const bg_sink *s, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", s->path ? s->path : "output");
}

static bg_status open_fd(bg_sink *s, bg_error *err)
{
    struct stat sb;
    if (stat(s->path, &sb) == 0 && !S_ISREG(sb.st_mode)) {
        s->fd = open(s->path, O_WRONLY | O_CLOEXEC);
        if (s->fd < 0) return bg_fail_os(err, "%s: cannot open for writing", s->path);
        return BG_OK;
    }
    if (asprintf(&s->part, "%s.part.%ld", s->path, (long)getpid()) < 0) {
        s->part = NULL;
        return no_memory(s, err);
    }
    s->fd = open(s->part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (s->fd >= 0) return BG_OK;
    bg_fail_os(err, "%s: cannot create", s->part);
    free(s->part); /* it is not ours to remove */
    s->part = NULL;
    return err->status;
}

bg_status bg_sink_open(bg_sink **out, const char *path, bg_error *err)
{
    *out = NULL;
    bool is_stdout = !path || strcmp(path, "-") == 0;
    bg_status st = BG_OK;
    bg_sink *s = calloc(1, sizeof *s);
    if (!s) return bg_fail(err, BG_NOMEM, "%s: out of memory", is_stdout ? "output" : path);
    s->fd = -1;
    s->path = strdup(is_stdout ? "standard output" : path);
    if (!s->path) {
        st = no_memory(s, err);
    } else if (is_stdout) {
        s->fd = STDOUT_FILENO;
    } else {
        s->kind = kind_of(path);
        st = open_fd(s, err);
    }
    if (!st && s->kind == GZ) {
        s->gz_ready =
            deflateInit2(&s->gz, 6, Z_DEFLATED, GZIP_WINDOW, 8, Z_DEFAULT_STRATEGY) == Z_OK;
        if (!s->gz_ready) st = no_memory(s, err);
    } else if (!st && s->kind == ZST) {
        s->zst = ZSTD_createCCtx();
        if (!s->zst || ZSTD_isError(ZSTD_CCtx_setParameter(s->zst, ZSTD_c_checksumFlag, 1)))
            st = no_memory(s, err);
    }
    if (st)
        bg_sink_close(s);
    else
        *out = s;
    return st;
}

void bg_sink_close(bg_sink *s)
{
    if (!s) return;
    if (s->gz_ready) deflateEnd(&s->gz);
    ZSTD_freeCCtx(s->zst);
    if (s->fd > STDOUT_FILENO) close(s->fd);
    if (s->part) unlink(s->part);
    bg_buf_release(&s->in);
    bg_buf_release(&s->out);
    free(s->part);
    free(s->path);
    free(s);
}

static bg_status write_out(bg_sink *s, bg_error *err)
{
    bg_status st = bg_write_all(s->fd, s->out.data, s->out.len, s->path, err);
    bg_buf_clear(&s->out);
    return st;
}

static bg_status deflate_block(bg_sink *s, bool last, bg_error *err)
{
    s->gz.next_in = (unsigned char *)s->in.data;
    s->gz.avail_in = (unsigned)s->in.len;
    int rc;
    do {
        if (!bg_buf_reserve(&s->out, BLOCK)) return no_memory(s, err);
        s->gz.next_out = (unsigned char *)s->out.data;
        s->gz.avail_out = BLOCK;
        rc = deflate(&s->gz, last ? Z_FINISH : Z_NO_FLUSH);
        if (rc == Z_STREAM_ERROR) return bg_fail(err, BG_INTERNAL, "%s: deflate failed", s->path);
        s->out.len = BLOCK - s->gz.avail_out;
        bg_status st = write_out(s, err);
        if (st) return st;
    } while (last ? rc != Z_STREAM_END : s->gz.avail_out == 0);
    return BG_OK;
}

static bg_status zstd_block(bg_sink *s, bool last, bg_error *err)
{
    ZSTD_inBuffer in = {s->in.data, s->in.len, 0};
    size_t rest;
    do {
        if (!bg_buf_reserve(&s->out, BLOCK)) return no_memory(s, err);
        ZSTD_outBuffer out = {s->out.data, BLOCK, 0};
        rest = ZSTD_compressStream2(s->zst, &out, &in, last ? ZSTD_e_end : ZSTD_e_continue);
        if (ZSTD_isError(rest)) return no_memory(s, err);
        s->out.len = out.pos;
        bg_status st = write_out(s, err);
        if (st) return st;
    } while (last ? rest != 0 : in.pos < in.size);
    return BG_OK;
}

/* Writes the lines that came together. */
static bg_status flush(bg_sink *s, bool last, bg_error *err)
{
    bg_status st = BG_OK;
    switch (s->kind) {
    case PLAIN:
        st = bg_write_all(s->fd, s->in.data, s->in.len, s->path, err);
        break;
    case GZ:
        st = deflate_block(s, last, err);
        break;
    case ZST:
        st = zstd_block(s, last, err);
        break;
    case LZ4:
        if (s->in.len) st = bg_frame_put(&s->out, s->in.data, s->in.len, 0, err);
        if (!st) st = write_out(s, err);
        break;
    }
    bg_buf_clear(&s->in);
    return st;
}

bg_status bg_sink_put(bg_sink *s, const void *data, size_t n, bg_error *err)
{
    bg_buf_add(&s->in, data, n);
    if (s->in.failed) return no_memory(s, err);
    return s->in.len >= BLOCK ? flush(s, false, err) : BG_OK;
}

bg_status bg_sink_finish(bg_sink *s, bg_error *err)
{
    bg_status st = flush(s, true, err);
    if (st || s->fd == STDOUT_FILENO) return st;
    if (s->part && fsync(s->fd) != 0) st = bg_fail_os(err, "%s: cannot sync", s->path);
    int fd = s->fd;
    s->fd = -1;
    if (close(fd) != 0 && !st) st = bg_fail_os(err, "%s: cannot close", s->path);
    if (st || !s->part) return st;
    if (rename(s->part, s->path) != 0) return bg_fail_os(err, "%s: cannot put in place", s->path);
    free(s->part);
    s->part = NULL;
    return bg_sync_dir_of(s->path, err);
}
