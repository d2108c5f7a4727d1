#include "engine/scheduler.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "engine/kv_pool.h"
#include "engine/prefix.h"

enum {
    GROUP_BLOCKS = 16, /* blocks of a prompt that decide which group it belongs to */
    SEAT_SHARE = 16,   /* a prefill phase begins when 1/16 of the batch would be new */
};

struct bg_seq_group { /* lives while sequences of it wait */
    uint64_t key;
    int64_t first; /* order of the sequence that opened it: where the group stands */
    int refs;
    bg_seq_group *next; /* in its bucket */
};

struct bg_sched {
    bg_sched_config c;
    bg_kv_pool *pool;
    bg_prefix *prefix; /* NULL: off */

    bg_seq **waiting; /* never admitted, in the order of admission; grows */
    int n_waiting, cap_waiting;
    bg_seq *oldest, *newest; /* the same by arrival */
    bg_seq_group **groups;   /* buckets */
    uint32_t group_mask;

    /* running + returning <= max_num_seqs: nothing new is admitted while something returns */
    bg_seq **returning, **running; /* by seniority */
    int n_returning, n_running;
    int32_t *free_slots;
    int n_free_slots;

    bg_seq *done;
    bg_load *loads;
    double output_share; /* of its max_tokens that a sequence makes: a running mean */
    uint64_t n_admitted;
    int in_flight;
    bg_engine_stats stats;
};

bg_status bg_sched_new(bg_sched **out, const bg_sched_config *c, bg_error *err)
{
    *out = NULL;
    if (c->block_tokens < 1 || c->max_num_seqs < 1 || c->max_batched_tokens < 1 ||
        c->max_model_len < 2 || c->window < 1)
        return bg_fail(err, BG_ARG,
                       "engine: block of %d tokens, %d sequences, %d tokens a step, context %d, "
                       "window %d: each must be positive, the context at least 2",
                       c->block_tokens, c->max_num_seqs, c->max_batched_tokens, c->max_model_len,
                       c->window);
    bg_sched *s = calloc(1, sizeof *s);
    if (!s) return bg_fail(err, BG_NOMEM, "scheduler: out of memory");
    s->c = *c;
    s->output_share = 0.5;
    size_t n = (size_t)c->max_num_seqs, n_buckets = 64;
    while (n_buckets < (size_t)c->window)
        n_buckets *= 2;
    s->group_mask = (uint32_t)n_buckets - 1;
    s->groups = calloc(n_buckets, sizeof(bg_seq_group *));
    s->returning = calloc(n, sizeof(bg_seq *));
    s->running = calloc(n, sizeof(bg_seq *));
    s->free_slots = calloc(n, sizeof *s->free_slots);
    s->loads = calloc(n + 1, sizeof *s->loads);
    bg_status st = BG_OK;
    if (!s->groups || !s->returning || !s->running || !s->free_slots || !s->loads)
        st = bg_fail(err, BG_NOMEM, "scheduler: out of memory");
    if (!st) st = bg_kv_new(&s->pool, c->n_blocks, err);
    if (!st && c->prefix_cache) st = bg_prefix_new(&s->prefix, c->n_blocks, c->block_tokens, err);
    if (st) {
        bg_sched_free(s);
        return st;
    }
    for (int i = 0; i < c->max_num_seqs; i++)
        s->free_slots[i] = c->max_num_seqs - 1 - i;
    s->n_free_slots = c->max_num_seqs;
    *out = s;
    return BG_OK;
}

static void leave_group(bg_sched *s, bg_seq_group *g)
{
    if (!g || --g->refs > 0) return;
    bg_seq_group **at = &s->groups[g->key & s->group_mask];
    while (*at != g)
        at = &(*at)->next;
    *at = g->next;
    free(g);
}

