/* comm/shm.c - collectives through memory that all ranks map.
 *
 * The memory, in this order, each part on its own cache lines:
 *
 *     gate    where ranks wait for each other
 *     slots   2 sets x n_ranks x slot_floats floats: what each rank brings
 *
 * An operation: every rank copies its values into its slot, waits for the others, and reads all
 * slots. Operations use the two sets in turn, so one wait is enough: a rank may write set B while
 * a slower one still reads set A, and cannot come back to A before the slower one has passed the
 * wait of B. Long sums are cut among the ranks instead (each adds one slice for all), which needs a
 * second wait and reads less memory. Either way an element is slot 0 + slot 1 + ... in that order.
 */
#include "comm/comm.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"

enum {
    LINE = 64,        /* bytes of a cache line */
    LANES = 64,       /* floats summed at a time */
    MAX_RANKS = 1024, /* keeps sizes far from overflow */
    SPINS = 3000,     /* pauses before sleeping: some 50 to 150 us */
    SLICE_MIN = 8192, /* floats from which on a sum is cut among more than two ranks */
};

/* turn counts completed waits in steps of 2; bit 0 is set for good by an abort, so that a rank
 * about to sleep on the old value does not. */
typedef struct gate {
    _Alignas(LINE) _Atomic uint32_t turn;
    _Alignas(LINE) _Atomic uint32_t arrived;
    _Alignas(LINE) _Atomic uint32_t sleepers;
} gate;

struct bg_comm {
    gate *gate;
    float *slots;
    size_t slot_floats; /* max_floats, rounded up to whole cache lines */
    size_t max_floats;
    int rank, n_ranks;
    unsigned set;       /* of the next operation */
    int64_t standin_ns; /* -1: a real one; else gate and slots are NULL */
};

static size_t slot_floats_of(size_t max_floats)
{
    const size_t line = LINE / sizeof(float);
    return (max_floats + line - 1) / line * line;
}

size_t bg_comm_shm_bytes(int n_ranks, size_t max_floats)
{
    return sizeof(gate) + 2 * (size_t)n_ranks * slot_floats_of(max_floats) * sizeof(float);
}

bg_status bg_comm_shm_join(bg_comm **c, void *memory, int rank, int n_ranks, size_t max_floats,
                           bg_error *err)
{
    *c = NULL;
    if (n_ranks < 1 || n_ranks > MAX_RANKS || rank < 0 || rank >= n_ranks)
        return bg_fail(err, BG_ARG, "communicator: rank %d of %d ranks, 0..%d of 1..%d are allowed",
                       rank, n_ranks, n_ranks - 1, MAX_RANKS);
    if (max_floats < 1 || max_floats > SIZE_MAX / 16 / (size_t)n_ranks)
        return bg_fail(err, BG_ARG, "communicator: slots of %zu values", max_floats);
    if ((uintptr_t)memory % LINE)
        return bg_fail(err, BG_ARG, "communicator: memory is not aligned to %d bytes", LINE);
    bg_comm *n = calloc(1, sizeof *n);
    if (!n) return bg_fail(err, BG_NOMEM, "communicator: out of memory");
    n->gate = memory;
    n->slots = (float *)(n->gate + 1);
    n->slot_floats = slot_floats_of(max_floats);
    n->max_floats = max_floats;
    n->rank = rank;
    n->n_ranks = n_ranks;
    n->standin_ns = -1;
    *c = n;
    return BG_OK;
}

bg_status bg_comm_standin_new(bg_comm **c, int rank, int n_ranks, int64_t all_reduce_ns,
                              bg_error *err)
{
    *c = NULL;
    if (n_ranks < 1 || n_ranks > MAX_RANKS || rank < 0 || rank >= n_ranks || all_reduce_ns < 0)
        return bg_fail(err, BG_ARG, "stand-in for a communicator: rank %d of %d, %lld ns", rank,
                       n_ranks, (long long)all_reduce_ns);
    bg_comm *n = calloc(1, sizeof *n);
    if (!n) return bg_fail(err, BG_NOMEM, "communicator: out of memory");
    n->rank = rank;
    n->n_ranks = n_ranks;
    n->standin_ns = all_reduce_ns;
    *c = n;
    return BG_OK;
}

int64_t bg_comm_standin_ns(const bg_comm *c)
{
    return c->standin_ns;
}

void bg_comm_free(bg_comm *c)
{
    free(c);
}

int bg_comm_rank(const bg_comm *c)
{
    return c->rank;
}

int bg_comm_size(const bg_comm *c)
{
    return c->n_ranks;
}

