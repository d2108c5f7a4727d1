/* The engine's thread, and the doors to it.
 *
 *     submit --> inbox --> scheduler --> plan --> ring down ... ring up --> apply --> events, done
 *
 * The scheduler belongs to the thread. Under the lock are only the inbox, the table of ids with the
 * list of cancels, the counts that others wait for, and copies of statistics and of the failure.
 *
 * Up to `depth` steps are in flight: step k+1 goes out before the answer to step k is read, so the
 * ranks do not wait for the coordinator. The thread waits in one place only, for the ring up: a few
 * microseconds spinning, then asleep. New sequences need to wake it only when it is idle; while
 * steps are in flight the next answer is soon enough. */
#include "engine/engine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "base/clock.h"
#include "base/ring.h"
#include "engine/engine_internal.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/step.h"
#include "engine/workers.h"

static const bg_engine_tuning DEFAULTS = {.depth = 2, .hang_ns = INT64_C(600000000000)};
/* How long a stop waits for steps in flight. */
static const int64_t STOP_NS = INT64_C(60000000000);

typedef struct flight {
    bg_plan plan;
    uint64_t number;
} flight;

struct bg_engine {
    bg_ranks *ranks;
    bg_engine_config c;
    bg_engine_tuning tuning;
    int32_t *eog;
    pthread_t thread;
    bool has_thread;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* window, live, failed or stopping */
    bg_seq *inbox, **inbox_end;
    bg_seq *cancels;
    bg_seq **by_id; /* buckets; as many sequences as may live at once */
    uint64_t id_mask, last_id;
    int n_inbox;
    int n_window; /* not yet admitted: in the inbox or waiting for the first time */
    int64_t n_live, load;
    bool idle, stopping, failed;
    bool winding_down, drop_new; /* lock: drop_new until the thread has seen it */
    bg_error failure;
    bg_engine_stats shown;

    /* the thread's own */
    bg_sched *sched;
    flight flights[BG_ENGINE_MAX_DEPTH]; /* a ring: flight number n is at n % depth */
    uint64_t n_sent, n_answered;
    bg_msg_entry *entries;
    bg_sampled *sampled;
    bg_token_event *events;
    unsigned char *msg;
    size_t msg_cap;
    bool own_fault; /* the failure is not one of the ranks: starting them again would not help */
    uint64_t restarts;
    int deaths_in_row;
    int64_t busy_ns, busy_since;
};

/* ---- making and freeing ---------------------------------------------------------------------- */

static bg_status allocate(bg_engine *e, bg_error *err)
{
    const bg_rank_config *rc = bg_ranks_config(e->ranks);
    size_t n = (size_t)rc->max_num_seqs, n_ids = 64;
    while (n_ids < (size_t)e->c.window + n)
        n_ids *= 2;
    e->id_mask = n_ids - 1;
    e->msg_cap = bg_ranks_max_message(e->ranks);
    if (e->msg_cap < bg_msg_result_max_bytes((int32_t)n))
        e->msg_cap = bg_msg_result_max_bytes((int32_t)n);
    e->by_id = calloc(n_ids, sizeof(bg_seq *));
    e->eog = malloc((e->c.n_eog + 1) * sizeof *e->eog);
    e->entries = calloc(n, sizeof *e->entries);
    e->sampled = calloc(n, sizeof *e->sampled);
    e->events = calloc(n, sizeof *e->events);
    e->msg = malloc(e->msg_cap);
    bool ok = e->by_id && e->eog && e->entries && e->sampled && e->events && e->msg;
    for (int i = 0; i < e->tuning.depth; i++) {
        e->flights[i].plan.items = calloc(n, sizeof(bg_plan_item));
        ok = ok && e->flights[i].plan.items;
    }
    if (!ok) return bg_fail(err, BG_NOMEM, "engine of %zu sequences: out of memory", n);
    if (e->c.n_eog) memcpy(e->eog, e->c.eog, e->c.n_eog * sizeof *e->eog);
    e->c.eog = e->eog;
    return BG_OK;
}

static void *engine_main(void *arg);

