/* engine/kv_pool.h - which KV blocks are free, and how many sequences hold each.
 *
 * A block is block_tokens consecutive positions of one sequence, in every layer of one rank. This
 * module deals in block numbers and never touches device memory.
 *
 * A free block keeps what was computed into it until it is handed out again; a block dropped with
 * `keep` (its content is in the prefix cache) is handed out as late as possible, least recently
 * dropped first, and bg_kv_hold() can bring it back before that.
 *
 * Block 0 is scratch and never handed out. Always: n_free + n_held + 1 == n_blocks. bg_kv_check()
 * verifies that; every test ends with it.
 * Threads: one owner, the scheduler. Nothing here locks. */
#ifndef BG_ENGINE_KV_POOL_H
#define BG_ENGINE_KV_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct bg_kv_pool bg_kv_pool;

/* Makes a pool of n_blocks, scratch included. *pool belongs to the caller, who ends it with
 * bg_kv_free(); it is NULL on failure. BG_ARG: n_blocks < 2. BG_NOMEM. */
bg_status bg_kv_new(bg_kv_pool **pool, int32_t n_blocks, bg_error *err);
void bg_kv_free(bg_kv_pool *pool);  /* NULL is allowed */
void bg_kv_reset(bg_kv_pool *pool); /* all blocks free, nothing kept */

/* Takes n blocks, all or none, each with one reference, into blocks[0..n). False, with nothing
 * taken, when fewer are free: that is the scheduler's signal to preempt, not an error. What a taken
 * block held is lost: the caller tells the prefix cache. */
bool bg_kv_take(bg_kv_pool *pool, int32_t n, int32_t *blocks);
/* One more reference to a block, which may be free. */
void bg_kv_hold(bg_kv_pool *pool, int32_t block);
/* One reference less. With the last one the block is free; keep: it is worth finding again. */
void bg_kv_drop(bg_kv_pool *pool, int32_t block, bool keep);

int32_t bg_kv_n_free(const bg_kv_pool *pool);
int32_t bg_kv_n_blocks(const bg_kv_pool *pool);
int32_t bg_kv_refs(const bg_kv_pool *pool, int32_t block);

/* Walks everything. BG_INTERNAL: what is wrong. */
bg_status bg_kv_check(const bg_kv_pool *pool, bg_error *err);

#endif
