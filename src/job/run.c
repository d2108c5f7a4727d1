/* Builds the pipeline, watches it, takes it apart.
 *
 *     main thread      signals, progress, time
 *     reader + text    job/feed.c
 *     admit thread     feed -> collect (announce) -> engine (submit)
 *     engine thread    engine/engine.c; its sink hands events to collect
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
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/io.h"
#include "job/check.h"
#include "job/collect.h"
#include "job/feed.h"
#include "job/progress.h"
#include "job/signals.h"

enum { WATCH_MS = 200 };

typedef struct run {
    const bg_job *job;
    FILE *messages;
    bg_outcome *outcome;
    bg_text_model model;
    bg_memory_plan plan;
    bg_rank_config rank_config;
    bg_signals signals;
    bg_log *log;
    int log_fd;
    bg_ranks *ranks;
    bg_engine *engine;
    bg_writer *writer;
    bg_recovered recovered;
    bg_feed *feed;
    bg_collect *collect;
    bg_progress *progress;
    json_t *identity;
    pthread_t admitter;
    bool admitting;
    int event; /* eventfd: something happened */
    atomic_bool finished, failed, stopping;
    bg_status admit_st;
    bg_error admit_err;
    int signal_seen;
    int64_t start_ns, run_ns, grace_end_ns;
} run;

/* ---- before anything runs
 * ------------------------------------------------------------------------- */

static bool same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static bg_status check_paths(const bg_job *job, bg_error *err)
{
    if (!job->inputs.n)
        return bg_fail(err, BG_ARG, "no input: name a JSONL file, or - for standard input");
    if (!job->output) return bg_fail(err, BG_ARG, "no output: give -o FILE, or -o - for stdout");
    int n_stdin = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        n_stdin += strcmp(job->inputs.v[i], "-") == 0;
        if (same_file(job->inputs.v[i], job->output) && strcmp(job->output, "/dev/null") != 0)
            return bg_fail(err, BG_ARG, "%s: is input and output at once; name another -o",
                           job->output);
    }
    if (n_stdin > 1) return bg_fail(err, BG_ARG, "standard input can be read once only");
    return BG_OK;
}

static bg_out_format output_format(const char *path)
{
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".lz4") == 0 ? BG_OUT_LZ4 : BG_OUT_PLAIN;
}

static bg_status open_log(run *r, bg_error *err)
{
    r->log_fd = STDERR_FILENO;
    if (r->job->log_file) {
        r->log_fd = open(r->job->log_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (r->log_fd < 0)
            return bg_fail_os(err, "%s: cannot open for appending", r->job->log_file);
    }
    int level = r->job->quiet && r->job->log_level > BG_LOG_ERROR && !r->job->log_file
                    ? BG_LOG_ERROR
                    : r->job->log_level;
    r->log = bg_log_new(r->log_fd, (bg_log_level)level);
    return r->log ? BG_OK : bg_fail(err, BG_NOMEM, "out of memory");
}

/* What the earlier run consumed must still be there, byte for byte. A stream is trusted to be the
 * same. */
static bg_status verify_input(run *r, bg_error *err)
{
    if (!r->recovered.input_end) return BG_OK;
    for (int i = 0; i < r->job->inputs.n; i++)
        if (strcmp(r->job->inputs.v[i], "-") == 0) return BG_OK;
    bg_input *in;
    bg_status st = bg_input_open(&in, (const char *const *)r->job->inputs.v, r->job->inputs.n,
                                 (size_t)r->job->max_line, err);
    if (st) return st;
    bool got = true, same = false;
    while (!st && got && !same) {
        bg_line line;
        st = bg_input_next(in, &line, &got, err);
        if (st || !got || line.end > r->recovered.input_end) break;
        same = line.end == r->recovered.input_end && line.hash == r->recovered.input_hash;
    }
    bg_input_close(in);
    if (!st && !same)
        st = bg_fail(
            err, BG_ARG,
            "%s: the input is not the one this output was started with: its first %llu bytes "
            "have changed; nothing was touched. Restore it, name another -o, or --overwrite",
            r->job->inputs.v[0], (unsigned long long)r->recovered.input_end);
    return st;
}

static void loaded(void *p, uint64_t done, uint64_t total)
{
    run *r = p;
    bg_progress_note(r->progress, "loading the model", total ? (double)done / (double)total : 0);
}

static bool load_stopped(void *p)
{
    run *r = p;
    int sig = bg_signals_take(&r->signals);
    if (sig == SIGTERM || sig == SIGINT || sig == SIGUSR1) r->signal_seen = sig;
    return r->signal_seen != 0;
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
        bg_status s = st ? st : bg_engine_submit(r->engine, &specs[i], &seq, &e);
        if (!s) continue;
        bg_collect_refused(r->collect, &specs[i], s == BG_ARG ? e.text : NULL);
        if (s != BG_ARG && !st) st = bg_fail(err, s, "%s", e.text);
    }
    return st;
}

