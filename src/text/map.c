#include "text/map.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "text/vocab.h"

static size_t capacity_for(size_t n) /* a power of two, more than twice n */
{
    size_t cap = 16;
    while (cap / 2 <= n)
        cap *= 2;
    return cap;
}

bool bg_map_init(bg_map *m, size_t n_keys)
{
    const size_t cap = capacity_for(n_keys);
    m->slot = malloc(cap * sizeof *m->slot);
    if (!m->slot) return false;
    memset(m->slot, 0xff, cap * sizeof *m->slot);
    m->mask = cap - 1;
    return true;
}

void bg_map_release(bg_map *m)
{
    free(m->slot);
    *m = (bg_map){0};
}

/* The slot of these bytes, or the empty one where they belong. */
static bg_map_slot *look_up(const bg_map *m, const bg_token_arena *a, const char *p, size_t n,
                            uint32_t *tag)
{
    const uint64_t h = bg_hash64(p, n, 0);
    *tag = (uint32_t)(h >> 32);
    for (size_t i = (size_t)h & m->mask;; i = (i + 1) & m->mask) {
        bg_map_slot *s = &m->slot[i];
        if (s->id < 0) return s;
        if (s->tag != *tag) continue;
        bg_str t = bg_arena_get(a, s->id);
        if (t.n == n && memcmp(t.p, p, n) == 0) return s;
    }
}

int32_t bg_map_add(bg_map *m, const bg_token_arena *a, int32_t id)
{
    const bg_str t = bg_arena_get(a, id);
    uint32_t tag;
    bg_map_slot *s = look_up(m, a, t.p, t.n, &tag);
    if (s->id >= 0) return s->id;
    *s = (bg_map_slot){tag, id};
    return -1;
}

int32_t bg_map_find(const bg_map *m, const bg_token_arena *a, const char *p, size_t n)
{
    uint32_t tag;
    return look_up(m, a, p, n, &tag)->id;
}

bool bg_pairs_init(bg_pairs *m, size_t n_pairs)
{
    const size_t cap = capacity_for(n_pairs);
    m->slot = malloc(cap * sizeof *m->slot);
    if (!m->slot) return false;
    memset(m->slot, 0xff, cap * sizeof *m->slot);
    m->mask = cap - 1;
    return true;
}

void bg_pairs_release(bg_pairs *m)
{
    free(m->slot);
    *m = (bg_pairs){0};
}

void bg_pairs_add(bg_pairs *m, int32_t left, int32_t right, uint32_t rank, int32_t id)
{
    const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t i = bg_pair_hash(key) & m->mask;
    while (m->slot[i].key != UINT64_MAX) {
        if (m->slot[i].key == key) return;
        i = (i + 1) & m->mask;
    }
    m->slot[i] = (bg_pair_slot){key, rank, id};
}
