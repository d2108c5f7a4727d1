/* output/reader.h - the lines of an output, verified, without its lock.
 *
 * One frame (LZ4) or one piece (plain) is in memory at a time. A line is handed out only after the
 * checksums of its frame, or the hash of its plain commit, were found right.
 *
 * Where a good output ends is told by the caller, who read the journal: up to `end` every byte must
 * be good, and what is behind is not looked at. Without a journal the output counts as far as it is
 * whole: what follows is a torn tail if nothing in it is whole again, else it is damage. */
#ifndef BG_OUTPUT_READER_H
#define BG_OUTPUT_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "output/lens.h"
#include "output/output.h"

#define BG_READER_NO_END UINT64_MAX

typedef struct bg_reader_commit { /* bytes whose hash is known, from the journal */
    uint64_t offset, bytes, hash;
} bg_reader_commit;

typedef struct bg_reader_config {
    const char *path; /* for messages; opened when fd is -1 */
    int fd;           /* -1: open path; else the caller's, who keeps it open; read by pread() */
    bg_out_format format;
    uint64_t end; /* BG_READER_NO_END: as far as it is whole */
    /* Ascending, without gaps, from byte 0 to end, and valid as long as the reader; 0 of them: only
     * the frames' own checksums are verified. */
    const bg_reader_commit *commits;
    size_t n_commits;
    uint64_t limit; /* the most text that a frame or line is believed to hold; 0: 4 GiB */
} bg_reader_config;

typedef struct bg_out_line { /* valid until the next call */
    const char *text;        /* LF included */
    size_t n;
    int64_t record; /* -1: it does not say */
    bool failed;
    bg_slice id; /* JSON text; {NULL, 0}: it has none, or null */
    int64_t prompt_tokens, output_tokens;
    uint64_t offset; /* of its frame, or of the line itself in a plain output */
    size_t in_frame; /* where it begins in the frame's text; 0 in a plain output */
} bg_out_line;

typedef struct bg_reader bg_reader;

/* BG_IO, BG_ARG (no regular file), BG_NOMEM. A file that is shorter than `end` is read as far as it
 * goes: then comes BG_FORMAT. */
bg_status bg_reader_open(bg_reader **r, const bg_reader_config *c, bg_error *err);
void bg_reader_close(bg_reader *r); /* NULL is allowed */
/* The next line. *got false: the end, or a torn tail begins here. BG_FORMAT: damaged; the text
 * names file and byte. BG_IO, BG_NOMEM. */
bg_status bg_reader_next(bg_reader *r, bg_out_line *line, bool *got, bg_error *err);
uint64_t bg_reader_whole(const bg_reader *r); /* bytes read and found good so far */
uint64_t bg_reader_size(const bg_reader *r);  /* of the file, when it was opened */
/* Bytes behind the good ones, once bg_reader_next() has met the end. */
uint64_t bg_reader_torn(const bg_reader *r);

/* Finds what a line says of itself; line->text and n are set. False: no result line. */
bool bg_out_line_look(bg_out_line *line);

/* "lz4" or plain, by the first bytes; an empty file by its name. */
bg_status bg_reader_guess(const char *path, bg_out_format *format, bg_error *err);

/* ---- a frame by itself
 * ------------------------------------------------------------------------------------ */

typedef enum bg_found { BG_FOUND_WHOLE, BG_FOUND_CUT, BG_FOUND_BAD } bg_found;

/* Looks for the frame at `offset`, in bytes up to `end`. When whole, its text replaces that of
 * `text`; *bytes: its length in the file. Otherwise `why` says what is wrong with it, which is no
 * failure. raw is scratch. BG_IO, BG_NOMEM. */
bg_status bg_reader_frame(int fd, const char *name, uint64_t offset, uint64_t end, uint64_t limit,
                          bg_buf *raw, bg_buf *text, uint64_t *bytes, bg_found *found,
                          bg_error *why, bg_error *err);
/* The next offset in [from, end) at which a whole frame begins; *got false: none. Its text is in
 * `text`. */
bg_status bg_reader_resync(int fd, const char *name, uint64_t from, uint64_t end, uint64_t limit,
                           bg_buf *raw, bg_buf *text, uint64_t *at, uint64_t *bytes, bool *got,
                           bg_error *err);

/* ---- lines in the order of their records
 * ------------------------------------------------------------------
 *
 * Memory: 48 bytes a line, and a cache of frames. */

typedef struct bg_place { /* where a line is */
    int64_t record;
    uint64_t offset, key;
    size_t in_frame, n;
    int32_t file; /* as bg_order_file() numbered it */
    bool failed;
} bg_place;

typedef struct bg_order bg_order;

bg_order *bg_order_new(size_t cache_bytes); /* 0: 64 MiB; NULL: no memory */
void bg_order_free(bg_order *o);
/* A file that lines come from; fd and name stay the caller's and must outlive o. Returns its
 * number; -1: no memory. */
int32_t bg_order_file(bg_order *o, int fd, const char *name, bg_out_format format);
bool bg_order_add(bg_order *o, int32_t file, const bg_out_line *line, uint64_t key); /* false: no
                                                                                    memory */
/* Sorts by record, then file, then place. */
void bg_order_sort(bg_order *o);
size_t bg_order_count(const bg_order *o);
/* The places, in their order; valid until the next add. */
bg_place *bg_order_places(bg_order *o);
/* The text of a line; valid until the next call. Verified like bg_reader_next()'s in an LZ4 output;
 * a plain output that changed meanwhile is BG_FORMAT when the line is no longer one. */
bg_status bg_order_text(bg_order *o, const bg_place *place, const char **text, bg_error *err);

#endif