bg_status bg_engine_new_tuned(bg_engine **out, bg_ranks *r, const bg_engine_config *c,
                              const bg_engine_tuning *t, bg_error *err)
{
    *out = NULL;
    const bg_rank_config *rc = bg_ranks_config(r);
    if (c->max_batched_tokens < 1 || c->max_batched_tokens > rc->max_step_tokens)
        return bg_fail(err, BG_ARG, "%d tokens a prefill step: the ranks take 1 to %d",
                       c->max_batched_tokens, rc->max_step_tokens);
    bg_engine *e = calloc(1, sizeof *e);
    if (!e) return bg_fail(err, BG_NOMEM, "engine: out of memory");
    e->ranks = r;
    e->c = *c;
    e->tuning = t ? *t : DEFAULTS;
    if (c->hang_ns > 0) e->tuning.hang_ns = c->hang_ns;
    if (!e->c.id_first) e->c.id_first = e->c.id_step = 1;
    e->last_id = e->c.id_first - e->c.id_step; /* may wrap: the next one is id_first */
    e->inbox_end = &e->inbox;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    bg_ranks_set_hang(r, e->tuning.hang_ns);
    bg_status st = allocate(e, err);
    if (!st) {
        bg_sched_config sc = {.n_blocks = rc->n_blocks,
                              .block_tokens = rc->block_tokens,
                              .max_num_seqs = rc->max_num_seqs,
                              .max_batched_tokens = c->max_batched_tokens,
                              .max_model_len = rc->max_model_len,
                              .window = c->window,
                              .prefix_cache = c->prefix_cache,
                              .greedy = e->tuning.greedy,
                              .eog = e->eog,
                              .n_eog = c->n_eog};
        st = bg_sched_new(&e->sched, &sc, err);
    }
    if (!st) {
        bg_sched_add_stats(e->sched, &e->shown);
        int os = pthread_create(&e->thread, NULL, engine_main, e);
        e->has_thread = os == 0;
        if (os) st = bg_fail(err, BG_IO, "cannot start the engine's thread: %s", strerror(os));
    }
    if (st) {
        bg_engine_free(e);
        return st;
    }
    *out = e;
    return BG_OK;
}

bg_status bg_engine_new(bg_engine **e, bg_ranks *r, const bg_engine_config *c, bg_error *err)
{
    return bg_engine_new_tuned(e, r, c, NULL, err);
}

void bg_engine_free(bg_engine *e)
{
    if (!e) return;
    bg_engine_stop(e);
    bg_sched_free(e->sched);
    for (bg_seq *q = e->inbox, *next; q; q = next) {
        next = q->next;
        bg_seq_free(q);
    }
    for (int i = 0; i < BG_ENGINE_MAX_DEPTH; i++)
        free(e->flights[i].plan.items);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->changed);
    free(e->by_id);
    free(e->eog);
    free(e->entries);
    free(e->sampled);
    free(e->events);
    free(e->msg);
    free(e);
}

/* ---- any thread ------------------------------------------------------------------------------ */

/* Locked. The kick, too, is under the lock: an idle engine is not starting ranks anew, so the ring
 * is there. */
static void wake(bg_engine *e)
{
    if (!e->idle) return;
    e->idle = false;
    bg_ranks_kick(e->ranks);
}

static bg_status check_message(const bg_engine *e, const bg_seq *q, bg_error *err)
{
    bg_msg_seat seat = {.n_tokens = q->max_total,
                        .n_blocks = q->max_total / bg_ranks_config(e->ranks)->block_tokens + 1,
                        .sampling = q->sampling};
    size_t n = bg_msg_seat_bytes(&seat), most = bg_ranks_max_message(e->ranks);
    if (n > most)
        return bg_fail(err, BG_ARG, "%d logit biases and %d stop ids are too many",
                       (int)q->sampling.n_bias, (int)q->sampling.n_stop_ids);
    return BG_OK;
}

static bg_status locked_failure(const bg_engine *e, bg_error *err)
{
    if (!err->status) *err = e->failure;
    return err->status;
}

/* How long it will go on is not known: an answer counts as a long one at most. */
static int64_t load_of(const bg_seq *q)
{
    enum { LONG_ANSWER = 512 };
    const int32_t most = q->max_total - q->n_prompt;
    return q->n_prompt + (most < LONG_ANSWER ? most : LONG_ANSWER);
}

bg_engine_room bg_engine_look(bg_engine *e)
{
    pthread_mutex_lock(&e->lock);
    bg_engine_room room = {e->failed, e->n_window >= e->c.window, e->load};
    pthread_mutex_unlock(&e->lock);
    return room;
}

