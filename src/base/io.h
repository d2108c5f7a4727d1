/* base/io.h - whole reads and writes, and a file as bytes. Each retries EINTR and short counts. */
#ifndef BG_BASE_IO_H
#define BG_BASE_IO_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* Writes all n bytes or fails with BG_IO; name is for the message. */
bg_status bg_write_all(int fd, const void *data, size_t n, const char *name, bg_error *err);
bg_status bg_pwrite_all(int fd, const void *data, size_t n, int64_t offset, const char *name,
                        bg_error *err);
/* Reads up to n bytes, fewer only at the end of the file; *got says how many. */
bg_status bg_read_full(int fd, void *data, size_t n, size_t *got, const char *name, bg_error *err);
bg_status bg_pread_full(int fd, void *data, size_t n, int64_t offset, size_t *got, const char *name,
                        bg_error *err);
bg_status bg_sync_data(int fd, const char *name, bg_error *err); /* fdatasync, not retried */
bg_status bg_sync_dir_of(const char *path, bg_error *err);       /* makes a new name durable */
/* The whole file (at most limit bytes, else BG_FORMAT) with a NUL after it; *data is the caller's.
 */
bg_status bg_read_file(const char *path, size_t limit, char **data, size_t *n, bg_error *err);

#endif
