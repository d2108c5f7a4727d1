/* A disk that fails, and forgets what was not synced: contents of files, and names in their folder.
 *
 * disk_begin() remembers what is there; a run over disk_sys() is recorded; disk_crash() makes the
 * folder what a crash at this moment may leave of it. A synced file keeps its bytes, a synced
 * folder its names; whatever is not synced is kept, lost, torn or comes out of order. That a file
 * was synced says nothing of its name. */
#ifndef BG_TEST_OUTPUT_DISK_H
#define BG_TEST_OUTPUT_DISK_H

#include <dirent.h>
#include <errno.h>

#include "base/rng.h"
#include "unit/output/job.h"

enum { DISK_OPS = 8192, DISK_NODES = 512, DISK_NAMES = 16 };

typedef struct disk_op { /* one change */
    enum { OP_WRITE, OP_CUT, OP_MAKE, OP_RENAME, OP_UNLINK } kind;
    bool synced;
    int node;
    int64_t offset; /* or the new size */
    size_t n;
    char *data;
    char name[32], to[32];
} disk_op;

typedef struct disk_node { /* a file, whatever its name */
    ino_t ino;
    bytes base;
} disk_node;

typedef struct disk_name {
    char name[32];
    int node;
} disk_name;

typedef struct disk {
    long calls, fail_at; /* the call that fails, from 0; -1: none */
    int error;
    bool half;    /* the failing write does half of its work first */
    bool dead;    /* nothing works any more after the failure: the power is gone */
    size_t piece; /* the most that a write takes at once; 0: all */
    disk_node nodes[DISK_NODES];
    disk_name names[DISK_NAMES]; /* at the beginning */
    disk_op ops[DISK_OPS];
    int n_nodes, n_names, n_ops;
    bg_out_sys sys;
} disk;

static const char *disk_base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int disk_node_of(const disk *d, int fd)
{
    struct stat sb;
    cr_assert_eq(fstat(fd, &sb), 0);
    for (int i = d->n_nodes - 1; i >= 0; i--) /* inode numbers are used again */
        if (d->nodes[i].ino == sb.st_ino) return i;
    cr_assert_fail("a file that nobody made");
    return -1;
}

static disk_op *disk_add(disk *d)
{
    cr_assert_lt(d->n_ops, DISK_OPS);
    d->ops[d->n_ops] = (disk_op){0};
    return &d->ops[d->n_ops++];
}

static bool disk_fails(disk *d)
{
    long call = d->calls++;
    if (call != d->fail_at && !(d->dead && d->fail_at >= 0 && call > d->fail_at)) return false;
    errno = d->error;
    return true;
}

static ssize_t disk_write(void *ctx, int fd, const void *data, size_t n, int64_t offset)
{
    disk *d = ctx;
    bool bad = disk_fails(d);
    if (bad && !d->half) return -1;
    if (bad) n = (n + 1) / 2; /* then the next call fails */
    if (bad && !d->dead) d->fail_at = d->calls;
    if (d->piece && n > d->piece) n = d->piece;
    disk_op *o = disk_add(d);
    o->kind = OP_WRITE;
    o->node = disk_node_of(d, fd);
    o->offset = offset;
    o->n = n;
    o->data = memcpy(malloc(n), data, n);
    return pwrite(fd, data, n, offset);
}

static int disk_sync(void *ctx, int fd)
{
    disk *d = ctx;
    if (disk_fails(d)) return -1;
    int node = disk_node_of(d, fd);
    for (int i = 0; i < d->n_ops; i++)
        if (d->ops[i].node == node && d->ops[i].kind <= OP_CUT) d->ops[i].synced = true;
    return 0;
}

static int disk_truncate(void *ctx, int fd, int64_t size)
{
    disk *d = ctx;
    if (disk_fails(d)) return -1;
    disk_op *o = disk_add(d);
    o->kind = OP_CUT;
    o->node = disk_node_of(d, fd);
    o->offset = size;
    return ftruncate(fd, size);
}

static int disk_make(void *ctx, const char *path, mode_t mode)
{
    disk *d = ctx;
    struct stat sb;
    if (disk_fails(d)) return -1;
    int fd = quick_make(NULL, path, mode);
    if (fd < 0) return fd;
    cr_assert_eq(fstat(fd, &sb), 0);
    cr_assert_lt(d->n_nodes, DISK_NODES);
    d->nodes[d->n_nodes++] = (disk_node){.ino = sb.st_ino};
    disk_op *o = disk_add(d);
    o->kind = OP_MAKE;
    o->node = d->n_nodes - 1;
    snprintf(o->name, sizeof o->name, "%s", disk_base(path));
    return fd;
}

