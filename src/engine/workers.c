#include "engine/workers.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/comm.h"
#include "engine/rank.h"
#include "engine/step.h"

enum {
    MIN_RING = 1 << 20,
    SEAT_EXTRAS = 128 << 10, /* bytes of a seat message for biases and stop ids */
};

static const int64_t STOP_NS = INT64_C(2000000000);  /* a rank may take to end when asked */
static const int64_t KILL_NS = INT64_C(30000000000); /* a killed rank may take to be reaped */
static const int64_t HANG_NS = INT64_C(600000000000);

typedef struct shared {      /* the map's header */
    _Atomic uint32_t alive;  /* rank processes not yet reaped; a futex */
    _Atomic uint32_t obeyed; /* commands that the nursery has carried out */
    _Alignas(64) bg_rank_slot slots[];
} shared;

typedef struct rank_thread {
    pthread_t thread;
    bool running;
    bg_ranks *ranks;
    int rank;
} rank_thread;

struct bg_ranks {
    bg_rank_config c;
    const bg_rank_ops *ops;
    bg_log *log;
    bool threads;
    rank_thread *thread; /* [tp] */

    size_t map_bytes, comm_offset, comm_bytes, down_offset, down_bytes, down_cap, up_offset, up_cap;
    size_t max_message;
    char *map;
    shared *shared;

    pid_t nursery; /* 0: none */
    int command;   /* the pipe to it; -1 */
    uint32_t n_commands;
    int64_t hang_ns;
    int64_t stalled_ns, last_watch;
    uint64_t last_beats;
};

/* ---- the shared map -------------------------------------------------------------------------- */

static bg_ring *down_ring(const bg_ranks *r, int rank)
{
    return (bg_ring *)(r->map + r->down_offset + (size_t)rank * r->down_bytes);
}

bg_ring *bg_ranks_up(bg_ranks *r)
{
    return (bg_ring *)(r->map + r->up_offset);
}

static void *comm_memory(const bg_ranks *r)
{
    return r->map + r->comm_offset;
}

static size_t align_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static void lay_out(bg_ranks *r)
{
    const bg_rank_config *c = &r->c;
    size_t tp = (size_t)c->tp;
    size_t table =
        ((size_t)c->max_model_len + (size_t)c->block_tokens - 1) / (size_t)c->block_tokens;
    size_t seat =
        bg_msg_seat_bytes(&(bg_msg_seat){0}) + 4 * ((size_t)c->max_model_len + table) + SEAT_EXTRAS;
    size_t step = bg_msg_step_bytes(c->max_num_seqs, c->n_blocks);
    r->max_message = seat > step ? seat : step;
    if (c->max_message > r->max_message) r->max_message = c->max_message;
    r->max_message = align_up(r->max_message, 64);
    /* Two steps and their answers may be under way: rank 0 never waits for the ring up, so it
     * always comes back to the ring down, and nothing waits in a circle. */
    r->down_cap = 2 * r->max_message + 64 < MIN_RING ? MIN_RING : 2 * r->max_message + 64;
    r->up_cap = 4 * bg_msg_result_max_bytes(c->max_num_seqs) + 64;
    r->comm_bytes = bg_comm_shm_bytes(c->tp, BG_RANK_COMM_FLOATS);
    r->comm_offset = align_up(sizeof(shared) + tp * sizeof(bg_rank_slot), 4096);
    r->down_offset = align_up(r->comm_offset + r->comm_bytes, 4096);
    r->down_bytes = align_up(bg_ring_bytes(r->down_cap), 4096);
    r->up_offset = r->down_offset + tp * r->down_bytes;
    r->map_bytes = r->up_offset + align_up(bg_ring_bytes(r->up_cap), 4096);
}

