/* base/buf.h - a growable byte buffer with sticky failure.
 *
 * Appending never fails visibly: when memory runs out, `failed` is set, later appends do nothing,
 * and the caller asks once at the end. data is always NUL-terminated once something was appended
 * (the NUL is not counted in len). Starts as {0}; ends with bg_buf_release(). */
#ifndef BG_BASE_BUF_H
#define BG_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

typedef struct bg_buf {
    char *data;
    size_t len, cap;
    bool failed; /* out of memory at some append */
} bg_buf;

bool bg_buf_reserve(bg_buf *b, size_t extra); /* room for extra more bytes; false: failed */
void bg_buf_add(bg_buf *b, const void *data, size_t n);
void bg_buf_str(bg_buf *b, const char *s);
void bg_buf_char(bg_buf *b, char c);
void bg_buf_printf(bg_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void bg_buf_clear(bg_buf *b);   /* len = 0, failed = false, memory kept */
void bg_buf_release(bg_buf *b); /* frees, and leaves {0} */
/* The bytes as a heap string for the caller to free(); b is {0} after. NULL if it had failed. */
char *bg_buf_take(bg_buf *b);

/* Appends s[0..n) as a JSON string with quotes. Valid UTF-8 passes through, except that control
 * characters, U+2028, U+2029 and U+0085 are written as escapes; bytes that are not valid UTF-8
 * become U+FFFD, one for each maximal ill-formed part (Unicode 15, section 3.9). */
void bg_buf_json(bg_buf *b, const char *s, size_t n);

#endif
