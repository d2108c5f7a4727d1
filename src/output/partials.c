#include "output/partials.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

typedef struct part {
    int64_t record;
    int choice;
    int n, cap;
    int32_t *tokens; /* while replaying; NULL in a run: there the hash stands for them */
    uint64_t hash;   /* of tokens[0..n) */
} part;

struct bg_partials {
    part *p; /* sorted */
    size_t n, cap;
    bg_partial *list; /* what was recovered, with its tokens; lives on when its records are done */
    int n_list;
};

bg_partials *bg_partials_new(void)
{
    return calloc(1, sizeof(bg_partials));
}

void bg_partials_free(bg_partials *s)
{
    if (!s) return;
    for (size_t i = 0; i < s->n; i++)
        free(s->p[i].tokens);
    for (int i = 0; i < s->n_list; i++)
        free(s->list[i].tokens);
    free(s->p);
    free(s->list);
    free(s);
}

static int order(const part *p, int64_t record, int choice)
{
    if (p->record != record) return p->record < record ? -1 : 1;
    return p->choice < choice ? -1 : p->choice > choice;
}

/* The part, made if it is not there. NULL: no memory. */
static part *part_of(bg_partials *s, int64_t record, int choice)
{
    size_t lo = 0, hi = s->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (order(&s->p[mid], record, choice) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo < s->n && order(&s->p[lo], record, choice) == 0) return &s->p[lo];
    if (s->n == s->cap) {
        size_t cap = s->cap ? s->cap * 2 : 64;
        part *p = realloc(s->p, cap * sizeof *p);
        if (!p) return NULL;
        s->p = p;
        s->cap = cap;
    }
    memmove(s->p + lo + 1, s->p + lo, (s->n - lo) * sizeof *s->p);
    s->n++;
    s->p[lo] = (part){.record = record, .choice = choice};
    return &s->p[lo];
}

static uint64_t hash_of(const int32_t *tokens, int n)
{
    return bg_hash64(tokens, (size_t)n * sizeof *tokens, 0);
}

bool bg_partials_gain(bg_partials *s, const bg_partial *list, int n, const bg_ranges *done,
                      bg_buf *out, bool *any)
{
    *any = false;
    for (int i = 0; i < n; i++) {
        const bg_partial *g = &list[i];
        if (g->n_tokens <= 0 || bg_ranges_has(done, g->record)) continue;
        part *p = part_of(s, g->record, g->choice);
        if (!p) return false;
        bool same = p->n <= g->n_tokens && (p->n == 0 || hash_of(g->tokens, p->n) == p->hash);
        int from = same ? p->n : 0;
        if (same && p->n == g->n_tokens) continue;
        bg_buf_printf(out, "%s{\"record\":%lld,\"choice\":%d,\"from\":%d,\"tokens\":[",
                      *any ? "," : "", (long long)g->record, g->choice, from);
        for (int k = from; k < g->n_tokens; k++)
            bg_buf_printf(out, k > from ? ",%d" : "%d", g->tokens[k]);
        bg_buf_str(out, "]}");
        p->n = g->n_tokens;
        p->hash = hash_of(g->tokens, g->n_tokens);
        *any = true;
    }
    return !out->failed;
}

static bool whole(const json_t *v, int64_t max, int64_t *out)
{
    *out = json_integer_value(v);
    return json_is_integer(v) && *out >= 0 && *out <= max;
}

static bool replay_one(bg_partials *s, const json_t *e, bool *nomem)
{
    const json_t *tokens = json_object_get(e, "tokens");
    int64_t record, choice, from, t;
    size_t n_new = json_array_size(tokens);
    if (!json_is_array(tokens) || !whole(json_object_get(e, "record"), INT64_MAX - 1, &record) ||
        !whole(json_object_get(e, "choice"), INT_MAX, &choice) ||
        !whole(json_object_get(e, "from"), INT_MAX, &from) || n_new > (size_t)(INT_MAX - from))
        return false;
    part *p = part_of(s, record, (int)choice);
    if (!p) {
        *nomem = true;
        return false;
    }
    if (from > p->n) return false;
    int n = (int)from + (int)n_new;
    if (n > p->cap) {
        int cap = n < INT_MAX / 2 ? n * 2 : n;
        int32_t *q = realloc(p->tokens, (size_t)cap * sizeof *q);
        if (!q) {
            *nomem = true;
            return false;
        }
        p->tokens = q;
        p->cap = cap;
    }
    for (size_t i = 0; i < n_new; i++) {
        if (!whole(json_array_get(tokens, i), INT32_MAX, &t)) return false;
        p->tokens[(size_t)from + i] = (int32_t)t;
    }
    p->n = n;
    p->hash = hash_of(p->tokens, n);
    return true;
}

bool bg_partials_replay(bg_partials *s, const json_t *list, bool *nomem)
{
    *nomem = false;
    if (!json_is_array(list)) return false;
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!replay_one(s, json_array_get(list, i), nomem)) return false;
    return true;
}

void bg_partials_drop(bg_partials *s, const bg_ranges *done)
{
    size_t kept = 0;
    for (size_t i = 0; i < s->n; i++) {
        if (bg_ranges_has(done, s->p[i].record))
            free(s->p[i].tokens);
        else
            s->p[kept++] = s->p[i];
    }
    s->n = kept;
}

bool bg_partials_list(bg_partials *s, bg_partial **list, int *n)
{
    s->list = calloc(s->n + 1, sizeof *s->list);
    if (!s->list) return false;
    for (size_t i = 0; i < s->n && s->n_list < INT_MAX; i++) {
        part *p = &s->p[i];
        if (!p->n) continue;
        s->list[s->n_list++] = (bg_partial){p->record, p->choice, p->tokens, p->n};
        p->tokens = NULL;
        p->cap = 0;
    }
    *list = s->list;
    *n = s->n_list;
    return true;
}
