/* Ids as 128-bit hashes in an open-addressing table. Two different ids would have to share all 128
 * bits to be taken for one another: with 2^32 records that has a chance of about 2^-65. */
#include "input/input.h"

#include <stdlib.h>

#include <xxhash.h>

typedef struct slot {
    uint64_t lo, hi;
    int64_t record1; /* record + 1; 0: free */
} slot;

struct bg_id_set {
    slot *slots;
    size_t cap, n; /* cap is a power of two */
};

bg_id_set *bg_id_set_new(void)
{
    bg_id_set *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->cap = 1024;
    s->slots = calloc(s->cap, sizeof *s->slots);
    if (!s->slots) {
        free(s);
        return NULL;
    }
    return s;
}

void bg_id_set_free(bg_id_set *s)
{
    if (!s) return;
    free(s->slots);
    free(s);
}

/* The slot of this hash, or the free one where it belongs. */
static slot *find(slot *slots, size_t cap, uint64_t lo, uint64_t hi)
{
    size_t i = (size_t)lo & (cap - 1);
    while (slots[i].record1 && (slots[i].lo != lo || slots[i].hi != hi))
        i = (i + 1) & (cap - 1);
    return &slots[i];
}

static bool grow(bg_id_set *s)
{
    slot *bigger = calloc(s->cap * 2, sizeof *bigger);
    if (!bigger) return false;
    for (size_t i = 0; i < s->cap; i++)
        if (s->slots[i].record1)
            *find(bigger, s->cap * 2, s->slots[i].lo, s->slots[i].hi) = s->slots[i];
    free(s->slots);
    s->slots = bigger;
    s->cap *= 2;
    return true;
}

int64_t bg_id_set_add(bg_id_set *s, const char *id, size_t n, int64_t record)
{
    XXH128_hash_t h = XXH3_128bits(id, n);
    slot *at = find(s->slots, s->cap, h.low64, h.high64);
    if (at->record1) return at->record1;
    if (s->n + 1 > s->cap / 4 * 3) {
        if (!grow(s)) return -1;
        at = find(s->slots, s->cap, h.low64, h.high64);
    }
    *at = (slot){h.low64, h.high64, record + 1};
    s->n++;
    return 0;
}
