#include "output/files.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_LINKS = 16 };

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

static int real_make(void *ctx, const char *path, mode_t mode)
{
    (void)ctx;
    return open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
}

static int real_rename(void *ctx, const char *from, const char *to)
{
    (void)ctx;
    return rename(from, to);
}

static int real_unlink(void *ctx, const char *path)
{
    (void)ctx;
    return unlink(path);
}

/* The directory's name, in place of the file's, in a copy. */
static char *dir_of(const char *path)
{
    char *copy = strdup(path);
    if (!copy) return NULL;
    char *dir = strdup(dirname(copy));
    free(copy);
    return dir;
}

static int real_sync_dir(void *ctx, const char *path)
{
    (void)ctx;
    char *dir = dir_of(path);
    if (!dir) {
        errno = ENOMEM;
        return -1;
    }
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(dir);
    if (fd < 0) return -1;
    /* Some file systems cannot sync a directory and say EINVAL; there it is not needed. */
    int rc = fsync(fd) != 0 && errno != EINVAL ? -1 : 0;
    int why = errno;
    close(fd);
    errno = why;
    return rc;
}

const bg_out_sys bg_out_real = {.write = real_write,
                                .sync = real_sync,
                                .truncate = real_truncate,
                                .make = real_make,
                                .rename = real_rename,
                                .unlink = real_unlink,
                                .sync_dir = real_sync_dir};

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

/* ---- names
 * ---------------------------------------------------------------------------------------- */

static bg_status no_memory(const char *path, bg_error *err)
{
    return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
}

/* Whether anybody may put files beside path: then what another user has put there is a trap. */
static bg_status among_strangers(const char *path, bool *yes, bg_error *err)
{
    struct stat sb;
    char *dir = dir_of(path);
    if (!dir) return no_memory(path, err);
    bg_status st = BG_OK;
    *yes = false;
    if (stat(dir, &sb) != 0)
        st = bg_fail_os(err, "%s: cannot open the folder", path);
    else
        *yes = (sb.st_mode & S_ISVTX) && (sb.st_mode & S_IWOTH);
    free(dir);
    return st;
}

static bg_status owner_fits(const char *path, const struct stat *sb, bg_error *err)
{
    bool strangers = false;
    if (sb->st_uid == geteuid()) return BG_OK;
    bg_status st = among_strangers(path, &strangers, err);
    if (!st && strangers)
        st = bg_fail(err, BG_ARG,
                     "%s: is another user's %s in a folder where anybody may put one; remove it, "
                     "or name a file elsewhere",
                     path, S_ISLNK(sb->st_mode) ? "link" : "file");
    return st;
}

/* What the link says, as a path from here. */
static bg_status follow(char **path, bg_error *err)
{
    char target[PATH_MAX];
    ssize_t n = readlink(*path, target, sizeof target - 1);
    if (n < 0) return bg_fail_os(err, "%s: cannot read the link", *path);
    target[n] = 0;
    char *next = NULL, *dir = NULL;
    if (target[0] == '/')
        next = strdup(target);
    else if ((dir = dir_of(*path)) && asprintf(&next, "%s/%s", dir, target) < 0)
        next = NULL;
    free(dir);
    if (!next) return no_memory(*path, err);
    free(*path);
    *path = next;
    return BG_OK;
}

