#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void end_in_dots(char *text)
{
    memcpy(text + BG_ERROR_TEXT - 4, "...", 4);
}

bg_status bg_fail_at(bg_error *err, bg_status st, int os, const char *file, int line,
                     const char *fmt, ...)
{
    if (err->status) return err->status;
    err->status = st;
    err->os = os;
    err->file = file;
    err->line = line;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
    if (n < 0) n = 0;
    if (n < BG_ERROR_TEXT && st == BG_IO && os) {
        char why[128];
        const char *s = strerror_r(os, why, sizeof why);
        n += snprintf(err->text + n, sizeof err->text - (size_t)n, ": %s", s);
    }
    if (n >= BG_ERROR_TEXT) end_in_dots(err->text);
    return st;
}

bg_status bg_wrap(bg_error *err, const char *fmt, ...)
{
    char old[BG_ERROR_TEXT];
    memcpy(old, err->text, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
    if (n < 0) n = 0;
    if (n < BG_ERROR_TEXT) n += snprintf(err->text + n, sizeof err->text - (size_t)n, ": %s", old);
    if (n >= BG_ERROR_TEXT) end_in_dots(err->text);
    return err->status;
}

const char *bg_status_name(bg_status st)
{
    static const char *const names[] = {"BG_OK",  "BG_NOMEM", "BG_IO",     "BG_FORMAT",
                                        "BG_ARG", "BG_BUSY",  "BG_DEVICE", "BG_INTERNAL"};
    return (unsigned)st < sizeof names / sizeof *names ? names[st] : "BG_?";
}
