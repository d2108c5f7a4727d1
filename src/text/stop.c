/* An Aho-Corasick automaton. Its state is the longest end of the text so far that begins a stop
 * string; each byte costs a constant number of steps on average, whatever the strings look like.
 *
 * Offsets below count bytes from the start of the text. held[head..) are the bytes from `out_at`
 * on: those not given out yet. */
#include "text/stop.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct node {
    int32_t child, sibling; /* 0: none; the root is node 0 and nobody's child */
    int32_t fail;           /* the state of the longest proper end of this one's string */
    uint32_t depth;         /* its length */
    uint32_t open;          /* length of the longest end of it that could grow into a stop string */
    int32_t found;          /* the longest stop string that is an end of it: its index, or -1 */
    uint32_t found_bytes;
    unsigned char byte;
} node;

struct bg_stop {
    node *nodes;
    int32_t n, state;
    bool include;

    bg_buf held;
    size_t head;
    uint64_t at, out_at;

    int best; /* the best occurrence so far, or -1 */
    uint64_t best_at;
    uint32_t best_bytes;
    bool done;
};

static int32_t step(const bg_stop *s, int32_t from, unsigned char c)
{
    int32_t i = s->nodes[from].child;
    while (i && s->nodes[i].byte != c)
        i = s->nodes[i].sibling;
    return i;
}

static int32_t next_state(const bg_stop *s, int32_t state, unsigned char c)
{
    for (;;) {
        const int32_t i = step(s, state, c);
        if (i || state == 0) return i;
        state = s->nodes[state].fail;
    }
}

static void insert(bg_stop *s, const char *text, int index)
{
    int32_t at = 0;
    for (const char *p = text; *p; p++) {
        int32_t i = step(s, at, (unsigned char)*p);
        if (!i) {
            i = s->n++;
            s->nodes[i] = (node){.byte = (unsigned char)*p,
                                 .sibling = s->nodes[at].child,
                                 .depth = s->nodes[at].depth + 1,
                                 .found = -1};
            s->nodes[at].child = i;
        }
        at = i;
    }
    if (s->nodes[at].found >= 0) return; /* given twice: the first is reported */
    s->nodes[at].found = index;
    s->nodes[at].found_bytes = s->nodes[at].depth;
}

/* Sets fail, open and found of all nodes, level by level. order has room for all of them. */
static void link_nodes(bg_stop *s, int32_t *order)
{
    int32_t n = 0;
    order[n++] = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t at = order[i];
        for (int32_t c = s->nodes[at].child; c; c = s->nodes[c].sibling) {
            node *x = &s->nodes[c];
            x->fail = at == 0 ? 0 : next_state(s, s->nodes[at].fail, x->byte);
            x->open = x->child ? x->depth : s->nodes[x->fail].open;
            if (x->found < 0) {
                x->found = s->nodes[x->fail].found;
                x->found_bytes = s->nodes[x->fail].found_bytes;
            }
            order[n++] = c;
        }
    }
}

bg_stop *bg_stop_new(const char *const *strings, size_t n, bool include)
{
    size_t bytes = 1;
    for (size_t i = 0; i < n; i++)
        bytes += strlen(strings[i]);
    bg_stop *s = bytes < INT32_MAX ? calloc(1, sizeof *s) : NULL;
    int32_t *order = malloc(bytes * sizeof *order);
    if (s) s->nodes = calloc(bytes, sizeof *s->nodes);
    if (!s || !order || !s->nodes) {
        free(order);
        bg_stop_free(s);
        return NULL;
    }
    s->n = 1;
    s->nodes[0].found = s->best = -1;
    s->include = include;
    for (size_t i = 0; i < n; i++)
        insert(s, strings[i], (int)i);
    link_nodes(s, order);
    free(order);
    return s;
}

void bg_stop_free(bg_stop *s)
{
    if (!s) return;
    free(s->nodes);
    bg_buf_release(&s->held);
    free(s);
}

static void give_out(bg_stop *s, uint64_t to, bg_buf *out)
{
    const size_t n = (size_t)(to - s->out_at);
    if (n == 0) return;
    bg_buf_add(out, s->held.data + s->head, n);
    s->out_at = to;
    s->head += n;
    if (s->head >= s->held.len - s->head) { /* moving costs no more than what was given out */
        memmove(s->held.data, s->held.data + s->head, s->held.len - s->head);
        s->held.len -= s->head;
        s->head = 0;
    }
}

static int end_at_best(bg_stop *s, bg_buf *out)
{
    s->done = true;
    give_out(s, s->best_at + (s->include ? s->best_bytes : 0), out);
    return s->best;
}

int bg_stop_add(bg_stop *s, const char *p, size_t n, bg_buf *out)
{
    if (s->done) return s->best;
    bg_buf_add(&s->held, p, n);
    if (s->held.failed) {
        out->failed = true;
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        s->state = next_state(s, s->state, (unsigned char)p[i]);
        s->at++;
        const node *x = &s->nodes[s->state];
        if (x->found >= 0) {
            const uint64_t start = s->at - x->found_bytes;
            /* One found later at the same place is longer. */
            if (s->best < 0 || start <= s->best_at) {
                s->best = x->found;
                s->best_at = start;
                s->best_bytes = x->found_bytes;
            }
        }
        /* What may still grow began at `at - open` at the earliest. */
        if (s->best >= 0 && (x->open == 0 || s->at - x->open > s->best_at))
            return end_at_best(s, out);
    }
    uint64_t sure = s->at - s->nodes[s->state].open;
    if (s->best >= 0 && s->best_at < sure) sure = s->best_at;
    give_out(s, sure, out);
    return -1;
}

int bg_stop_finish(bg_stop *s, bg_buf *out)
{
    if (s->done) return s->best;
    if (s->best >= 0) return end_at_best(s, out);
    s->done = true;
    give_out(s, s->at, out);
    return -1;
}
