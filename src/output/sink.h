/* output/sink.h - a file (or standard output) that lines are written to, compressed by its name.
 *
 *     NAME.gz gzip, NAME.zst Zstandard, NAME.lz4 LZ4 frames like an output's, else as they are
 *
 * A file appears under its name when all of it is on the disk, by renaming NAME.part.PID; until
 * then what was there stays. What is no regular file (a pipe, a device) is written to as it is. */
#ifndef BG_OUTPUT_SINK_H
#define BG_OUTPUT_SINK_H

#include <stddef.h>

#include "base/error.h"

typedef struct bg_sink bg_sink;

/* path NULL or "-": standard output. BG_IO, BG_NOMEM. */
bg_status bg_sink_open(bg_sink **s, const char *path, bg_error *err);
bg_status bg_sink_put(bg_sink *s, const void *data, size_t n, bg_error *err); /* whole lines */
/* Writes what is left and puts the file in its place. */
bg_status bg_sink_finish(bg_sink *s, bg_error *err);
/* Without a finish before: the file is as it was. NULL is allowed. */
void bg_sink_close(bg_sink *s);

#endif
