#include "base/io.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"

enum { CHUNK = 1 << 30 }; /* some systems refuse more than 2 GiB at a time */

bg_status bg_write_all(int fd, const void *data, size_t n, const char *name, bg_error *err)
{
    const char *p = data;
    while (n) {
        ssize_t w = write(fd, p, n < CHUNK ? n : CHUNK);
        if (w < 0 && errno == EINTR) continue;
        if (w < 0) return bg_fail_os(err, "%s: cannot write", name);
        p += w;
        n -= (size_t)w;
    }
    return BG_OK;
}

bg_status bg_pwrite_all(int fd, const void *data, size_t n, int64_t offset, const char *name,
                        bg_error *err)
{
    const char *p = data;
    while (n) {
        ssize_t w = pwrite(fd, p, n < CHUNK ? n : CHUNK, offset);
        if (w < 0 && errno == EINTR) continue;
        if (w < 0) return bg_fail_os(err, "%s: cannot write", name);
        p += w;
        n -= (size_t)w;
        offset += w;
    }
    return BG_OK;
}

bg_status bg_read_full(int fd, void *data, size_t n, size_t *got, const char *name, bg_error *err)
{
    char *p = data;
    *got = 0;
    while (*got < n) {
        size_t want = n - *got;
        ssize_t r = read(fd, p + *got, want < CHUNK ? want : CHUNK);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return bg_fail_os(err, "%s: cannot read", name);
        if (r == 0) break;
        *got += (size_t)r;
    }
    return BG_OK;
}

bg_status bg_pread_full(int fd, void *data, size_t n, int64_t offset, size_t *got, const char *name,
                        bg_error *err)
{
    char *p = data;
    *got = 0;
    while (*got < n) {
        size_t want = n - *got;
        ssize_t r = pread(fd, p + *got, want < CHUNK ? want : CHUNK, offset + (int64_t)*got);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return bg_fail_os(err, "%s: cannot read", name);
        if (r == 0) break;
        *got += (size_t)r;
    }
    return BG_OK;
}

bg_status bg_sync_data(int fd, const char *name, bg_error *err)
{
    if (fdatasync(fd) != 0) return bg_fail_os(err, "%s: cannot sync", name);
    return BG_OK;
}

bg_status bg_sync_dir_of(const char *path, bg_error *err)
{
    char *copy = strdup(path);
    if (!copy) return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    bg_status st = BG_OK;
    const char *dir = dirname(copy);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        st = bg_fail_os(err, "%s: cannot open the directory", dir);
    } else {
        /* Some file systems cannot sync a directory and say EINVAL; there it is not needed. */
        if (fsync(fd) != 0 && errno != EINVAL)
            st = bg_fail_os(err, "%s: cannot sync the directory", dir);
        close(fd);
    }
    free(copy);
    return st;
}

bg_status bg_read_file(const char *path, size_t limit, char **data, size_t *n, bg_error *err)
{
    *data = NULL;
    *n = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return bg_fail_os(err, "%s: cannot open", path);
    bg_buf b = {0};
    bg_status st = BG_OK;
    for (;;) {
        size_t got = 0;
        if (!bg_buf_reserve(&b, 65536)) {
            st = bg_fail(err, BG_NOMEM, "%s: out of memory", path);
            break;
        }
        st = bg_read_full(fd, b.data + b.len, 65536, &got, path, err);
        if (st || got == 0) break;
        b.len += got;
        if (b.len > limit) {
            st = bg_fail(err, BG_FORMAT, "%s: larger than the %zu bytes allowed here", path, limit);
            break;
        }
    }
    close(fd);
    if (!st) {
        *n = b.len;
        b.data[b.len] = 0;
        *data = bg_buf_take(&b);
    }
    bg_buf_release(&b);
    return st;
}
