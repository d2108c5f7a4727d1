#include "base/hash.h"

#include <stdio.h>

#include <xxhash.h>

uint64_t bg_hash64(const void *data, size_t n, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, n, seed);
}

bg_hasher *bg_hasher_new(void)
{
    XXH3_state_t *s = XXH3_createState();
    if (s) XXH3_64bits_reset(s);
    return (bg_hasher *)s;
}

void bg_hasher_free(bg_hasher *h)
{
    XXH3_freeState((XXH3_state_t *)h);
}

void bg_hasher_reset(bg_hasher *h)
{
    XXH3_64bits_reset((XXH3_state_t *)h);
}

void bg_hasher_copy(bg_hasher *to, const bg_hasher *from)
{
    XXH3_copyState((XXH3_state_t *)to, (const XXH3_state_t *)from);
}

void bg_hasher_add(bg_hasher *h, const void *data, size_t n)
{
    if (n) XXH3_64bits_update((XXH3_state_t *)h, data, n);
}

uint64_t bg_hasher_value(const bg_hasher *h)
{
    return XXH3_64bits_digest((const XXH3_state_t *)h);
}

void bg_hex64(uint64_t v, char out[17])
{
    snprintf(out, 17, "%016llx", (unsigned long long)v);
}
