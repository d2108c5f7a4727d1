#include "engine/kv_pool.h"

#include <stdlib.h>

/* The free blocks form a ring through block 0: next[0] is handed out first, prev[0] last. */
struct bg_kv_pool {
    int32_t n_blocks, n_free;
    int32_t *refs, *next, *prev;
};

static void link_after(bg_kv_pool *p, int32_t at, int32_t block)
{
    int32_t after = p->next[at];
    p->next[at] = block;
    p->prev[block] = at;
    p->next[block] = after;
    p->prev[after] = block;
    p->n_free++;
}

static void unlink_free(bg_kv_pool *p, int32_t block)
{
    p->next[p->prev[block]] = p->next[block];
    p->prev[p->next[block]] = p->prev[block];
    p->n_free--;
}

bg_status bg_kv_new(bg_kv_pool **pool, int32_t n_blocks, bg_error *err)
{
    *pool = NULL;
    if (n_blocks < 2)
        return bg_fail(err, BG_ARG, "%d KV blocks: at least 2 are needed", (int)n_blocks);
    bg_kv_pool *p = calloc(1, sizeof *p);
    if (!p) return bg_fail(err, BG_NOMEM, "KV pool: out of memory");
    p->n_blocks = n_blocks;
    p->refs = calloc((size_t)n_blocks, sizeof *p->refs);
    p->next = calloc((size_t)n_blocks, sizeof *p->next);
    p->prev = calloc((size_t)n_blocks, sizeof *p->prev);
    if (!p->refs || !p->next || !p->prev) {
        bg_kv_free(p);
        return bg_fail(err, BG_NOMEM, "KV pool of %d blocks: out of memory", (int)n_blocks);
    }
    bg_kv_reset(p);
    *pool = p;
    return BG_OK;
}

void bg_kv_free(bg_kv_pool *p)
{
    if (!p) return;
    free(p->refs);
    free(p->next);
    free(p->prev);
    free(p);
}

void bg_kv_reset(bg_kv_pool *p)
{
    p->next[0] = p->prev[0] = 0;
    p->n_free = 0;
    for (int32_t b = 1; b < p->n_blocks; b++) {
        p->refs[b] = 0;
        link_after(p, p->prev[0], b);
    }
}

bool bg_kv_take(bg_kv_pool *p, int32_t n, int32_t *blocks)
{
    if (n > p->n_free) return false;
    for (int32_t i = 0; i < n; i++) {
        blocks[i] = p->next[0];
        unlink_free(p, blocks[i]);
        p->refs[blocks[i]] = 1;
    }
    return true;
}

void bg_kv_hold(bg_kv_pool *p, int32_t block)
{
    if (p->refs[block]++ == 0) unlink_free(p, block);
}

void bg_kv_drop(bg_kv_pool *p, int32_t block, bool keep)
{
    if (--p->refs[block] == 0) link_after(p, keep ? p->prev[0] : 0, block);
}

int32_t bg_kv_n_free(const bg_kv_pool *p)
{
    return p->n_free;
}

int32_t bg_kv_n_blocks(const bg_kv_pool *p)
{
    return p->n_blocks;
}

int32_t bg_kv_refs(const bg_kv_pool *p, int32_t block)
{
    return p->refs[block];
}

bg_status bg_kv_check(const bg_kv_pool *p, bg_error *err)
{
    int32_t free_seen = 0, held = 0;
    if (p->refs[0]) return bg_fail(err, BG_INTERNAL, "KV scratch block is held");
    for (int32_t at = 0, b = p->next[0]; b != 0; at = b, b = p->next[b]) {
        if (b < 0 || b >= p->n_blocks || p->prev[b] != at || p->refs[b] != 0 ||
            ++free_seen >= p->n_blocks)
            return bg_fail(err, BG_INTERNAL, "KV free list is damaged after block %d", (int)at);
    }
    for (int32_t b = 1; b < p->n_blocks; b++) {
        if (p->refs[b] < 0)
            return bg_fail(err, BG_INTERNAL, "KV block %d has %d references", (int)b,
                           (int)p->refs[b]);
        held += p->refs[b] > 0;
    }
    if (free_seen != p->n_free || free_seen + held + 1 != p->n_blocks)
        return bg_fail(err, BG_INTERNAL, "KV blocks: %d free (counted %d), %d held, of %d",
                       (int)p->n_free, (int)free_seen, (int)held, (int)p->n_blocks);
    return BG_OK;
}