static void *admit(void *p)
{
    run *r = p;
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
    bg_status drained = bg_engine_drain(r->engine, st ? &drain_err : err);
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
    bg_engine_get_stats(r->engine, &es);
    *n = (bg_progress_numbers){.done_now = atomic_load(&c->records),
                               .prompt_tokens = (int64_t)(es.prompt_tokens + es.cached_tokens),
                               .output_tokens = (int64_t)es.output_tokens,
                               .running = es.n_running,
                               .waiting = es.n_waiting,
                               .in_flight = atomic_load(&c->in_flight)};
    n->done = r->recovered.n_records + n->done_now;
    n->failed = r->recovered.n_failed + atomic_load(&c->failed);
    bg_feed_progress(r->feed, &n->read, &n->total, &n->records_read);
}

static void stop_admitting(run *r)
{
    if (atomic_exchange(&r->stopping, true)) return;
    bg_feed_stop(r->feed);
    bg_engine_wind_down(r->engine);
    r->grace_end_ns = bg_now_ns() + (int64_t)(r->job->grace * 1e9);
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
        bg_ranks_stop(r->ranks);
        _exit(128 + sig); /* the user insists: what was committed stays */
    } else {
        r->signal_seen = sig;
        if (!r->job->quiet) {
            bg_progress_hide(r->progress);
            fprintf(r->messages,
                    "%s: finishing what runs (up to %.0f s), then committing; once more to stop at "
                    "once\n",
                    strsignal(sig), r->job->grace);
        }
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
            bg_engine_stop(r->engine);
        }
        if (atomic_load(&r->stopping) && bg_now_ns() >= r->grace_end_ns) bg_engine_stop(r->engine);
        bg_progress_numbers n;
        numbers(r, &n);
        if (!r->job->quiet) bg_progress_show(r->progress, &n, false);
    }
}

/* ---- the end
 * -------------------------------------------------------------------------------------------- */

static bg_status write_summary(run *r, bg_status st, const bg_error *why, bg_error *err)
{
    if (!r->job->summary) return BG_OK;
    bg_engine_stats es;
    bg_engine_get_stats(r->engine, &es);
    const bg_collect_counts *c = bg_collect_get_counts(r->collect);
    uint64_t text, file, commits;
    bg_writer_sizes(r->writer, &text, &file, &commits);
    double s = (double)(bg_now_ns() - r->run_ns) * 1e-9;
    const bg_outcome *o = r->outcome;
    json_t *j = json_pack(
        "{ss ss s{sI sI sI} s{sI sI sI s{sI}} sf sf sf s{sI sI sI sI sI sI sI} s{sI sI sI} ss ss "
        "ss}",
        "version", BG_VERSION, "status",
        o->finished ? "completed"
        : st        ? "failed"
                    : "stopped",
        "request_counts", "total", (json_int_t)o->n_records, "completed",
        (json_int_t)(o->n_records - o->n_failed), "failed", (json_int_t)o->n_failed, "usage",
        "input_tokens", (json_int_t)atomic_load(&c->prompt_tokens), "output_tokens",
        (json_int_t)atomic_load(&c->output_tokens), "total_tokens",
        (json_int_t)(atomic_load(&c->prompt_tokens) + atomic_load(&c->output_tokens)),
        "input_tokens_details", "cached_tokens", (json_int_t)es.cached_tokens, "seconds", s,
        "output_tokens_per_second", s > 0 ? (double)es.output_tokens / s : 0.0,
        "prompt_tokens_per_second", s > 0 ? (double)(es.prompt_tokens + es.cached_tokens) / s : 0.0,
        "engine", "steps", (json_int_t)es.steps, "prefill_steps", (json_int_t)es.prefill_steps,
        "decode_steps", (json_int_t)es.decode_steps, "preemptions", (json_int_t)es.preemptions,
        "restarts", (json_int_t)es.restarts, "recomputed_tokens", (json_int_t)es.recomputed_tokens,
        "busy_ms", (json_int_t)(es.busy_ns / 1000000), "output", "text_bytes", (json_int_t)text,
        "file_bytes", (json_int_t)file, "commits", (json_int_t)commits, "model", r->model.name,
        "system_fingerprint", r->model.fingerprint, "error", st ? why->text : "");
    char *text_json = j ? json_dumps(j, JSON_INDENT(2)) : NULL;
    json_decref(j);
    if (!text_json) return bg_fail(err, BG_NOMEM, "out of memory for the summary");
    FILE *f = fopen(r->job->summary, "we");
    bool ok = f && fprintf(f, "%s\n", text_json) > 0;
    if (f && fclose(f) != 0) ok = false;
    free(text_json);
    return ok ? BG_OK : bg_fail_os(err, "%s: cannot write the summary", r->job->summary);
}