static int disk_rename(void *ctx, const char *from, const char *to)
{
    disk *d = ctx;
    if (disk_fails(d)) return -1;
    int fd = open(from, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    disk_op *o = disk_add(d);
    o->kind = OP_RENAME;
    o->node = disk_node_of(d, fd);
    snprintf(o->name, sizeof o->name, "%s", disk_base(from));
    snprintf(o->to, sizeof o->to, "%s", disk_base(to));
    close(fd);
    return rename(from, to);
}

static int disk_unlink(void *ctx, const char *path)
{
    disk *d = ctx;
    if (disk_fails(d)) return -1;
    if (unlink(path) != 0) return -1;
    disk_op *o = disk_add(d);
    o->kind = OP_UNLINK;
    o->node = -1;
    snprintf(o->name, sizeof o->name, "%s", disk_base(path));
    return 0;
}

static int disk_sync_dir(void *ctx, const char *path)
{
    disk *d = ctx;
    (void)path; /* there is one folder */
    if (disk_fails(d)) return -1;
    for (int i = 0; i < d->n_ops; i++)
        if (d->ops[i].kind >= OP_MAKE) d->ops[i].synced = true;
    return 0;
}

UNUSED static const bg_out_sys *disk_begin(disk *d, long fail_at)
{
    memset(d, 0, sizeof *d);
    d->fail_at = fail_at;
    d->error = fail_at % 2 ? ENOSPC : EIO;
    DIR *list = opendir(dir);
    cr_assert(list);
    for (struct dirent *e; (e = readdir(list));) {
        if (e->d_name[0] == '.') continue;
        char path[320];
        struct stat sb;
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        cr_assert_eq(stat(path, &sb), 0);
        cr_assert_lt(d->n_names, DISK_NAMES);
        d->names[d->n_names].node = d->n_nodes;
        snprintf(d->names[d->n_names++].name, 32, "%.31s", e->d_name);
        d->nodes[d->n_nodes++] = (disk_node){sb.st_ino, load(path)};
    }
    closedir(list);
    d->sys = (bg_out_sys){.write = disk_write,
                          .sync = disk_sync,
                          .truncate = disk_truncate,
                          .make = disk_make,
                          .rename = disk_rename,
                          .unlink = disk_unlink,
                          .sync_dir = disk_sync_dir,
                          .ctx = d};
    return &d->sys;
}

UNUSED static void disk_end(disk *d)
{
    for (int i = 0; i < d->n_ops; i++)
        free(d->ops[i].data);
    for (int i = 0; i < d->n_nodes; i++)
        free(d->nodes[i].base.data);
}

/* What becomes of what was not synced; FATE_MIXED: of each change something else. */
typedef enum fate {
    FATE_KEEP,
    FATE_DROP,
    FATE_CUT,
    FATE_ZEROS,
    FATE_LATE,
    FATE_HALF_ZEROS,
    N_FATES,
    FATE_MIXED
} fate;

static void put_at(bg_buf *b, size_t offset, const char *data, size_t n)
{
    while (b->len < offset + n)
        bg_buf_char(b, 0);
    for (size_t i = 0; i < n; i++)
        b->data[offset + i] = data ? data[i] : 0;
}

static fate fate_of(fate all, uint64_t seed, int i)
{
    return all == FATE_MIXED ? (fate)(bg_sample_word(seed, (uint64_t)i, 9) % FATE_LATE) : all;
}

static void node_after(const disk *d, int node, fate all, uint64_t seed, bg_buf *b)
{
    int n_unsynced = 0;
    bg_buf_add(b, d->nodes[node].base.data, d->nodes[node].base.n);
    for (int i = 0; i < d->n_ops; i++) {
        const disk_op *o = &d->ops[i];
        if (o->node != node || o->kind > OP_CUT) continue;
        fate now = o->synced ? FATE_KEEP : fate_of(all, seed, i);
        size_t n = now == FATE_CUT ? o->n / 2 : o->n;
        if (now == FATE_DROP || (now == FATE_LATE && n_unsynced++ == 0)) continue;
        if (o->kind == OP_CUT) {
            if ((size_t)o->offset < b->len) b->len = (size_t)o->offset;
            continue;
        }
        put_at(b, (size_t)o->offset, now == FATE_ZEROS ? NULL : o->data, n);
        if (now == FATE_HALF_ZEROS) put_at(b, (size_t)o->offset, NULL, n / 2);
    }
}

static int name_at(const disk_name *names, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (names[i].node >= 0 && strcmp(names[i].name, name) == 0) return i;
    return -1;
}

static void set_name(disk_name *names, int *n, const char *name, int node)
{
    int at = name_at(names, *n, name);
    if (at < 0 && node < 0) return;
    if (at < 0) {
        cr_assert_lt(*n, DISK_NAMES * 8);
        at = (*n)++;
        snprintf(names[at].name, sizeof names[at].name, "%s", name);
    }
    names[at].node = node;
}

/* Makes the folder what a crash now may leave of it. */
UNUSED static void disk_crash(const disk *d, fate all, uint64_t seed)
{
    disk_name names[DISK_NAMES * 8];
    int n = d->n_names, n_unsynced = 0;
    memcpy(names, d->names, sizeof d->names);
    for (int i = 0; i < d->n_ops; i++) {
        const disk_op *o = &d->ops[i];
        if (o->kind < OP_MAKE) continue;
        fate now = o->synced ? FATE_KEEP : fate_of(all, seed, i);
        if (now == FATE_DROP || now == FATE_ZEROS || (now == FATE_LATE && n_unsynced++ == 0))
            continue;
        if (o->kind != OP_MAKE) set_name(names, &n, o->name, -1);
        if (o->kind != OP_UNLINK)
            set_name(names, &n, o->kind == OP_MAKE ? o->name : o->to, o->node);
    }
    remove_files();
    for (int i = 0; i < n; i++) {
        char path[96];
        bg_buf b = {0};
        if (names[i].node < 0) continue;
        snprintf(path, sizeof path, "%s/%.31s", dir, names[i].name);
        node_after(d, names[i].node, all, seed, &b);
        store(path, b.data, b.len);
        bg_buf_release(&b);
    }
}

#endif
