#include "output/status.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/clock.h"
#include "output/view.h"

/* ---- the lock
 * -----------------------------------------------------------------------------------------------
 *
 * A line of /proc/locks: "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF", with the file system's
 * device and the inode in hexadecimal and decimal. stat() names another device on some file systems
 * (btrfs), so the right name is learnt from a lock that we take ourselves: a shared one on the
 * journal, which nobody else ever locks. Processes of other PID namespaces and hosts are not shown.
 */

typedef struct lock_line {
    long pid;
    unsigned major, minor;
    unsigned long long inode;
} lock_line;

static bool parse_lock(const char *s, lock_line *l)
{
    char kind[16];
    if (strstr(s, "->")) return false; /* one that waits */
    return sscanf(s, "%*d: %15s %*s %*s %ld %x:%x:%llu", kind, &l->pid, &l->major, &l->minor,
                  &l->inode) == 5 &&
           strcmp(kind, "FLOCK") == 0;
}

/* The pid of another process that has locked inode on (major, minor), or 0. With pid: that one's
 * lock on the inode, whatever the device, into *found. */
static long search_locks(unsigned maj, unsigned min, unsigned long long inode, long pid,
                         lock_line *found)
{
    char text[256];
    long holder = 0;
    FILE *f = fopen("/proc/locks", "re");
    if (!f) return 0;
    while (!holder && fgets(text, sizeof text, f)) {
        lock_line l;
        if (!parse_lock(text, &l) || l.inode != inode) continue;
        if (pid ? l.pid != pid : (l.major != maj || l.minor != min)) continue;
        holder = l.pid;
        if (found) *found = l;
    }
    (void)fclose(f);
    return holder;
}

static long lock_holder(const bg_view *v)
{
    struct stat out, journal;
    if (v->out_fd < 0 || fstat(v->out_fd, &out) != 0) return 0;
    unsigned maj = major(out.st_dev), min = minor(out.st_dev);
    long holder = search_locks(maj, min, out.st_ino, 0, NULL);
    lock_line own;
    if (holder || v->journal_fd < 0 || fstat(v->journal_fd, &journal) != 0 ||
        journal.st_dev != out.st_dev || flock(v->journal_fd, LOCK_SH | LOCK_NB) != 0)
        return holder;
    if (search_locks(0, 0, journal.st_ino, getpid(), &own) &&
        (own.major != maj || own.minor != min))
        holder = search_locks(own.major, own.minor, out.st_ino, 0, NULL);
    flock(v->journal_fd, LOCK_UN);
    return holder;
}

static bool alive(int64_t pid)
{
    char path[64], text[512], *p;
    if (pid <= 0 || (kill((pid_t)pid, 0) != 0 && errno == ESRCH)) return false;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    FILE *f = fopen(path, "re");
    if (!f) return true;
    size_t n = fread(text, 1, sizeof text - 1, f);
    (void)fclose(f);
    text[n] = 0;
    p = strrchr(text, ')'); /* the state is behind the name, which may hold anything */
    return !p || (p[1] && p[2] != 'Z' && p[2] != 'X');
}

static void look_at_lock(bg_job_status *s, const bg_view *v)
{
    char host[64] = "";
    if (gethostname(host, sizeof host - 1) != 0) strcpy(host, "?");
    if (v->n_runs) {
        const bg_view_run *r = &v->runs[v->n_runs - 1];
        s->run_pid = r->pid;
        s->n_runs = (int64_t)v->n_runs;
        memcpy(s->run_host, r->host, sizeof s->run_host);
        memcpy(s->run_start, r->start, sizeof s->run_start);
        s->run_here = strcmp(r->host, host) == 0;
        s->run_alive = s->run_here && alive(r->pid);
    }
    long holder = lock_holder(v);
    s->lock = holder                            ? BG_LOCK_HELD
              : s->run_pid >= 0 && !s->run_here ? BG_LOCK_UNKNOWN
                                                : BG_LOCK_FREE;
    if (holder > 0) s->holder = holder;
    s->holder_alive = holder > 0 && alive(holder);
}

