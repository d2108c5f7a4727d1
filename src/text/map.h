/* text/map.h - hash maps of the tokenizer: bytes to token id, and pair of ids to merge.
 *
 * Open addressing, filled once, at most half full; neither map holds the keys' bytes: they stay in
 * the arena that the caller passes to every call. */
#ifndef BG_TEXT_MAP_H
#define BG_TEXT_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct bg_token_arena bg_token_arena;

typedef struct bg_map_slot {
    uint32_t tag; /* high half of the hash */
    int32_t id;   /* -1: empty */
} bg_map_slot;

typedef struct bg_map {
    bg_map_slot *slot;
    size_t mask;
} bg_map;

bool bg_map_init(bg_map *m, size_t n_keys); /* false: no memory */
void bg_map_release(bg_map *m);
/* The id whose bytes in a equal those of `id`, or -1 and `id` is now in the map. */
int32_t bg_map_add(bg_map *m, const bg_token_arena *a, int32_t id);
int32_t bg_map_find(const bg_map *m, const bg_token_arena *a, const char *p, size_t n); /* or -1 */

typedef struct bg_pair_slot {
    uint64_t key; /* left id, right id; all ones: empty */
    uint32_t rank;
    int32_t id; /* of the merged token */
} bg_pair_slot;

typedef struct bg_pairs {
    bg_pair_slot *slot;
    size_t mask;
} bg_pairs;

bool bg_pairs_init(bg_pairs *m, size_t n_pairs);
void bg_pairs_release(bg_pairs *m);
/* Keeps the entry that is there already: of two equal pairs the lower rank, added first, wins. */
void bg_pairs_add(bg_pairs *m, int32_t left, int32_t right, uint32_t rank, int32_t id);

static inline size_t bg_pair_hash(uint64_t key)
{
    key *= UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(key ^ key >> 32);
}

/* NULL: the two do not merge. left and right are ids of the vocabulary. */
static inline const bg_pair_slot *bg_pairs_find(const bg_pairs *m, int32_t left, int32_t right)
{
    const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (size_t i = bg_pair_hash(key) & m->mask;; i = (i + 1) & m->mask) {
        if (m->slot[i].key == key) return &m->slot[i];
        if (m->slot[i].key == UINT64_MAX) return NULL;
    }
}

#endif