/* Only while no rank lives. */
static void reset_map(bg_ranks *r)
{
    for (int i = 0; i < r->c.tp; i++) {
        bg_rank_slot *s = &r->shared->slots[i];
        memset(&s->err, 0, sizeof s->err);
        atomic_store(&s->exited, 0);
        atomic_store(&s->wait_status, 0);
        atomic_store(&s->done, 0);
        atomic_store(&s->state, BG_RANK_STARTING);
        bg_ring_init(down_ring(r, i), r->down_cap);
    }
    bg_ring_init(bg_ranks_up(r), r->up_cap);
    memset(comm_memory(r), 0, r->comm_bytes);
}

static bg_rank_link link_of(bg_ranks *r, int rank)
{
    return (bg_rank_link){.rank = rank,
                          .slot = &r->shared->slots[rank],
                          .down = down_ring(r, rank),
                          .up = bg_ranks_up(r),
                          .comm_memory = comm_memory(r),
                          .max_message = r->max_message};
}

/* ---- in the nursery and in a rank: processes without threads --------------------------------- */

static void close_from(unsigned first)
{
    if (syscall(SYS_close_range, first, ~0U, 0) == 0) return;
    long most = sysconf(_SC_OPEN_MAX);
    for (long fd = (long)first; fd < (most < 0 || most > 65536 ? 65536 : most); fd++)
        close((int)fd);
}

static void become_child_of(pid_t parent, const char *name)
{
    static const int ignored[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGUSR1, SIGUSR2};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1); /* it died before the line above */
    prctl(PR_SET_NAME, name);
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
        signal(ignored[i], SIG_IGN);
    signal(SIGCHLD, SIG_DFL);
    signal(SIGALRM, SIG_DFL);
    signal(SIGBUS, SIG_DFL); /* how a rank ended is told by its status */
}

static void fork_rank(bg_ranks *r, int rank)
{
    bg_rank_slot *slot = &r->shared->slots[rank];
    pid_t nursery = getpid(), pid = fork();
    if (pid == 0) {
        char name[24];
        snprintf(name, sizeof name, "bg-rank%d", r->c.first_rank + rank);
        become_child_of(nursery, name);
        close_from(3);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        /* The nursery stores it too, but perhaps only after the rank says that it is ready. */
        atomic_store(&slot->pid, getpid());
        bg_rank_link link = link_of(r, rank);
        _exit(bg_rank_run(&r->c, r->ops, &link) ? 1 : 0);
    }
    if (pid < 0) {
        bg_error err = {0};
        bg_fail_os(&err, "cannot fork");
        slot->err = err;
        atomic_store(&slot->state, BG_RANK_FAILED);
        bg_ring_kick(bg_ranks_up(r));
        return;
    }
    atomic_store(&slot->pid, pid);
    atomic_fetch_add(&r->shared->alive, 1);
}

static void kill_ranks(bg_ranks *r)
{
    for (int i = 0; i < r->c.tp; i++) {
        pid_t pid = atomic_load(&r->shared->slots[i].pid);
        if (pid > 0) kill(pid, SIGKILL);
    }
}

static void reap(bg_ranks *r, int options)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, options)) > 0) {
        for (int i = 0; i < r->c.tp; i++) {
            bg_rank_slot *s = &r->shared->slots[i];
            if (atomic_load(&s->pid) != pid) continue;
            atomic_store(&s->pid, 0);
            atomic_store(&s->wait_status, status);
            atomic_store(&s->exited, 1);
            /* Last touches the ring before the count: at zero the coordinator makes it anew. */
            bg_ring_kick(bg_ranks_up(r));
            atomic_fetch_sub(&r->shared->alive, 1);
            syscall(SYS_futex, &r->shared->alive, FUTEX_WAKE, 1, NULL, NULL, 0);
        }
    }
}