/* ---- counts and rates
 * ------------------------------------------------------------------------------------------ */

static void count(bg_job_status *s, const bg_view *v, int64_t wall_ns)
{
    bool all = true;
    int64_t in = 0, out = 0;
    for (size_t i = 0; i < v->n_commits; i++) {
        const bg_view_commit *c = &v->commits[i];
        all = all && (c->has_tokens || !c->n_records);
        in += c->prompt_tokens;
        out += c->output_tokens;
        if (c->at_ns) s->commit_at_ns = c->at_ns;
    }
    if (all && v->n_commits) {
        s->prompt_tokens = in;
        s->output_tokens = out;
    }
    if (s->commit_at_ns) s->commit_age_s = (double)(wall_ns - s->commit_at_ns) * 1e-9;
    if (s->commit_age_s < 0) s->commit_age_s = 0; /* a clock was set back */
    s->n_done = bg_ranges_count(v->done);
    s->n_failed = v->n_failed;
    s->out_bytes = v->out_size;
    s->text_bytes = v->text_bytes;
    s->journal_bytes = v->journal_size;
    if (v->journal == BG_VIEW_GOOD && v->out_size > v->out_end)
        s->tail_bytes = v->out_size - v->out_end;
}

/* Over the present (or last) run. A folded commit stands for what was before, so after one the time
 * counts from there. */
static void rate(bg_job_status *s, const bg_view *v)
{
    if (!v->n_runs) return;
    const bg_view_run *r = &v->runs[v->n_runs - 1];
    int64_t from = r->start_ns, to = 0, records = 0, tokens = 0;
    for (size_t i = r->first_commit; i < v->n_commits; i++) {
        const bg_view_commit *c = &v->commits[i];
        if (c->folded) {
            from = c->at_ns;
            continue;
        }
        records += c->n_records;
        tokens += c->output_tokens;
        if (c->at_ns) to = c->at_ns;
    }
    if (!from || to <= from) return;
    double seconds = (double)(to - from) * 1e-9;
    s->record_rate = (double)records / seconds;
    s->token_rate = (double)tokens / seconds;
}

static void estimate(bg_job_status *s, const bg_view *v)
{
    const bg_input_place *p = &v->input;
    int64_t index, shards = 1;
    const char *shard = json_string_value(json_object_get(bg_view_identity(v), "shard"));
    const char *selection = json_string_value(json_object_get(v->end, "selection"));
    snprintf(s->shard, sizeof s->shard, "%s", shard ? shard : "");
    snprintf(s->selection, sizeof s->selection, "%s", selection ? selection : "");
    if (*s->shard && sscanf(s->shard, "%ld/%ld", &index, &shards) != 2) shards = 1;
    if (shards < 1) shards = 1;
    if (s->state == BG_STATE_FINISHED) {
        s->n_total = s->n_done;
        s->share = 1;
        s->eta_s = 0;
    }
    if (!v->has_input) return;
    s->input_read = p->read;
    s->input_total = p->total;
    if (s->state == BG_STATE_FINISHED || !p->total || !p->read || p->records <= 0) return;
    s->share = (double)p->read / (double)p->total;
    if (s->share > 1) s->share = 1;
    double total = (double)p->records / s->share / (double)shards;
    if (total < (double)s->n_done) total = (double)s->n_done;
    s->n_total = (int64_t)(total + 0.5);
    /* the input is read ahead of the results */
    s->share = total > 0 ? (double)s->n_done / total : 0;
    if (s->record_rate > 0) s->eta_s = (total - (double)s->n_done) / s->record_rate;
}

static bg_status count_partials(bg_job_status *s, bg_view *v, bg_error *err)
{
    bg_partial *list;
    int n;
    if (!bg_partials_list(v->partials, &list, &n))
        return bg_fail(err, BG_NOMEM, "%s: out of memory", v->path);
    s->partial_sequences = n;
    for (int i = 0; i < n; i++)
        s->partial_tokens += list[i].n_tokens;
    return BG_OK;
}

/* ---- the state
 * --------------------------------------------------------------------------------------------- */

