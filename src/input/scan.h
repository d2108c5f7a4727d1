/* input/scan.h - what can still be learned from a line that is not valid JSON.
 *
 * A lexical walk without memory of its own: it follows strings, brackets, colons and commas and
 * judges nothing else. */
#ifndef BG_INPUT_SCAN_H
#define BG_INPUT_SCAN_H

#include <stdbool.h>
#include <stddef.h>

typedef struct bg_scan {
    size_t id_at,
        id_n;   /* the text of the outermost object's custom_id, else of its id; id_n 0: there is
                   none in front of `end`, or it is there twice, or it is not whole */
    bool batch; /* a key of OpenAI batch lines is there: custom_id, method, url or body */
    char path[192]; /* of the value at `end`, "body.messages[2].content"; "": none */
} bg_scan;

/* Walks s[0..n) up to `end`. */
void bg_scan_line(const char *s, size_t n, size_t end, bg_scan *out);

/* Where s[0..n) nests deeper than `max` levels: the offset + 1 of the bracket; 0: nowhere. Brackets
 * in strings do not count. What is in front of the first error of a line that is not JSON is seen
 * as a parser would see it. */
size_t bg_scan_too_deep(const char *s, size_t n, int max);

#endif
