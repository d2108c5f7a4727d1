/* Builds the pipeline, watches it, takes it apart.
 *
 *     main thread      signals, progress, time
 *     reader + text    job/feed.c
 *     admit thread     feed -> collect (announce) -> engine (submit)
 *     engine threads   engine/engine.c, one a replica; their sink hands events to collect
 *     collect thread   job/collect.c: results, the writer
 *
 * A stop goes through stop_admitting(): the feed ends, the engine winds down, what runs may finish
 * within the grace time, then the collector commits. */
#include "job/job.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "job/collect.h"
#include "job/feed.h"
#include "job/metrics.h"
#include "job/notify.h"
#include "job/prepare.h"
#include "job/progress.h"
#include "job/signals.h"
#include "job/summary.h"

enum { WATCH_MS = 200 };

typedef struct run {
    const bg_job *job;
    FILE *messages;
    bg_outcome *outcome;
    bg_prepared p;
    bg_rank_config *rank_configs; /* [dp] */
    bg_signals signals;
    bg_log *log;
    int log_fd;
    bg_replicas *replicas;
    bool opened; /* their engines run */
    bg_feed *feed;
    bg_collect *collect;
    bg_progress *progress;
    bg_notify *manager;
    pthread_t admitter;
    bool admitting;
    int event; /* eventfd: something happened */
    atomic_bool finished, failed, stopping, too_many;
    bg_status admit_st;
    bg_error admit_err;
    int signal_seen;
    int64_t start_ns, run_ns, grace_end_ns;
    int64_t stop_ns; /* the time limit, less the grace; INT64_MAX: none */
    /* For metrics, which the collecting thread writes at each commit. */
    int64_t start_wall_ns;
    atomic_int state; /* bg_run_state */
    atomic_bool metrics_failed;
    /* For the watchdog: steps, and when they last were more. */
    uint64_t steps;
    int64_t steps_ns;
} run;

/* ---- before anything runs
 * ------------------------------------------------------------------------- */

