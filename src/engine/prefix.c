#include "engine/prefix.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

typedef struct entry { /* of the block with the same number */
    uint64_t key, parent;
    uint64_t serial; /* 0: not in the cache */
    int32_t next;    /* in its bucket; -1: last */
} entry;

struct bg_prefix {
    int32_t n_blocks;
    int block_tokens;
    uint32_t mask; /* buckets - 1 */
    uint64_t last_serial;
    int32_t *buckets; /* first block, or -1 */
    entry *entries;
    int32_t *tokens; /* [n_blocks, block_tokens] */
};

bg_status bg_prefix_new(bg_prefix **out, int32_t n_blocks, int block_tokens, bg_error *err)
{
    *out = NULL;
    bg_prefix *p = calloc(1, sizeof *p);
    if (!p) return bg_fail(err, BG_NOMEM, "prefix cache: out of memory");
    uint32_t n_buckets = 16;
    while (n_buckets < (uint32_t)n_blocks)
        n_buckets *= 2;
    p->n_blocks = n_blocks;
    p->block_tokens = block_tokens;
    p->mask = n_buckets - 1;
    p->buckets = malloc(n_buckets * sizeof *p->buckets);
    p->entries = calloc((size_t)n_blocks, sizeof *p->entries);
    p->tokens = calloc((size_t)n_blocks * (size_t)block_tokens, sizeof *p->tokens);
    if (!p->buckets || !p->entries || !p->tokens) {
        bg_prefix_free(p);
        return bg_fail(err, BG_NOMEM, "prefix cache of %d blocks: out of memory", (int)n_blocks);
    }
    bg_prefix_reset(p);
    *out = p;
    return BG_OK;
}

void bg_prefix_free(bg_prefix *p)
{
    if (!p) return;
    free(p->buckets);
    free(p->entries);
    free(p->tokens);
    free(p);
}

void bg_prefix_reset(bg_prefix *p)
{
    for (uint32_t i = 0; i <= p->mask; i++)
        p->buckets[i] = -1;
    for (int32_t b = 0; b < p->n_blocks; b++)
        p->entries[b].serial = 0;
}

static size_t block_bytes(const bg_prefix *p)
{
    return (size_t)p->block_tokens * sizeof(int32_t);
}

static int32_t *tokens_of(const bg_prefix *p, int32_t block)
{
    return p->tokens + (size_t)block * (size_t)p->block_tokens;
}

static int32_t find(const bg_prefix *p, uint64_t key, uint64_t parent, const int32_t *tokens)
{
    for (int32_t b = p->buckets[key & p->mask]; b >= 0; b = p->entries[b].next) {
        const entry *e = &p->entries[b];
        if (e->key == key && e->parent == parent &&
            memcmp(tokens_of(p, b), tokens, block_bytes(p)) == 0)
            return b;
    }
    return -1;
}

int32_t bg_prefix_find(const bg_prefix *p, uint64_t parent, const int32_t *tokens, uint64_t *serial)
{
    int32_t b = find(p, bg_hash64(tokens, block_bytes(p), parent), parent, tokens);
    if (b >= 0) *serial = p->entries[b].serial;
    return b;
}

uint64_t bg_prefix_add(bg_prefix *p, uint64_t parent, const int32_t *tokens, int32_t block)
{
    uint64_t key = bg_hash64(tokens, block_bytes(p), parent);
    int32_t same = find(p, key, parent, tokens);
    if (same >= 0) return p->entries[same].serial;
    int32_t *bucket = &p->buckets[key & p->mask];
    memcpy(tokens_of(p, block), tokens, block_bytes(p));
    p->entries[block] = (entry){key, parent, ++p->last_serial, *bucket};
    *bucket = block;
    return p->last_serial;
}

bool bg_prefix_has(const bg_prefix *p, int32_t block)
{
    return p->entries[block].serial != 0;
}

void bg_prefix_forget(bg_prefix *p, int32_t block)
{
    entry *e = &p->entries[block];
    if (!e->serial) return;
    int32_t *at = &p->buckets[e->key & p->mask];
    while (*at != block)
        at = &p->entries[*at].next;
    *at = e->next;
    e->serial = 0;
}
