#include "base/buf.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

bool bg_buf_reserve(bg_buf *b, size_t extra)
{
    if (b->failed) return false;
    if (extra >= SIZE_MAX / 2 - b->len) {
        b->failed = true;
        return false;
    }
    size_t need = b->len + extra + 1;
    if (need <= b->cap) return true;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need)
        cap += cap / 2 + 32;
    char *p = realloc(b->data, cap);
    if (!p) {
        b->failed = true;
        return false;
    }
    b->data = p;
    b->cap = cap;
    return true;
}

void bg_buf_add(bg_buf *b, const void *data, size_t n)
{
    if (!bg_buf_reserve(b, n)) return;
    if (n) memcpy(b->data + b->len, data, n);
    b->len += n;
    b->data[b->len] = 0;
}

void bg_buf_str(bg_buf *b, const char *s)
{
    bg_buf_add(b, s, strlen(s));
}

void bg_buf_char(bg_buf *b, char c)
{
    bg_buf_add(b, &c, 1);
}

void bg_buf_printf(bg_buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) b->failed = true;
    if (n >= 0 && bg_buf_reserve(b, (size_t)n)) {
        vsnprintf(b->data + b->len, (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
}

void bg_buf_clear(bg_buf *b)
{
    b->len = 0;
    b->failed = false;
    if (b->data) b->data[0] = 0;
}

void bg_buf_release(bg_buf *b)
{
    free(b->data);
    *b = (bg_buf){0};
}

char *bg_buf_take(bg_buf *b)
{
    if (!b->failed && !b->data) bg_buf_add(b, "", 0);
    char *s = b->failed ? NULL : b->data;
    if (!s) free(b->data);
    *b = (bg_buf){0};
    return s;
}

void bg_buf_json(bg_buf *b, const char *s, size_t n)
{
    bg_buf_char(b, '"');
    size_t plain = 0; /* start of the run not yet copied */
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c < 0x7f && c != '"' && c != '\\') {
            i++;
            continue;
        }
        uint32_t cp;
        size_t len = bg_utf8_next(s + i, n - i, &cp);
        bool escape = cp == BG_UTF8_BAD || cp < 0x20 || cp == '"' || cp == '\\' || cp == 0x7f ||
                      cp == 0x85 || cp == 0x2028 || cp == 0x2029;
        if (escape) {
            bg_buf_add(b, s + plain, i - plain);
            switch (cp) {
            case BG_UTF8_BAD:
                bg_buf_str(b, "\xef\xbf\xbd");
                break;
            case '"':
                bg_buf_str(b, "\\\"");
                break;
            case '\\':
                bg_buf_str(b, "\\\\");
                break;
            case '\n':
                bg_buf_str(b, "\\n");
                break;
            case '\r':
                bg_buf_str(b, "\\r");
                break;
            case '\t':
                bg_buf_str(b, "\\t");
                break;
            default:
                bg_buf_printf(b, "\\u%04x", (unsigned)cp);
            }
            plain = i + len;
        }
        i += len;
    }
    bg_buf_add(b, s + plain, n - plain);
    bg_buf_char(b, '"');
}