void bg_sched_free(bg_sched *s)
{
    if (!s) return;
    for (int i = 0; i < s->n_waiting; i++) {
        leave_group(s, s->waiting[i]->group);
        leave_group(s, s->waiting[i]->family);
        bg_seq_free(s->waiting[i]);
    }
    for (int i = 0; i < s->n_returning; i++)
        bg_seq_free(s->returning[i]);
    for (int i = 0; i < s->n_running; i++)
        bg_seq_free(s->running[i]);
    for (bg_seq *q; (q = bg_sched_take_done(s)) != NULL;)
        bg_seq_free(q);
    bg_kv_free(s->pool);
    bg_prefix_free(s->prefix);
    free(s->groups);
    free(s->waiting);
    free(s->returning);
    free(s->running);
    free(s->free_slots);
    free(s->loads);
    free(s);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static int32_t blocks_for(const bg_sched *s, int32_t n_tokens)
{
    return (int32_t)(((int64_t)n_tokens + s->c.block_tokens - 1) / s->c.block_tokens);
}

bg_status bg_sched_check(const bg_sched *s, const bg_seq *seq, bg_error *err)
{
    int32_t need = blocks_for(s, seq->max_total - 1); /* the last token is never computed */
    if (need > s->c.n_blocks - 1)
        return bg_fail(err, BG_ARG,
                       "a prompt of %d tokens and up to %d of output need %d KV blocks of %d "
                       "tokens, there are %d; lower max_tokens or give the cache more memory",
                       (int)seq->n_prompt, (int)(seq->max_total - seq->n_prompt), (int)need,
                       s->c.block_tokens, s->c.n_blocks - 1);
    return BG_OK;
}

static bg_seq_group *join_group(bg_sched *s, uint64_t key, int64_t order)
{
    bg_seq_group **bucket = &s->groups[key & s->group_mask], *g = *bucket;
    while (g && g->key != key)
        g = g->next;
    if (!g) {
        g = calloc(1, sizeof *g);
        if (!g) return NULL;
        g->key = key;
        g->first = order;
        g->next = *bucket;
        *bucket = g;
    }
    g->refs++;
    return g;
}

/* 2 log2 of the cost in decoded tokens, rounded down; a prompt token costs about an eighth of one.
 */
static int32_t cost_class(const bg_seq *q)
{
    uint32_t cost = (uint32_t)(q->max_total - q->n_tokens) + (uint32_t)q->n_prompt / 8 + 2;
    int32_t log = 31 - __builtin_clz(cost);
    return 2 * log + (int32_t)(cost >> (log - 1) & 1);
}

static int compare(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

/* Below 0: a is admitted first. Groups that collide in `first` are told apart by their keys. */
static int compare_waiting(const bg_seq *a, const bg_seq *b)
{
    int d = compare(b->cost_class, a->cost_class);
    if (!d) d = compare(a->group->first, b->group->first);
    if (!d && a->group != b->group) d = a->group->key < b->group->key ? -1 : 1;
    if (!d) d = compare(a->family->first, b->family->first);
    if (!d && a->family != b->family) d = a->family->key < b->family->key ? -1 : 1;
    if (!d) d = compare(a->order, b->order);
    if (!d) d = a->id < b->id ? -1 : a->id > b->id;
    return d;
}

static int waiting_place(const bg_sched *s, const bg_seq *q)
{
    int lo = 0, hi = s->n_waiting;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (compare_waiting(s->waiting[mid], q) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bg_status bg_sched_add(bg_sched *s, bg_seq *q, bg_error *err)
{
    if (s->n_waiting == s->cap_waiting) {
        int cap = s->cap_waiting ? 2 * s->cap_waiting : 64;
        bg_seq **w = realloc(s->waiting, (size_t)cap * sizeof *w);
        if (!w) goto nomem;
        s->waiting = w;
        s->cap_waiting = cap;
    }
    size_t n = (size_t)q->n_prompt, head = n / (size_t)s->c.block_tokens;
    head = (head > GROUP_BLOCKS ? GROUP_BLOCKS : head) * (size_t)s->c.block_tokens;
    if (head == 0) head = n;
    q->group = join_group(s, bg_hash64(q->tokens, head * sizeof(int32_t), 1), q->order);
    q->family = join_group(s, bg_hash64(q->tokens, n * sizeof(int32_t), 2), q->order);
    if (!q->group || !q->family) {
        leave_group(s, q->group);
        leave_group(s, q->family);
        q->group = q->family = NULL;
        goto nomem;
    }
    q->cost_class = cost_class(q);
    q->arrival = s->n_admitted;
    int at = waiting_place(s, q);
    memmove(s->waiting + at + 1, s->waiting + at, (size_t)(s->n_waiting - at) * sizeof(bg_seq *));
    s->waiting[at] = q;
    s->n_waiting++;
    q->older = s->newest;
    q->newer = NULL;
    *(s->newest ? &s->newest->newer : &s->oldest) = q;
    s->newest = q;
    return BG_OK;
nomem:
    return bg_fail(err, BG_NOMEM, "sequence: out of memory");
}

static void remove_waiting(bg_sched *s, bg_seq *q)
{
    int at = waiting_place(s, q);
    s->n_waiting--;
    memmove(s->waiting + at, s->waiting + at + 1, (size_t)(s->n_waiting - at) * sizeof(bg_seq *));
    *(q->older ? &q->older->newer : &s->oldest) = q->newer;
    *(q->newer ? &q->newer->older : &s->newest) = q->older;
    leave_group(s, q->group);
    leave_group(s, q->family);
    q->group = q->family = NULL;
    q->older = q->newer = NULL;
}

/* ---- running and returning: short arrays by seniority ---------------------------------------- */

static void insert_by_seniority(bg_seq **list, int *n, bg_seq *q)
{
    int at = *n;
    while (at > 0 && list[at - 1]->seniority > q->seniority)
        at--;
    memmove(list + at + 1, list + at, (size_t)(*n - at) * sizeof(bg_seq *));
    list[at] = q;
    (*n)++;
}

static void remove_from(bg_seq **list, int *n, const bg_seq *q)
{
    int at = 0;
    while (list[at] != q)
        at++;
    (*n)--;
    memmove(list + at, list + at + 1, (size_t)(*n - at) * sizeof(bg_seq *));
}

static void forget_seat(bg_seq *q)
{
    q->slot = -1;
    q->n_computed = q->n_pending = q->n_in_flight = 0;
    q->n_blocks = q->n_sent_blocks = q->n_shared = 0;
    q->chain = BG_PREFIX_ROOT;
    q->n_chained = 0;
}

static void give_up_seat(bg_sched *s, bg_seq *q)
{
    /* From the last to the first: the pool hands out the ends of chains before their beginnings. */
    for (int32_t i = q->n_blocks - 1; i >= 0; i--)
        bg_kv_drop(s->pool, q->blocks[i], s->prefix && bg_prefix_has(s->prefix, q->blocks[i]));
    s->free_slots[s->n_free_slots++] = q->slot;
    remove_from(s->running, &s->n_running, q);
    forget_seat(q);
}

static void put_done(bg_sched *s, bg_seq *q)
{
    q->next = s->done;
    s->done = q;
}

bg_seq *bg_sched_take_done(bg_sched *s)
{
    bg_seq *q = s->done;
    if (q) s->done = q->next;
    return q;
}

static void learn_output_share(bg_sched *s, const bg_seq *q)
{
    double share = (double)bg_seq_n_output(q) / (double)(q->max_total - q->n_prompt);
    s->output_share += (share - s->output_share) / 16;
}

/* A seated sequence is over. */
static void end(bg_sched *s, bg_seq *q)
{
    q->state = BG_SEQ_ENDING;
    learn_output_share(s, q);
    if (q->n_in_flight == 0) {
        give_up_seat(s, q);
        put_done(s, q);
    }
}

bool bg_sched_cancel(bg_sched *s, bg_seq *q)
{
    if (q->state == BG_SEQ_ENDING) return false;
    if (q->slot >= 0) {
        end(s, q);
        return true;
    }
    if (q->started)
        remove_from(s->returning, &s->n_returning, q);
    else
        remove_waiting(s, q);
    q->state = BG_SEQ_ENDING;
    put_done(s, q);
    return true;
}

static void preempt(bg_sched *s, bg_seq *q)
{
    give_up_seat(s, q);
    q->state = BG_SEQ_WAITING;
    insert_by_seniority(s->returning, &s->n_returning, q);
    s->stats.preemptions++;
}

void bg_sched_restart(bg_sched *s)
{
    while (s->n_running) {
        bg_seq *q = s->running[s->n_running - 1];
        give_up_seat(s, q);
        if (q->state == BG_SEQ_ENDING) {
            put_done(s, q);
        } else {
            q->state = BG_SEQ_WAITING;
            insert_by_seniority(s->returning, &s->n_returning, q);
        }
    }
    s->in_flight = 0;
    bg_kv_reset(s->pool);
    if (s->prefix) bg_prefix_reset(s->prefix);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static bool take_blocks(bg_sched *s, int32_t n, int32_t *blocks)
{
    if (!bg_kv_take(s->pool, n, blocks)) return false;
    if (s->prefix)
        for (int32_t i = 0; i < n; i++)
            bg_prefix_forget(s->prefix, blocks[i]);
    return true;
}

/* Full blocks of q that are in the cache; all but the last token may come from it, as the last
 * one's logits are needed. blocks and chain may be NULL. *n_free: how many of them are free. */
static int32_t find_cached(const bg_sched *s, const bg_seq *q, int32_t *blocks, uint64_t *chain,
                           int32_t *n_free)
{
    int32_t n = 0, most = (q->n_tokens - 1) / s->c.block_tokens;
    uint64_t serial = BG_PREFIX_ROOT;
    *n_free = 0;
    while (s->prefix && n < most) {
        int32_t b = bg_prefix_find(s->prefix, serial, q->tokens + n * s->c.block_tokens, &serial);
        if (b < 0) break;
        *n_free += bg_kv_refs(s->pool, b) == 0;
        if (blocks) blocks[n] = b;
        n++;
    }
    if (chain) *chain = serial;
    return n;
}

/* Makes blocks findable that are full, computed and known. */
static void chain_full_blocks(bg_sched *s, bg_seq *q)
{
    if (!s->prefix) return;
    int32_t sure = q->n_computed < q->n_tokens ? q->n_computed : q->n_tokens;
    while ((q->n_chained + 1) * s->c.block_tokens <= sure) {
        q->chain = bg_prefix_add(s->prefix, q->chain, q->tokens + q->n_chained * s->c.block_tokens,
                                 q->blocks[q->n_chained]);
        q->n_chained++;
    }
}

/* ---- will the blocks last? ------------------------------------------------------------------- */

static int by_remaining(const void *pa, const void *pb)
{
    const bg_load *a = pa, *b = pb;
    return compare(b->remaining, a->remaining);
}

int64_t bg_sched_peak_blocks(bg_load *loads, int n, int block_tokens)
{
    qsort(loads, (size_t)n, sizeof *loads, by_remaining);
    int64_t held = 0, peak = 0;
    for (int i = 0; i < n; i++) {
        held += loads[i].held;
        /* half a block more for each, on average, is only partly filled */
        int64_t tokens = held + (int64_t)(i + 1) * loads[i].remaining;
        int64_t blocks = (tokens + block_tokens - 1) / block_tokens + (i + 1) / 2;
        if (blocks > peak) peak = blocks;
    }
    return peak;
}

static bg_load load_of(const bg_sched *s, const bg_seq *q, int32_t n_shared)
{
    int32_t made = bg_seq_len(q) - q->n_prompt, most = q->max_total - q->n_prompt;
    int32_t left = most - made;
    if (!q->ignore_eos) {
        double share = s->output_share * 1.25;
        int32_t expected = share < 1 ? (int32_t)(share * (double)most) - made : left;
        if (expected < made / 2 + 16) expected = made / 2 + 16; /* it already went on for longer */
        if (expected < left) left = expected;
    }
    if (q->state == BG_SEQ_ENDING || s->c.greedy) left = 0;
    return (bg_load){bg_seq_len(q) - n_shared * s->c.block_tokens, left};
}

/* A tentative admission after those in s->loads[0 .. n): true and one more load if the blocks last.
 */
static bool fits(bg_sched *s, const bg_seq *q, int *n, int32_t *n_base)
{
    int32_t n_free, n_shared = find_cached(s, q, NULL, NULL, &n_free);
    s->loads[*n] = load_of(s, q, n_shared);
    int64_t peak = bg_sched_peak_blocks(s->loads, *n + 1, s->c.block_tokens);
    if (*n_base + n_free + peak > s->c.n_blocks - 1) return false;
    *n_base += n_free;
    (*n)++;
    return true;
}

/* Loads of the running sequences, and the blocks that are used but no sequence's own. */
static int running_loads(bg_sched *s, int32_t *n_base)
{
    int32_t own = 0;
    for (int i = 0; i < s->n_running; i++) {
        bg_seq *q = s->running[i];
        s->loads[i] = load_of(s, q, q->n_shared);
        own += q->n_blocks - q->n_shared;
    }
    int32_t used = s->c.n_blocks - 1 - bg_kv_n_free(s->pool);
    *n_base = used > own ? used - own : 0;
    return s->n_running;
}

/* ---- prefill --------------------------------------------------------------------------------- */

static bg_seq *next_to_admit(const bg_sched *s)
{
    if (s->n_returning) return s->returning[0];
    if (!s->n_waiting) return NULL;
    if (s->n_admitted - s->oldest->arrival > 2 * (uint64_t)s->c.window) return s->oldest;
    return s->waiting[0];
}

static bool prefill_now(bg_sched *s)
{
    int n_decoding = 0;
    for (int i = 0; i < s->n_running; i++) {
        if (s->running[i]->state == BG_SEQ_PREFILL) return true;
        n_decoding += s->running[i]->state == BG_SEQ_DECODE;
    }
    int n_all = s->n_returning + s->n_waiting, n_new = 0;
    if (!n_all || !s->n_free_slots) return false;
    if (!n_decoding) return true;
    int32_t n_base;
    int n = running_loads(s, &n_base);
    int64_t n_tokens = 0;
    while (n_new < n_all && n_new < s->n_free_slots) {
        const bg_seq *q =
            n_new < s->n_returning ? s->returning[n_new] : s->waiting[n_new - s->n_returning];
        if (!fits(s, q, &n, &n_base)) break;
        n_new++;
        n_tokens += q->n_tokens;
        if (n_tokens >= s->c.max_batched_tokens || n_new * SEAT_SHARE >= n_decoding + n_new)
            return true;
    }
    return n_new == n_all;
}

/* Seats q with the blocks of all its known tokens. *ok false: the blocks do not last. */
static bg_status admit(bg_sched *s, bg_seq *q, bool *ok, bg_error *err)
{
    *ok = false;
    if (s->n_running) {
        int32_t n_base;
        int n = running_loads(s, &n_base);
        if (!fits(s, q, &n, &n_base)) return BG_OK;
    }
    bg_status st = bg_seq_reserve(q, s->c.block_tokens, err);
    if (st) return st;
    int32_t n_free, total = blocks_for(s, q->n_tokens);
    int32_t n_shared = find_cached(s, q, q->blocks, &q->chain, &n_free);
    for (int32_t i = 0; i < n_shared; i++)
        bg_kv_hold(s->pool, q->blocks[i]);
    if (!take_blocks(s, total - n_shared, q->blocks + n_shared)) {
        for (int32_t i = n_shared - 1; i >= 0; i--)
            bg_kv_drop(s->pool, q->blocks[i], true);
        q->chain = BG_PREFIX_ROOT;
        return BG_OK;
    }
    q->n_blocks = total;
    q->n_shared = q->n_chained = n_shared;
    q->n_computed = n_shared * s->c.block_tokens;
    if (q->started) {
        remove_from(s->returning, &s->n_returning, q);
    } else {
        remove_waiting(s, q);
        q->started = true;
        q->seniority = s->n_admitted++;
        q->max_computed = q->n_computed;
        q->n_cached = q->n_computed < q->n_prompt ? q->n_computed : q->n_prompt;
        s->stats.cached_tokens += (uint64_t)q->n_cached;
    }
    q->slot = s->free_slots[--s->n_free_slots];
    q->state = BG_SEQ_PREFILL;
    insert_by_seniority(s->running, &s->n_running, q);
    *ok = true;
    return BG_OK;
}

static void add_item(bg_sched *s, bg_plan *p, bg_seq *q, int32_t pos0, int32_t n_tokens,
                     bool sample)
{
    bool seat = q->n_sent_blocks == 0;
    p->items[p->n_items++] = (bg_plan_item){.seq = q,
                                            .pos0 = pos0,
                                            .n_tokens = n_tokens,
                                            .block0 = q->n_sent_blocks,
                                            .n_blocks = seat ? 0 : q->n_blocks - q->n_sent_blocks,
                                            .seat = seat,
                                            .sample = sample};
    p->n_rows += n_tokens;
    q->n_sent_blocks = q->n_blocks;
    q->n_computed = pos0 + n_tokens;
    q->n_pending += sample;
    q->n_in_flight++;
    if (p->prefill) {
        int32_t fresh0 = pos0 > q->max_computed ? pos0 : q->max_computed;
        int32_t fresh = q->n_computed > fresh0 ? q->n_computed - fresh0 : 0;
        s->stats.prompt_tokens += (uint64_t)fresh;
        s->stats.recomputed_tokens += (uint64_t)(n_tokens - fresh);
    }
    if (q->n_computed > q->max_computed) q->max_computed = q->n_computed;
    chain_full_blocks(s, q);
}

static void add_chunk(bg_sched *s, bg_plan *p, bg_seq *q)
{
    int32_t left = q->n_tokens - q->n_computed, room = s->c.max_batched_tokens - p->n_rows;
    int32_t n = left < room ? left : room;
    if (n == left) q->state = BG_SEQ_DECODE;
    add_item(s, p, q, q->n_computed, n, n == left);
}

static bg_status plan_prefill(bg_sched *s, bg_plan *p, bg_error *err)
{
    p->prefill = true;
    for (int i = 0; i < s->n_running && p->n_rows < s->c.max_batched_tokens; i++)
        if (s->running[i]->state == BG_SEQ_PREFILL) add_chunk(s, p, s->running[i]);
    while (p->n_rows < s->c.max_batched_tokens && s->n_free_slots) {
        bg_seq *q = next_to_admit(s);
        bool ok = false;
        if (!q) break;
        bg_status st = admit(s, q, &ok, err);
        if (st) return st;
        if (!ok) break;
        add_chunk(s, p, q);
    }
    return BG_OK;
}

/* ---- decode ---------------------------------------------------------------------------------- */

static bool decodes(const bg_seq *q)
{
    return q->state == BG_SEQ_DECODE && bg_seq_len(q) < q->max_total;
}

static bg_seq *youngest(const bg_sched *s)
{
    for (int i = s->n_running - 1; i >= 0; i--)
        if (s->running[i]->state != BG_SEQ_ENDING) return s->running[i];
    return NULL;
}

/* Gives each decoding sequence the block of its next position, seniors first. False: blocks ran
 * out, and nobody can be preempted before the steps in flight are answered. */
static bool extend_all(bg_sched *s)
{
    for (int i = 0; i < s->n_running; i++) {
        bg_seq *q = s->running[i];
        if (!decodes(q)) continue;
        while ((bg_seq_len(q) - 1) / s->c.block_tokens >= q->n_blocks) {
            if (take_blocks(s, 1, q->blocks + q->n_blocks)) {
                q->n_blocks++;
                continue;
            }
            /* Its tokens in flight would be lost, and the step still writes to its blocks. */
            if (s->in_flight) return false;
            bg_seq *victim = youngest(s);
            preempt(s, victim);
            if (victim == q) return true; /* and it was the last in the list that decodes */
        }
    }
    return true;
}

static void plan_decode(bg_sched *s, bg_plan *p)
{
    p->prefill = false;
    if (!extend_all(s)) return;
    for (int i = 0; i < s->n_running; i++) {
        bg_seq *q = s->running[i];
        if (decodes(q)) add_item(s, p, q, bg_seq_len(q) - 1, 1, true);
    }
}

/* ---- the step -------------------------------------------------------------------------------- */

bg_status bg_sched_plan(bg_sched *s, bg_plan *p, bg_plan_kind *kind, bg_error *err)
{
    *kind = BG_PLAN_NONE;
    p->n_items = p->n_rows = 0;
    if (prefill_now(s)) {
        bg_status st = plan_prefill(s, p, err);
        if (st) return st;
    }
    if (!p->n_items) plan_decode(s, p);
    if (p->n_items) {
        *kind = BG_PLAN_STEP;
        s->in_flight++;
        s->stats.steps++;
        *(p->prefill ? &s->stats.prefill_steps : &s->stats.decode_steps) += 1;
    } else if (!s->in_flight && (s->n_running || s->n_returning || s->n_waiting)) {
        return bg_fail(err, BG_INTERNAL,
                       "scheduler: %d sequences run and %d wait, and no step can be made of them",
                       s->n_running, s->n_returning + s->n_waiting);
    }
    return BG_OK;
}

bg_status bg_sched_apply(bg_sched *s, const bg_plan *p, const bg_sampled *sampled, int n,
                         bg_token_event *events, int *n_events, bg_error *err)
{
    int used = 0;
    *n_events = 0;
    s->in_flight--;
    for (int i = 0; i < p->n_items; i++) {
        bg_seq *q = p->items[i].seq;
        q->n_in_flight--;
        if (p->items[i].sample) {
            if (used == n || sampled[used].slot != q->slot || sampled[used].token < 0)
                return bg_fail(err, BG_INTERNAL,
                               "answer of a step: token %d of %d is not for slot %d", used, n,
                               (int)q->slot);
            const bg_sampled *got = &sampled[used++];
            if (q->state != BG_SEQ_ENDING) { /* else: a token after the end */
                q->n_pending--;
                q->tokens[q->n_tokens++] = got->token;
                s->stats.output_tokens++;
                bg_finish finish = bg_seq_finish(q, s->c.eog, s->c.n_eog);
                events[(*n_events)++] = (bg_token_event){.user = q->user,
                                                         .seq = q->id,
                                                         .has_token = true,
                                                         .sampled = *got,
                                                         .finish = finish,
                                                         .n_cached = q->n_cached};
                chain_full_blocks(s, q);
                if (finish != BG_FINISH_NONE) {
                    end(s, q);
                    continue;
                }
            }
        }
        if (q->state == BG_SEQ_ENDING && q->n_in_flight == 0) {
            give_up_seat(s, q);
            put_done(s, q);
        }
    }
    if (used != n)
        return bg_fail(err, BG_INTERNAL, "answer of a step: %d tokens, %d were asked for", n, used);
    return BG_OK;
}

/* ---- numbers --------------------------------------------------------------------------------- */

int bg_sched_n_new(const bg_sched *s)
{
    return s->n_waiting;
}

int bg_sched_n_waiting(const bg_sched *s)
{
    return s->n_waiting + s->n_returning;
}

int bg_sched_n_running(const bg_sched *s)
{
    return s->n_running;
}

int bg_sched_in_flight(const bg_sched *s)
{
    return s->in_flight;
}

void bg_sched_add_stats(const bg_sched *s, bg_engine_stats *stats)
{
    uint64_t restarts = stats->restarts;
    int64_t busy_ns = stats->busy_ns;
    *stats = s->stats;
    stats->restarts = restarts;
    stats->busy_ns = busy_ns;
    stats->n_running = s->n_running;
    stats->n_waiting = bg_sched_n_waiting(s);
    stats->blocks_free = bg_kv_n_free(s->pool);
    stats->blocks_total = s->c.n_blocks - 1;
}

static bg_status verify_refs(const bg_sched *s, int32_t *refs, bg_error *err)
{
    for (int i = 0; i < s->n_running; i++)
        for (int32_t k = 0; k < s->running[i]->n_blocks; k++)
            refs[s->running[i]->blocks[k]]++;
    for (int32_t b = 0; b < s->c.n_blocks; b++)
        if (refs[b] != bg_kv_refs(s->pool, b))
            return bg_fail(err, BG_INTERNAL, "KV block %d: %d references, %d sequences hold it",
                           (int)b, (int)bg_kv_refs(s->pool, b), (int)refs[b]);
    return BG_OK;
}

bg_status bg_sched_verify(const bg_sched *s, bg_error *err)
{
    bg_status st = bg_kv_check(s->pool, err);
    if (st) return st;
    int32_t *refs = calloc((size_t)s->c.n_blocks, sizeof *refs);
    if (!refs) return bg_fail(err, BG_NOMEM, "out of memory");
    st = verify_refs(s, refs, err);
    free(refs);
    if (st) return st;
    if (s->n_running + s->n_free_slots != s->c.max_num_seqs ||
        s->n_running + s->n_returning > s->c.max_num_seqs)
        return bg_fail(err, BG_INTERNAL, "slots: %d free, %d running, %d returning, of %d",
                       s->n_free_slots, s->n_running, s->n_returning, s->c.max_num_seqs);
    for (int i = 0; i < s->n_running; i++) {
        const bg_seq *q = s->running[i];
        if (q->slot < 0 || q->n_computed > bg_seq_len(q) || bg_seq_len(q) > q->max_total + 1 ||
            q->n_computed > q->n_blocks * s->c.block_tokens || q->n_in_flight > s->in_flight ||
            (i && s->running[i - 1]->seniority >= q->seniority))
            return bg_fail(err, BG_INTERNAL,
                           "running sequence %d: slot %d, %d tokens + %d, %d computed", (int)q->id,
                           (int)q->slot, (int)q->n_tokens, (int)q->n_pending, (int)q->n_computed);
    }
    int n = 0;
    for (const bg_seq *q = s->oldest; q; q = q->newer)
        n++;
    for (int i = 1; i < s->n_waiting; i++)
        if (compare_waiting(s->waiting[i - 1], s->waiting[i]) >= 0)
            return bg_fail(err, BG_INTERNAL, "waiting sequences %d and %d are out of order", i - 1,
                           i);
    if (n != s->n_waiting)
        return bg_fail(err, BG_INTERNAL, "%d waiting by arrival, %d by cost", n, s->n_waiting);
    return BG_OK;
}