/* Not the _PRIVATE forms: the waiters are processes. */
static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits until all ranks are here. What a rank wrote before is seen by all after. */
static bg_status meet(bg_comm *c, bg_error *err)
{
    gate *g = c->gate;
    uint32_t turn = atomic_load_explicit(&g->turn, memory_order_acquire);
    if (turn & 1) goto aborted;
    if (atomic_fetch_add(&g->arrived, 1) + 1 == (uint32_t)c->n_ranks) {
        /* Before the turn: the next wait's arrivals begin as soon as it changes. */
        atomic_store_explicit(&g->arrived, 0, memory_order_relaxed);
        uint32_t before = atomic_fetch_add(&g->turn, 2);
        if (atomic_load(&g->sleepers)) futex_wake_all(&g->turn);
        if (before & 1) goto aborted;
        return BG_OK;
    }
    uint32_t now = turn;
    for (int i = 0; i < SPINS && now == turn; i++) {
        pause_briefly();
        now = atomic_load_explicit(&g->turn, memory_order_acquire);
    }
    if (now == turn) {
        /* A sleeper counts itself before the kernel compares the word, the last rank changes the
         * word before it looks for sleepers: one of them sees the other. */
        atomic_fetch_add(&g->sleepers, 1);
        while ((now = atomic_load(&g->turn)) == turn)
            futex_wait(&g->turn, turn);
        atomic_fetch_sub(&g->sleepers, 1);
    }
    if (now & 1) goto aborted;
    return BG_OK;
aborted:
    return bg_fail(err, BG_DEVICE,
                   "rank %d: the replica was stopped while its ranks exchanged data", c->rank);
}

void bg_comm_shm_abort(void *memory)
{
    gate *g = memory;
    atomic_fetch_or(&g->turn, 1);
    futex_wake_all(&g->turn);
}

static float *slot(const bg_comm *c, unsigned set, int rank)
{
    return c->slots + ((size_t)set * (size_t)c->n_ranks + (size_t)rank) * c->slot_floats;
}

/* out[i] = sum over ranks, in rank order, of their slots' element i, for i in [from, to). */
static void sum_slots(const bg_comm *c, unsigned set, float *out, size_t from, size_t to)
{
    const float *s0 = slot(c, set, 0);
    size_t i = from;
    for (; i + LANES <= to; i += LANES) {
        float acc[LANES];
        memcpy(acc, s0 + i, sizeof acc);
        for (int r = 1; r < c->n_ranks; r++) {
            const float *s = slot(c, set, r) + i;
            for (int j = 0; j < LANES; j++)
                acc[j] += s[j];
        }
        memcpy(out + i, acc, sizeof acc);
    }
    for (; i < to; i++) {
        float acc = s0[i];
        for (int r = 1; r < c->n_ranks; r++)
            acc += slot(c, set, r)[i];
        out[i] = acc;
    }
}

static bg_status reduce_piece(bg_comm *c, float *x, size_t n, bg_error *err)
{
    const unsigned set = c->set;
    c->set ^= 1;
    memcpy(slot(c, set, c->rank), x, n * sizeof *x);
    bg_status st = meet(c, err);
    if (st) return st;
    if (c->n_ranks <= 2 || n < SLICE_MIN) {
        sum_slots(c, set, x, 0, n);
        return BG_OK;
    }
    /* Slice r is read and written by rank r alone, so slot 0 can take the sums. Borders on cache
     * lines keep ranks from writing the same line. */
    const size_t line = LINE / sizeof(float), lines = (n + line - 1) / line;
    size_t from = lines * (size_t)c->rank / (size_t)c->n_ranks * line;
    size_t to = lines * ((size_t)c->rank + 1) / (size_t)c->n_ranks * line;
    if (to > n) to = n;
    sum_slots(c, set, slot(c, set, 0), from, to);
    st = meet(c, err);
    if (!st) memcpy(x, slot(c, set, 0), n * sizeof *x);
    return st;
}

bg_status bg_comm_all_reduce(bg_comm *c, float *x, size_t n, bg_error *err)
{
    bg_status st = BG_OK;
    if (c->n_ranks == 1) return BG_OK;
    if (c->standin_ns >= 0) {
        for (const int64_t from = bg_now_ns(); bg_now_ns() - from < c->standin_ns;)
            pause_briefly();
        return BG_OK;
    }
    for (size_t at = 0; !st && at < n; at += c->max_floats)
        st = reduce_piece(c, x + at, n - at < c->max_floats ? n - at : c->max_floats, err);
    return st;
}

bg_status bg_comm_all_gather(bg_comm *c, const float *x, size_t n, float *out, bg_error *err)
{
    bg_status st = BG_OK;
    for (int r = 0; c->standin_ns >= 0 && r < c->n_ranks; r++)
        memcpy(out + (size_t)r * n, x, n * sizeof *x);
    if (c->standin_ns >= 0) return BG_OK;
    for (size_t at = 0; !st && at < n; at += c->max_floats) {
        const size_t len = n - at < c->max_floats ? n - at : c->max_floats;
        const unsigned set = c->set;
        c->set ^= 1;
        memcpy(slot(c, set, c->rank), x + at, len * sizeof *x);
        st = meet(c, err);
        for (int r = 0; !st && r < c->n_ranks; r++)
            memcpy(out + (size_t)r * n + at, slot(c, set, r), len * sizeof *x);
    }
    return st;
}

bg_status bg_comm_barrier(bg_comm *c, bg_error *err)
{
    return c->standin_ns >= 0 ? BG_OK : meet(c, err);
}
