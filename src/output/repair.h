/* output/repair.h - a journal made anew from the output, whatever became of the old one.
 *
 * What is whole stays byte for byte. A tail that is not whole is cut off. Damage in the middle is
 * moved to PATH.damaged, and the output closes over it. Of a journal that was there, and that can
 * be shown to belong to this output, identity, keys and place in the input are kept; else the new
 * one has "identity":null, and keys of the ids only. It becomes PATH.journal.bad.
 *
 * Crashes: the output without a journal is what repair starts from, and the journal comes last. */
#ifndef BG_OUTPUT_REPAIR_H
#define BG_OUTPUT_REPAIR_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/error.h"

typedef struct bg_repaired { /* ends with bg_repaired_release() */
    bool good;               /* output and journal fit: nothing was done */
    bool known;              /* identity was kept */
    int64_t n_records, n_failed;
    uint64_t cut_bytes;            /* of tails that were not whole */
    uint64_t damaged_bytes;        /* of damage in the middle */
    int64_t n_damaged;             /* places */
    int64_t n_duplicates;          /* lines that were there twice, byte for byte; one is kept */
    int64_t n_lost;                /* records that the old journal had, and that are gone */
    bg_buf lost;                   /* they, as "3,7-9" */
    bg_buf damaged_path, bad_path; /* where damage and the old journal went; empty: nowhere */
    bool unverified; /* plain text without a journal's hashes: lines, not their bytes */
} bg_repaired;

/* error_path: the error file, or NULL: the one that the old journal names, if any. BG_BUSY: a run
 * holds the output. BG_FORMAT: nothing in it is a result of ours, or a record has two different
 * results; the text names both places. BG_ARG, BG_IO, BG_NOMEM. */
bg_status bg_repair(const char *path, const char *error_path, bg_repaired *r, bg_error *err);
void bg_repaired_release(bg_repaired *r);

#endif
