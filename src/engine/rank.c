#include "engine/rank.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "engine/step.h"

/* How long a look for messages takes while a step is under way: the next step shall go out as soon
 * as it comes, and the answer to this one too. */
static const int64_t LOOK_NS = 20000;

typedef struct flight { /* a step that was started */
    uint64_t number;
    int expected; /* tokens */
    int64_t start_ns;
} flight;

typedef struct rank {
    const bg_rank_config *c;
    const bg_rank_ops *ops;
    const bg_rank_link *link;
    void *state;
    int32_t table_cap;  /* blocks of the longest sequence */
    int32_t *tables;    /* [max_num_seqs, table_cap]; pages that nothing needs are never touched */
    int32_t *n_blocks;  /* of each slot; 0: not seated */
    int32_t *len;       /* tokens in each slot's history */
    bg_seq_step *seqs;  /* [max_num_seqs] */
    bg_sampled *out;    /* [max_num_seqs] */
    unsigned char *msg; /* the message being read, or the answer */
    size_t msg_cap;
    flight flights[BG_STEPS_AHEAD]; /* flight number n is at n % BG_STEPS_AHEAD */
    uint64_t n_started, n_answered;
    int64_t last_end_ns; /* of the step answered last */
} rank;

static void beat(const rank *r)
{
    atomic_fetch_add_explicit(&r->link->slot->beats, 1, memory_order_relaxed);
}

static void on_progress(void *ctx, uint64_t done, uint64_t total)
{
    const rank *r = ctx;
    atomic_store(&r->link->slot->total, total);
    atomic_store(&r->link->slot->done, done);
    beat(r);
}

static int32_t *table_of(const rank *r, int32_t slot)
{
    return r->tables + (size_t)slot * (size_t)r->table_cap;
}

static bg_status append_blocks(rank *r, int32_t slot, const int32_t *blocks, int32_t n,
                               bg_error *err)
{
    if (n > r->table_cap - r->n_blocks[slot])
        return bg_fail(err, BG_INTERNAL, "slot %d: %d blocks and %d more, at most %d", (int)slot,
                       (int)r->n_blocks[slot], (int)n, (int)r->table_cap);
    int32_t *at = table_of(r, slot) + r->n_blocks[slot];
    for (int32_t i = 0; i < n; i++) {
        if (blocks[i] < 1 || blocks[i] >= r->c->n_blocks)
            return bg_fail(err, BG_INTERNAL, "slot %d: block %d of %d", (int)slot, (int)blocks[i],
                           r->c->n_blocks);
        at[i] = blocks[i];
    }
    r->n_blocks[slot] += n;
    return BG_OK;
}

static bg_status do_seat(rank *r, size_t n, bg_error *err)
{
    bg_msg_seat s;
    bg_status st = bg_msg_get_seat(r->msg, n, &s, err);
    if (st) return st;
    if (s.slot < 0 || s.slot >= r->c->max_num_seqs || s.n_tokens > r->c->max_model_len)
        return bg_fail(err, BG_INTERNAL, "seat in slot %d of %d with %d tokens, at most %d",
                       (int)s.slot, r->c->max_num_seqs, (int)s.n_tokens, r->c->max_model_len);
    r->n_blocks[s.slot] = 0;
    r->len[s.slot] = s.n_tokens;
    st = append_blocks(r, s.slot, s.blocks, s.n_blocks, err);
    if (!st)
        st = r->ops->seat(r->state, s.slot, &s.sampling, s.tokens, s.n_tokens, s.n_generated, err);
    return st;
}

