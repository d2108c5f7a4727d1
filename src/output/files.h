/* output/files.h - files that only grow, their names, and the system calls below.
 *
 * Every change of an output, its error file and its journal goes through a bg_out_sys, so that
 * tests can fail any call and lose or reorder what was not synced. A failed call is never repeated.
 */
#ifndef BG_OUTPUT_FILES_H
#define BG_OUTPUT_FILES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"
#include "output/output.h"

typedef struct bg_out_sys { /* each returns what the system call returns, with errno */
    ssize_t (*write)(void *ctx, int fd, const void *data, size_t n,
                     int64_t offset); /* -1: no offset */
    int (*sync)(void *ctx, int fd);
    int (*truncate)(void *ctx, int fd, int64_t size);
    int (*make)(void *ctx, const char *path, mode_t mode); /* a file that was not there: its fd */
    int (*rename)(void *ctx, const char *from, const char *to);
    int (*unlink)(void *ctx, const char *path);
    int (*sync_dir)(void *ctx, const char *path); /* the directory that path lies in */
    void *ctx;
} bg_out_sys;

extern const bg_out_sys bg_out_real;

typedef struct bg_out_file {
    const bg_out_sys *sys;
    int fd;           /* -1: none */
    const char *name; /* borrowed, for messages */
    uint64_t end;     /* where the next byte goes */
    bool stream;      /* standard output: no offsets, no sync */
} bg_out_file;

bg_status bg_out_append(bg_out_file *f, const void *data, size_t n, bg_error *err);
bg_status bg_out_sync(bg_out_file *f, bg_error *err);
/* Cuts the file at `size`, which becomes its end, and syncs that. */
bg_status bg_out_cut(bg_out_file *f, uint64_t size, bg_error *err);

/* ---- names
 * ---------------------------------------------------------------------------------------- */

typedef struct bg_out_opened {
    int fd;        /* -1: there is none */
    char *real;    /* the name behind links, the one to rename to; the caller's */
    bool made;     /* it was not there */
    uint64_t size; /* now */
} bg_out_opened;

/* Opens a regular file for reading and writing, made (0666 & umask) if `create`. A link is followed
 * when it is the user's own, or lies where only trusted users can put one; neither link nor file of
 * another owner in a sticky world-writable folder is, and no link that dangles. BG_ARG: refused.
 * BG_IO, BG_NOMEM. */
bg_status bg_out_open(bg_out_opened *o, const char *path, bool create, const bg_out_sys *sys,
                      bg_error *err);
/* Whether path is the very file that fd has open. */
bool bg_out_is(int fd, const char *path);
bg_out_format bg_out_format_of(const char *path); /* by its suffix */

bg_status bg_out_make(bg_out_file *f, mode_t mode, bg_error *err); /* f->name, which must be new */
bg_status bg_out_rename(const bg_out_sys *sys, const char *from, const char *to, bg_error *err);
/* One that is not there is fine. */
bg_status bg_out_remove(const bg_out_sys *sys, const char *path, bg_error *err);
bg_status bg_out_sync_dir(const bg_out_sys *sys, const char *path, bg_error *err);

/* bg_writer_open() over other system calls. */
bg_status bg_writer_open_on(bg_writer **w, const bg_writer_config *c, const bg_out_sys *sys,
                            bg_recovered *rec, bg_error *err);

#endif
