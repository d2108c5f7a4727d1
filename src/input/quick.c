#include "input/quick.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/utf8.h"

enum { MAX_DIGITS = 18, MAX_NUMBER = 64 };

typedef struct quick {
    const char *at, *end;
    char *scratch; /* strings with escapes, unescaped */
    size_t cap;
    bool nomem;
} quick;

static json_t *value(quick *q);

static void skip_space(quick *q)
{
    while (q->at < q->end && (*q->at == ' ' || *q->at == '\t' || *q->at == '\n' || *q->at == '\r'))
        q->at++;
}

static bool take(quick *q, char c)
{
    if (q->at == q->end || *q->at != c) return false;
    q->at++;
    return true;
}

static json_t *no_memory(quick *q)
{
    q->nomem = true;
    return NULL;
}

/* ---- strings
 * ----------------------------------------------------------------------------------------- */

/* The first quote, backslash or control character of s[0..end), or end. *high: a byte before it is
 * not ASCII. */
static const char *plain_end(const char *s, const char *end, bool *high)
{
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), us = _mm_set1_epi8(31);
    int seen = 0;
    for (; end - s >= 16; s += 16) {
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)s);
        __m128i stop = _mm_or_si128(_mm_cmpeq_epi8(x, quote), _mm_cmpeq_epi8(x, slash));
        stop = _mm_or_si128(stop, _mm_cmpeq_epi8(_mm_min_epu8(x, us), x));
        unsigned mask = (unsigned)_mm_movemask_epi8(stop);
        int bits = _mm_movemask_epi8(x);
        if (mask) {
            int at = __builtin_ctz(mask);
            seen |= bits & ((1 << at) - 1);
            *high |= seen != 0;
            return s + at;
        }
        seen |= bits;
    }
    *high |= seen != 0;
#endif
    for (; s < end; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\' || c < 32) break;
        *high |= c >= 0x80;
    }
    return s;
}

static int hex4(const char *s)
{
    int v = 0;
    for (int i = 0; i < 4; i++) {
        char c = s[i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0) return -1;
        v = v << 4 | d;
    }
    return v;
}

/* One escape at q->at (behind the backslash) to *out. False: leave it to jansson. */
static bool escape(quick *q, char **out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (q->at == q->end) return false;
    const char *f = strchr(from, *q->at);
    if (*q->at && f) {
        *(*out)++ = to[f - from];
        q->at++;
        return true;
    }
    if (*q->at != 'u' || q->end - q->at < 5) return false;
    int c = hex4(q->at + 1);
    q->at += 5;
    if (c <= 0 || (c >= 0xdc00 && c <= 0xdfff)) return false;
    uint32_t cp = (uint32_t)c;
    if (c >= 0xd800 && c <= 0xdbff) {
        if (q->end - q->at < 6 || q->at[0] != '\\' || q->at[1] != 'u') return false;
        int low = hex4(q->at + 2);
        if (low < 0xdc00 || low > 0xdfff) return false;
        q->at += 6;
        cp = 0x10000 + (((uint32_t)c - 0xd800) << 10) + ((uint32_t)low - 0xdc00);
    }
    *out += bg_utf8_put(*out, cp);
    return true;
}

static bool reserve(quick *q, size_t n)
{
    if (n <= q->cap) return true;
    char *p = realloc(q->scratch, n + n / 2);
    if (!p) {
        q->nomem = true;
        return false;
    }
    q->scratch = p;
    q->cap = n + n / 2;
    return true;
}

/* The string whose opening quote is behind q->at: text[0..*n) points into the line, or into scratch
 * until the next string. NULL: leave it. */
static const char *string(quick *q, size_t *n)
{
    bool high = false;
    const char *start = q->at, *stop = plain_end(start, q->end, &high);
    if (stop < q->end && *stop == '"') {
        q->at = stop + 1;
        *n = (size_t)(stop - start);
        return high && !bg_utf8_valid(start, *n) ? NULL : start;
    }
    /* An escape is never shorter than what it stands for, so the string's own length is room. */
    const char *close = stop;
    while (close < q->end && *close == '\\') {
        close = close + 1 < q->end ? close + 2 : q->end;
        close = plain_end(close, q->end, &high);
    }
    if (close == q->end || *close != '"' || !reserve(q, (size_t)(close - start) + 1)) return NULL;
    if (high && !bg_utf8_valid(start, (size_t)(close - start))) return NULL;
    char *out = q->scratch;
    if (!out) return NULL;
    while (stop < close) {
        memcpy(out, start, (size_t)(stop - start));
        out += stop - start;
        q->at = stop + 1;
        if (!escape(q, &out)) return NULL;
        start = q->at;
        stop = plain_end(start, close, &high);
    }
    memcpy(out, start, (size_t)(close - start));
    out += close - start;
    q->at = close + 1;
    *n = (size_t)(out - q->scratch);
    return q->scratch;
}