/* An entry of the step: checks that it stays inside its history and its blocks. */
static bg_status read_entry(rank *r, bg_msg_step *msg, bg_seq_step *q, bg_error *err)
{
    bg_msg_entry e;
    bg_status st = bg_msg_next_entry(msg, &e, err);
    if (st) return st;
    if (e.slot >= r->c->max_num_seqs || !r->n_blocks[e.slot])
        return bg_fail(err, BG_INTERNAL, "step: nobody is seated in slot %d", (int)e.slot);
    st = append_blocks(r, e.slot, e.blocks, e.n_blocks, err);
    if (st) return st;
    int64_t end = (int64_t)e.pos0 + e.n_tokens, len = r->len[e.slot];
    if (end > len || (e.sample && end != len) ||
        end > (int64_t)r->n_blocks[e.slot] * r->c->block_tokens)
        return bg_fail(err, BG_INTERNAL,
                       "step: slot %d to position %lld, with %lld tokens and %d blocks",
                       (int)e.slot, (long long)end, (long long)len, (int)r->n_blocks[e.slot]);
    r->len[e.slot] += e.sample;
    *q = (bg_seq_step){e.slot,  e.pos0, e.n_tokens, r->n_blocks[e.slot], table_of(r, e.slot),
                       e.sample};
    return BG_OK;
}

static bg_status send_result(rank *r, const bg_msg_result *head, bg_error *err)
{
    size_t n = bg_msg_put_result(r->msg, r->msg_cap, head, r->out);
    if (!n) return bg_fail(err, BG_INTERNAL, "answer of %d tokens does not fit", (int)head->n);
    switch (bg_ring_write(r->link->up, r->msg, n, -1)) {
    case BG_RING_OK:
        return BG_OK;
    case BG_RING_CLOSED:
        return BG_OK; /* nobody wants it any more; `down` says so too */
    default:
        return bg_fail(err, BG_INTERNAL, "answer of %zu bytes does not fit its ring", n);
    }
}

static bg_status start_step(rank *r, size_t n, bg_error *err)
{
    bg_msg_step msg;
    int64_t rows = 0;
    flight *f = &r->flights[r->n_started % BG_STEPS_AHEAD];
    bg_status st = bg_msg_get_step(r->msg, n, &msg, err);
    if (st) return st;
    if (msg.n_seqs > r->c->max_num_seqs)
        return bg_fail(err, BG_INTERNAL, "step of %d sequences, at most %d", (int)msg.n_seqs,
                       r->c->max_num_seqs);
    *f = (flight){.number = msg.number, .start_ns = bg_now_ns()};
    for (int32_t i = 0; i < msg.n_seqs; i++) {
        st = read_entry(r, &msg, &r->seqs[i], err);
        if (st) return st;
        rows += r->seqs[i].n_tokens;
        f->expected += r->seqs[i].sample;
    }
    if (rows > r->c->max_step_tokens || msg.left)
        return bg_fail(err, BG_INTERNAL, "step of %lld tokens, at most %d", (long long)rows,
                       r->c->max_step_tokens);
    bg_batch batch = {.n_seqs = msg.n_seqs, .seqs = r->seqs};
    st = r->ops->launch(r->state, &batch, err);
    if (!st) r->n_started++;
    return st;
}

static int under_way(const rank *r)
{
    return (int)(r->n_started - r->n_answered);
}

/* The oldest step's tokens, as soon as they are there. */
static bg_status end_step(rank *r, bg_error *err)
{
    const flight *f = &r->flights[r->n_answered % BG_STEPS_AHEAD];
    int got = 0;
    bg_status st = r->ops->fetch(r->state, r->out, &got, err);
    if (st) return st;
    if (got != f->expected)
        return bg_fail(err, BG_INTERNAL, "step sampled %d tokens, %d were asked for", got,
                       f->expected);
    /* Two steps share the device one after the other: the second begins when the first ends. */
    const int64_t begin = f->start_ns > r->last_end_ns ? f->start_ns : r->last_end_ns;
    r->last_end_ns = bg_now_ns();
    r->n_answered++;
    if (r->ops->device_times) {
        int64_t work = 0, idle = 0;
        r->ops->device_times(r->state, &work, &idle);
        atomic_store_explicit(&r->link->slot->device_work_ns, work, memory_order_relaxed);
        atomic_store_explicit(&r->link->slot->device_idle_ns, idle, memory_order_relaxed);
    }
    if (r->link->rank == 0)
        st = send_result(r, &(bg_msg_result){got, f->number, r->last_end_ns - begin}, err);
    beat(r);
    return st;
}

