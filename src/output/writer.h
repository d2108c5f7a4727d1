/* output/writer.h - the writer's insides, for the files that make it up: output.c (opening, adding,
 * committing, finishing), fold.c (the journal made short), rewrite.c (all files replaced). */
#ifndef BG_OUTPUT_WRITER_H
#define BG_OUTPUT_WRITER_H

#include "base/hash.h"
#include "output/entries.h"
#include "output/files.h"
#include "output/keys.h"
#include "output/lock.h"
#include "output/partials.h"
#include "output/recover.h"

typedef struct bg_side { /* the output, or the error file */
    bg_out_file f;       /* fd -1: there is none */
    char *path, *real;   /* real: behind links */
    bg_out_format format;
    bg_buf text; /* lines since the last commit */
    bg_buf frame;
    bg_hasher *whole;    /* of all that is committed */
    uint64_t text_bytes; /* that is committed */
} bg_side;

struct bg_writer {
    const bg_out_sys *sys;
    bg_out_lock *lock; /* has the output open */
    bg_side side[BG_SIDES];
    bg_out_file journal;
    char *journal_path, *journal_real;
    char *first;     /* the journal's first entry, for this job */
    char *selection; /* or NULL */
    bool ordered;
    int level;
    size_t commit_bytes;
    int64_t commit_ns, last_commit_ns, start_wall_ns;
    int64_t committing_ns, committing_cpu_ns;
    uint64_t fold_bytes, folded_end; /* folded_end: of the journal when it was as short as can be */
    bg_ranges *done;                 /* committed or added */
    bg_ranges *pending;              /* added since the last commit */
    bg_keys *keys;                   /* of both */
    bg_buf entry;
    int64_t n_failed, pending_failed;
    int64_t tokens[2], pending_tokens[2]; /* tokens: committed */
    uint64_t commits;
    bg_partials *partials;
    const bg_partial *(*get_partials)(void *ctx, int *n);
    void *get_ctx;
    void (*on_commit)(void *ctx);
    void *commit_ctx;
    bg_input_place input;
    bool has_input, input_moved; /* moved: since the last commit */
    bool finished;
    bool differs, adopted; /* differs: must be rewritten before anything else */
    bool begun;            /* something was written; before, these say what there is to do first: */
    bool fresh;
    uint64_t journal_cut, side_cut[BG_SIDES]; /* where the files are whole up to */
    bg_error why; /* the failure that ended it; every later call returns it */
};

/* Remembers a failure that leaves the files or the pending lines in doubt. */
bg_status bg_writer_ends(bg_writer *w, bg_status st, const bg_error *err);
/* The failure that ended it. */
bg_status bg_writer_ended(const bg_writer *w, bg_error *err);

static inline bool bg_writer_has_errors(const bg_writer *w)
{
    return w->side[BG_SIDE_ERRORS].path != NULL;
}

/* What a journal says that is as short as can be. */
typedef struct bg_manifest {
    bg_entry_piece piece[BG_SIDES];
    const bg_ranges *done;
    const bg_keys *keys;
    int64_t n_failed, tokens[2];
    bool partials, end;
    bool ordered; /* of the end */
} bg_manifest;

bg_manifest bg_writer_manifest(const bg_writer *w); /* as things are */
/* Writes it to f, a new file of f->name that it makes, and syncs it. */
bg_status bg_writer_put_manifest(bg_writer *w, const bg_manifest *m, bg_out_file *f, bg_error *err);
/* Puts it in the journal's place. */
bg_status bg_writer_fold(bg_writer *w, const bg_manifest *m, bg_error *err);

/* Syncs the folders of all files: a file that was synced may still have no name. */
bg_status bg_writer_sync_names(const bg_writer *w, bg_error *err);
/* Removes what a fold or rewrite that did not come to count has left. */
bg_status bg_writer_remove_stale(const bg_writer *w, bg_error *err);
/* A rewrite that counts, but was not brought to its end: ends it. The lock, the error file and the
 * journal are opened, and are again after it. */
bg_status bg_writer_roll_forward(bg_writer *w, const bg_writer_config *c, bg_error *err);
/* Sorts what is committed, with an end entry. */
bg_status bg_writer_sort(bg_writer *w, bg_error *err);

/* Opens, of what is there, the error file and the journal; the output's size is looked at. */
bg_status bg_writer_open_files(bg_writer *w, bg_error *err);
void bg_writer_close_files(bg_writer *w); /* but not the output */

#endif
