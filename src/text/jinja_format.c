/* Formatting with patterns: `fmt % args` (printf style), str.format(), strftime. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "text/jinja_builtin.h"

/* ---- fmt % args ---- */

typedef struct spec { /* one %-directive */
    bool minus, plus, space, zero, alt;
    int64_t width, precision; /* precision -1: none */
    char conv;
} spec;

typedef struct values { /* what is left of the right side */
    jn_val all;
    const jn_val *v;
    size_t n, at;
    bool by_name;
} values;

enum { MAX_WIDTH = 1000, MAX_PRECISION = 60 };

static bool next_value(jn_state *r, values *a, jn_val *v)
{
    if (a->at == a->n) return jn_fail(r, "not enough arguments for format string");
    *v = a->v[a->at++];
    return true;
}

static bool number_in(jn_state *r, const jn_str *f, size_t *i, values *a, int64_t *n)
{
    *n = 0;
    if (*i < f->n && jn_bytes(f)[*i] == '*') {
        jn_val v = {0};
        ++*i;
        return next_value(r, a, &v) && jn_want_int(r, v, n);
    }
    for (; *i < f->n && jn_bytes(f)[*i] >= '0' && jn_bytes(f)[*i] <= '9'; ++*i)
        if (*n < MAX_WIDTH * 10) *n = *n * 10 + (jn_bytes(f)[*i] - '0');
    return true;
}

/* Parses what follows the % at f[*i - 1]; *named is the value of a %(name) directive. */
static bool parse_spec(jn_state *r, const jn_str *f, size_t *i, values *a, spec *s, jn_val *named)
{
    const char *p = jn_bytes(f);
    *s = (spec){.precision = -1};
    named->kind = JN_MISSING;
    if (*i < f->n && p[*i] == '(') {
        const char *end = memchr(p + *i, ')', f->n - *i);
        jn_val key;
        if (!end) return jn_fail(r, "incomplete format key");
        if (a->all.kind != JN_DICT) return jn_fail(r, "format requires a mapping");
        size_t from = *i + 1, to = (size_t)(end - p);
        if (!jn_str_sub(r, f, from, to - from, &key) || !jn_dict_get(r, a->all.dict, key, named))
            return false;
        if (named->kind == JN_MISSING)
            return jn_fail(r, "format key '%.*s' is missing", (int)(to - from), p + from);
        a->by_name = true;
        *i = to + 1;
    }
    for (; *i < f->n && p[*i] && strchr("-+ 0#", p[*i]); ++*i) {
        s->minus |= p[*i] == '-';
        s->plus |= p[*i] == '+';
        s->space |= p[*i] == ' ';
        s->zero |= p[*i] == '0';
        s->alt |= p[*i] == '#';
    }
    if (!number_in(r, f, i, a, &s->width)) return false;
    if (s->width < 0) {
        s->minus = true;
        s->width = s->width < -MAX_WIDTH ? MAX_WIDTH + 1 : -s->width;
    }
    if (*i < f->n && p[*i] == '.') {
        ++*i;
        if (!number_in(r, f, i, a, &s->precision)) return false;
        if (s->precision < 0) s->precision = 0;
    }
    if (s->width > MAX_WIDTH) return jn_fail(r, "a format width is over %d", MAX_WIDTH);
    if (*i < f->n && p[*i] && strchr("hlL", p[*i])) ++*i;
    if (*i == f->n) return jn_fail(r, "incomplete format");
    s->conv = p[(*i)++];
    return true;
}

static bool spaces(jn_state *r, jn_buf *b, int64_t n)
{
    for (; n > 0; n--)
        if (!jn_put(r, b, " ", 1, true)) return false;
    return true;
}

static bool padded(jn_state *r, jn_buf *b, const spec *s, const jn_str *text)
{
    int64_t n = s->width - (int64_t)jn_cp_count(jn_bytes(text), text->n);
    return (s->minus || spaces(r, b, n)) && jn_put_str(r, b, text) &&
           (!s->minus || spaces(r, b, n));
}