_Noreturn static void run_nursery(bg_ranks *r, int command, pid_t coordinator)
{
    become_child_of(coordinator, "bg-nursery");
    int null = open("/dev/null", O_RDWR), high = fcntl(command, F_DUPFD, 10);
    if (null < 0 || high < 0) _exit(1);
    dup2(null, 0);
    dup2(null, 1);
    dup2(high, 3);
    close_from(4);
    sigset_t chld, none;
    sigemptyset(&none);
    sigemptyset(&chld);
    sigaddset(&chld, SIGCHLD);
    sigprocmask(SIG_SETMASK, &chld, NULL);
    int child_fd = signalfd(-1, &chld, SFD_NONBLOCK);
    if (child_fd < 0) _exit(1);
    for (;;) {
        struct pollfd fds[2] = {{.fd = 3, .events = POLLIN}, {.fd = child_fd, .events = POLLIN}};
        if (poll(fds, 2, -1) < 0 && errno != EINTR) break;
        if (fds[1].revents) {
            struct signalfd_siginfo info;
            while (read(child_fd, &info, sizeof info) > 0) {
            }
            reap(r, WNOHANG);
        }
        if (fds[0].revents) {
            char cmd;
            ssize_t n = read(3, &cmd, 1);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) break;
            if (cmd == 'K') kill_ranks(r);
            if (cmd == 'S')
                for (int i = 0; i < r->c.tp; i++)
                    fork_rank(r, i);
            atomic_fetch_add(&r->shared->obeyed, 1);
        }
    }
    kill_ranks(r);
    reap(r, 0);
    _exit(0);
}

/* ---- the coordinator: processes -------------------------------------------------------------- */

static bg_status command_nursery(bg_ranks *r, char cmd, bg_error *err)
{
    ssize_t n;
    /* A nursery that is gone must not end the job by SIGPIPE, and the caller may have threads. */
    sigset_t pipe_set, old, pending;
    sigemptyset(&pipe_set);
    sigaddset(&pipe_set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_set, &old);
    do
        n = write(r->command, &cmd, 1);
    while (n < 0 && errno == EINTR);
    int os = errno;
    if (n < 0 && os == EPIPE && sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE))
        sigtimedwait(&pipe_set, NULL, &(struct timespec){0});
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (n == 1) {
        r->n_commands++;
        return BG_OK;
    }
    return bg_fail(err, BG_DEVICE, "the process that starts the ranks is gone (%s)", strerror(os));
}

static bool nursery_gone(bg_ranks *r)
{
    if (r->nursery == 0) return true;
    pid_t got = waitpid(r->nursery, NULL, WNOHANG);
    if (got == 0 || (got < 0 && errno != ECHILD) || (got < 0 && kill(r->nursery, 0) == 0))
        return false;
    r->nursery = 0;
    return true;
}

/* Waits until every command was obeyed and all rank processes are reaped. False: not within
 * timeout_ns. */
static bool wait_all_reaped(bg_ranks *r, int64_t timeout_ns)
{
    int64_t start = bg_now_ns();
    for (;;) {
        uint32_t alive = atomic_load(&r->shared->alive);
        if (alive == 0 && atomic_load(&r->shared->obeyed) == r->n_commands) return true;
        if (bg_now_ns() - start > timeout_ns || nursery_gone(r)) return false;
        struct timespec t = {0, 20 * 1000 * 1000};
        syscall(SYS_futex, &r->shared->alive, FUTEX_WAIT, alive, &t, NULL, 0);
    }
}

static bg_status start_nursery(bg_ranks *r, bg_error *err)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) != 0) return bg_fail_os(err, "cannot make a pipe");
    pid_t coordinator = getpid(), pid = fork();
    if (pid == 0) run_nursery(r, fds[0], coordinator);
    close(fds[0]);
    if (pid < 0) {
        close(fds[1]);
        return bg_fail_os(err, "cannot fork the process that starts the ranks");
    }
    r->nursery = pid;
    r->command = fds[1];
    return BG_OK;
}

/* ---- the coordinator: threads, for tests ----------------------------------------------------- */

static void *thread_main(void *arg)
{
    rank_thread *t = arg;
    bg_rank_link link = link_of(t->ranks, t->rank);
    bg_rank_run(&t->ranks->c, t->ranks->ops, &link);
    return NULL;
}

