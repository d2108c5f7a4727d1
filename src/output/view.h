/* output/view.h - what an output's journal tells, read without its lock.
 *
 * A run may be writing both while this reads: an entry that is not whole yet is a torn tail, and
 * what was not committed when the journal was read is not seen. A rewrite that changes the files in
 * between is noticed, and they are read again. Nothing is changed, and no lock of the output is
 * taken, not even for a moment: that could end a run that starts in this moment. */
#ifndef BG_OUTPUT_VIEW_H
#define BG_OUTPUT_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/error.h"
#include "output/keys.h"
#include "output/output.h"
#include "output/partials.h"
#include "output/reader.h"

typedef struct bg_view_commit {
    bool folded; /* it stands for all commits before it */
    uint64_t text;
    bg_reader_commit out, errors; /* errors: of the error file; bytes 0: none */
    int64_t n_records, failed;
    int64_t at_ns; /* wall time; 0: not known */
    bool has_tokens;
    int64_t prompt_tokens, output_tokens;
} bg_view_commit;

typedef struct bg_view_run {
    int64_t pid, start_ns; /* start 0: not known */
    char host[64], start[40];
    size_t first_commit; /* the number of commits before it */
} bg_view_run;

typedef enum bg_view_journal {
    BG_VIEW_NO_JOURNAL,   /* none, or nothing of its first entry is there */
    BG_VIEW_GOOD,         /* perhaps with a torn tail */
    BG_VIEW_DAMAGED,      /* `why` says where */
    BG_VIEW_NOT_A_JOURNAL /* of ours, or of another version */
} bg_view_journal;

typedef struct bg_view { /* starts as {0}; ends with bg_view_release() */
    char *path, *journal_path;
    int out_fd, journal_fd; /* -1: there is none */
    uint64_t out_size, journal_size, journal_torn;
    bg_view_journal journal;
    bg_error why;  /* of DAMAGED and NOT_A_JOURNAL */
    json_t *first; /* the first entry */
    json_t *end;   /* the end entry's object, of a finished output; else NULL */
    bg_out_format format;
    bool rewrite; /* a rewrite is decided, and its files are not all in place */
    bg_view_commit *commits;
    size_t n_commits, cap_commits;
    bg_view_run *runs;
    size_t n_runs, cap_runs;
    bg_ranges *done;
    bg_keys *keys; /* NULL: not asked for */
    int64_t n_failed;
    uint64_t out_end, errors_end; /* committed bytes of both files */
    uint64_t text_bytes;
    bool has_input;
    bg_input_place input; /* of the last commit that has it */
    bg_partials *partials;
} bg_view;

/* Neither file need be there. BG_IO, BG_NOMEM; BG_ARG: the output is no regular file. keys: keep
 * the records' keys, which takes memory for each record. */
bg_status bg_view_open(bg_view *v, const char *path, bool keys, bg_error *err);
void bg_view_release(bg_view *v);

const json_t *bg_view_identity(const bg_view *v); /* NULL: none */
/* Whether the job has an error file, and the caller's own name of it: beside the output, or as it
 * is named from here. A file of that name need not be there. BG_NOMEM. */
bool bg_view_has_errors(const bg_view *v);
bg_status bg_view_error_path(const bg_view *v, char **path, bg_error *err);
/* What a reader must find in the output, for the reader's config; the caller frees *commits.
 * False: no memory. Without a good journal: everything, as far as it is whole. */
bool bg_view_reader(const bg_view *v, bg_reader_config *c, bg_reader_commit **commits);
/* Whether the bytes of the last commit that has any are there: true, too, when it is longer than
 * `most` bytes and was not looked at. */
bg_status bg_view_check_last(const bg_view *v, uint64_t most, bool *good, bg_error *err);

/* Whether whole commits follow that the journal does not know, more than the one that a crash can
 * leave: then it is an older copy. LZ4 only: lines do not tell where a commit ends. */
bg_status bg_view_is_old(const bg_view *v, bool *yes, bg_error *err);

int64_t bg_view_time(const char *text); /* of an ISO time in UTC, ns; 0: malformed */

#endif