static bg_status open_log(run *r, bg_error *err)
{
    r->log_fd = STDERR_FILENO;
    if (r->job->log_file) {
        r->log_fd = open(r->job->log_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (r->log_fd < 0) {
            r->outcome->stage = BG_STAGE_OUTPUT;
            return bg_fail_os(err, "%s: cannot open for appending", r->job->log_file);
        }
    }
    int level = r->job->quiet && r->job->log_level > BG_LOG_ERROR && !r->job->log_file
                    ? BG_LOG_ERROR
                    : r->job->log_level;
    r->log = bg_log_new(r->log_fd, (bg_log_level)level);
    bg_log_set_format(r->log, (bg_log_format)r->job->log_format);
    return r->log ? BG_OK : bg_fail(err, BG_NOMEM, "out of memory");
}

static void loaded(void *p, uint64_t done, uint64_t total)
{
    run *r = p;
    bg_progress_note(r->progress, "loading the model", total ? (double)done / (double)total : 0);
    bg_notify_tick(r->manager, "loading the model");
}

/* Asked while waiting for the lock and for the model. */
static bool early_stop(void *p)
{
    run *r = p;
    int sig = bg_signals_take(&r->signals);
    if (sig == SIGTERM || sig == SIGINT || sig == SIGUSR1) r->signal_seen = sig;
    if (bg_now_ns() >= r->stop_ns) r->outcome->time_up = true;
    bg_notify_tick(r->manager, NULL);
    return r->signal_seen != 0 || r->outcome->time_up;
}

/* ---- admit thread
 * ------------------------------------------------------------------------------------ */

static void wake(run *r)
{
    uint64_t one = 1;
    ssize_t n = write(r->event, &one, sizeof one);
    (void)n; /* the watcher also wakes by time */
}

static bg_status submit_all(run *r, bg_seq_spec *specs, int n, bg_error *err)
{
    bg_status st = BG_OK;
    for (int i = 0; i < n; i++) {
        bg_error e = {0};
        uint64_t seq;
        bg_status s = st ? st : bg_replicas_submit(r->replicas, &specs[i], &seq, &e);
        if (!s) continue;
        bg_collect_refused(r->collect, &specs[i], s == BG_ARG ? e.text : NULL);
        if (s != BG_ARG && !st) st = bg_fail(err, s, "%s", e.text);
    }
    return st;
}

static void *admit(void *p)
{
    run *r = p;
    prctl(PR_SET_NAME, "bg-admit"); /* as tools show it */
    bg_error *err = &r->admit_err;
    bg_status st = BG_OK;
    bool more = true;
    while (!st && more) {
        bg_feed_item *item;
        bg_seq_spec *specs;
        int n;
        st = bg_feed_next(r->feed, &item, err);
        more = !st && item;
        if (more) st = bg_collect_announce(r->collect, item, &specs, &n, err);
        if (more && !st) st = submit_all(r, specs, n, err);
    }
    /* What was taken before a failure still gets its result, unless the engine itself is gone. */
    bg_error drain_err = {0};
    bg_status drained = bg_replicas_drain(r->replicas, st ? &drain_err : err);
    if (!st) st = drained;
    bool stopped = atomic_load(&r->stopping);
    r->admit_st = st == BG_BUSY && stopped ? BG_OK : st;
    bg_collect_end(r->collect, !st && !stopped);
    return NULL;
}

static void on_failure(void *p)
{
    run *r = p;
    atomic_store(&r->failed, true);
    wake(r);
}

static void on_too_many(void *p)
{
    run *r = p;
    atomic_store(&r->too_many, true);
    wake(r);
}

static void on_finished(void *p)
{
    run *r = p;
    atomic_store(&r->finished, true);
    wake(r);
}

/* ---- watching
 * ----------------------------------------------------------------------------------------- */

static void numbers(run *r, bg_progress_numbers *n)
{
    const bg_collect_counts *c = bg_collect_get_counts(r->collect);
    bg_engine_stats es;
    bg_replicas_get_stats(r->replicas, &es);
    *n = (bg_progress_numbers){.done_now = atomic_load(&c->records),
                               .prompt_tokens = (int64_t)(es.prompt_tokens + es.cached_tokens),
                               .output_tokens = (int64_t)es.output_tokens,
                               .running = es.n_running,
                               .waiting = es.n_waiting,
                               .in_flight = atomic_load(&c->in_flight)};
    n->wanted = r->job->sample;
    if (r->job->shard_count) n->wanted /= (double)r->job->shard_count;
    n->limit = r->job->limit;
    n->done = r->p.recovered.n_records + n->done_now;
    n->failed = r->p.recovered.n_failed + atomic_load(&c->failed);
    bg_feed_progress(r->feed, &n->read, &n->total, &n->records_read);
}

static void write_metrics(void *v)
{
    run *r = v;
    const bg_job *job = r->job;
    bg_progress_numbers n;
    bg_engine_stats es;
    uint64_t text, file, commits;
    char shard[48];
    numbers(r, &n);
    bg_replicas_get_stats(r->replicas, &es);
    bg_writer_sizes(r->p.writer, &text, &file, &commits);
    snprintf(shard, sizeof shard, "%lld/%lld", (long long)job->shard_index + 1,
             (long long)job->shard_count);
    double s = (double)(bg_now_ns() - r->run_ns) * 1e-9;
    const bg_metrics m = {.version = BG_VERSION,
                          .model = r->p.model.name,
                          .output = job->output,
                          .shard = job->shard_count ? shard : NULL,
                          .state = (bg_run_state)atomic_load(&r->state),
                          .start_wall_ns = r->start_wall_ns,
                          .last_commit_wall_ns = commits ? bg_wall_ns() : 0,
                          .records_done = n.done,
                          .records_failed = n.failed,
                          .records_in_flight = n.in_flight,
                          .running = n.running,
                          .waiting = n.waiting,
                          .prompt_tokens = n.prompt_tokens,
                          .cached_tokens = (int64_t)es.cached_tokens,
                          .output_tokens = n.output_tokens,
                          .output_tokens_per_second = s > 0 ? (double)n.output_tokens / s : 0,
                          .commits = (int64_t)commits,
                          .text_bytes = (int64_t)text,
                          .file_bytes = (int64_t)file,
                          .restarts = (int64_t)es.restarts,
                          .preemptions = (int64_t)es.preemptions,
                          .kv_blocks_used = es.blocks_total - es.blocks_free,
                          .kv_blocks = es.blocks_total,
                          .input_share = n.total ? (double)n.read / (double)n.total : -1};
    bg_error err = {0};
    if (bg_metrics_write(job->metrics_file, &m, &err) && !atomic_exchange(&r->metrics_failed, true))
        bg_log_at(r->log, BG_LOG_WARN, "%s; the job goes on without", err.text);
}

static void stop_admitting(run *r)
{
    if (atomic_exchange(&r->stopping, true)) return;
    atomic_store(&r->state, BG_RUN_STOPPING);
    bg_notify_stopping(r->manager, (int64_t)(r->job->grace * 1e9));
    bg_feed_stop(r->feed);
    bg_replicas_wind_down(r->replicas);
    r->grace_end_ns = bg_now_ns() + (int64_t)(r->job->grace * 1e9);
}

static void say(run *r, const char *why, const char *more)
{
    if (r->job->quiet) return;
    bg_progress_hide(r->progress);
    fprintf(r->messages, "%s: finishing what runs (up to %.0f s), then committing%s\n", why,
            r->job->grace, more);
}

static void take_signal(run *r, int sig)
{
    if (sig == SIGQUIT) {
        bg_progress_numbers n;
        numbers(r, &n);
        bg_progress_show(r->progress, &n, true);
    } else if (sig == SIGHUP) {
        if (r->job->log_file) {
            int fd = open(r->job->log_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
            if (fd >= 0) {
                dup3(fd, r->log_fd, O_CLOEXEC);
                close(fd);
            }
        }
    } else if (r->signal_seen) {
        bg_replicas_kill(r->replicas);
        _exit(128 + sig); /* the user insists: what was committed stays */
    } else {
        r->signal_seen = sig;
        say(r, strsignal(sig), "; once more to stop at once");
        stop_admitting(r);
    }
}

/* The service manager's watchdog is fed while steps are made: an engine that has been stuck for ten
 * minutes is worth a restart. */
static void tell_manager(run *r, const bg_progress_numbers *n)
{
    enum { STUCK_S = 600 };
    int64_t now = bg_now_ns();
    bg_engine_stats es;
    bg_replicas_get_stats(r->replicas, &es);
    if (es.steps != r->steps || !es.n_running) {
        r->steps = es.steps;
        r->steps_ns = now;
    }
    if (now - r->steps_ns > STUCK_S * INT64_C(1000000000)) return;
    char status[160];
    snprintf(status, sizeof status, "%lld records done, %lld failed, %d running%s",
             (long long)n->done, (long long)n->failed, n->running,
             atomic_load(&r->stopping) ? ", stopping" : "");
    bg_notify_tick(r->manager, status);
}

static void check_limits(run *r)
{
    if (atomic_load(&r->stopping)) return;
    if (bg_now_ns() >= r->stop_ns) {
        r->outcome->time_up = true;
        say(r, "time limit", "");
        stop_admitting(r);
    }
    if (atomic_load(&r->too_many)) {
        r->outcome->too_many = true;
        say(r, "too many failed records", "");
        stop_admitting(r);
    }
}

static void watch(run *r)
{
    struct pollfd fds[2] = {{.fd = r->signals.fd, .events = POLLIN},
                            {.fd = r->event, .events = POLLIN}};
    while (!atomic_load(&r->finished)) {
        poll(fds, 2, WATCH_MS);
        if (fds[1].revents & POLLIN) {
            uint64_t count;
            ssize_t n = read(r->event, &count, sizeof count);
            (void)n;
        }
        for (int sig; (sig = bg_signals_take(&r->signals));)
            take_signal(r, sig);
        if (atomic_load(&r->failed)) { /* results have nowhere to go */
            stop_admitting(r);
            bg_replicas_stop(r->replicas);
        }
        if (atomic_load(&r->stopping) && bg_now_ns() >= r->grace_end_ns)
            bg_replicas_stop(r->replicas);
        check_limits(r);
        bg_progress_numbers n;
        numbers(r, &n);
        if (!r->job->quiet) bg_progress_show(r->progress, &n, false);
        tell_manager(r, &n);
    }
}

/* ---- the end
 * -------------------------------------------------------------------------------------------- */

/* The summary in all its forms. A summary that cannot be written is a failure only where nothing
 * worse has happened. */
static bg_status summarise(run *r, bg_status st, bg_error *err)
{
    const bg_job *job = r->job;
    char failures[512] = "";
    bg_summary s = {.job = job,
                    .model = &r->p.model,
                    .plan = &r->p.plan,
                    .outcome = r->outcome,
                    .failures = failures,
                    .run_ns = r->run_ns ? bg_now_ns() - r->run_ns : 0,
                    .total_ns = bg_now_ns() - r->start_ns,
                    .status = st,
                    .error = st ? err->text : ""};
    if (r->opened) bg_replicas_get_stats(r->replicas, &s.engine);
    if (r->collect) {
        s.counts = bg_collect_get_counts(r->collect);
        bg_collect_failures(r->collect, failures, sizeof failures);
    }
    if (r->p.writer) {
        bg_writer_sizes(r->p.writer, &s.text_bytes, &s.file_bytes, &s.commits);
        s.commit_ns = bg_writer_commit_ns(r->p.writer, &s.commit_cpu_ns);
    }
    r->outcome->summary = bg_summary_json(&s);
    bg_error se = {0};
    if (job->summary && r->p.writer) {
        if (r->outcome->summary)
            bg_summary_write(r->outcome->summary, job->summary, &se);
        else
            bg_fail(&se, BG_NOMEM, "out of memory for the summary");
        if (se.status && !st) {
            st = bg_fail_at(err, se.status, 0, se.file, se.line, "%s", se.text);
            err->os = se.os;
            r->outcome->stage = BG_STAGE_OUTPUT;
        }
    }
    if (!s.counts) return st;
    if (!job->quiet)
        bg_summary_print(&s, r->messages);
    else if (*failures)
        bg_summary_print_failures(&s, r->messages);
    return st;
}

/* A GPU's longest step takes a second; a small machine may sit over a large prefill for minutes. */
static int64_t hang_ns(const run *r)
{
    const double s = r->job->hang_timeout > 0 ? r->job->hang_timeout : r->p.plan.gpu ? 120 : 600;
    return (int64_t)(s * 1e9);
}

static bool is_done(void *p, int64_t record)
{
    return bg_writer_done(p, record);
}

static bg_status start(run *r, bg_error *err)
{
    size_t n_eog;
    const int32_t *eog = bg_vocab_eog(r->p.model.vocab, &n_eog);
    const bg_collect_config cc = {
        .job = r->job,
        .model = &r->p.model,
        .writer = r->p.writer,
        .partials = r->p.recovered.partials,
        .n_partials = r->p.recovered.n_partials,
        .log = r->log,
        .ordered = r->job->ordered && strcmp(r->job->output, "-") == 0,
        .max_failed = r->job->max_failed < 0 ? -1 : r->job->max_failed - r->p.recovered.n_failed,
        .on_too_many = on_too_many,
        .on_failure = on_failure,
        .on_finished = on_finished,
        .ctx = r};
    bg_status st = bg_collect_new(&r->collect, &cc, err);
    const bg_engine_config ec = {.prefix_cache = r->job->prefix_cache,
                                 .window = (int)r->job->window,
                                 .max_batched_tokens = r->p.plan.max_batched_tokens,
                                 .max_restarts = 3,
                                 .hang_ns = hang_ns(r),
                                 .eog = eog,
                                 .n_eog = n_eog,
                                 .on_events = bg_collect_events,
                                 .ctx = r->collect,
                                 .log = r->log};
    if (!st) st = bg_replicas_open(r->replicas, &ec, err);
    r->opened = !st;
    if (!st) bg_collect_set_engine(r->collect, r->replicas);
    const bg_feed_config fc = {.job = r->job,
                               .model = &r->p.model,
                               .is_done = is_done,
                               .ctx = r->p.writer,
                               .wall_s = r->p.wall_s,
                               .log = r->log};
    if (!st) st = bg_feed_open(&r->feed, &fc, err);
    if (!st && r->job->metrics_file) {
        write_metrics(r);
        bg_writer_on_commit(r->p.writer, write_metrics, r);
    }
    if (!st) {
        int rc = pthread_create(&r->admitter, NULL, admit, r);
        r->admitting = rc == 0;
        if (rc) st = bg_fail_at(err, BG_IO, rc, __FILE__, __LINE__, "cannot start a thread");
    }
    return st;
}

static bg_status finish(run *r, bg_error *err)
{
    pthread_join(r->admitter, NULL);
    r->admitting = false;
    bg_status st = bg_collect_join(r->collect, err);
    if (!st && r->admit_st) {
        st = bg_fail_at(err, r->admit_st, 0, r->admit_err.file, r->admit_err.line, "%s",
                        r->admit_err.text);
        err->os = r->admit_err.os;
    }
    bg_outcome *o = r->outcome;
    o->n_records = bg_writer_count(r->p.writer, &o->n_failed);
    o->n_now = o->n_records - r->p.recovered.n_records;
    o->stopped_by = r->signal_seen;
    o->finished = !st && !atomic_load(&r->stopping);
    atomic_store(&r->state, o->finished ? BG_RUN_COMPLETED : st ? BG_RUN_FAILED : BG_RUN_STOPPED);
    if (r->job->metrics_file) write_metrics(r);
    bg_progress_hide(r->progress);
    return st;
}

static void release(run *r)
{
    if (r->feed) bg_feed_stop(r->feed);
    if (r->replicas) bg_replicas_stop(r->replicas);
    if (r->admitting) pthread_join(r->admitter, NULL);
    bg_feed_close(r->feed);
    bg_replicas_free(r->replicas);
    bg_collect_free(r->collect);
    free(r->rank_configs);
    bg_log_hooks(r->log, NULL, NULL, NULL);
    bg_progress_free(r->progress);
    bg_notify_close(r->manager);
    bg_prepared_release(&r->p);
    bg_log_free(r->log);
    if (r->job->log_file && r->log_fd >= 0) close(r->log_fd);
    if (r->event >= 0) close(r->event);
    bg_signals_restore(&r->signals);
}

static void describe(const run *r)
{
    char w[32], kv[32], replicas[32] = "";
    if (r->p.plan.dp > 1) snprintf(replicas, sizeof replicas, "%d replicas, ", r->p.plan.dp);
    uint64_t kv_all = r->p.plan.kv_bytes_per_token * (uint64_t)r->p.plan.block_tokens *
                      (uint64_t)r->p.plan.n_blocks * (uint64_t)r->p.plan.dp;
    uint64_t weights = r->p.model.desc.weight_bytes;
    if (r->p.plan.gpu && r->p.plan.tp == 1) weights = r->p.plan.weights[0];
    bg_format_bytes(weights, w, sizeof w);
    bg_format_bytes(kv_all, kv, sizeof kv);
    fprintf(r->messages, "%s: %s, %s of weights, up to %s of KV cache, context %d, %d at a time, ",
            r->p.model.name, r->p.model.desc.arch_name, w, kv, r->p.plan.max_model_len,
            r->p.plan.max_num_seqs);
    if (r->p.plan.gpu)
        fprintf(r->messages, "%s%s\n", replicas, r->p.plan.device);
    else
        fprintf(r->messages, "%s%d rank%s x %d thread%s\n", replicas, r->p.plan.tp,
                r->p.plan.tp > 1 ? "s" : "", r->p.plan.threads_per_rank,
                r->p.plan.threads_per_rank > 1 ? "s" : "");
}

/* When to stop so that the grace, too, ends within the limit. */
static int64_t stop_time(const bg_job *job, int64_t start_ns)
{
    if (job->time_limit <= 0) return INT64_MAX;
    double s = job->time_limit - job->grace;
    if (s < job->time_limit / 2) s = job->time_limit / 2;
    return start_ns + (int64_t)(s * 1e9);
}

static void make_progress(run *r)
{
    const bg_job *job = r->job;
    bool tty = isatty(fileno(r->messages)) && !job->quiet;
    const char *term = getenv("TERM");
    if (term && strcmp(term, "dumb") == 0) tty = false;
    bool color = job->color == BG_COLOR_ALWAYS || (job->color == BG_COLOR_AUTO && tty);
    r->progress = bg_progress_new(r->messages, tty, color, job->quiet ? 0 : job->progress);
    bg_log_hooks(r->log, bg_progress_hide, bg_progress_unhide, r->progress);
}

static bg_status generate(run *r, bg_error *err)
{
    bg_outcome *o = r->outcome;
    make_progress(r);
    if (!r->job->quiet) describe(r);
    o->stage = BG_STAGE_MODEL;
    const int dp = r->p.plan.dp;
    r->rank_configs = calloc((size_t)dp, sizeof *r->rank_configs);
    if (!r->rank_configs) return bg_fail(err, BG_NOMEM, "%d replicas: out of memory", dp);
    for (int i = 0; i < dp; i++)
        bg_rank_config_fill(&r->rank_configs[i], r->job, &r->p.plan, i);
    bg_status st =
        bg_replicas_start(&r->replicas, r->rank_configs, dp, &bg_rank_ops_model, r->log, err);
    if (!st) st = bg_replicas_wait_ready(r->replicas, loaded, r, early_stop, err);
    if (st == BG_BUSY && (r->signal_seen || o->time_up)) { /* while loading: nothing was begun */
        o->stopped_by = r->signal_seen;
        *err = (bg_error){0};
        return BG_OK;
    }
    if (st) return st;
    bg_progress_hide(r->progress);
    o->stage = BG_STAGE_RUN;
    r->run_ns = r->steps_ns = bg_now_ns();
    atomic_store(&r->state, BG_RUN_RUNNING);
    bg_notify_ready(r->manager, "running");
    st = start(r, err);
    if (st) return st;
    watch(r);
    return finish(r, err);
}

bg_status bg_job_run(const bg_job *job, FILE *messages, bg_outcome *outcome, bg_error *err)
{
    *outcome = (bg_outcome){0};
    run r = {.job = job,
             .messages = messages,
             .outcome = outcome,
             .event = -1,
             .log_fd = -1,
             .start_ns = bg_now_ns(),
             .start_wall_ns = bg_wall_ns()};
    r.signals.fd = -1;
    r.stop_ns = stop_time(job, r.start_ns);
    bg_status st = bg_signals_block(&r.signals, err);
    if (!st) st = open_log(&r, err);
    if (!st) {
        r.event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (r.event < 0) st = bg_fail_os(err, "cannot make an event descriptor");
    }
    if (!st) st = bg_notify_open(&r.manager, job->notify_socket, job->watchdog_us, err);
    if (!st) st = bg_prepare(&r.p, job, messages, outcome, early_stop, &r, err);
    if (st == BG_BUSY && (r.signal_seen || outcome->time_up)) { /* while waiting for the lock */
        outcome->locked = false;
        outcome->stopped_by = r.signal_seen;
        *err = (bg_error){0};
        st = BG_OK;
    } else if (!st && !r.p.nothing_to_do) {
        st = generate(&r, err);
    } else if (!st) {
        bg_notify_ready(r.manager, "done before"); /* ending without it would be a failure */
    }
    st = summarise(&r, st, err);
    release(&r);
    return st;
}
