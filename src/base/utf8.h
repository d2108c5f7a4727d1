/* base/utf8.h - decode, encode and validate UTF-8 (Unicode 15, tables 3-6 and 3-7). */
#ifndef BG_BASE_UTF8_H
#define BG_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BG_UTF8_BAD UINT32_C(0xFFFFFFFF)

/* Decodes the code point at s[0..n), n >= 1, and returns the bytes it takes. For ill-formed input
 * *cp is BG_UTF8_BAD and the length is that of the maximal ill-formed part, at least 1: what one
 * U+FFFD stands for. Surrogates and numbers over U+10FFFF are ill-formed. */
size_t bg_utf8_next(const char *s, size_t n, uint32_t *cp);

/* Writes cp (a scalar value) to out, which has room for 4 bytes, and returns the length. */
size_t bg_utf8_put(char *out, uint32_t cp);

bool bg_utf8_valid(const char *s, size_t n);

/* Makes s valid: each byte that belongs to no character becomes a question mark. */
void bg_utf8_mend(char *s);

/* How many bytes at the end of s[0..n) start a character that more bytes could still complete
 * (0 to 3). Bytes that can never become a character do not count: they are not held back. */
size_t bg_utf8_unfinished(const char *s, size_t n);

#endif
