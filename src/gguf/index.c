#include "gguf/file.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/rng.h"

static bool same(bg_str a, bg_str b)
{
    return a.n == b.n && memcmp(a.p, b.p, a.n) == 0;
}

bool str_index_build(str_index *x, const void *items, int64_t n, str_index_get *get, int64_t *first,
                     int64_t *second)
{
    uint64_t cap = 16;
    while (cap < 2 * (uint64_t)n)
        cap *= 2;
    *first = *second = -1;
    x->slot = calloc(cap, sizeof *x->slot);
    if (!x->slot) return false;
    x->mask = cap - 1;
    x->seed = bg_mix64((uint64_t)(uintptr_t)x->slot);
    for (int64_t i = 0; i < n; i++) {
        bg_str s = get(items, i);
        uint64_t at = bg_hash64(s.p, s.n, x->seed) & x->mask;
        for (; x->slot[at]; at = (at + 1) & x->mask) {
            int64_t j = (int64_t)x->slot[at] - 1;
            if (!same(get(items, j), s)) continue;
            *first = j;
            *second = i;
            return true;
        }
        x->slot[at] = (uint32_t)(i + 1);
    }
    return true;
}

int64_t str_index_find(const str_index *x, const void *items, str_index_get *get, const char *key)
{
    if (!x->slot) return -1;
    bg_str s = {key, strlen(key)};
    uint64_t at = bg_hash64(s.p, s.n, x->seed) & x->mask;
    for (; x->slot[at]; at = (at + 1) & x->mask) {
        int64_t j = (int64_t)x->slot[at] - 1;
        if (same(get(items, j), s)) return j;
    }
    return -1;
}

void str_index_release(str_index *x)
{
    free(x->slot);
    *x = (str_index){0};
}
