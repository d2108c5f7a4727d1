#include "text/text.h"

#include <stdlib.h>

bool bg_ids_add(bg_ids *ids, int32_t id)
{
    if (ids->n == ids->cap) {
        if (ids->failed) return false;
        size_t cap = ids->cap ? ids->cap * 2 : 64;
        int32_t *v = cap > SIZE_MAX / sizeof *v ? NULL : realloc(ids->v, cap * sizeof *v);
        if (!v) {
            ids->failed = true;
            return false;
        }
        ids->v = v;
        ids->cap = cap;
    }
    ids->v[ids->n++] = id;
    return true;
}

void bg_ids_release(bg_ids *ids)
{
    free(ids->v);
    *ids = (bg_ids){0};
}
