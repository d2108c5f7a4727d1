/* engine/prefix.h - finds the KV block that already holds given tokens after a given prefix.
 *
 * A full block is known by its chain: its tokens and all tokens before them. Each block in the
 * cache has a serial number never used again, and names its parent's; the key is XXH3 of the
 * block's tokens seeded with the parent's serial. A find compares serial and tokens themselves, so
 * by induction a hit has exactly the wanted tokens before it too: a hash collision costs time,
 * never a wrong text.
 *
 * A block stays findable, held or free, until bg_prefix_forget(): the caller says so when the pool
 * hands the block out for something else. Descendants of a forgotten block cannot be found any more
 * (their parent's serial is gone); the pool's order hands out descendants first, so this is rare.
 * Threads: one owner, the scheduler. */
#ifndef BG_ENGINE_PREFIX_H
#define BG_ENGINE_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct bg_prefix bg_prefix;

enum { BG_PREFIX_ROOT = 0 }; /* the serial before a sequence's first block */

/* *p is the caller's; NULL on failure. BG_NOMEM. */
bg_status bg_prefix_new(bg_prefix **p, int32_t n_blocks, int block_tokens, bg_error *err);
void bg_prefix_free(bg_prefix *p);  /* NULL is allowed */
void bg_prefix_reset(bg_prefix *p); /* forgets all blocks */

/* The block with these block_tokens tokens after parent, and its serial; -1: there is none. */
int32_t bg_prefix_find(const bg_prefix *p, uint64_t parent, const int32_t *tokens,
                       uint64_t *serial);
/* Adds a block, which is not in the cache, and returns its serial. If another block has the same
 * content, that one stays and its serial is returned. */
uint64_t bg_prefix_add(bg_prefix *p, uint64_t parent, const int32_t *tokens, int32_t block);
bool bg_prefix_has(const bg_prefix *p, int32_t block);
void bg_prefix_forget(bg_prefix *p, int32_t block); /* nothing happens if it is not there */

#endif
