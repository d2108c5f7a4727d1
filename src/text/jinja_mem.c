#include "text/jinja_mem.h"

#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

struct jn_chunk {
    jn_chunk *next;
    alignas(max_align_t) char data[];
};

enum { ALIGN = 16, FIRST_CHUNK = 16 << 10, LARGEST_CHUNK = 1 << 20 };

static size_t align_up(size_t n)
{
    return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1);
}

static void *no(jn_arena *a, bool over)
{
    a->over = over;
    return NULL;
}

static bool new_chunk(jn_arena *a, size_t need)
{
    size_t size = a->used < FIRST_CHUNK ? FIRST_CHUNK : a->used;
    if (size > LARGEST_CHUNK) size = LARGEST_CHUNK;
    if (size < need) size = need;
    if (size > a->limit - a->used) size = need;
    if (size > a->limit - a->used) return no(a, true) != NULL;
    jn_chunk *c = malloc(sizeof *c + size);
    if (!c) return no(a, false) != NULL;
    c->next = a->chunks;
    a->chunks = c;
    a->used += size;
    a->at = c->data;
    a->end = c->data + size;
    return true;
}

static void *take(jn_arena *a, size_t n)
{
    a->count++;
    if (a->fail_at && a->count >= a->fail_at) return no(a, false);
    if (n > a->limit) return no(a, true);
    n = align_up(n ? n : 1);
    if (n > (size_t)(a->end - a->at) && !new_chunk(a, n)) return NULL;
    char *p = a->at;
    a->at += n;
    return p;
}

void *jn_arena_alloc(jn_arena *a, size_t n)
{
    void *p = take(a, n);
    if (p) memset(p, 0, n);
    return p;
}

void *jn_arena_grow(jn_arena *a, void *p, size_t n, size_t new_n)
{
    if (p && (char *)p + align_up(n) == a->at && !a->fail_at && new_n <= a->limit) {
        size_t more = align_up(new_n) - align_up(n);
        if (more <= (size_t)(a->end - a->at)) {
            a->at += more;
            return p;
        }
    }
    void *q = take(a, new_n);
    if (q && p && n) memcpy(q, p, n);
    return q;
}

void jn_arena_release(jn_arena *a)
{
    while (a->chunks) {
        jn_chunk *c = a->chunks;
        a->chunks = c->next;
        free(c);
    }
    a->at = a->end = NULL;
    a->used = 0;
}