static bool exists(const char *path, const char *suffix)
{
    char name[4096];
    return (size_t)snprintf(name, sizeof name, "%s%s", path, suffix) < sizeof name &&
           access(name, F_OK) == 0;
}

static void say(char *out, size_t size, const char *what)
{
    snprintf(out, size, "%.500s", what);
}
#define WHY(text)  say(s->why, sizeof s->why, (text))
#define NEXT(text) say(s->next, sizeof s->next, (text))

static void without_journal(bg_job_status *s, const bg_view *v)
{
    bool running = s->lock == BG_LOCK_HELD;
    s->state = running ? BG_STATE_RUNNING : BG_STATE_NOT_STARTED;
    if (v->out_fd < 0 && v->journal_fd < 0) s->state = BG_STATE_MISSING;
    if (v->out_size == 0 && v->journal == BG_VIEW_NO_JOURNAL) return;
    s->state = BG_STATE_NEEDS_REPAIR;
    WHY(v->why.status ? v->why.text : "there are results, but no journal");
    if (running)
        NEXT("somebody holds it: look what they do");
    else if (v->journal == BG_VIEW_NOT_A_JOURNAL)
        NEXT("put the right journal back, or use the version that wrote it");
    else
        NEXT("put the journal back, or rebuild it with batchgen repair");
}

static bg_status with_journal(bg_job_status *s, const bg_view *v, bg_error *err)
{
    bool running = s->lock == BG_LOCK_HELD, good = true, old;
    if (v->rewrite || (running && exists(v->path, ".rewrite"))) {
        s->state = running ? BG_STATE_REWRITING : BG_STATE_UNFINISHED;
        if (!running) NEXT("start the same command again: it puts the rewritten files in place");
        return BG_OK;
    }
    bg_status st = BG_OK;
    if (v->out_fd < 0 && v->out_end) {
        s->state = BG_STATE_DAMAGED;
        WHY("the output is gone, its journal is there");
        NEXT("put the output back; or remove the journal, and all starts anew");
        return BG_OK;
    }
    st = bg_view_check_last(v, (uint64_t)64 << 20, &good, err);
    if (st) return st;
    if (!good) {
        s->state = BG_STATE_DAMAGED;
        snprintf(s->why, sizeof s->why, "the bytes of the last commit are not there: %llu of %llu",
                 (unsigned long long)(v->out_size < v->out_end ? v->out_size : v->out_end),
                 (unsigned long long)v->out_end);
        NEXT("restore the file; or start the same command again, which runs again what is lost, or "
             "says to use batchgen repair");
        return BG_OK;
    }
    st = bg_view_is_old(v, &old, err);
    if (st) return st;
    if (old) {
        s->state = BG_STATE_NEEDS_REPAIR;
        WHY("commits follow that the journal does not know: it is an older one, or another's");
        NEXT("put the right journal back, or rebuild it with batchgen repair");
        return BG_OK;
    }
    s->state = v->end ? BG_STATE_FINISHED : running ? BG_STATE_RUNNING : BG_STATE_UNFINISHED;
    if (s->state == BG_STATE_UNFINISHED && s->lock == BG_LOCK_FREE)
        NEXT("start the same command again: it goes on where it was");
    else if (s->state == BG_STATE_UNFINISHED)
        NEXT("look on that host whether it still runs, or start the same command again: it ends at "
             "once if it does");
    return BG_OK;
}

bg_status bg_job_status_read(bg_job_status *s, const char *path, int64_t wall_ns, bg_error *err)
{
    *s = (bg_job_status){.holder = -1,
                         .run_pid = -1,
                         .n_total = -1,
                         .prompt_tokens = -1,
                         .output_tokens = -1,
                         .share = -1,
                         .record_rate = -1,
                         .token_rate = -1,
                         .eta_s = -1,
                         .commit_age_s = -1,
                         .error_bytes = -1};
    bg_view v;
    bg_status st = bg_view_open(&v, path, false, err);
    if (st) return st;
    look_at_lock(s, &v);
    count(s, &v, wall_ns);
    st = count_partials(s, &v, err);
    if (!st && v.journal == BG_VIEW_GOOD)
        st = with_journal(s, &v, err);
    else if (!st)
        without_journal(s, &v);
    s->rebuilt = v.first && json_is_null(json_object_get(v.first, "identity"));
    if (bg_view_has_errors(&v)) s->error_bytes = (int64_t)v.errors_end;
    rate(s, &v);
    estimate(s, &v);
    bg_view_release(&v);
    return st;
}

