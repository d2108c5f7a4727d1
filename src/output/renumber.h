/* output/renumber.h - a result line taken apart where it says which record it is of. */
#ifndef BG_OUTPUT_RENUMBER_H
#define BG_OUTPUT_RENUMBER_H

#include <stdbool.h>

#include "base/buf.h"
#include "output/lens.h"

typedef struct bg_result_parts { /* slices of the line */
    bool openai;
    int64_t line;
    bg_slice file;       /* JSON text; {NULL, 0}: the job has one input */
    bg_slice id, status; /* OpenAI: of custom_id and status_code */
    bg_slice body_id;    /* OpenAI: the body up to the number in its id; {NULL, 0}: it has none */
    bg_slice body;       /* OpenAI: the rest of it */
    bg_slice error;      /* OpenAI: "error" up to its line number; {NULL, 0}: null */
    bg_slice rest;       /* plain: from "id" on, LF included */
} bg_result_parts;

/* line[0..n) as bg_result_line() writes it, LF included. False: it is no such line. */
bool bg_result_take_apart(const char *line, size_t n, bg_result_parts *p);
/* Appends the line that bg_result_line() would have made with these numbers. file_name NULL: the
 * job has one input. */
void bg_result_renumber(const bg_result_parts *p, int64_t record, int64_t line,
                        const char *file_name, bg_buf *out);

#endif