static bool format_str(jn_state *r, jn_buf *b, const spec *s, jn_val v)
{
    const jn_str *text;
    jn_val cut;
    if (s->conv == 'r' || s->conv == 'a') {
        if (!jn_repr(r, v, &v)) return false;
    }
    if (s->conv == 'c') {
        char c[4];
        if (v.kind == JN_STR && jn_cp_count(jn_bytes(v.s), v.s->n) != 1)
            return jn_fail(r, "%%c requires an int or a single character");
        if (v.kind != JN_STR) {
            int64_t i;
            if (!jn_want_int(r, v, &i)) return false;
            if (i < 0 || i > 0x10ffff || (i >= 0xd800 && i < 0xe000))
                return jn_fail(r, "%%c: %lld is no character", (long long)i);
            /* A number from the request must not become a piece of a control token. */
            if (!jn_str_copy(r, c, bg_utf8_put(c, (uint32_t)i), false, &v)) return false;
        }
    }
    if (!jn_str_of(r, v, &text)) return false;
    if (s->precision >= 0 && s->conv != 'c') {
        size_t n = jn_cp_offset(jn_bytes(text), text->n, (size_t)s->precision);
        if (!jn_str_sub(r, text, 0, n, &cut)) return false;
        text = cut.s;
    }
    return padded(r, b, s, text);
}

/* The pattern for snprintf(): flags, width and precision as given, then `conv`. */
static const char *c_pattern(const spec *s, const char *conv, char out[32])
{
    char prec[8] = "";
    if (s->precision >= 0)
        snprintf(prec, sizeof prec, ".%d",
                 (int)(s->precision < MAX_PRECISION ? s->precision : MAX_PRECISION));
    snprintf(out, 32, "%%%s%s%s%s%s%d%s%s", s->minus ? "-" : "", s->plus ? "+" : "",
             s->space ? " " : "", s->zero ? "0" : "", s->alt ? "#" : "", (int)s->width, prec, conv);
    return out;
}

static bool format_number(jn_state *r, jn_buf *b, const spec *s, jn_val v)
{
    char pattern[32], text[MAX_WIDTH + 400];
    int n;
    bool integer = strchr("diuxXo", s->conv) != NULL;
    if (!jn_is_number(v))
        return v.kind == JN_UNDEF ? jn_undef_fail(r, v.undef)
                                  : jn_fail(r, "%%%c format: a number is required, not %s", s->conv,
                                            jn_type_name(v));
    if (integer && v.kind == JN_FLOAT) {
        if (!strchr("diu", s->conv) || !(fabs(v.f) < 0x1p63))
            return jn_fail(r, "%%%c format: an integer is required", s->conv);
        v = jn_int((int64_t)v.f);
    }
    spec t = *s;
    if (t.width == 0) t.zero = false;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    if (strchr("diu", s->conv)) {
        n = snprintf(text, sizeof text, c_pattern(&t, "lld", pattern), (long long)jn_as_int(v));
    } else if (integer) {
        /* Python prints the sign of a negative number; C's %x would print its bits. */
        int64_t i = jn_as_int(v);
        char conv[4] = {'l', 'l', s->conv, 0};
        if (i < 0) return jn_fail(r, "%%%c of a negative number is not supported", s->conv);
        n = snprintf(text, sizeof text, c_pattern(&t, conv, pattern), (unsigned long long)i);
    } else {
        char conv[2] = {s->conv, 0};
        n = snprintf(text, sizeof text, c_pattern(&t, conv, pattern), jn_as_float(v));
    }
#pragma GCC diagnostic pop
    if (n < 0 || (size_t)n >= sizeof text) return jn_fail(r, "a formatted number is too long");
    return jn_put(r, b, text, (size_t)n, true);
}

static bool directive(jn_state *r, const jn_str *f, size_t *i, values *a, jn_buf *b)
{
    spec s;
    jn_val v;
    if (!parse_spec(r, f, i, a, &s, &v)) return false;
    if (s.conv == '%') return jn_put(r, b, "%", 1, true);
    if (!s.conv || !strchr("srcadiuxXoeEfFgG", s.conv))
        return jn_fail(r, "unsupported format character in '%%' format");
    if (v.kind == JN_MISSING && !next_value(r, a, &v)) return false;
    return strchr("srca", s.conv) ? format_str(r, b, &s, v) : format_number(r, b, &s, v);
}

bool jn_printf(jn_state *r, const jn_str *f, jn_val args, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    values a = {.all = args, .v = &args, .n = 1};
    if (args.kind == JN_TUPLE) {
        a.v = args.list->v;
        a.n = args.list->n;
    }
    if (!b) return false;
    for (size_t i = 0; i < f->n;) {
        const char *pct = memchr(jn_bytes(f) + i, '%', f->n - i);
        size_t to = pct ? (size_t)(pct - jn_bytes(f)) : f->n;
        if (!jn_put_part(r, b, f, i, to - i)) return false;
        i = to;
        if (!pct) break;
        i++;
        if (!directive(r, f, &i, &a, b)) return false;
    }
    jn_kind k = args.kind; /* those that Python calls mappings need not be used up */
    bool mapping = k == JN_DICT || k == JN_LIST || k == JN_RANGE || k == JN_UNDEF;
    bool leftover = a.at < a.n && !a.by_name && !mapping;
    if (leftover) return jn_fail(r, "not all arguments converted during string formatting");
    return jn_finish(r, b, out);
}

