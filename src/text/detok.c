#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/stop.h"
#include "text/text.h"

struct bg_detok {
    const bg_vocab *v;
    bool show_special, finished;
    char tail[4]; /* bytes that may still become a character */
    size_t n_tail;
    bg_stop *stop; /* NULL: no stop strings */
    bg_buf raw;    /* tail and new bytes; then the valid text of one token */
    bg_buf valid;
};

bg_detok *bg_detok_new(const bg_vocab *v, const char *const *stops, size_t n_stops,
                       bool include_stop, bool show_special)
{
    bg_detok *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->v = v;
    d->show_special = show_special;
    if (n_stops > 0) {
        d->stop = bg_stop_new(stops, n_stops, include_stop);
        if (!d->stop) {
            free(d);
            return NULL;
        }
    }
    return d;
}

void bg_detok_free(bg_detok *d)
{
    if (!d) return;
    bg_stop_free(d->stop);
    bg_buf_release(&d->raw);
    bg_buf_release(&d->valid);
    free(d);
}

/* Appends s as valid UTF-8: one U+FFFD for each maximal ill-formed part. */
static void add_valid(bg_buf *out, const char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        const size_t len = bg_utf8_next(s + i, n - i, &cp);
        if (cp == BG_UTF8_BAD)
            bg_buf_add(out, "\xef\xbf\xbd", 3);
        else
            bg_buf_add(out, s + i, len);
        i += len;
    }
}

/* Puts text that is valid UTF-8 through the stop strings. */
static int put(bg_detok *d, const bg_buf *text, bg_buf *out)
{
    if (text->failed) {
        out->failed = true;
        return -1;
    }
    if (d->stop) return bg_stop_add(d->stop, text->data, text->len, out);
    bg_buf_add(out, text->data, text->len);
    return -1;
}

int bg_detok_add(bg_detok *d, int32_t id, bg_buf *out)
{
    const bg_str t = bg_token_bytes(d->v, id, d->show_special);
    bg_buf_clear(&d->raw);
    bg_buf_clear(&d->valid);
    bg_buf_add(&d->raw, d->tail, d->n_tail);
    bg_buf_add(&d->raw, t.p, t.n);
    if (d->raw.failed || d->finished) {
        out->failed |= d->raw.failed;
        return -1;
    }
    d->n_tail = bg_utf8_unfinished(d->raw.data, d->raw.len);
    memcpy(d->tail, d->raw.data + d->raw.len - d->n_tail, d->n_tail);
    add_valid(&d->valid, d->raw.data, d->raw.len - d->n_tail);
    return put(d, &d->valid, out);
}

int bg_detok_finish(bg_detok *d, bg_buf *out)
{
    if (d->finished) return -1;
    d->finished = true;
    bg_buf_clear(&d->valid);
    add_valid(&d->valid, d->tail, d->n_tail);
    d->n_tail = 0;
    const int found = put(d, &d->valid, out);
    return d->stop && found < 0 ? bg_stop_finish(d->stop, out) : found;
}