bg_status bg_engine_submit(bg_engine *e, const bg_seq_spec *spec, uint64_t *id, bg_error *err)
{
    bg_seq *q;
    bg_status st = bg_seq_new(&q, spec, bg_ranks_config(e->ranks)->max_model_len, err);
    if (!st) st = bg_sched_check(e->sched, q, err);
    if (!st) st = check_message(e, q, err);
    if (st) {
        bg_seq_free(q);
        return st;
    }
    pthread_mutex_lock(&e->lock);
    while (e->n_window >= e->c.window && !e->stopping && !e->winding_down && !e->failed)
        pthread_cond_wait(&e->changed, &e->lock);
    if (e->failed) {
        st = locked_failure(e, err);
    } else if (e->stopping || e->winding_down) {
        st = bg_fail(err, BG_BUSY, "the engine is stopping");
    } else {
        q->id = e->last_id += e->c.id_step;
        bg_seq **bucket = &e->by_id[q->id & e->id_mask];
        q->id_next = *bucket;
        *bucket = q;
        *e->inbox_end = q;
        e->inbox_end = &q->next;
        e->n_inbox++;
        e->n_window++;
        e->n_live++;
        e->load += load_of(q);
        *id = q->id;
        wake(e);
    }
    pthread_mutex_unlock(&e->lock);
    if (st) bg_seq_free(q);
    return st;
}

void bg_engine_cancel(bg_engine *e, uint64_t id)
{
    pthread_mutex_lock(&e->lock);
    bg_seq *q = e->by_id[id & e->id_mask];
    while (q && q->id != id)
        q = q->id_next;
    if (q && !q->cancelled) {
        q->cancelled = true;
        q->cancel_next = e->cancels;
        e->cancels = q;
        wake(e);
    }
    pthread_mutex_unlock(&e->lock);
}

void bg_engine_wind_down(bg_engine *e)
{
    pthread_mutex_lock(&e->lock);
    if (!e->winding_down) {
        e->winding_down = e->drop_new = true;
        wake(e);
        pthread_cond_broadcast(&e->changed);
    }
    pthread_mutex_unlock(&e->lock);
}

bg_status bg_engine_drain(bg_engine *e, bg_error *err)
{
    bg_status st = BG_OK;
    pthread_mutex_lock(&e->lock);
    while (e->n_live > 0 && !e->failed && !e->stopping)
        pthread_cond_wait(&e->changed, &e->lock);
    if (e->failed)
        st = locked_failure(e, err);
    else if (e->n_live > 0)
        st = bg_fail(err, BG_BUSY, "the engine is stopping");
    pthread_mutex_unlock(&e->lock);
    return st;
}

