/* output/recover.h - what an output, its error file and its journal hold together.
 *
 * Only reads. A commit counts when its entry is whole and the bytes it names are there and have
 * their hash. The first one that does not count ends the walk; it and what follows is a torn tail,
 * to be cut. When something after it is whole again, then this is no tail but damage, and nothing
 * may be cut: BG_FORMAT. So it is when a commit's bytes are there and are others, since all were on
 * disk before its entry was written; when bytes of a folded commit are not there; when the error
 * file is shorter than it must be; and when more than one commit lies behind the journal's last,
 * which must then be an older copy. */
#ifndef BG_OUTPUT_RECOVER_H
#define BG_OUTPUT_RECOVER_H

#include "base/hash.h"
#include "output/keys.h"
#include "output/output.h"
#include "output/partials.h"

enum { BG_SIDE_OUT, BG_SIDE_ERRORS, BG_SIDES }; /* the two files that a commit covers */

typedef struct bg_recovered_side {
    uint64_t end, text_bytes; /* where it is whole up to */
    bg_hasher *whole;         /* of all of that */
} bg_recovered_side;

typedef struct bg_recovery { /* ends with bg_recovery_release() */
    bool fresh;              /* there is nothing to keep: start all files anew */
    bool finished;
    bool differs, adopted; /* as in bg_recovered */
    bg_recovered_side side[BG_SIDES];
    uint64_t journal_end;
    uint64_t folded_end; /* of the journal: behind its first commit */
    uint64_t commits;
    int64_t lost; /* as in bg_recovered */
    int64_t n_failed, tokens[2];
    bool has_input;
    bg_input_place input;
    bg_ranges *done;
    bg_keys *keys;
    bg_partials *partials;
} bg_recovery;

typedef struct bg_recover_files {
    struct {
        int fd; /* -1: there is none */
        const char *name;
        uint64_t size;
        bg_out_format format;
    } side[BG_SIDES];
    int journal_fd;
    const char *journal_name;
} bg_recover_files;

/* BG_ARG: another job's. BG_FORMAT, BG_IO, BG_NOMEM. r may be released in every case. */
bg_status bg_recover(bg_recovery *r, const bg_recover_files *f, const bg_writer_config *c,
                     bg_error *err);
void bg_recovery_release(bg_recovery *r);

/* Whether the journal's first entry is of this job. BG_ARG: it is not. */
bg_status bg_recover_fits(const bg_recover_files *f, const bg_writer_config *c, bg_error *err);
/* Whether the journal ends with the entry that makes a rewrite count. */
bg_status bg_recover_rewritten(int journal_fd, const char *journal_name, bool *yes, bg_error *err);

/* Who wrote the last run entry, as "pid 12 on host, since 2026-...", for messages; "": unknown. */
void bg_recover_holder(const char *journal_name, char *out, size_t size);

/* The first entry's object for this job; sealed by the caller. */
void bg_recover_identity(const bg_writer_config *c, bg_buf *out);

#endif
