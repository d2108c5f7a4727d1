/* output/number.h - a float as the shortest decimal text that reads back as the same float. */
#ifndef BG_OUTPUT_NUMBER_H
#define BG_OUTPUT_NUMBER_H

#include "base/buf.h"

/* A JSON number with a point or an exponent, whatever the locale. f must be finite. */
void bg_number_put(bg_buf *b, float f);

#endif
