#include "output/files.h"

#include <errno.h>
#include <unistd.h>

static ssize_t real_write(void *ctx, int fd, const void *data, size_t n, int64_t offset)
{
    (void)ctx;
    return offset < 0 ? write(fd, data, n) : pwrite(fd, data, n, offset);
}

static int real_sync(void *ctx, int fd)
{
    (void)ctx;
    return fdatasync(fd);
}

static int real_truncate(void *ctx, int fd, int64_t size)
{
    (void)ctx;
    return ftruncate(fd, size);
}

const bg_out_sys bg_out_real = {real_write, real_sync, real_truncate, NULL};

bg_status bg_out_append(bg_out_file *f, const void *data, size_t n, bg_error *err)
{
    const char *p = data;
    while (n) {
        size_t part = n < (1u << 30) ? n : 1u << 30;
        ssize_t w = f->sys->write(f->sys->ctx, f->fd, p, part, f->stream ? -1 : (int64_t)f->end);
        if (w < 0 && errno == EINTR) continue; /* nothing was done: not a failure */
        if (w == 0) errno = EIO;
        if (w <= 0) return bg_fail_os(err, "%s: cannot write", f->name);
        p += w;
        n -= (size_t)w;
        f->end += (uint64_t)w;
    }
    return BG_OK;
}

bg_status bg_out_sync(bg_out_file *f, bg_error *err)
{
    if (f->stream) return BG_OK;
    if (f->sys->sync(f->sys->ctx, f->fd) != 0) return bg_fail_os(err, "%s: cannot sync", f->name);
    return BG_OK;
}

bg_status bg_out_cut(bg_out_file *f, uint64_t size, bg_error *err)
{
    if (f->sys->truncate(f->sys->ctx, f->fd, (int64_t)size) != 0)
        return bg_fail_os(err, "%s: cannot cut at byte %llu", f->name, (unsigned long long)size);
    f->end = size;
    return bg_out_sync(f, err);
}
