/* base/hash.h - XXH3 over bytes, whole or streamed. Not cryptographic: guards against accidents. */
#ifndef BG_BASE_HASH_H
#define BG_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t bg_hash64(const void *data, size_t n, uint64_t seed);

/* A running hash. hash(a then b) equals hash of their concatenation. */
typedef struct bg_hasher bg_hasher;
bg_hasher *bg_hasher_new(void); /* NULL: out of memory */
void bg_hasher_free(bg_hasher *h);
void bg_hasher_reset(bg_hasher *h);
void bg_hasher_copy(bg_hasher *to, const bg_hasher *from); /* its state */
void bg_hasher_add(bg_hasher *h, const void *data, size_t n);
uint64_t bg_hasher_value(const bg_hasher *h); /* of all so far; more may follow */

/* 16 lower-case hex digits and a NUL into out[17]. */
void bg_hex64(uint64_t v, char out[17]);

#endif
