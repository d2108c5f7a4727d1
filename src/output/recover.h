/* output/recover.h - what an output and its journal hold together.
 *
 * Only reads. A commit counts when its entry is whole and the bytes it names are there and have its
 * hash. The first one that does not count ends the walk; it and what follows is a torn tail, to be
 * cut. When something after it is whole again, then this is no tail but damage, and nothing may be
 * cut: BG_FORMAT. */
#ifndef BG_OUTPUT_RECOVER_H
#define BG_OUTPUT_RECOVER_H

#include "output/output.h"
#include "output/partials.h"

typedef struct bg_recovery { /* ends with bg_recovery_release() */
    bool fresh;              /* there is nothing to keep: start both files anew */
    bool finished;
    uint64_t out_end, journal_end; /* where both are whole up to */
    uint64_t commits, text_bytes;
    int64_t n_failed;
    uint64_t input_end, input_hash;
    bg_ranges *done;
    bg_partials *partials;
} bg_recovery;

typedef struct bg_recover_files {
    int out_fd, journal_fd;
    const char *out_name, *journal_name;
    uint64_t out_size, journal_size;
} bg_recover_files;

/* BG_ARG: another job's. BG_FORMAT, BG_IO, BG_NOMEM. r may be released in every case. */
bg_status bg_recover(bg_recovery *r, const bg_recover_files *f, const bg_writer_config *c,
                     bg_error *err);
void bg_recovery_release(bg_recovery *r);

/* Who wrote the last run entry, as "pid 12 on host, since 2026-...", for messages; "": unknown. */
void bg_recover_holder(const char *journal_name, char *out, size_t size);

/* The first entry's object for this job; sealed by the caller. */
void bg_recover_identity(const bg_writer_config *c, bg_buf *out);

#endif