/* Ends the steps that are done; with no room for another, waits for one. */
static bg_status end_steps(rank *r, bg_error *err)
{
    bg_status st = BG_OK;
    while (!st && under_way(r)) {
        if (r->ops->ready(r->state)) {
            st = end_step(r, err);
        } else if (under_way(r) == BG_STEPS_AHEAD) {
            nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
        } else {
            break;
        }
    }
    return st;
}

static bg_status obey(rank *r, size_t n, bool *stop, bg_error *err)
{
    bg_msg_kind kind;
    bg_status st = bg_msg_get_kind(r->msg, n, &kind, err);
    if (st) return st;
    *stop = kind == BG_MSG_STOP;
    if (kind == BG_MSG_SEAT)
        st = do_seat(r, n, err);
    else if (kind == BG_MSG_STEP)
        st = start_step(r, n, err);
    else if (kind != BG_MSG_STOP)
        st = bg_fail(err, BG_INTERNAL, "message of kind %d came down", (int)kind);
    if (!st) beat(r);
    return st;
}

static bg_status work(rank *r, bg_error *err)
{
    bg_status st = BG_OK;
    for (bool stop = false; !st && !stop;) {
        size_t n;
        st = end_steps(r, err);
        if (st) return st;
        switch (bg_ring_read(r->link->down, r->msg, r->msg_cap, &n, under_way(r) ? LOOK_NS : -1)) {
        case BG_RING_OK:
            st = obey(r, n, &stop, err);
            break;
        case BG_RING_TIMEOUT:
        case BG_RING_KICKED:
            break;
        case BG_RING_CLOSED:
            stop = true;
            break;
        default:
            return bg_fail(err, BG_INTERNAL, "ring of steps is damaged (%zu bytes)", n);
        }
    }
    while (!st && under_way(r))
        st = end_step(r, err);
    return st;
}

static bg_status make_buffers(rank *r, bg_error *err)
{
    size_t n = (size_t)r->c->max_num_seqs;
    r->table_cap =
        (int32_t)(((int64_t)r->c->max_model_len + r->c->block_tokens - 1) / r->c->block_tokens);
    r->msg_cap = r->link->max_message;
    if (r->msg_cap < bg_msg_result_max_bytes((int32_t)n))
        r->msg_cap = bg_msg_result_max_bytes((int32_t)n);
    r->tables = calloc(n * (size_t)r->table_cap, sizeof *r->tables);
    r->n_blocks = calloc(n, sizeof *r->n_blocks);
    r->len = calloc(n, sizeof *r->len);
    r->seqs = calloc(n, sizeof *r->seqs);
    r->out = calloc(n, sizeof *r->out);
    r->msg = malloc(r->msg_cap);
    if (!r->tables || !r->n_blocks || !r->len || !r->seqs || !r->out || !r->msg)
        return bg_fail(err, BG_NOMEM, "block tables of %zu slots: out of memory", n);
    return BG_OK;
}

bg_status bg_rank_run(const bg_rank_config *c, const bg_rank_ops *ops, const bg_rank_link *link)
{
    rank r = {.c = c, .ops = ops, .link = link};
    bg_error err = {0};
    bg_status st = make_buffers(&r, &err);
    const int64_t begin = bg_now_ns();
    if (!st) st = ops->start(&r.state, c, link->rank, link->comm_memory, on_progress, &r, &err);
    if (!st) {
        if (ops->memory) atomic_store(&link->slot->memory, ops->memory(r.state));
        if (ops->load_times) link->slot->load = *ops->load_times(r.state);
        link->slot->start_ns = bg_now_ns() - begin;
        atomic_store(&link->slot->state, BG_RANK_READY);
        bg_ring_kick(link->up);
        st = work(&r, &err);
    }
    if (st) { /* said before the end, which may take long on a device that failed */
        link->slot->err = err;
        atomic_store(&link->slot->state, BG_RANK_FAILED);
        bg_ring_kick(link->up);
    }
    if (r.state) ops->stop(r.state);
    free(r.tables);
    free(r.n_blocks);
    free(r.len);
    free(r.seqs);
    free(r.out);
    free(r.msg);
    if (!st) {
        atomic_store(&link->slot->state, BG_RANK_STOPPED);
        bg_ring_kick(link->up);
    }
    return st;
}
