#include "job/match.h"

#include <stdlib.h>
#include <string.h>

#include "job/feed.h"

typedef struct entry { /* a good record of the input */
    uint64_t key;
    int64_t record, line;
    int file;
    bool used;
} entry;

typedef struct table {
    const bg_job *job;
    entry *v; /* sorted by key, then record */
    size_t n, cap;
    bg_matched *counts;
} table;

static bool add(table *t, const bg_request *r)
{
    if (t->n == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 1024;
        entry *v = realloc(t->v, cap * sizeof *v);
        if (!v) return false;
        t->v = v;
        t->cap = cap;
    }
    t->v[t->n++] = (entry){.key = bg_result_key(r->id, r->content_hash),
                           .record = r->record,
                           .line = r->line,
                           .file = r->file};
    return true;
}

static int by_key(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return (x->record > y->record) - (x->record < y->record);
}

/* The first entry of this key that no result has taken yet. Equal records without an id pair in
 * order. */
static entry *find(table *t, uint64_t key)
{
    size_t lo = 0, hi = t->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (t->v[mid].key < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    while (lo < t->n && t->v[lo].key == key && t->v[lo].used)
        lo++;
    return lo < t->n && t->v[lo].key == key ? &t->v[lo] : NULL;
}

static bool keep(void *ctx, const bg_done *old, int64_t *record, int64_t *line,
                 const char **file_name)
{
    table *t = ctx;
    entry *e = old->failed || !old->key ? NULL : find(t, old->key);
    if (!e) {
        t->counts->dropped++;
        return false;
    }
    e->used = true;
    t->counts->kept++;
    t->counts->moved += e->record != *record;
    *record = e->record;
    *line = e->line;
    *file_name = t->job->inputs.n > 1 ? t->job->inputs.v[e->file] : NULL;
    return true;
}

bg_status bg_match_input(const bg_job *job, bg_writer *w, const char *dropped_path, bg_matched *n,
                         bg_error *err)
{
    *n = (bg_matched){0};
    table t = {.job = job, .counts = n};
    const bg_feed_config fc = {.job = job};
    bg_feed *f;
    bg_status st = bg_feed_open(&f, &fc, err);
    if (st) return st;
    for (;;) {
        bg_feed_item *item;
        st = bg_feed_next(f, &item, err);
        if (st || !item) break;
        if (!item->req.error_code && !add(&t, &item->req))
            st = bg_fail(err, BG_NOMEM, "out of memory for the ids of the input");
        bg_feed_item_free(item);
        if (st) break;
    }
    bg_feed_close(f);
    if (!st) {
        if (t.n) qsort(t.v, t.n, sizeof *t.v, by_key);
        const bg_rewrite how = {.keep = keep, .ctx = &t, .dropped_path = dropped_path};
        int64_t kept, dropped;
        st = bg_writer_rewrite(w, &how, &kept, &dropped, err);
    }
    free(t.v);
    return st;
}

bg_status bg_match_ids(const bg_job *job, const bg_writer *w, bg_error *err)
{
    int64_t failed, found = 0, done = bg_writer_count(w, &failed);
    const bg_feed_config fc = {.job = job};
    bg_feed *f;
    bg_status st = bg_feed_open(&f, &fc, err);
    if (st) return st;
    for (;;) {
        bg_feed_item *item;
        st = bg_feed_next(f, &item, err);
        if (st || !item) break;
        const bg_request *r = &item->req;
        if (bg_writer_done(w, r->record)) {
            uint64_t was = bg_writer_key(w, r->record) >> 32;
            found++;
            if (was && (!r->id || bg_result_key(r->id, 0) >> 32 != was))
                st = bg_fail(err, BG_ARG,
                             "%s: line %lld: the output has a result of another id for this line: "
                             "it belongs to another input; nothing was changed. Name the right "
                             "input, another -o, or --overwrite",
                             job->inputs.v[r->file], (long long)r->line);
        }
        bg_feed_item_free(item);
        if (st) break;
    }
    bg_feed_close(f);
    if (!st && found < done)
        st = bg_fail(err, BG_ARG,
                     "%s: the output has results of %lld records that the input does not have; "
                     "nothing was changed. Name the right input, another -o, or --overwrite",
                     job->inputs.v[0], (long long)(done - found));
    return st;
}
