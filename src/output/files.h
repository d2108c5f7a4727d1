/* output/files.h - a file that only grows, and the system calls below it.
 *
 * Every byte of an output and its journal goes through a bg_out_sys, so that tests can fail any
 * call and lose what was not synced. A failed call is never repeated. */
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

/* bg_writer_open() over other system calls. */
bg_status bg_writer_open_on(bg_writer **w, const bg_writer_config *c, const bg_out_sys *sys,
                            bg_recovered *rec, bg_error *err);

#endif
