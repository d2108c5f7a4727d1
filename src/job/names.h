/* job/names.h - date fields and shard numbers in file names.
 *
 *     %Y %m %d %H %M %S   year, month, day, hour, minute, second of the start, local time
 *     %F  %Y-%m-%d        %j  day of the year, 001-366        %%  a percent sign
 *     %V  ISO week, 01-53 %G  its year (which is not always %Y)
 *     {shard} {shards}    I and N of --shard I/N, I with leading zeros to the width of N
 *
 * Other braces stay as they are. */
#ifndef BG_JOB_NAMES_H
#define BG_JOB_NAMES_H

#include <stdint.h>

#include "base/error.h"

/* *out is the caller's to free; NULL for a name that is NULL. wall_s: seconds since 1970.
 * shard_index counts from 0; shard_count 0: no shards. BG_ARG: another % field, or {shard} without
 * shards. BG_NOMEM. */
bg_status bg_name_expand(const char *name, int64_t wall_s, int64_t shard_index, int64_t shard_count,
                         char **out, bg_error *err);

#endif
