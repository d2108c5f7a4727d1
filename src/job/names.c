#include "job/names.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/buf.h"

/* False: there is no such field. */
static bool add_date(bg_buf *b, char field, const struct tm *tm)
{
    char text[32];
    size_t n = 0;
    switch (field) {
    case 'Y':
        n = strftime(text, sizeof text, "%Y", tm);
        break;
    case 'm':
        n = strftime(text, sizeof text, "%m", tm);
        break;
    case 'd':
        n = strftime(text, sizeof text, "%d", tm);
        break;
    case 'H':
        n = strftime(text, sizeof text, "%H", tm);
        break;
    case 'M':
        n = strftime(text, sizeof text, "%M", tm);
        break;
    case 'S':
        n = strftime(text, sizeof text, "%S", tm);
        break;
    case 'F':
        n = strftime(text, sizeof text, "%F", tm);
        break;
    case 'j':
        n = strftime(text, sizeof text, "%j", tm);
        break;
    case 'V':
        n = strftime(text, sizeof text, "%V", tm);
        break;
    case 'G':
        n = strftime(text, sizeof text, "%G", tm);
        break;
    case '%':
        text[n++] = '%';
        break;
    default:
        return false;
    }
    bg_buf_add(b, text, n);
    return true;
}

static bg_status unknown_field(const char *name, const char *at, bg_error *err)
{
    if (!at[1])
        return bg_fail(err, BG_ARG, "%s: ends in a lone %%; write %%%% for a percent sign", name);
    return bg_fail(err, BG_ARG,
                   "%s: %%%c is no field of names; there are %%Y %%m %%d %%H %%M %%S %%F %%j %%V "
                   "%%G, and %%%% for a percent sign",
                   name, at[1]);
}

static bg_status expand(const char *name, const struct tm *tm, int64_t index, int64_t count,
                        bg_buf *b, bg_error *err)
{
    bg_status st = BG_OK;
    for (const char *c = name; !st && *c;) {
        bool one = strncmp(c, "{shard}", 7) == 0, all = strncmp(c, "{shards}", 8) == 0;
        if (*c == '%') {
            if (!add_date(b, c[1], tm)) st = unknown_field(name, c, err);
            c += 2;
        } else if (one || all) {
            if (!count)
                st = bg_fail(err, BG_ARG, "%s: has %.*s, but there is no --shard", name,
                             one ? 7 : 8, c);
            int width = one ? snprintf(NULL, 0, "%lld", (long long)count) : 0;
            bg_buf_printf(b, "%0*lld", width, (long long)(one ? index + 1 : count));
            c += one ? 7 : 8;
        } else {
            bg_buf_char(b, *c++);
        }
    }
    return st;
}

bg_status bg_name_expand(const char *name, int64_t wall_s, int64_t shard_index, int64_t shard_count,
                         char **out, bg_error *err)
{
    *out = NULL;
    if (!name) return BG_OK;
    time_t t = (time_t)wall_s;
    struct tm tm = {0};
    tzset();
    if (!localtime_r(&t, &tm)) return bg_fail(err, BG_ARG, "%s: the clock shows no date", name);
    bg_buf b = {0};
    bg_buf_add(&b, "", 0);
    bg_status st = expand(name, &tm, shard_index, shard_count, &b, err);
    if (!st) {
        *out = bg_buf_take(&b);
        if (!*out) st = bg_fail(err, BG_NOMEM, "%s: out of memory", name);
    }
    bg_buf_release(&b);
    return st;
}
