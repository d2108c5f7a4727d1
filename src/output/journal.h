/* output/journal.h - the journal's entries as bytes, written and read.
 *
 *     OBJECT SP HASH LF
 *
 * OBJECT is a JSON object on one line, HASH the XXH3-64 of its bytes as 16 lower-case hex digits.
 */
#ifndef BG_OUTPUT_JOURNAL_H
#define BG_OUTPUT_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/buf.h"
#include "base/error.h"

/* The entry that makes a rewrite count: the object, always these bytes. */
#define BG_JOURNAL_REWRITE "{\"rewrite\":{}}"

/* Ends the object that buf holds from byte `start` on with its hash and LF. */
void bg_journal_seal(bg_buf *buf, size_t start);

/* Reads whole entries in order, and looks past damage for more of them. Starts as {.fd, .name};
 * ends with bg_journal_reader_release(). */
typedef struct bg_journal_reader {
    int fd;
    const char *name;
    bg_buf buf;
    size_t pos;      /* buf.data[pos..len) is not looked at yet */
    uint64_t offset; /* file offset of buf.data[pos] */
    bool eof;
} bg_journal_reader;

typedef struct bg_journal_entry {
    json_t *object;      /* the reader's caller frees it; NULL: the line is damaged */
    bool hides_whole;    /* damaged, but a whole entry is at its end: the LF before it is gone */
    uint64_t start, end; /* its bytes in the file, LF included */
} bg_journal_entry;

/* The next line, whole or damaged. *got false: the end of the file. BG_IO, BG_NOMEM. */
bg_status bg_journal_next(bg_journal_reader *r, bg_journal_entry *e, bool *got, bg_error *err);
void bg_journal_reader_release(bg_journal_reader *r);

#endif