/* ---- str.format() ---- */

/* The value that the field name says: empty (the next), a number, or a keyword. */
static bool field_value(jn_state *r, const char *name, size_t n, const jn_args *a, size_t *next,
                        jn_val *v)
{
    size_t i = 0, digits = 0;
    for (; digits < n && digits < 6 && name[digits] >= '0' && name[digits] <= '9'; digits++)
        i = i * 10 + (size_t)(name[digits] - '0');
    if (n == 0) i = (*next)++;
    if (n == digits) {
        if (i >= a->n) return jn_fail(r, "format(): there is no argument %zu", i);
        *v = a->v[i];
        return true;
    }
    for (i = 0; i < a->n_kw; i++) {
        if (a->kw[i].name->n != n || memcmp(jn_bytes(a->kw[i].name), name, n) != 0) continue;
        *v = a->kw[i].v;
        return true;
    }
    return jn_fail(r, "format(): there is no argument '%.*s'", (int)n, name);
}

bool jn_str_format(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    const char *p = jn_bytes(self.s), *end = p + self.s->n;
    size_t next = 0;
    if (!b) return false;
    for (const char *q = p; q < end;) {
        size_t k = 0;
        while (q + k < end && q[k] != '{' && q[k] != '}')
            k++;
        if (!jn_put_part(r, b, self.s, (size_t)(q - p), k)) return false;
        q += k;
        if (q == end) break;
        if (q + 1 < end && q[1] == q[0]) { /* {{ and }} */
            if (!jn_put_part(r, b, self.s, (size_t)(q - p), 1)) return false;
            q += 2;
            continue;
        }
        const char *close = *q == '{' ? memchr(q, '}', (size_t)(end - q)) : NULL;
        if (!close) return jn_fail(r, "format(): a single '%c' in the format string", *q);
        size_t n = (size_t)(close - q) - 1;
        jn_val v = {0};
        if (memchr(q + 1, ':', n) || memchr(q + 1, '!', n) || memchr(q + 1, '.', n) ||
            memchr(q + 1, '[', n) || memchr(q + 1, '{', n))
            return jn_fail(r, "format(): only {}, {0} and {name} are supported");
        if (!field_value(r, q + 1, n, a, &next, &v) || !jn_print(r, b, v)) return false;
        q = close + 1;
    }
    return jn_finish(r, b, out);
}

/* ---- strftime ---- */

static const char *const days[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                   "Thursday", "Friday", "Saturday"};
static const char *const months[] = {"January",   "February", "March",    "April",
                                     "May",       "June",     "July",     "August",
                                     "September", "October",  "November", "December"};

/* Week of the year, weeks starting on `start` (0 Sunday, 1 Monday). */
static int week(const struct tm *t, int start)
{
    return (t->tm_yday + 7 - (t->tm_wday + 7 - start) % 7) / 7;
}

/* Year and week of ISO 8601. */
static void iso_week(const struct tm *t, int *year, int *w)
{
    int day = (t->tm_wday + 6) % 7; /* Monday 0 */
    *year = t->tm_year + 1900;
    *w = (t->tm_yday - day + 10) / 7;
    int jan1 = (day - t->tm_yday % 7 + 7) % 7; /* weekday of January 1 */
    bool leap = (*year % 4 == 0 && *year % 100) || *year % 400 == 0;
    if (*w < 1) {
        --*year;
        bool before = (*year % 4 == 0 && *year % 100) || *year % 400 == 0;
        int prev = (jan1 + 7 - (before ? 366 : 365) % 7) % 7;
        *w = prev == 3 || (before && prev == 2) ? 53 : 52;
    } else if (*w == 53 && jan1 != 3 && !(leap && jan1 == 2)) {
        ++*year;
        *w = 1;
    }
}

static int two(char *out, int v, char flag)
{
    return sprintf(out, flag == '-' ? "%d" : flag == '_' ? "%2d" : "%02d", v);
}