void bg_engine_ask_stop(bg_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->stopping = true;
    wake(e);
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

void bg_engine_stop(bg_engine *e)
{
    bg_engine_ask_stop(e);
    pthread_mutex_lock(&e->lock);
    bool join = e->has_thread;
    e->has_thread = false;
    pthread_mutex_unlock(&e->lock);
    if (join) pthread_join(e->thread, NULL);
}

void bg_engine_get_stats(bg_engine *e, bg_engine_stats *s)
{
    pthread_mutex_lock(&e->lock);
    *s = e->shown;
    pthread_mutex_unlock(&e->lock);
}

bg_status bg_engine_error(bg_engine *e, bg_error *err)
{
    pthread_mutex_lock(&e->lock);
    bg_status st = e->failed ? locked_failure(e, err) : BG_OK;
    pthread_mutex_unlock(&e->lock);
    return st;
}

bg_status bg_engine_verify(bg_engine *e, bg_error *err)
{
    bg_status st = bg_sched_verify(e->sched, err);
    if (st) return st;
    bg_engine_stats s = {0};
    bg_sched_add_stats(e->sched, &s);
    if (s.blocks_free != s.blocks_total || s.n_running || s.n_waiting || e->n_sent != e->n_answered)
        return bg_fail(err, BG_INTERNAL, "drained: %d of %d blocks free, %d running, %d waiting",
                       s.blocks_free, s.blocks_total, s.n_running, s.n_waiting);
    return BG_OK;
}

/* ---- the thread: events and ends ------------------------------------------------------------- */

static void report(bg_engine *e, const bg_token_event *events, int n)
{
    if (n && e->c.on_events) e->c.on_events(e->c.ctx, events, n);
}

static void report_finish(bg_engine *e, const bg_seq *q, bg_finish finish)
{
    bg_token_event ev = {.user = q->user, .seq = q->id, .finish = finish, .n_cached = q->n_cached};
    report(e, &ev, 1);
}

static bg_engine_stats current_stats(const bg_engine *e)
{
    bg_engine_stats s = {.restarts = e->restarts, .busy_ns = e->busy_ns};
    bg_sched_add_stats(e->sched, &s);
    bg_ranks_device_times(e->ranks, &s.device_work_ns, &s.device_idle_ns);
    return s;
}

/* Frees sequences that are over; after their last event was reported. */
static void retire(bg_engine *e, bg_seq *list)
{
    if (!list) return;
    bg_engine_stats now = current_stats(e);
    pthread_mutex_lock(&e->lock);
    now.n_waiting += e->n_inbox;
    e->shown = now; /* who waits for the last sequence finds it counted */
    for (bg_seq *q = list; q; q = q->next) {
        bg_seq **at = &e->by_id[q->id & e->id_mask];
        while (*at != q)
            at = &(*at)->id_next;
        *at = q->id_next;
        if (q->cancelled) /* perhaps not looked at yet */
            for (bg_seq **c = &e->cancels; *c; c = &(*c)->cancel_next)
                if (*c == q) {
                    *c = q->cancel_next;
                    break;
                }
        e->n_live--;
        e->load -= load_of(q);
    }
    if (e->n_live == 0) pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    for (bg_seq *q = list, *next; q; q = next) {
        next = q->next;
        bg_seq_free(q);
    }
}

static void retire_done(bg_engine *e)
{
    bg_seq *list = NULL, *q;
    while ((q = bg_sched_take_done(e->sched)) != NULL) {
        q->next = list;
        list = q;
    }
    retire(e, list);
}

static void publish(bg_engine *e)
{
    bg_engine_stats s = current_stats(e);
    int n_new = bg_sched_n_new(e->sched);
    pthread_mutex_lock(&e->lock);
    e->shown = s;
    e->shown.n_waiting += e->n_inbox;
    bool room = n_new + e->n_inbox < e->n_window;
    e->n_window = n_new + e->n_inbox;
    if (room) pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* ---- the thread: news in --------------------------------------------------------------------- */

typedef struct news {
    bg_seq *added, *cancelled;
    bool stopping;
} news;

/* Locked; winding down: sequences that never started are cancelled. */
static void cancel_new(bg_engine *e)
{
    for (uint64_t i = 0; i <= e->id_mask; i++)
        for (bg_seq *q = e->by_id[i]; q; q = q->id_next) {
            if (q->started || q->cancelled) continue;
            q->cancelled = true;
            q->cancel_next = e->cancels;
            e->cancels = q;
        }
}

static news take_news(bg_engine *e)
{
    pthread_mutex_lock(&e->lock);
    if (e->drop_new) cancel_new(e);
    e->drop_new = false;
    news n = {e->inbox, e->cancels, e->stopping};
    e->inbox = NULL;
    e->inbox_end = &e->inbox;
    e->n_inbox = 0;
    e->cancels = NULL;
    pthread_mutex_unlock(&e->lock);
    return n;
}

/* The engine has failed; sequences not yet with the scheduler wait in the inbox to be freed. */
static void put_back(bg_engine *e, bg_seq *q)
{
    pthread_mutex_lock(&e->lock);
    while (q) {
        bg_seq *next = q->next;
        q->next = e->inbox;
        e->inbox = q;
        q = next;
    }
    pthread_mutex_unlock(&e->lock);
}

static bg_status handle_news(bg_engine *e, const news *n, bg_error *err)
{
    bg_seq *over = NULL;
    for (bg_seq *q = n->added, *next; q; q = next) {
        next = q->next;
        bg_finish finish = bg_seq_finish(q, e->eog, e->c.n_eog);
        if (finish != BG_FINISH_NONE) { /* what was regained is all there will be */
            report_finish(e, q, finish);
            q->state = BG_SEQ_ENDING;
            q->next = over;
            over = q;
        } else if (bg_sched_add(e->sched, q, err)) {
            e->own_fault = true;
            put_back(e, q);
            put_back(e, over);
            return err->status;
        }
    }
    for (bg_seq *q = n->cancelled; q; q = q->cancel_next)
        if (bg_sched_cancel(e->sched, q)) report_finish(e, q, BG_FINISH_CANCEL);
    retire(e, over);
    retire_done(e);
    return BG_OK;
}

/* ---- the thread: steps out, answers in ------------------------------------------------------- */

static int depth(const bg_engine *e)
{
    return (int)(e->n_sent - e->n_answered);
}

static bg_status send_message(bg_engine *e, size_t n, bg_error *err)
{
    if (!n) return bg_fail(err, BG_INTERNAL, "a message for the ranks is too long");
    return bg_ranks_send(e->ranks, e->msg, n, err);
}

static bg_status send_step(bg_engine *e, const flight *f, bg_error *err)
{
    for (int32_t i = 0; i < f->plan.n_items; i++) {
        const bg_plan_item *it = &f->plan.items[i];
        const bg_seq *q = it->seq;
        e->entries[i] = (bg_msg_entry){.slot = q->slot,
                                       .pos0 = it->pos0,
                                       .n_tokens = it->n_tokens,
                                       .n_blocks = it->n_blocks,
                                       .blocks = q->blocks + it->block0,
                                       .sample = it->sample};
        if (!it->seat) continue;
        bg_msg_seat seat = {.slot = q->slot,
                            .n_generated = bg_seq_n_output(q),
                            .n_tokens = q->n_tokens,
                            .n_blocks = q->n_blocks,
                            .tokens = q->tokens,
                            .blocks = q->blocks,
                            .sampling = q->sampling};
        bg_status st = send_message(e, bg_msg_put_seat(e->msg, e->msg_cap, &seat), err);
        if (st) return st;
    }
    return send_message(
        e, bg_msg_put_step(e->msg, e->msg_cap, f->number, e->entries, f->plan.n_items), err);
}

static bg_status fill_pipeline(bg_engine *e, bg_error *err)
{
    while (depth(e) < e->tuning.depth) {
        flight *f = &e->flights[e->n_sent % (uint64_t)e->tuning.depth];
        bg_plan_kind kind;
        bg_status st = bg_sched_plan(e->sched, &f->plan, &kind, err);
        e->own_fault = st != BG_OK;
        if (st || kind == BG_PLAN_NONE) return st;
        if (depth(e) == 0) {
            e->busy_since = bg_now_ns();
            bg_ranks_watch_reset(e->ranks);
        }
        f->number = e->n_sent++;
        st = send_step(e, f, err);
        if (st) return st;
    }
    return BG_OK;
}

static bg_status handle_answer(bg_engine *e, size_t n, bg_error *err)
{
    bg_msg_result head;
    const bg_rank_config *rc = bg_ranks_config(e->ranks);
    bg_status st = bg_msg_get_result(e->msg, n, &head, e->sampled, rc->max_num_seqs, err);
    if (st) return st;
    if (depth(e) == 0 || head.number != e->n_answered)
        return bg_fail(err, BG_INTERNAL, "answer to step %llu came, %llu was due",
                       (unsigned long long)head.number, (unsigned long long)e->n_answered);
    flight *f = &e->flights[e->n_answered++ % (uint64_t)e->tuning.depth];
    int64_t now = bg_now_ns();
    e->busy_ns += now - e->busy_since;
    e->busy_since = now;
    int n_events;
    st = bg_sched_apply(e->sched, &f->plan, e->sampled, head.n, e->events, &n_events, err);
    if (!st) e->deaths_in_row = 0;
    report(e, e->events, n_events);
    return st;
}

/* Waits for one answer, or less: a kick, or one tick. */
static bg_status wait_answer(bg_engine *e, bg_error *err)
{
    size_t n;
    switch (bg_ring_read(bg_ranks_up(e->ranks), e->msg, e->msg_cap, &n, BG_RANKS_TICK_NS)) {
    case BG_RING_OK:
        return handle_answer(e, n, err);
    case BG_RING_TIMEOUT:
    case BG_RING_KICKED:
        return bg_ranks_watch(e->ranks, err);
    default:
        return bg_fail(err, BG_INTERNAL, "the ring of answers is damaged");
    }
}

/* Nothing is in flight and nothing can be sent. */
static bg_status wait_idle(bg_engine *e, bg_error *err)
{
    size_t n;
    pthread_mutex_lock(&e->lock);
    e->idle = !e->inbox && !e->cancels && !e->stopping;
    bool sleep = e->idle;
    pthread_mutex_unlock(&e->lock);
    if (!sleep) return BG_OK;
    /* A rank that dies kicks too; it is noticed at once, or else at the next step. */
    bg_ring_result res = bg_ring_read(bg_ranks_up(e->ranks), e->msg, e->msg_cap, &n, -1);
    pthread_mutex_lock(&e->lock);
    e->idle = false;
    pthread_mutex_unlock(&e->lock);
    bg_ranks_watch_reset(e->ranks);
    if (res == BG_RING_KICKED || res == BG_RING_TIMEOUT) return bg_ranks_watch(e->ranks, err);
    return bg_fail(err, BG_INTERNAL, "an answer came and none was due");
}

/* ---- the thread: dead ranks ------------------------------------------------------------------ */

static bool is_stopping(void *ctx)
{
    bg_engine *e = ctx;
    pthread_mutex_lock(&e->lock);
    bool stopping = e->stopping;
    pthread_mutex_unlock(&e->lock);
    return stopping;
}

/* Starts all ranks again, as often as it takes and max_restarts allows. BG_BUSY: a stop came. */
static bg_status recover(bg_engine *e, bg_error *why)
{
    for (;;) {
        e->deaths_in_row++;
        if (e->deaths_in_row >= e->c.max_restarts) {
            bg_error last = *why;
            memset(why, 0, sizeof *why);
            return bg_fail(why, BG_DEVICE,
                           "ranks failed %d times and no step succeeded between: %s",
                           e->deaths_in_row, last.text);
        }
        bg_log_at(e->c.log, BG_LOG_WARN, "%s; starting the ranks again (%d of %d)", why->text,
                  e->deaths_in_row, e->c.max_restarts - 1);
        memset(why, 0, sizeof *why);
        if (depth(e)) e->busy_ns += bg_now_ns() - e->busy_since;
        e->n_answered = e->n_sent;
        e->restarts++;
        bg_sched_restart(e->sched);
        retire_done(e);
        publish(e);
        bg_status st = bg_ranks_restart(e->ranks, why);
        if (st) return st;
        st = bg_ranks_wait_ready(e->ranks, NULL, e, is_stopping, why);
        if (!st || st == BG_BUSY) return st;
    }
}

/* The engine has failed: nothing is added to the table any more. */
bool bg_engine_hand_over(bg_engine *e, bool (*give)(void *ctx, const bg_seq_spec *spec), void *ctx)
{
    if (e->own_fault) return false; /* what it stumbled over, another would too */
    for (uint64_t i = 0; i <= e->id_mask; i++)
        for (bg_seq *q = e->by_id[i]; q; q = q->id_next) {
            if (q->state == BG_SEQ_ENDING) continue; /* its last event was reported */
            pthread_mutex_lock(&e->lock);
            bool cancelled = q->cancelled;
            pthread_mutex_unlock(&e->lock);
            const bg_seq_spec spec = {.user = q->user,
                                      .order = q->order,
                                      .prompt = q->tokens,
                                      .n_prompt = q->n_prompt,
                                      .regained = q->tokens + q->n_prompt,
                                      .n_regained = bg_seq_n_output(q),
                                      .max_tokens = q->max_total - q->n_prompt,
                                      .ignore_eos = q->ignore_eos,
                                      .sampling = q->sampling};
            if (cancelled)
                report_finish(e, q, BG_FINISH_CANCEL);
            else if (!give(ctx, &spec))
                return false;
        }
    pthread_mutex_lock(&e->lock);
    e->shown.n_running = e->shown.n_waiting = 0;
    pthread_mutex_unlock(&e->lock);
    return true;
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* One turn: news in, steps out, one answer in. */
static bg_status turn(bg_engine *e, bool *stop, bg_error *err)
{
    news n = take_news(e);
    bg_status st = handle_news(e, &n, err);
    *stop = n.stopping;
    if (st || n.stopping) return st;
    st = fill_pipeline(e, err);
    publish(e);
    if (st) return st;
    st = depth(e) ? wait_answer(e, err) : wait_idle(e, err);
    retire_done(e);
    return st;
}

static void *engine_main(void *arg)
{
    bg_engine *e = arg;
    prctl(PR_SET_NAME, "bg-engine"); /* as tools show it */
    bg_error err = {0};
    bg_status st;
    bool stop = false;
    do {
        st = turn(e, &stop, &err);
        if (st && !stop && !e->own_fault) {
            st = recover(e, &err);
            stop = st == BG_BUSY;
        }
    } while (!st && !stop);
    /* The steps under way are finished: their tokens are paid for. */
    int64_t since = bg_now_ns();
    while (!st && depth(e) && bg_now_ns() - since < STOP_NS) {
        st = wait_answer(e, &err);
        retire_done(e);
    }
    publish(e);
    pthread_mutex_lock(&e->lock);
    e->failed = st && !stop;
    if (e->failed) e->failure = err;
    bool report_failure = e->failed && e->c.on_failed;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    if (report_failure) e->c.on_failed(e->c.failed_ctx, e);
    return NULL;
}