/* ---- telling it
 * -------------------------------------------------------------------------------------------- */

const char *bg_state_name(bg_state s)
{
    static const char *const names[] = {"missing",    "not_started", "running",      "rewriting",
                                        "unfinished", "finished",    "needs_repair", "damaged"};
    return names[s];
}

static void print_lock(const bg_job_status *s, FILE *out)
{
    bool run = s->run_pid >= 0;
    if (s->lock == BG_LOCK_HELD) {
        fprintf(out, "  lock        held by pid %lld", (long long)s->holder);
        if (!s->holder_alive)
            fputs(", which is gone: a process it started still has the file", out);
        else if (run && s->holder == s->run_pid)
            fprintf(out, " on %s, since %s", s->run_host, s->run_start);
        fputc('\n', out);
    } else if (run && s->state != BG_STATE_FINISHED) {
        fprintf(out, "  last run    pid %lld on %s, started %s, %s\n", (long long)s->run_pid,
                s->run_host, s->run_start,
                s->lock == BG_LOCK_UNKNOWN ? "cannot be seen from this host"
                : s->run_alive             ? "no longer holds the output"
                                           : "is gone");
    }
}

void bg_job_status_print(const bg_job_status *s, const char *path, FILE *out)
{
    static const char *const names[] = {"missing",         "not started", "running",
                                        "being rewritten", "unfinished",  "finished",
                                        "needs repair",    "damaged"};
    char a[32], b[32];
    fprintf(out, "%s: %s", path, names[s->state]);
    if (s->share >= 0 && s->state != BG_STATE_FINISHED) fprintf(out, ", %.1f %%", 100 * s->share);
    if (*s->shard) fprintf(out, ", shard %s", s->shard);
    if (*s->selection) fprintf(out, ", %s", s->selection);
    fputc('\n', out);
    if (*s->why) fprintf(out, "  wrong       %s\n", s->why);
    if (s->state == BG_STATE_MISSING) return;
    print_lock(s, out);
    if (s->rebuilt) fputs("  journal     rebuilt by repair\n", out);
    fprintf(out, "  records     %lld done, %lld of them failed", (long long)s->n_done,
            (long long)s->n_failed);
    if (s->n_total > s->n_done) fprintf(out, ", about %lld in all", (long long)s->n_total);
    fputc('\n', out);
    if (s->output_tokens >= 0)
        fprintf(out, "  tokens      %lld of prompts, %lld generated\n", (long long)s->prompt_tokens,
                (long long)s->output_tokens);
    if (s->partial_sequences)
        fprintf(out, "  in flight   %lld tokens of %lld unfinished answers are saved\n",
                (long long)s->partial_tokens, (long long)s->partial_sequences);
    if (s->record_rate >= 0) {
        fprintf(out, "  rate        %.3g records/s, %.4g tokens/s", s->record_rate, s->token_rate);
        if (s->eta_s > 0 && s->state == BG_STATE_RUNNING) {
            bg_format_duration(s->eta_s < 9e9 ? (int64_t)(s->eta_s * 1e9) : INT64_MAX, a, sizeof a);
            fprintf(out, ", %s to go", a);
        }
        fputc('\n', out);
    }
    if (s->commit_at_ns) {
        bg_format_time(s->commit_at_ns, b, sizeof b);
        bg_format_duration((int64_t)(s->commit_age_s * 1e9), a, sizeof a);
        fprintf(out, "  last commit %s ago, at %s\n", a, b);
    }
    bg_format_bytes(s->out_bytes, a, sizeof a);
    bg_format_bytes(s->text_bytes, b, sizeof b);
    fprintf(out, "  sizes       %s for %s of text", a, b);
    bg_format_bytes(s->journal_bytes, a, sizeof a);
    fprintf(out, ", journal %s", a);
    bg_format_bytes(s->error_bytes > 0 ? (uint64_t)s->error_bytes : 0, a, sizeof a);
    if (s->error_bytes >= 0) fprintf(out, ", error file %s", a);
    fputc('\n', out);
    if (s->tail_bytes)
        fprintf(out, "  tail        %llu bytes are not committed%s\n",
                (unsigned long long)s->tail_bytes,
                s->state == BG_STATE_RUNNING        ? " yet"
                : s->state == BG_STATE_NEEDS_REPAIR ? ""
                                                    : " and will be cut off");
    if (*s->next) fprintf(out, "  next        %s\n", s->next);
}

