/* output/frames.h - one commit's text as one LZ4 frame.
 *
 * The frame says how much text it holds, and carries a checksum of each block and of the whole
 * text, so that a reader tells a torn or altered frame from a whole one without the journal. */
#ifndef BG_OUTPUT_FRAMES_H
#define BG_OUTPUT_FRAMES_H

#include <stddef.h>

#include "base/buf.h"
#include "base/error.h"

/* Appends text[0..n) as one frame to out. BG_NOMEM. */
bg_status bg_frame_put(bg_buf *out, const char *text, size_t n, int level, bg_error *err);

/* Reads the frame at the start of data[0..n) and appends its text to out (which may hold part of it
 * after a failure). *used: the frame's bytes. BG_FORMAT: not a whole frame with all that
 * bg_frame_put() writes. limit: the most text that is believed. */
bg_status bg_frame_get(bg_buf *out, const char *data, size_t n, size_t limit, size_t *used,
                       bg_error *err);

#endif
