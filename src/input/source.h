/* input/source.h - one input as decompressed bytes.
 *
 * What the bytes are is told by how they start, never by the name: gzip members, Zstandard frames
 * and LZ4 frames, one after another and in any mixture, skippable frames (of the latter two)
 * between them; anything else is taken as it is. Checksums that a format carries are verified. */
#ifndef BG_INPUT_SOURCE_H
#define BG_INPUT_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

typedef struct bg_source bg_source;

/* path "-": standard input, which is not closed. BG_IO, BG_NOMEM. */
bg_status bg_source_open(bg_source **s, const char *path, bg_error *err);
void bg_source_close(bg_source *s);
/* Up to cap decompressed bytes, at least one unless the end has come (*got 0). On failure, too,
 * *got bytes in front of the damage are in out. BG_FORMAT: damaged or cut short. BG_IO. */
bg_status bg_source_read(bg_source *s, char *out, size_t cap, size_t *got, bg_error *err);
uint64_t bg_source_stored(const bg_source *s); /* bytes of the file consumed so far */

#endif
