/* text/stop.h - finds the first of several strings in text that comes in pieces. */
#ifndef BG_TEXT_STOP_H
#define BG_TEXT_STOP_H

#include <stddef.h>

#include "base/buf.h"

typedef struct bg_stop bg_stop;

/* Copies the strings, of which none is empty. NULL: no memory. */
bg_stop *bg_stop_new(const char *const *strings, size_t n, bool include);
void bg_stop_free(bg_stop *s);

/* Takes text and appends to out what can no longer belong to an occurrence. Returns the index of
 * the string that occurs first (the smallest start, of these the longest), or -1 while that is
 * open: an occurrence counts only once no other can begin earlier, nor a longer one at its place.
 * After one is found the rest of the text is dropped (include: behind the occurrence, else from it
 * on). */
int bg_stop_add(bg_stop *s, const char *p, size_t n, bg_buf *out);
/* The text is over: decides an open occurrence, or gives out what was held back. Returns as above.
 */
int bg_stop_finish(bg_stop *s, bg_buf *out);

#endif
