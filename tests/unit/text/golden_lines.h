/* Golden files with one JSON object a line. */
#ifndef GOLDEN_LINES_H
#define GOLDEN_LINES_H

#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>
#include <jansson.h>

#include "base/io.h"

static inline char *golden_text(const char *path, size_t *n)
{
    bg_error err = {0};
    char *data = NULL;
    bg_status st = bg_read_file(path, 8 << 20, &data, n, &err);
    cr_assert_eq(st, BG_OK, "%s", err.text);
    return data;
}

/* Calls one() for each line; returns how many there were. */
static inline size_t golden_lines(const char *path, void (*one)(const json_t *line))
{
    size_t n, count = 0;
    char *data = golden_text(path, &n);
    for (char *p = data, *end; p < data + n; p = end + 1) {
        end = memchr(p, '\n', (size_t)(data + n - p));
        if (!end) end = data + n;
        json_error_t why;
        json_t *j = json_loadb(p, (size_t)(end - p), JSON_ALLOW_NUL, &why);
        cr_assert_not_null(j, "%s: line %zu: %s", path, count + 1, why.text);
        one(j);
        json_decref(j);
        count++;
    }
    free(data);
    return count;
}

static inline const char *text_of(const json_t *line, const char *key)
{
    return json_string_value(json_object_get(line, key));
}

#endif