/* One try; *again: the name changed meanwhile. */
static bg_status open_once(bg_out_opened *o, const char *path, bool create, const bg_out_sys *sys,
                           bool *again, bg_error *err)
{
    struct stat sb;
    bg_status st = BG_OK;
    *again = false;
    int links = 0;
    for (; !st; links++) {
        if (lstat(o->real, &sb) != 0) {
            if (errno != ENOENT) return bg_fail_os(err, "%s: cannot open for writing", path);
            if (links)
                return bg_fail(err, BG_ARG,
                               "%s: is a link to %s, which is not there; remove the link, or make "
                               "the file",
                               path, o->real);
            if (!create) return BG_OK;
            o->fd = sys->make(sys->ctx, o->real, 0666);
            o->made = o->fd >= 0;
            *again = o->fd < 0 && errno == EEXIST;
            if (o->fd < 0 && !*again) return bg_fail_os(err, "%s: cannot open for writing", path);
            return BG_OK;
        }
        if (!S_ISLNK(sb.st_mode)) break;
        if (links == MAX_LINKS) return bg_fail(err, BG_ARG, "%s: too many links", path);
        st = owner_fits(o->real, &sb, err);
        if (!st) st = follow(&o->real, err);
    }
    if (!st && !S_ISREG(sb.st_mode))
        st = bg_fail(err, BG_ARG, "%s: not a regular file; use - for standard output", path);
    if (!st) st = owner_fits(o->real, &sb, err);
    if (st) return st;
    o->fd = open(o->real, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    *again = o->fd < 0 && (errno == ENOENT || errno == ELOOP);
    if (o->fd < 0 && !*again) return bg_fail_os(err, "%s: cannot open for writing", path);
    struct stat now;
    if (o->fd >= 0 && fstat(o->fd, &now) != 0) return bg_fail_os(err, "%s: cannot stat", path);
    if (o->fd >= 0 && (now.st_dev != sb.st_dev || now.st_ino != sb.st_ino)) *again = true;
    if (o->fd >= 0) o->size = (uint64_t)now.st_size;
    return BG_OK;
}

bg_status bg_out_open(bg_out_opened *o, const char *path, bool create, const bg_out_sys *sys,
                      bg_error *err)
{
    bg_status st = BG_OK;
    bool again = true;
    *o = (bg_out_opened){.fd = -1};
    for (int tries = 0; again && !st; tries++) {
        *o = (bg_out_opened){.fd = -1};
        o->real = strdup(path);
        if (!o->real)
            st = no_memory(path, err);
        else if (tries == 100)
            st = bg_fail(err, BG_BUSY, "%s: is replaced by others again and again", path);
        else
            st = open_once(o, path, create, sys, &again, err);
        if (!st && !again) break;
        if (o->fd >= 0) close(o->fd);
        free(o->real);
        o->real = NULL;
        o->fd = -1;
    }
    return st;
}

bool bg_out_is(int fd, const char *path)
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

bg_out_format bg_out_format_of(const char *path)
{
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".lz4") == 0 ? BG_OUT_LZ4 : BG_OUT_PLAIN;
}

bg_status bg_out_make(bg_out_file *f, mode_t mode, bg_error *err)
{
    f->end = 0;
    f->fd = f->sys->make(f->sys->ctx, f->name, 0666);
    if (f->fd < 0) return bg_fail_os(err, "%s: cannot make", f->name);
    if (mode) (void)!fchmod(f->fd, mode & 0777); /* as the file it takes the place of */
    return BG_OK;
}

bg_status bg_out_rename(const bg_out_sys *sys, const char *from, const char *to, bg_error *err)
{
    if (sys->rename(sys->ctx, from, to) != 0)
        return bg_fail_os(err, "%s: cannot rename to %s", from, to);
    return BG_OK;
}

bg_status bg_out_remove(const bg_out_sys *sys, const char *path, bg_error *err)
{
    if (access(path, F_OK) != 0 && errno == ENOENT) {
        struct stat sb;
        if (lstat(path, &sb) != 0) return BG_OK;
    }
    if (sys->unlink(sys->ctx, path) != 0 && errno != ENOENT)
        return bg_fail_os(err, "%s: cannot remove", path);
    return BG_OK;
}

bg_status bg_out_sync_dir(const bg_out_sys *sys, const char *path, bg_error *err)
{
    if (sys->sync_dir(sys->ctx, path) != 0)
        return bg_fail_os(err, "%s: cannot sync the directory", path);
    return BG_OK;
}
