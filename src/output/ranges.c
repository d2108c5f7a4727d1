#include "output/ranges.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct range {
    int64_t first, last;
} range;

struct bg_ranges { /* sorted, disjoint, and never touching: {0-3},{4-5} is one range */
    range *r;
    size_t n, cap;
    int64_t count;
};

bg_ranges *bg_ranges_new(void)
{
    return calloc(1, sizeof(bg_ranges));
}

void bg_ranges_free(bg_ranges *s)
{
    if (!s) return;
    free(s->r);
    free(s);
}

void bg_ranges_clear(bg_ranges *s)
{
    s->n = 0;
    s->count = 0;
}

/* The first range whose last is >= v; n: none. */
static size_t find(const bg_ranges *s, int64_t v)
{
    size_t lo = 0, hi = s->n;
    if (hi && s->r[hi - 1].last < v) return hi; /* the usual case: growing at the end */
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (s->r[mid].last < v)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool bg_ranges_add(bg_ranges *s, int64_t first, int64_t last)
{
    if (first > last || first < 0 || last == INT64_MAX) return false;
    size_t at = find(s, first == 0 ? 0 : first - 1); /* one that ends just before joins in */
    size_t end = at;
    while (end < s->n && s->r[end].first <= last + 1) { /* swallow what it overlaps or touches */
        if (s->r[end].first < first) first = s->r[end].first;
        if (s->r[end].last > last) last = s->r[end].last;
        s->count -= s->r[end].last - s->r[end].first + 1;
        end++;
    }
    if (end == at) {
        if (s->n == s->cap) {
            size_t cap = s->cap ? s->cap * 2 : 16;
            range *p = realloc(s->r, cap * sizeof *p);
            if (!p) return false;
            s->r = p;
            s->cap = cap;
        }
        memmove(s->r + at + 1, s->r + at, (s->n - at) * sizeof *s->r);
        s->n++;
    } else {
        memmove(s->r + at + 1, s->r + end, (s->n - end) * sizeof *s->r);
        s->n -= end - at - 1;
    }
    s->r[at] = (range){first, last};
    s->count += last - first + 1;
    return true;
}

bool bg_ranges_has(const bg_ranges *s, int64_t v)
{
    size_t at = find(s, v);
    return at < s->n && s->r[at].first <= v;
}

int64_t bg_ranges_count(const bg_ranges *s)
{
    return s->count;
}

int64_t bg_ranges_prefix(const bg_ranges *s)
{
    return s->n && s->r[0].first == 0 ? s->r[0].last + 1 : 0;
}

bool bg_ranges_at(const bg_ranges *s, size_t i, int64_t *first, int64_t *last)
{
    if (i >= s->n) return false;
    *first = s->r[i].first;
    *last = s->r[i].last;
    return true;
}

bool bg_ranges_print(const bg_ranges *s, bg_buf *out)
{
    for (size_t i = 0; i < s->n; i++) {
        if (i) bg_buf_char(out, ',');
        bg_buf_printf(out, "%" PRId64, s->r[i].first);
        if (s->r[i].last > s->r[i].first) bg_buf_printf(out, "-%" PRId64, s->r[i].last);
    }
    return !out->failed;
}

static bool number(const char *text, size_t n, size_t *at, int64_t *out)
{
    size_t i = *at;
    int64_t v = 0;
    while (i < n && text[i] >= '0' && text[i] <= '9') {
        if (v > (INT64_MAX - 10) / 10) return false;
        v = v * 10 + (text[i++] - '0');
    }
    if (i == *at) return false;
    *at = i;
    *out = v;
    return true;
}

bool bg_ranges_read(bg_ranges *s, const char *text, size_t n, bool *nomem)
{
    *nomem = false;
    for (size_t i = 0; i < n;) {
        int64_t first, last;
        if (!number(text, n, &i, &first)) return false;
        last = first;
        if (i < n && text[i] == '-') {
            i++;
            if (!number(text, n, &i, &last)) return false;
        }
        if (first > last || last == INT64_MAX) return false;
        if (!bg_ranges_add(s, first, last)) {
            *nomem = true;
            return false;
        }
        if (i == n) break;
        if (text[i++] != ',' || i == n) return false;
    }
    return true;
}

bool bg_ranges_parse(bg_ranges *s, const char *text, size_t n)
{
    bool nomem;
    return bg_ranges_read(s, text, n, &nomem);
}