/* ---- the other values
 * -------------------------------------------------------------------------------- */

static size_t digits(quick *q)
{
    const char *start = q->at;
    while (q->at < q->end && *q->at >= '0' && *q->at <= '9')
        q->at++;
    return (size_t)(q->at - start);
}

static json_t *number(quick *q)
{
    const char *start = q->at;
    bool negative = take(q, '-'), real = false;
    const char *first = q->at;
    size_t n = digits(q);
    if (n == 0 || n > MAX_DIGITS || (n > 1 && *first == '0')) return NULL;
    if (take(q, '.')) {
        real = true;
        if (!digits(q)) return NULL;
    }
    if (q->at < q->end && (*q->at == 'e' || *q->at == 'E')) {
        q->at++;
        if (q->at < q->end && (*q->at == '+' || *q->at == '-')) q->at++;
        real = true;
        if (!digits(q)) return NULL;
    }
    json_t *v;
    if (real) {
        char text[MAX_NUMBER];
        size_t len = (size_t)(q->at - start);
        if (len >= sizeof text) return NULL;
        memcpy(text, start, len);
        text[len] = 0;
        errno = 0;
        double d = strtod(text, NULL);
        if (errno || !isfinite(d)) return NULL;
        v = json_real(d);
    } else {
        json_int_t i = 0;
        for (size_t k = 0; k < n; k++)
            i = i * 10 + (first[k] - '0');
        v = json_integer(negative ? -i : i);
    }
    return v ? v : no_memory(q);
}

static json_t *array(quick *q)
{
    json_t *a = json_array();
    if (!a) return no_memory(q);
    skip_space(q);
    if (take(q, ']')) return a;
    for (;;) {
        json_t *v = value(q);
        if (!v) break;
        if (json_array_append_new(a, v) != 0) {
            q->nomem = true;
            break;
        }
        skip_space(q);
        if (take(q, ']')) return a;
        if (!take(q, ',')) break;
    }
    json_decref(a);
    return NULL;
}

/* One "key": value pair. */
static bool member(quick *q, json_t *o)
{
    enum { SHORT = 64 };
    char kept[SHORT];
    size_t n;
    skip_space(q);
    if (!take(q, '"')) return false;
    const char *key = string(q, &n);
    /* Keys are short; and the value's strings use scratch too. */
    if (!key || n >= SHORT) return false;
    memcpy(kept, key, n);
    skip_space(q);
    if (!take(q, ':')) return false;
    json_t *v = value(q);
    if (!v) return false;
    if (json_object_getn(o, kept, n)) { /* twice: an error, and jansson's to tell */
        json_decref(v);
        return false;
    }
    if (json_object_setn_new_nocheck(o, kept, n, v) == 0) return true;
    q->nomem = true;
    return false;
}

static json_t *object(quick *q)
{
    json_t *o = json_object();
    if (!o) return no_memory(q);
    skip_space(q);
    if (take(q, '}')) return o;
    while (member(q, o)) {
        skip_space(q);
        if (take(q, '}')) return o;
        if (!take(q, ',')) break;
    }
    json_decref(o);
    return NULL;
}

static bool word(quick *q, const char *text)
{
    size_t n = strlen(text);
    if ((size_t)(q->end - q->at) < n || memcmp(q->at, text, n) != 0) return false;
    q->at += n;
    return true;
}

static json_t *value(quick *q)
{
    skip_space(q);
    if (q->at == q->end) return NULL;
    switch (*q->at) {
    case '"': {
        size_t n;
        q->at++;
        const char *s = string(q, &n);
        if (!s) return NULL;
        json_t *v = json_stringn_nocheck(s, n);
        return v ? v : no_memory(q);
    }
    case '{':
        q->at++;
        return object(q);
    case '[':
        q->at++;
        return array(q);
    case 't':
        return word(q, "true") ? json_true() : NULL;
    case 'f':
        return word(q, "false") ? json_false() : NULL;
    case 'n':
        return word(q, "null") ? json_null() : NULL;
    default:
        return number(q);
    }
}

json_t *bg_quick_load(const char *s, size_t n, bool *nomem)
{
    quick q = {.at = s, .end = s + n};
    json_t *v = value(&q);
    skip_space(&q);
    if (v && q.at != q.end) {
        json_decref(v);
        v = NULL;
    }
    free(q.scratch);
    *nomem = !v && q.nomem;
    return v;
}