static bg_status start_threads(bg_ranks *r, bg_error *err)
{
    for (int i = 0; i < r->c.tp; i++) {
        r->thread[i] = (rank_thread){.ranks = r, .rank = i};
        int os = pthread_create(&r->thread[i].thread, NULL, thread_main, &r->thread[i]);
        if (os) return bg_fail(err, BG_IO, "cannot start a thread: %s", strerror(os));
        r->thread[i].running = true;
    }
    return BG_OK;
}

static void join_threads(bg_ranks *r)
{
    bg_comm_shm_abort(comm_memory(r));
    bg_ring_close(bg_ranks_up(r));
    for (int i = 0; i < r->c.tp; i++)
        bg_ring_close(down_ring(r, i));
    for (int i = 0; i < r->c.tp; i++) {
        if (r->thread[i].running) pthread_join(r->thread[i].thread, NULL);
        r->thread[i].running = false;
    }
}

/* ---- start, stop, restart -------------------------------------------------------------------- */

static bg_status check_config(const bg_rank_config *c, bg_error *err)
{
    if (c->tp < 1 || c->tp > BG_MAX_RANKS)
        return bg_fail(err, BG_ARG, "%d ranks: 1 to %d are possible", c->tp, BG_MAX_RANKS);
    if (c->n_blocks < 2 || c->block_tokens < 1 || c->max_num_seqs < 1 || c->max_model_len < 2 ||
        c->max_step_tokens < c->max_num_seqs)
        return bg_fail(err, BG_ARG,
                       "%d KV blocks of %d tokens, %d sequences, steps of %d tokens, context %d: "
                       "at least 2, 1, 1, as many as sequences, and 2",
                       c->n_blocks, c->block_tokens, c->max_num_seqs, c->max_step_tokens,
                       c->max_model_len);
    return BG_OK;
}

bg_status bg_ranks_start_as(bg_ranks **out, const bg_rank_config *c, const bg_rank_ops *ops,
                            bool threads, bg_log *log, bg_error *err)
{
    *out = NULL;
    bg_status st = check_config(c, err);
    if (st) return st;
    bg_ranks *r = calloc(1, sizeof *r);
    if (!r) return bg_fail(err, BG_NOMEM, "ranks: out of memory");
    r->c = *c;
    r->ops = ops;
    r->log = log;
    r->threads = threads;
    r->command = -1;
    r->hang_ns = HANG_NS;
    r->thread = calloc((size_t)c->tp, sizeof *r->thread);
    lay_out(r);
    void *map = mmap(NULL, r->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED || !r->thread) {
        st = bg_fail(err, BG_NOMEM, "%zu bytes of memory shared with the ranks: out of memory",
                     r->map_bytes);
        goto out;
    }
    r->map = map;
    r->shared = map;
    reset_map(r);
    if (threads) {
        st = start_threads(r, err);
    } else {
        st = start_nursery(r, err);
        if (!st) st = command_nursery(r, 'S', err);
    }
    if (st) goto out;
    bg_ranks_watch_reset(r);
    *out = r;
    r = NULL;
out:
    bg_ranks_stop(r);
    return st;
}

bg_status bg_ranks_start(bg_ranks **r, const bg_rank_config *c, const bg_rank_ops *ops, bg_log *log,
                         bg_error *err)
{
    return bg_ranks_start_as(r, c, ops, false, log, err);
}

static bool all_ready(const bg_ranks *r)
{
    for (int i = 0; i < r->c.tp; i++) {
        const bg_rank_slot *s = &r->shared->slots[i];
        if (atomic_load(&s->state) != BG_RANK_READY || atomic_load(&s->exited)) return false;
    }
    return true;
}

static void end_processes(bg_ranks *r)
{
    /* Ranks that load or are stuck in a collective with a dead one would not hear it: kill them. */
    if (all_ready(r)) {
        _Alignas(8) char msg[8];
        size_t n = bg_msg_put_stop(msg, sizeof msg);
        for (int i = 0; i < r->c.tp; i++) {
            bg_ring_write(down_ring(r, i), msg, n, 0);
            bg_ring_close(down_ring(r, i));
        }
        wait_all_reaped(r, STOP_NS);
    }
    close(r->command); /* the nursery kills, reaps and exits */
    while (r->nursery && waitpid(r->nursery, NULL, 0) < 0 && errno == EINTR) {
    }
    r->nursery = 0;
}

