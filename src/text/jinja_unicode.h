/* text/jinja_unicode.h - what Python's str methods know about characters. Independent of locale. */
#ifndef BG_TEXT_JINJA_UNICODE_H
#define BG_TEXT_JINJA_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

size_t jn_upper(uint32_t c, uint32_t out[3]); /* full mapping; how many characters it has */
size_t jn_lower(uint32_t c, uint32_t out[2]);
bool jn_is_upper(uint32_t c); /* has a lower case that differs */
bool jn_is_lower(uint32_t c);
bool jn_is_space(uint32_t c);
bool jn_is_letter(uint32_t c);
int jn_digit(uint32_t c);         /* value of a decimal digit, or -1 */
bool jn_is_printable(uint32_t c); /* repr() shows it as it is */

#endif
