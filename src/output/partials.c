#include "output/partials.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct part {
    int64_t record;
    int choice;
    int n, cap;
    int32_t *tokens;
    bg_probs *probs; /* as many, or NULL */
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
    bg_partials_clear(s);
    for (int i = 0; i < s->n_list; i++) {
        free(s->list[i].tokens);
        free(s->list[i].probs);
    }
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

static void part_free(part *p)
{
    free(p->tokens);
    free(p->probs);
}

static bool make_room(part *p, int n, bool probs)
{
    if (n > p->cap || (probs && !p->probs)) {
        int cap = n <= p->cap ? p->cap : n < INT_MAX / 2 ? n * 2 : n;
        int32_t *q = realloc(p->tokens, (size_t)cap * sizeof *q);
        if (!q) return false;
        p->tokens = q;
        if (probs || p->probs) {
            bool fresh = !p->probs;
            bg_probs *r = realloc(p->probs, (size_t)cap * sizeof *r);
            if (!r) return false;
            if (fresh) memset(r, 0, (size_t)cap * sizeof *r);
            p->probs = r;
        }
        p->cap = cap;
    }
    return true;
}

/* Nine digits give a float32 back exactly; JSON has no infinity. */
static void print_float(bg_buf *out, float f)
{
    if (f == 0 && signbit(f))
        bg_buf_str(out, "-0.0"); /* as an integer it would lose its sign */
    else if (isfinite(f))
        bg_buf_printf(out, "%.9g", (double)f);
    else
        bg_buf_str(out, "null");
}

static void print_probs(const bg_probs *b, bg_buf *out)
{
    bg_buf_char(out, '[');
    print_float(out, b->logprob);
    for (int k = 0; k < b->n_top; k++) {
        bg_buf_printf(out, ",%d,", (int)b->top[k].token);
        print_float(out, b->top[k].logprob);
    }
    bg_buf_char(out, ']');
}

static void print_part(const part *p, int from, bool first, bg_buf *out)
{
    bg_buf_printf(out, "%s{\"record\":%lld,\"choice\":%d,\"from\":%d,\"tokens\":[",
                  first ? "" : ",", (long long)p->record, p->choice, from);
    for (int k = from; k < p->n; k++)
        bg_buf_printf(out, k > from ? ",%d" : "%d", p->tokens[k]);
    for (int k = from; p->probs && k < p->n; k++) {
        bg_buf_str(out, k > from ? "," : "],\"logprobs\":[");
        print_probs(&p->probs[k], out);
    }
    bg_buf_str(out, "]}");
}

bool bg_partials_gain(bg_partials *s, const bg_partial *list, int n, const bg_ranges *done,
                      bg_buf *out, bool *any)
{
    *any = false;
    for (int i = 0; i < n; i++) {
        const bg_partial *g = &list[i];
        if (g->n_tokens <= 0 || bg_ranges_has(done, g->record)) continue;
        part *p = part_of(s, g->record, g->choice);
        if (!p || !make_room(p, g->n_tokens, g->probs != NULL)) return false;
        bool same = p->n <= g->n_tokens &&
                    (p->n == 0 || !memcmp(g->tokens, p->tokens, (size_t)p->n * sizeof *p->tokens));
        int from = same ? p->n : 0;
        if (same && p->n == g->n_tokens) continue;
        memcpy(p->tokens + from, g->tokens + from,
               (size_t)(g->n_tokens - from) * sizeof *p->tokens);
        if (g->probs)
            memcpy(p->probs + from, g->probs + from,
                   (size_t)(g->n_tokens - from) * sizeof *p->probs);
        p->n = g->n_tokens;
        print_part(p, from, !*any, out);
        *any = true;
    }
    return !out->failed;
}

static bool whole(const json_t *v, int64_t max, int64_t *out)
{
    *out = json_integer_value(v);
    return json_is_integer(v) && *out >= 0 && *out <= max;
}

static bool read_float(const json_t *v, float *out)
{
    *out = json_is_null(v) ? -INFINITY : (float)json_number_value(v);
    return json_is_null(v) || (json_is_number(v) && isfinite(*out));
}

/* [logprob, token, its logprob, ...] */
static bool read_probs(const json_t *list, bg_probs *b)
{
    size_t n = json_array_size(list);
    if (n % 2 == 0 || n > 1 + 2 * BG_PROBS_TOP) return false;
    if (!read_float(json_array_get(list, 0), &b->logprob)) return false;
    b->n_top = (int32_t)(n / 2);
    for (size_t k = 0; k < n / 2; k++) {
        int64_t t;
        if (!whole(json_array_get(list, 1 + 2 * k), INT32_MAX, &t) ||
            !read_float(json_array_get(list, 2 + 2 * k), &b->top[k].logprob))
            return false;
        b->top[k].token = (int32_t)t;
    }
    return true;
}

static bool replay_one(bg_partials *s, const json_t *e, bool *nomem)
{
    const json_t *tokens = json_object_get(e, "tokens"), *probs = json_object_get(e, "logprobs");
    int64_t record, choice, from, t;
    size_t n_new = json_array_size(tokens);
    if (!json_is_array(tokens) || !whole(json_object_get(e, "record"), INT64_MAX - 1, &record) ||
        !whole(json_object_get(e, "choice"), INT_MAX, &choice) ||
        !whole(json_object_get(e, "from"), INT_MAX, &from) || n_new > (size_t)(INT_MAX - from) ||
        (probs && json_array_size(probs) != n_new))
        return false;
    part *p = part_of(s, record, (int)choice);
    if (!p) {
        *nomem = true;
        return false;
    }
    if (from > p->n) return false;
    int n = (int)from + (int)n_new;
    if (!make_room(p, n, probs != NULL)) {
        *nomem = true;
        return false;
    }
    for (size_t i = 0; i < n_new; i++) {
        if (!whole(json_array_get(tokens, i), INT32_MAX, &t)) return false;
        p->tokens[(size_t)from + i] = (int32_t)t;
        if (probs && !read_probs(json_array_get(probs, i), &p->probs[(size_t)from + i]))
            return false;
    }
    p->n = n;
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

bool bg_partials_print(const bg_partials *s, bg_buf *out, bool *any)
{
    *any = false;
    for (size_t i = 0; i < s->n; i++) {
        if (!s->p[i].n) continue;
        print_part(&s->p[i], 0, !*any, out);
        *any = true;
    }
    return !out->failed;
}

void bg_partials_clear(bg_partials *s)
{
    for (size_t i = 0; i < s->n; i++)
        part_free(&s->p[i]);
    s->n = 0;
}

void bg_partials_drop(bg_partials *s, const bg_ranges *done)
{
    size_t kept = 0;
    for (size_t i = 0; i < s->n; i++) {
        if (bg_ranges_has(done, s->p[i].record))
            part_free(&s->p[i]);
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
        const part *p = &s->p[i];
        if (!p->n) continue;
        bg_partial *q = &s->list[s->n_list++];
        *q = (bg_partial){.record = p->record, .choice = p->choice, .n_tokens = p->n};
        q->tokens = malloc((size_t)p->n * sizeof *q->tokens);
        if (p->probs) q->probs = malloc((size_t)p->n * sizeof *q->probs);
        if (!q->tokens || !q->probs != !p->probs) return false;
        memcpy(q->tokens, p->tokens, (size_t)p->n * sizeof *q->tokens);
        if (p->probs) memcpy(q->probs, p->probs, (size_t)p->n * sizeof *q->probs);
    }
    *list = s->list;
    *n = s->n_list;
    return true;
}