static void print_summary(run *r)
{
    const bg_outcome *o = r->outcome;
    bg_engine_stats es;
    bg_engine_get_stats(r->engine, &es);
    double s = (double)(bg_now_ns() - r->run_ns) * 1e-9;
    unsigned long long prompt_tokens = es.prompt_tokens + es.cached_tokens;
    char time[32];
    bg_format_duration(bg_now_ns() - r->start_ns, time, sizeof time);
    fprintf(r->messages, "%s: %lld of %lld records%s in this run, %lld failed, in %s\n",
            o->finished ? "done" : "stopped", (long long)o->n_now, (long long)o->n_records,
            o->finished ? "" : " so far", (long long)o->n_failed, time);
    if (s > 0)
        fprintf(
            r->messages,
            "      %llu prompt tokens (%llu cached), %llu output tokens: %.0f output tokens/s\n",
            prompt_tokens, (unsigned long long)es.cached_tokens,
            (unsigned long long)es.output_tokens, (double)es.output_tokens / s);
    if (!o->finished) fprintf(r->messages, "      start the same command again to go on\n");
}

static bool is_done(void *p, int64_t record)
{
    return bg_writer_done(p, record);
}

static bg_status start(run *r, bg_error *err)
{
    size_t n_eog;
    const int32_t *eog = bg_vocab_eog(r->model.vocab, &n_eog);
    const bg_collect_config cc = {.job = r->job,
                                  .model = &r->model,
                                  .writer = r->writer,
                                  .partials = r->recovered.partials,
                                  .n_partials = r->recovered.n_partials,
                                  .log = r->log,
                                  .on_failure = on_failure,
                                  .on_finished = on_finished,
                                  .ctx = r};
    bg_status st = bg_collect_new(&r->collect, &cc, err);
    const bg_engine_config ec = {.prefix_cache = r->job->prefix_cache,
                                 .window = (int)r->job->window,
                                 .max_batched_tokens = (int)r->job->max_num_batched_tokens,
                                 .max_restarts = 3,
                                 .eog = eog,
                                 .n_eog = n_eog,
                                 .on_events = bg_collect_events,
                                 .ctx = r->collect,
                                 .log = r->log};
    if (!st) st = bg_engine_new(&r->engine, r->ranks, &ec, err);
    if (!st) bg_collect_set_engine(r->collect, r->engine);
    const bg_feed_config fc = {
        .job = r->job, .model = &r->model, .is_done = is_done, .ctx = r->writer, .log = r->log};
    if (!st) st = bg_feed_open(&r->feed, &fc, err);
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
    o->n_records = bg_writer_count(r->writer, &o->n_failed);
    o->n_now = o->n_records - r->recovered.n_records;
    o->stopped_by = r->signal_seen;
    o->finished = !st && !atomic_load(&r->stopping);
    bg_progress_hide(r->progress);
    bg_error se = {0};
    if (write_summary(r, st, err, &se) && !st) st = bg_fail(err, se.status, "%s", se.text);
    if (!r->job->quiet) print_summary(r);
    return st;
}

static void release(run *r)
{
    if (r->feed) bg_feed_stop(r->feed);
    if (r->engine) bg_engine_stop(r->engine);
    if (r->admitting) pthread_join(r->admitter, NULL);
    bg_feed_close(r->feed);
    bg_engine_free(r->engine);
    bg_collect_free(r->collect);
    bg_writer_close(r->writer);
    bg_ranks_stop(r->ranks);
    bg_log_hooks(r->log, NULL, NULL, NULL);
    bg_progress_free(r->progress);
    json_decref(r->identity);
    bg_text_model_close(&r->model);
    bg_log_free(r->log);
    if (r->job->log_file && r->log_fd >= 0) close(r->log_fd);
    if (r->event >= 0) close(r->event);
    bg_signals_restore(&r->signals);
}

