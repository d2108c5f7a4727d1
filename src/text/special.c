#include "text/special.h"

#include <stdlib.h>
#include <string.h>

#include "text/vocab.h"

typedef struct node {
    int32_t child, sibling; /* index, or 0 */
    int32_t id;             /* of the token that ends here, or -1 */
    unsigned char byte;
} node;

/* A trie over the token texts. Node 0 is unused; the root's children are in `first`. */
struct bg_special {
    node *nodes;
    int32_t n, cap;
    int32_t first[256];
};

static bool is_special(const bg_vocab *v, int32_t id)
{
    return v->kind[id] == BG_TOKEN_USER || v->flags[id] & BG_TOKEN_TRUSTED_ONLY;
}

static int32_t new_node(bg_special *s, unsigned char byte)
{
    s->nodes[s->n] = (node){.byte = byte, .id = -1};
    return s->n++;
}

static void insert(bg_special *s, bg_str t, int32_t id)
{
    int32_t *link = &s->first[(unsigned char)t.p[0]], at = 0;
    for (size_t i = 0; i < t.n; i++) {
        const unsigned char c = (unsigned char)t.p[i];
        while (*link && s->nodes[*link].byte != c)
            link = &s->nodes[*link].sibling;
        if (!*link) *link = new_node(s, c);
        at = *link;
        link = &s->nodes[at].child;
    }
    s->nodes[at].id = id;
}

bg_status bg_special_new(bg_special **special, const bg_vocab *v, bg_error *err)
{
    *special = NULL;
    size_t bytes = 1;
    for (int32_t i = 0; i < v->n; i++)
        if (is_special(v, i)) bytes += bg_arena_get(&v->text, i).n;
    if (bytes > INT32_MAX)
        return bg_fail(err, BG_FORMAT, "vocabulary: %zu bytes of special tokens, too many", bytes);
    bg_special *s = calloc(1, sizeof *s);
    node *nodes = calloc(bytes, sizeof *nodes);
    if (!s || !nodes) {
        free(s);
        free(nodes);
        return bg_fail(err, BG_NOMEM, "vocabulary: out of memory");
    }
    s->nodes = nodes;
    s->n = 1;
    for (int32_t i = 0; i < v->n; i++)
        if (is_special(v, i)) insert(s, bg_arena_get(&v->text, i), i);
    *special = s;
    return BG_OK;
}

void bg_special_free(bg_special *s)
{
    if (!s) return;
    free(s->nodes);
    free(s);
}

typedef struct hit {
    size_t at, n;
    int32_t id;
} hit;

typedef struct hits {
    hit *v;
    size_t n, cap;
} hits;

static bool add_hit(hits *h, hit x)
{
    if (h->n == h->cap) {
        const size_t cap = h->cap ? h->cap * 2 : 32;
        hit *v = realloc(h->v, cap * sizeof *v);
        if (!v) return false;
        h->v = v;
        h->cap = cap;
    }
    h->v[h->n++] = x;
    return true;
}

/* Every place in text where a special token is spelled that may be one there. */
static bool find_hits(const bg_special *s, const bg_vocab *v, const char *text,
                      const bg_segment *segs, size_t n_segs, hits *out)
{
    size_t n = 0;
    for (size_t i = 0; i < n_segs; i++)
        n += segs[i].n;
    size_t seg = 0, seg_end = n_segs ? segs[0].n : 0; /* the segment of byte i */
    size_t trusted_seg = 0, trusted_end = 0; /* how far trusted text reaches without a gap */
    for (size_t i = 0; i < n; i++) {
        while (i >= seg_end)
            seg_end += segs[++seg].n;
        int32_t at = s->first[(unsigned char)text[i]];
        if (!at) continue;
        if (segs[seg].parse_special && trusted_end <= i) {
            trusted_end = seg_end;
            for (trusted_seg = seg + 1; trusted_seg < n_segs && segs[trusted_seg].parse_special;
                 trusted_seg++)
                trusted_end += segs[trusted_seg].n;
        }
        for (size_t j = i + 1; at; j++) {
            const int32_t id = s->nodes[at].id;
            if (id >= 0 && (!(v->flags[id] & BG_TOKEN_TRUSTED_ONLY) || j <= trusted_end) &&
                !add_hit(out, (hit){i, j - i, id}))
                return false;
            if (j == n) break;
            at = s->nodes[at].child;
            while (at && s->nodes[at].byte != (unsigned char)text[j])
                at = s->nodes[at].sibling;
        }
    }
    return true;
}

static int by_precedence(const void *a, const void *b)
{
    const hit *x = a, *y = b;
    if (x->n != y->n) return x->n > y->n ? -1 : 1;
    if (x->id != y->id) return x->id < y->id ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static int by_place(const void *a, const void *b)
{
    const hit *x = a, *y = b;
    return x->at < y->at ? -1 : x->at > y->at;
}

static bool is_space(char c) /* of the C locale */
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Takes the hits that do not overlap an earlier taken one, in order of precedence; taken[i] is set
 * for every byte that belongs to a token or is dropped beside one. Returns how many were kept. */
static size_t choose(const bg_vocab *v, const char *text, size_t n, hits *h, unsigned char *taken)
{
    size_t kept = 0;
    qsort(h->v, h->n, sizeof *h->v, by_precedence);
    for (size_t i = 0; i < h->n; i++) {
        const hit x = h->v[i];
        if (memchr(taken + x.at, 1, x.n)) continue;
        memset(taken + x.at, 1, x.n);
        if (v->flags[x.id] & BG_TOKEN_LSTRIP)
            for (size_t j = x.at; j > 0 && !taken[j - 1] && is_space(text[j - 1]); j--)
                taken[j - 1] = 1;
        if (v->flags[x.id] & BG_TOKEN_RSTRIP)
            for (size_t j = x.at + x.n; j < n && !taken[j] && is_space(text[j]); j++)
                taken[j] = 1;
        h->v[kept++] = x;
    }
    qsort(h->v, kept, sizeof *h->v, by_place);
    return kept;
}

bg_status bg_special_split(const bg_special *s, const bg_vocab *v, const char *text,
                           const bg_segment *segs, size_t n_segs, bg_fragments *frags,
                           bg_error *err)
{
    bg_status st = BG_OK;
    size_t n = 0;
    for (size_t i = 0; i < n_segs; i++)
        n += segs[i].n;
    *frags = (bg_fragments){0};
    hits h = {0};
    unsigned char *taken = NULL;
    if (!find_hits(s, v, text, segs, n_segs, &h)) goto nomem;
    if (h.n > 0) {
        taken = calloc(n, 1);
        if (!taken) goto nomem;
    }
    const size_t kept = h.n > 0 ? choose(v, text, n, &h, taken) : 0;
    frags->v = malloc((2 * kept + 1) * sizeof *frags->v);
    if (!frags->v) goto nomem;
    size_t at = 0;
    for (size_t i = 0; i <= kept; i++) {
        size_t end = i < kept ? h.v[i].at : n;
        /* What is taken between two tokens was dropped, at either side of the text that is left. */
        if (taken) {
            while (at < end && taken[at])
                at++;
            while (end > at && taken[end - 1])
                end--;
        }
        if (end > at) frags->v[frags->n++] = (bg_fragment){at, end - at, -1};
        if (i == kept) break;
        frags->v[frags->n++] = (bg_fragment){h.v[i].at, h.v[i].n, h.v[i].id};
        at = h.v[i].at + h.v[i].n;
    }
    goto out;
nomem:
    st = bg_fail(err, BG_NOMEM, "tokenising %zu bytes: out of memory", n);
out:
    free(h.v);
    free(taken);
    return st;
}
