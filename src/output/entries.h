/* output/entries.h - the journal's entries as text. output.c's head comment has their form. */
#ifndef BG_OUTPUT_ENTRIES_H
#define BG_OUTPUT_ENTRIES_H

#include "output/keys.h"
#include "output/output.h"

typedef struct bg_entry_piece { /* a commit's bytes in one file */
    uint64_t offset, bytes, text, hash;
} bg_entry_piece;

typedef struct bg_entry_commit {
    uint64_t n;
    bool folded;
    bg_entry_piece out;
    const bg_entry_piece *errors; /* NULL: there is no error file */
    const bg_ranges *records;
    const bg_keys *keys;
    int64_t failed, tokens[2];
    const bg_input_place *input; /* NULL: as before */
} bg_entry_commit;

typedef struct bg_entry_end {
    uint64_t commits;
    bg_entry_piece out;
    const bg_entry_piece *errors;
    int64_t records, failed;
    const char *selection;
    bool ordered;
} bg_entry_end;

/* Each appends an entry's object, unsealed; the commit's without its last two braces, so that the
 * list of partial tokens can follow. */
void bg_entry_put_run(bg_buf *b, int64_t start_wall_ns);
void bg_entry_put_commit(bg_buf *b, const bg_entry_commit *c);
void bg_entry_put_end(bg_buf *b, const bg_entry_end *e);

#endif
