#include "text/merge.h"

#include <stdlib.h>
#include <string.h>

/* Up to here an array scan beats the heap, and its cost a byte is bounded. */
enum { SHORT_WORD = 32 };

typedef struct bg_merge_job {
    uint32_t priority;
    int32_t left;   /* symbol index; ties go to the smaller, which is further left */
    uint32_t bytes; /* of the pair: another value by now means that one of the two has changed */
    int32_t id;
} job;

void bg_merger_release(bg_merger *m)
{
    free(m->sym);
    free(m->prev);
    free(m->next);
    free(m->heap);
    *m = (bg_merger){0};
}

bool bg_merger_reserve(bg_merger *m, size_t n)
{
    if (n <= m->cap) return true;
    if (n > INT32_MAX) return false;
    const size_t cap = n < 64 ? 64 : n;
    bg_symbol *v = malloc(cap * sizeof *v);
    if (!v) return false;
    free(m->sym);
    m->sym = v;
    m->cap = (uint32_t)cap;
    return true;
}

bool bg_merger_grow(bg_merger *m)
{
    if (m->n < m->cap) return true;
    if (m->cap > INT32_MAX / 2) return false;
    const uint32_t cap = m->cap ? m->cap * 2 : 64;
    bg_symbol *v = realloc(m->sym, cap * sizeof *v);
    if (!v) return false;
    m->sym = v;
    m->cap = cap;
    return true;
}

static void run_short(bg_merger *m, bg_merge_pair *pair, const void *ctx)
{
    bg_symbol *s = m->sym;
    uint32_t n = m->n, priority[SHORT_WORD];
    int32_t id[SHORT_WORD];
    for (uint32_t i = 0; i + 1 < n; i++)
        priority[i] = pair(ctx, &s[i], &s[i + 1], &id[i]);
    m->steps += n;
    while (n > 1) {
        uint32_t best = 0;
        for (uint32_t i = 1; i + 1 < n; i++)
            if (priority[i] < priority[best]) best = i;
        if (priority[best] == BG_MERGE_NEVER) break;
        s[best].n += s[best + 1].n;
        s[best].id = id[best];
        n--;
        for (uint32_t i = best + 1; i < n; i++)
            s[i] = s[i + 1];
        for (uint32_t i = best + 1; i + 1 < n; i++) {
            priority[i] = priority[i + 1];
            id[i] = id[i + 1];
        }
        if (best > 0) priority[best - 1] = pair(ctx, &s[best - 1], &s[best], &id[best - 1]);
        if (best + 1 < n) priority[best] = pair(ctx, &s[best], &s[best + 1], &id[best]);
        m->steps += 2;
    }
    m->n = n;
}

static bool before(const job *a, const job *b)
{
    return a->priority != b->priority ? a->priority < b->priority : a->left < b->left;
}

static bool heap_push(bg_merger *m, job x)
{
    if (m->heap_n == m->heap_cap) {
        if (m->heap_cap > UINT32_MAX / 2) return false;
        const uint32_t cap = m->heap_cap ? m->heap_cap * 2 : 256;
        job *v = realloc(m->heap, cap * sizeof *v);
        if (!v) return false;
        m->heap = v;
        m->heap_cap = cap;
    }
    uint32_t i = m->heap_n++;
    for (; i > 0 && before(&x, &m->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        m->heap[i] = m->heap[(i - 1) / 2];
        m->steps++;
    }
    m->heap[i] = x;
    return true;
}

static job heap_pop(bg_merger *m)
{
    const job top = m->heap[0], last = m->heap[--m->heap_n];
    uint32_t i = 0;
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= m->heap_n) break;
        if (c + 1 < m->heap_n && before(&m->heap[c + 1], &m->heap[c])) c++;
        if (!before(&m->heap[c], &last)) break;
        m->heap[i] = m->heap[c];
        i = c;
        m->steps++;
    }
    m->heap[i] = last;
    return top;
}

static bool offer(bg_merger *m, int32_t left, bg_merge_pair *pair, const void *ctx)
{
    const int32_t right = left < 0 ? -1 : m->next[left];
    if (right < 0) return true;
    job x = {.left = left, .bytes = m->sym[left].n + m->sym[right].n};
    x.priority = pair(ctx, &m->sym[left], &m->sym[right], &x.id);
    m->steps++;
    return x.priority == BG_MERGE_NEVER || heap_push(m, x);
}

static bool reserve_links(bg_merger *m)
{
    if (m->link_cap >= m->n) return true;
    free(m->prev);
    free(m->next);
    m->prev = malloc(m->cap * sizeof *m->prev);
    m->next = malloc(m->cap * sizeof *m->next);
    m->link_cap = m->prev && m->next ? m->cap : 0;
    return m->link_cap > 0;
}

static bool run_long(bg_merger *m, bg_merge_pair *pair, const void *ctx)
{
    const int32_t n = (int32_t)m->n;
    bg_symbol *s = m->sym;
    if (!reserve_links(m)) return false;
    m->heap_n = 0;
    for (int32_t i = 0; i < n; i++) {
        m->prev[i] = i - 1;
        m->next[i] = i + 1 < n ? i + 1 : -1;
    }
    for (int32_t i = 0; i < n; i++)
        if (!offer(m, i, pair, ctx)) return false;
    while (m->heap_n > 0) {
        const job x = heap_pop(m);
        const int32_t l = x.left, r = m->next[l];
        /* A symbol only grows, to the right, until it is merged away (n = 0): the same start and
         * the same bytes are the same pair. */
        if (s[l].n == 0 || r < 0 || s[l].n + s[r].n != x.bytes) continue;
        s[l].n = x.bytes;
        s[l].id = x.id;
        s[r].n = 0;
        m->next[l] = m->next[r];
        if (m->next[r] >= 0) m->prev[m->next[r]] = l;
        if (!offer(m, m->prev[l], pair, ctx) || !offer(m, l, pair, ctx)) return false;
    }
    uint32_t kept = 0;
    for (int32_t i = 0; i >= 0; i = m->next[i])
        s[kept++] = s[i];
    m->n = kept;
    return true;
}

bool bg_merger_run(bg_merger *m, bg_merge_pair *pair, const void *ctx)
{
    if (m->n > SHORT_WORD) return run_long(m, pair, ctx);
    run_short(m, pair, ctx);
    return true;
}