/* Text of one directive; -1: unknown. The C locale, whatever the process has. */
static int date_part(const struct tm *t, int64_t wall_s, char conv, char flag, char *out)
{
    int year = t->tm_year + 1900, h12 = t->tm_hour % 12 ? t->tm_hour % 12 : 12, iso_year, w;
    iso_week(t, &iso_year, &w);
    switch (conv) {
    case 'a':
        return sprintf(out, "%.3s", days[t->tm_wday]);
    case 'A':
        return sprintf(out, "%s", days[t->tm_wday]);
    case 'b':
    case 'h':
        return sprintf(out, "%.3s", months[t->tm_mon]);
    case 'B':
        return sprintf(out, "%s", months[t->tm_mon]);
    case 'c':
        return sprintf(out, "%.3s %.3s %2d %02d:%02d:%02d %d", days[t->tm_wday], months[t->tm_mon],
                       t->tm_mday, t->tm_hour, t->tm_min, t->tm_sec, year);
    case 'C':
        return two(out, year / 100, flag);
    case 'd':
        return two(out, t->tm_mday, flag);
    case 'D':
    case 'x':
        return sprintf(out, "%02d/%02d/%02d", t->tm_mon + 1, t->tm_mday, year % 100);
    case 'e':
        return two(out, t->tm_mday, flag ? flag : '_');
    case 'f':
        return sprintf(out, "000000");
    case 'F':
        return sprintf(out, "%d-%02d-%02d", year, t->tm_mon + 1, t->tm_mday);
    case 'g':
        return two(out, iso_year % 100, flag);
    case 'G':
        return sprintf(out, "%d", iso_year);
    case 'H':
        return two(out, t->tm_hour, flag);
    case 'I':
        return two(out, h12, flag);
    case 'j':
        return sprintf(out, flag == '-' ? "%d" : "%03d", t->tm_yday + 1);
    case 'k':
        return two(out, t->tm_hour, flag ? flag : '_');
    case 'l':
        return two(out, h12, flag ? flag : '_');
    case 'm':
        return two(out, t->tm_mon + 1, flag);
    case 'M':
        return two(out, t->tm_min, flag);
    case 'n':
        return sprintf(out, "\n");
    case 'p':
        return sprintf(out, t->tm_hour < 12 ? "AM" : "PM");
    case 'P':
        return sprintf(out, t->tm_hour < 12 ? "am" : "pm");
    case 'r':
        return sprintf(out, "%02d:%02d:%02d %s", h12, t->tm_min, t->tm_sec,
                       t->tm_hour < 12 ? "AM" : "PM");
    case 'R':
        return sprintf(out, "%02d:%02d", t->tm_hour, t->tm_min);
    case 's':
        return sprintf(out, "%lld", (long long)wall_s);
    case 'S':
        return two(out, t->tm_sec, flag);
    case 't':
        return sprintf(out, "\t");
    case 'T':
    case 'X':
        return sprintf(out, "%02d:%02d:%02d", t->tm_hour, t->tm_min, t->tm_sec);
    case 'u':
        return sprintf(out, "%d", t->tm_wday ? t->tm_wday : 7);
    case 'U':
        return two(out, week(t, 0), flag);
    case 'V':
        return two(out, w, flag);
    case 'w':
        return sprintf(out, "%d", t->tm_wday);
    case 'W':
        return two(out, week(t, 1), flag);
    case 'y':
        return two(out, year % 100, flag);
    case 'Y':
        return sprintf(out, "%d", year);
    case 'z':
    case 'Z':
        return 0; /* datetime.now() is naive */
    case '%':
        return sprintf(out, "%%");
    default:
        return -1;
    }
}

bool jn_strftime(jn_state *r, const jn_str *f, jn_val *out)
{
    struct tm t;
    time_t wall = (time_t)r->wall_s;
    jn_buf *b = jn_buf_new(r);
    if (!b) return false;
    if (!gmtime_r(&wall, &t) || t.tm_year < -1900 || t.tm_year > 8099)
        return jn_fail(r, "strftime_now: the clock is outside the years 0 to 9999");
    const char *p = jn_bytes(f);
    for (size_t i = 0; i < f->n;) {
        char text[64], flag = 0;
        size_t from = i++;
        int n = -1;
        if (p[from] == '%') {
            if (i < f->n && (p[i] == '-' || p[i] == '_' || p[i] == '0')) flag = p[i++];
            if (i < f->n) n = date_part(&t, r->wall_s, p[i++], flag == '0' ? 0 : flag, text);
        }
        bool ok =
            n < 0 ? jn_put_part(r, b, f, from, i - from) : jn_put(r, b, text, (size_t)n, true);
        if (!ok) return false;
    }
    return jn_finish(r, b, out);
}
