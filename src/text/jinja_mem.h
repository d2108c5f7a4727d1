/* text/jinja_mem.h - the memory of one template or of one render: taken piece by piece, given back
 * all at once, so that no error path can leak. */
#ifndef BG_TEXT_JINJA_MEM_H
#define BG_TEXT_JINJA_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct jn_chunk jn_chunk;

typedef struct jn_arena { /* starts as {0} with limit set */
    jn_chunk *chunks;
    char *at, *end;     /* the free part of the newest chunk */
    size_t used, limit; /* bytes taken from the system; at most limit */
    bool over;          /* the limit said no, not the system */
    int64_t fail_at;    /* for tests: this allocation (counted from 1) and all later ones fail */
    int64_t count;
} jn_arena;

/* n zeroed bytes, aligned for anything. NULL: no memory, or over the limit. */
void *jn_arena_alloc(jn_arena *a, size_t n);
/* Makes the block p of n bytes larger: in place if it is the newest, else by copying it. */
void *jn_arena_grow(jn_arena *a, void *p, size_t n, size_t new_n);
void jn_arena_release(jn_arena *a);

#endif