/* Lock and recovery come before the model's weights: a second start must end at once. */
static bg_status open_all(run *r, bool *nothing_to_do, bg_error *err)
{
    const bg_job *job = r->job;
    *nothing_to_do = false;
    bg_status st = check_paths(job, err);
    if (st) return st;
    r->outcome->stage = BG_STAGE_MODEL;
    st = bg_text_model_open(&r->model, job, err);
    if (!st) st = bg_plan_memory(&r->plan, job, &r->model, err);
    if (st) return st;
    r->outcome->stage = BG_STAGE_SETUP;
    r->model.max_model_len = r->plan.max_model_len;
    if (job->strict) {
        st = bg_check_strict(job, &r->model, r->messages, err);
        if (st) return st;
    }
    r->identity = bg_job_identity(job, &r->model, &r->plan, err);
    if (!r->identity) return err->status;
    const bg_writer_config wc = {.path = job->output,
                                 .format = output_format(job->output),
                                 .identity = r->identity,
                                 .overwrite = job->overwrite,
                                 .commit_bytes = (size_t)job->commit_bytes,
                                 .commit_ns = (int64_t)(job->commit_interval * 1e9)};
    r->outcome->stage = BG_STAGE_OUTPUT;
    st = bg_writer_open(&r->writer, &wc, &r->recovered, err);
    if (st) return st;
    r->outcome->stage = BG_STAGE_SETUP;
    if (r->recovered.finished) {
        *nothing_to_do = true;
        *r->outcome = (bg_outcome){.stage = BG_STAGE_RUN,
                                   .finished = true,
                                   .already = true,
                                   .n_records = r->recovered.n_records,
                                   .n_failed = r->recovered.n_failed};
        if (!job->quiet)
            fprintf(r->messages, "%s: this job is done, %lld records, %lld failed: nothing to do\n",
                    job->output, (long long)r->recovered.n_records,
                    (long long)r->recovered.n_failed);
        return BG_OK;
    }
    st = verify_input(r, err);
    if (!st && r->recovered.resumed && !job->quiet)
        fprintf(r->messages, "%s: going on after %lld records%s\n", job->output,
                (long long)r->recovered.n_records,
                r->recovered.cut_bytes ? " (an uncommitted tail was cut off)" : "");
    return st;
}

static void describe(const run *r)
{
    char w[32], kv[32];
    uint64_t kv_all =
        r->plan.kv_bytes_per_token * (uint64_t)r->plan.block_tokens * (uint64_t)r->plan.n_blocks;
    bg_format_bytes(r->model.desc.weight_bytes, w, sizeof w);
    bg_format_bytes(kv_all, kv, sizeof kv);
    fprintf(r->messages,
            "%s: %s, %s of weights, up to %s of KV cache, context %d, %d at a time, %d rank%s x %d "
            "thread%s\n",
            r->model.name, r->model.desc.arch_name, w, kv, r->plan.max_model_len,
            r->plan.max_num_seqs, r->plan.tp, r->plan.tp > 1 ? "s" : "", r->plan.threads_per_rank,
            r->plan.threads_per_rank > 1 ? "s" : "");
}

bg_status bg_job_run(const bg_job *job, FILE *messages, bg_outcome *outcome, bg_error *err)
{
    *outcome = (bg_outcome){0};
    run r = {.job = job,
             .messages = messages,
             .outcome = outcome,
             .event = -1,
             .log_fd = -1,
             .start_ns = bg_now_ns()};
    r.signals.fd = -1;
    bg_status st = bg_signals_block(&r.signals, err);
    if (!st) st = open_log(&r, err);
    if (!st) {
        r.event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (r.event < 0) st = bg_fail_os(err, "cannot make an event descriptor");
    }
    bool nothing = false;
    if (!st) st = open_all(&r, &nothing, err);
    if (!st && !nothing) {
        bool tty = isatty(fileno(messages)) && !job->quiet;
        const char *term = getenv("TERM");
        if (term && strcmp(term, "dumb") == 0) tty = false;
        bool color = job->color == BG_COLOR_ALWAYS || (job->color == BG_COLOR_AUTO && tty);
        r.progress = bg_progress_new(messages, tty, color, job->quiet ? 0 : job->progress);
        bg_log_hooks(r.log, bg_progress_hide, bg_progress_unhide, r.progress);
        if (!job->quiet) describe(&r);
        outcome->stage = BG_STAGE_MODEL;
        bg_rank_config_fill(&r.rank_config, job, &r.plan);
        st = bg_ranks_start(&r.ranks, &r.rank_config, &bg_rank_ops_model, r.log, err);
        if (!st) st = bg_ranks_wait_ready(r.ranks, loaded, &r, load_stopped, err);
        if (st == BG_BUSY && r.signal_seen) { /* stopped while loading: nothing was begun */
            outcome->stopped_by = r.signal_seen;
            outcome->n_records = r.recovered.n_records;
            *err = (bg_error){0};
            st = BG_OK;
        } else if (!st) {
            bg_progress_hide(r.progress);
            outcome->stage = BG_STAGE_RUN;
            r.run_ns = bg_now_ns();
            st = start(&r, err);
            if (!st) {
                watch(&r);
                st = finish(&r, err);
            }
        }
    }
    release(&r);
    return st;
}