void bg_ranks_stop(bg_ranks *r)
{
    if (!r) return;
    if (r->map && r->threads) join_threads(r);
    if (r->command >= 0) end_processes(r);
    if (r->map) munmap(r->map, r->map_bytes);
    free(r->thread);
    free(r);
}

bg_status bg_ranks_restart(bg_ranks *r, bg_error *err)
{
    if (r->threads) {
        join_threads(r);
        reset_map(r);
        bg_ranks_watch_reset(r);
        return start_threads(r, err);
    }
    bg_status st = command_nursery(r, 'K', err);
    if (st) return st;
    if (!wait_all_reaped(r, KILL_NS))
        return bg_fail(err, BG_DEVICE, "a rank does not end even when killed");
    reset_map(r);
    bg_ranks_watch_reset(r);
    return command_nursery(r, 'S', err);
}

/* ---- watching -------------------------------------------------------------------------------- */

static bg_status rank_failure(const bg_ranks *r, int own_rank, bg_error *err)
{
    const bg_rank_slot *s = &r->shared->slots[own_rank];
    const int rank = r->c.first_rank + own_rank; /* as the job counts them */
    if (atomic_load(&s->state) == BG_RANK_FAILED) {
        bg_error own = s->err;
        bg_wrap(&own, "rank %d", rank);
        if (!err->status) *err = own;
        return err->status;
    }
    int status = atomic_load(&s->wait_status);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        return bg_fail(err, BG_DEVICE,
                       "rank %d was killed (signal 9); the kernel does that when memory runs out: "
                       "see its log",
                       rank);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS)
        return bg_fail(err, BG_DEVICE,
                       "rank %d died of signal %d: the model became shorter, or its device failed, "
                       "while it was read",
                       rank, SIGBUS);
    if (WIFSIGNALED(status))
        return bg_fail(err, BG_DEVICE, "rank %d died of signal %d (%s)", rank, WTERMSIG(status),
                       strsignal(WTERMSIG(status)));
    return bg_fail(err, BG_DEVICE, "rank %d ended unasked, with exit status %d", rank,
                   WEXITSTATUS(status));
}

/* A rank that could say why comes before one that just died: it may have died of that. */
static bg_status find_failure(bg_ranks *r, bg_error *err)
{
    int dead = -1;
    for (int i = 0; i < r->c.tp; i++) {
        const bg_rank_slot *s = &r->shared->slots[i];
        int32_t state = atomic_load(&s->state);
        if (state == BG_RANK_FAILED) return rank_failure(r, i, err);
        if ((atomic_load(&s->exited) || state == BG_RANK_STOPPED) && dead < 0) dead = i;
    }
    if (dead >= 0) return rank_failure(r, dead, err);
    if (!r->threads && nursery_gone(r))
        return bg_fail(err, BG_DEVICE, "the process that starts the ranks is gone");
    return BG_OK;
}

static uint64_t beats(const bg_ranks *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < r->c.tp; i++)
        sum += atomic_load_explicit(&r->shared->slots[i].beats, memory_order_relaxed);
    return sum;
}

void bg_ranks_watch_reset(bg_ranks *r)
{
    r->last_beats = beats(r);
    r->last_watch = bg_now_ns();
    r->stalled_ns = 0;
}

void bg_ranks_set_hang(bg_ranks *r, int64_t hang_ns)
{
    r->hang_ns = hang_ns;
}