static json_t *count_or_null(int64_t v)
{
    return v < 0 ? json_null() : json_integer(v);
}

static json_t *real_or_null(double v)
{
    return v < 0 ? json_null() : json_real(v);
}

/* A path may be any bytes; JSON is UTF-8. */
static json_t *path_text(const char *path)
{
    bg_buf b = {0};
    bg_buf_json(&b, path, strlen(path));
    json_t *v = b.failed ? NULL : json_loads(b.data, JSON_DECODE_ANY, NULL);
    bg_buf_release(&b);
    return v;
}

static json_t *text_or_null(const char *s)
{
    return *s ? path_text(s) : json_null();
}

bool bg_job_status_json(const bg_job_status *s, const char *path, FILE *out)
{
    char at[40] = "";
    if (s->commit_at_ns) bg_format_time(s->commit_at_ns, at, sizeof at);
    json_t *lock =
        json_pack("{so so so}", "held",
                  s->lock == BG_LOCK_UNKNOWN ? json_null() : json_boolean(s->lock == BG_LOCK_HELD),
                  "pid", count_or_null(s->holder), "alive",
                  s->holder < 0 ? json_null() : json_boolean(s->holder_alive));
    json_t *run = s->run_pid < 0
                      ? json_null()
                      : json_pack("{sI ss ss so}", "pid", (json_int_t)s->run_pid, "host",
                                  s->run_host, "start", s->run_start, "alive",
                                  s->run_here ? json_boolean(s->run_alive) : json_null());
    json_t *records = json_pack("{sI sI so}", "done", (json_int_t)s->n_done, "failed",
                                (json_int_t)s->n_failed, "total", count_or_null(s->n_total));
    json_t *tokens =
        json_pack("{so so sI sI}", "prompt", count_or_null(s->prompt_tokens), "output",
                  count_or_null(s->output_tokens), "saved_in_flight", (json_int_t)s->partial_tokens,
                  "sequences_in_flight", (json_int_t)s->partial_sequences);
    json_t *rates = json_pack("{so so}", "records_per_second", real_or_null(s->record_rate),
                              "output_tokens_per_second", real_or_null(s->token_rate));
    json_t *sizes =
        json_pack("{sI sI sI so sI}", "output", (json_int_t)s->out_bytes, "text",
                  (json_int_t)s->text_bytes, "journal", (json_int_t)s->journal_bytes, "error_file",
                  count_or_null(s->error_bytes), "uncommitted", (json_int_t)s->tail_bytes);
    json_t *o = json_pack(
        "{so ss so so so so sb so sI so so so so so so so so}", "output", path_text(path), "state",
        bg_state_name(s->state), "why", text_or_null(s->why), "next", text_or_null(s->next), "lock",
        lock, "last_run", run, "rebuilt", s->rebuilt, "shard", text_or_null(s->shard), "runs",
        (json_int_t)s->n_runs, "selection", text_or_null(s->selection), "records", records,
        "tokens", tokens, "share", real_or_null(s->share), "rate", rates, "eta_seconds",
        real_or_null(s->eta_s), "last_commit",
        *at ? json_pack("{ss sf}", "at", at, "age_seconds", s->commit_age_s) : json_null(), "bytes",
        sizes);
    bool ok = o && json_dumpf(o, out, JSON_COMPACT) == 0;
    if (ok) fputc('\n', out);
    json_decref(o);
    return ok;
}
