#include "base/utf8.h"

#include <string.h>

/* For lead byte c: the sequence's length (0: never a lead), and the bounds of its second byte. */
static size_t lead(unsigned char c, unsigned char *lo, unsigned char *hi)
{
    *lo = 0x80;
    *hi = 0xbf;
    if (c < 0x80) return 1;
    if (c < 0xc2) return 0;
    if (c < 0xe0) return 2;
    if (c < 0xf0) {
        if (c == 0xe0) *lo = 0xa0;
        if (c == 0xed) *hi = 0x9f;
        return 3;
    }
    if (c < 0xf5) {
        if (c == 0xf0) *lo = 0x90;
        if (c == 0xf4) *hi = 0x8f;
        return 4;
    }
    return 0;
}

size_t bg_utf8_next(const char *s, size_t n, uint32_t *cp)
{
    unsigned char c = (unsigned char)s[0], lo, hi;
    size_t len = lead(c, &lo, &hi);
    *cp = BG_UTF8_BAD;
    if (len == 1) {
        *cp = c;
        return 1;
    }
    if (len == 0) return 1;
    uint32_t v = c & (0x7fu >> len);
    for (size_t i = 1; i < len; i++) {
        unsigned char t = i < n ? (unsigned char)s[i] : 0;
        if (t < lo || t > hi) return i;
        v = v << 6 | (t & 0x3fu);
        lo = 0x80;
        hi = 0xbf;
    }
    *cp = v;
    return len;
}

size_t bg_utf8_put(char *out, uint32_t cp)
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    size_t len = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (size_t i = len - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (cp & 0x3f));
        cp >>= 6;
    }
    out[0] = (char)((0xf00u >> len & 0xffu) | cp);
    return len;
}

bool bg_utf8_valid(const char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint64_t eight;
        if (n - i >= sizeof eight) {
            memcpy(&eight, s + i, sizeof eight);
            if (!(eight & UINT64_C(0x8080808080808080))) { /* ASCII all of it */
                i += sizeof eight;
                continue;
            }
        }
        uint32_t cp;
        i += bg_utf8_next(s + i, n - i, &cp);
        if (cp == BG_UTF8_BAD) return false;
    }
    return true;
}

size_t bg_utf8_unfinished(const char *s, size_t n)
{
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        unsigned char lo, hi;
        size_t len = lead((unsigned char)s[n - back], &lo, &hi);
        if (len == 1) return 0;
        if (len == 0) {
            if (((unsigned char)s[n - back] & 0xc0) != 0x80) return 0; /* never valid */
            continue;
        }
        if (len <= back) return 0;
        if (back >= 2) {
            unsigned char t = (unsigned char)s[n - back + 1];
            if (t < lo || t > hi) return 0;
        }
        return back;
    }
    return 0;
}

void bg_utf8_mend(char *s)
{
    size_t n = strlen(s), len;
    uint32_t cp;
    for (; n; s += len, n -= len) {
        len = bg_utf8_next(s, n, &cp);
        if (cp == BG_UTF8_BAD) memset(s, '?', len);
    }
}