bg_status bg_ranks_watch(bg_ranks *r, bg_error *err)
{
    bg_status st = find_failure(r, err);
    if (st) return st;
    int64_t now = bg_now_ns(), since = now - r->last_watch;
    uint64_t b = beats(r);
    r->last_watch = now;
    if (b != r->last_beats) {
        r->last_beats = b;
        r->stalled_ns = 0;
        return BG_OK;
    }
    /* Much more than a tick: this process slept too. */
    r->stalled_ns += since > 10 * (int64_t)BG_RANKS_TICK_NS ? BG_RANKS_TICK_NS : since;
    /* Loading has longer pauses than a step: a driver that starts, a slow disk. */
    if (r->stalled_ns < r->hang_ns || (r->stalled_ns < HANG_NS && !all_ready(r))) return BG_OK;
    char text[32];
    bg_format_duration(r->stalled_ns, text, sizeof text);
    return bg_fail(err, BG_DEVICE, "no rank got on for %s", text);
}

static void log_ready(const bg_ranks *r)
{
    for (int i = 0; i < r->c.tp; i++) {
        bg_load_times times;
        int64_t start_ns;
        char text[160];
        bg_ranks_load_times(r, i, &times, &start_ns);
        bg_load_times_text(&times, text, sizeof text);
        bg_log_at(r->log, BG_LOG_INFO, "rank %d: ready after %.2f s%s%s", r->c.first_rank + i,
                  (double)start_ns * 1e-9, *text ? "; weights: " : "", text);
    }
}

bg_status bg_ranks_wait_ready(bg_ranks *r, void (*progress)(void *, uint64_t done, uint64_t total),
                              void *ctx, bool (*stop)(void *), bg_error *err)
{
    for (;;) {
        if (all_ready(r)) {
            log_ready(r);
            return BG_OK;
        }
        bg_status st = bg_ranks_watch(r, err);
        if (st) return st;
        if (stop && stop(ctx)) return bg_fail(err, BG_BUSY, "stopped while the model loaded");
        if (progress) {
            uint64_t done = 0, total = 0;
            for (int i = 0; i < r->c.tp; i++) {
                done += atomic_load(&r->shared->slots[i].done);
                total += atomic_load(&r->shared->slots[i].total);
            }
            progress(ctx, done, total);
        }
        char none[8];
        size_t n; /* nothing but kicks comes before the first step */
        bg_ring_read(bg_ranks_up(r), none, sizeof none, &n, BG_RANKS_TICK_NS);
    }
}

/* ---- the rest -------------------------------------------------------------------------------- */

bg_status bg_ranks_send(bg_ranks *r, const void *msg, size_t n, bg_error *err)
{
    for (int i = 0; i < r->c.tp; i++) {
        for (;;) {
            bg_ring_result res = bg_ring_write(down_ring(r, i), msg, n, BG_RANKS_TICK_NS);
            if (res == BG_RING_OK) break;
            if (res != BG_RING_TIMEOUT)
                return bg_fail(err, BG_INTERNAL, "a message of %zu bytes does not fit its ring", n);
            bg_status st = bg_ranks_watch(r, err);
            if (st) return st;
        }
    }
    return BG_OK;
}

const bg_rank_config *bg_ranks_config(const bg_ranks *r)
{
    return &r->c;
}

size_t bg_ranks_max_message(const bg_ranks *r)
{
    return r->max_message;
}

void bg_ranks_kick(bg_ranks *r)
{
    bg_ring_kick(bg_ranks_up(r));
}

pid_t bg_ranks_pid(const bg_ranks *r, int rank)
{
    return rank >= 0 && rank < r->c.tp ? atomic_load(&r->shared->slots[rank].pid) : 0;
}

uint64_t bg_ranks_memory(const bg_ranks *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < r->c.tp; i++)
        sum += atomic_load(&r->shared->slots[i].memory);
    return sum;
}

void bg_ranks_device_times(const bg_ranks *r, int64_t *work_ns, int64_t *idle_ns)
{
    *work_ns = atomic_load_explicit(&r->shared->slots[0].device_work_ns, memory_order_relaxed);
    *idle_ns = atomic_load_explicit(&r->shared->slots[0].device_idle_ns, memory_order_relaxed);
}

void bg_ranks_load_times(const bg_ranks *r, int rank, bg_load_times *times, int64_t *start_ns)
{
    *times = r->shared->slots[rank].load;
    *start_ns = r->shared->slots[rank].start_ns;
}
