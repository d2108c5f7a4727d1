#include "job/prepare.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "job/check.h"
#include "job/feed.h"
#include "job/match.h"

void bg_prepared_release(bg_prepared *p)
{
    bg_writer_close(p->writer);
    json_decref(p->identity);
    free(p->selection);
    bg_text_model_close(&p->model);
    *p = (bg_prepared){0};
}

static bool is_stream(const char *path)
{
    return strcmp(path, "-") == 0;
}

static bool has_stream(const bg_job *job)
{
    for (int i = 0; i < job->inputs.n; i++)
        if (is_stream(job->inputs.v[i])) return true;
    return false;
}

static bool same_file(const char *a, const char *b)
{
    struct stat x, y;
    if (strcmp(a, b) == 0) return true;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Every file that is written, each with the option that names it. */
static bg_status check_written(const bg_job *job, bg_error *err)
{
    const struct {
        const char *option, *path;
    } files[] = {{"-o", job->output},
                 {"--error-file", job->error_file},
                 {"--summary", job->summary},
                 {"--metrics-file", job->metrics_file},
                 {"--log-file", job->log_file}};
    enum { N = sizeof files / sizeof *files };
    for (int i = 0; i < N; i++) {
        const char *path = files[i].path;
        if (!path || is_stream(path) || strcmp(path, "/dev/null") == 0) continue;
        for (int k = 0; k < job->inputs.n; k++)
            if (!is_stream(job->inputs.v[k]) && same_file(job->inputs.v[k], path))
                return bg_fail(err, BG_ARG, "%s: is input and output at once; name another %s",
                               path, files[i].option);
        if (job->model && same_file(job->model, path))
            return bg_fail(err, BG_ARG, "%s: is the model and output at once; name another %s",
                           path, files[i].option);
        for (int k = 0; k < i; k++)
            if (files[k].path && same_file(files[k].path, path) && strncmp(path, "/dev/", 5) != 0)
                return bg_fail(err, BG_ARG, "%s: is %s and %s at once; name another one", path,
                               files[k].option, files[i].option);
    }
    return BG_OK;
}

static bg_status check_paths(const bg_job *job, bg_error *err)
{
    if (!job->inputs.n)
        return bg_fail(err, BG_ARG, "no input: name a JSONL file, or - for standard input");
    if (!job->output) return bg_fail(err, BG_ARG, "no output: give -o FILE, or -o - for stdout");
    int n_stdin = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        n_stdin += is_stream(job->inputs.v[i]);
        if (!is_stream(job->inputs.v[i]) && access(job->inputs.v[i], R_OK) != 0)
            return bg_fail_os(err, "%s: cannot open", job->inputs.v[i]);
    }
    if (n_stdin > 1) return bg_fail(err, BG_ARG, "standard input can be read once only");
    if (n_stdin && job->strict)
        return bg_fail(err, BG_ARG, "--strict reads the input twice: give a file instead of -");
    if (is_stream(job->output)) {
        const char *what = job->error_file     ? "--error-file"
                           : job->retry_failed ? "--retry-failed"
                                               : NULL;
        if (what)
            return bg_fail(err, BG_ARG, "%s: needs an output file, not standard output", what);
    }
    return check_written(job, err);
}

static bg_out_format output_format(const char *path)
{
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".lz4") == 0 ? BG_OUT_LZ4 : BG_OUT_PLAIN;
}

/* Whether what the earlier run consumed is still there, byte for byte. A stream is trusted to be
 * the same. */
static bg_status same_input(const bg_prepared *p, const bg_job *job, bool *same, bg_error *err)
{
    const bg_recovered *was = &p->recovered;
    *same = true;
    if (!was->input_end) return BG_OK;
    if (has_stream(job)) return BG_OK;
    *same = false;
    bg_input *in;
    bg_status st = bg_input_open(&in, (const char *const *)job->inputs.v, job->inputs.n,
                                 (size_t)job->max_line, err);
    if (st) return st;
    for (bool got = true; !st && got && !*same;) {
        bg_line line;
        st = bg_input_next(in, &line, &got, err);
        if (st || !got || line.end > was->input_end) break;
        *same = line.end == was->input_end && line.hash == was->input_hash;
    }
    bg_input_close(in);
    return st;
}

static bg_status match(bg_prepared *p, const bg_job *job, FILE *messages, bg_error *err)
{
    bg_buf path = {0};
    bg_buf_printf(&path, "%s.orphaned.jsonl", job->output);
    if (path.failed) {
        bg_buf_release(&path);
        return bg_fail(err, BG_NOMEM, "out of memory");
    }
    bg_matched n;
    bg_status st = bg_match_input(job, p->writer, path.data, &n, err);
    if (!st && !job->quiet) {
        fprintf(messages,
                "%s: the input has changed: %lld results kept (%lld of them on another line)",
                job->output, (long long)n.kept, (long long)n.moved);
        if (n.dropped)
            fprintf(messages, ", %lld taken out (answers among them are in %s)",
                    (long long)n.dropped, path.data);
        fputc('\n', messages);
    }
    p->recovered.n_partials = 0; /* their record numbers may be other records' now */
    bg_buf_release(&path);
    return st;
}

static bool succeeded(void *ctx, const bg_done *old, int64_t *record, int64_t *line,
                      const char **file_name)
{
    (void)ctx, (void)record, (void)line, (void)file_name;
    return !old->failed;
}

static bg_status retry(bg_prepared *p, const bg_job *job, FILE *messages, bg_error *err)
{
    const bg_rewrite how = {.keep = succeeded, .same_input = true};
    int64_t kept, dropped;
    bg_status st = bg_writer_rewrite(p->writer, &how, &kept, &dropped, err);
    if (!st && !job->quiet)
        fprintf(messages, "%s: %lld failed records are tried again\n", job->output,
                (long long)dropped);
    return st;
}

/* What an existing output needs before it is gone on with. One without commits loses nothing by a
 * changed input. */
static bg_status look_back(bg_prepared *p, const bg_job *job, FILE *messages, bg_error *err)
{
    bg_recovered *rec = &p->recovered;
    if (!rec->resumed && !rec->finished) return BG_OK;
    bool same, changed = false;
    bg_status st = BG_OK;
    if (rec->lost)
        fprintf(
            messages,
            "batchgen: %s: %lld results that were committed are not in the file any more; their "
            "records are run again\n",
            job->output, (long long)rec->lost);
    if (rec->adopted) {
        if (has_stream(job))
            return bg_fail(err, BG_ARG,
                           "%s: its journal was rebuilt, so its ids must be compared with the "
                           "input first: give the input as a file instead of -",
                           job->output);
        st = bg_match_ids(job, p->writer, err);
        const bg_rewrite how = {0};
        int64_t kept, dropped;
        if (!st) st = bg_writer_rewrite(p->writer, &how, &kept, &dropped, err);
        if (st) return st;
    }
    st = same_input(p, job, &same, err);
    if (st) return st;
    if (rec->differs || !same) {
        if (job->on_input_change != BG_INPUT_MATCH && (rec->n_commits || rec->lost))
            return bg_fail(
                err, BG_ARG,
                "%s: the input is not the one this output was started with: %s; nothing was "
                "touched. Restore it, name another -o, keep what still fits with "
                "--on-input-change=match, or start anew with --overwrite",
                job->inputs.v[0],
                same ? "it has grown or shrunk" : "what was read of it then has changed");
        st = match(p, job, messages, err);
        changed = true;
    } else if (job->retry_failed && rec->n_failed) {
        st = retry(p, job, messages, err);
        changed = true;
    }
    if (!st && changed) {
        rec->n_records = bg_writer_count(p->writer, &rec->n_failed);
        rec->finished = false;
        rec->resumed = true;
    }
    return st;
}

static bg_status open_output(bg_prepared *p, const bg_job *job, bg_out_lock *take_lock,
                             bg_error *err)
{
    p->selection = bg_job_selection(job);
    if (!p->selection) {
        bg_out_lock_free(take_lock);
        return bg_fail(err, BG_NOMEM, "out of memory");
    }
    const bg_writer_config wc = {.path = job->output,
                                 .error_path = job->error_file,
                                 .format = output_format(job->output),
                                 .identity = p->identity,
                                 .started_s = p->wall_s,
                                 .may_differ = "input_bytes", /* look_back() says more of it */
                                 .selection = p->selection,
                                 .take_lock = take_lock,
                                 .overwrite = job->overwrite,
                                 .ordered = job->ordered,
                                 .commit_bytes = (size_t)job->commit_bytes,
                                 .commit_ns = (int64_t)(job->commit_interval * 1e9)};
    return bg_writer_open(&p->writer, &wc, &p->recovered, err);
}

/* What a job decided when it began stays so, whatever memory and clocks say when it goes on: a
 * context that was chosen by the memory that was free, and the time that templates see. */
static bg_status keep_decisions(bg_prepared *p, const bg_job *job, int64_t *max_model_len,
                                bg_error *err)
{
    json_t *was = NULL;
    bg_status st = BG_OK;
    *max_model_len = job->max_model_len;
    if (!is_stream(job->output) && !job->overwrite)
        st = bg_out_first(job->output, &was, &p->wall_s, err);
    const char *model = json_string_value(json_object_get(was, "model"));
    if (!*max_model_len && model && strcmp(model, p->model.fingerprint) == 0)
        *max_model_len = json_integer_value(json_object_get(was, "max_model_len"));
    json_decref(was);
    if (!p->wall_s) p->wall_s = bg_job_wall_s(job);
    return st;
}

static bg_status model_and_plan(bg_prepared *p, const bg_job *job, bg_error *err)
{
    bg_job planned = *job; /* what it points to stays the job's */
    bg_status st = bg_text_model_open(&p->model, job, err);
    if (!st) st = keep_decisions(p, job, &planned.max_model_len, err);
    if (!st) st = bg_plan_memory(&p->plan, &planned, &p->model, err);
    if (!st) p->model.max_model_len = p->plan.max_model_len;
    return st;
}

bg_status bg_prepare(bg_prepared *p, const bg_job *job, FILE *messages, bg_outcome *outcome,
                     bool (*stop)(void *), void *ctx, bg_error *err)
{
    bg_out_lock *lock = NULL;
    bg_status st = check_paths(job, err);
    if (st) return st;
    outcome->stage = BG_STAGE_OUTPUT;
    if (!is_stream(job->output)) {
        st = bg_out_lock_take(&lock, job->output, (int64_t)(job->wait * 1e9), stop, ctx, err);
        outcome->locked = st == BG_BUSY;
    }
    if (!st) {
        outcome->stage = BG_STAGE_MODEL;
        st = model_and_plan(p, job, err);
    }
    if (!st) {
        outcome->stage = BG_STAGE_SETUP;
        if (job->strict) st = bg_check_strict(job, &p->model, messages, err);
    }
    if (!st) {
        p->identity = bg_job_identity(job, &p->model, &p->plan, err);
        if (!p->identity) st = err->status;
    }
    if (st) {
        bg_out_lock_free(lock);
        return st;
    }
    outcome->stage = BG_STAGE_OUTPUT;
    st = open_output(p, job, lock, err);
    if (st) return st;
    outcome->stage = BG_STAGE_SETUP;
    st = look_back(p, job, messages, err);
    if (!st) outcome->stage = BG_STAGE_OUTPUT;
    if (!st) st = bg_writer_begin(p->writer, err);
    if (st) return st;
    outcome->stage = BG_STAGE_SETUP;
    const bg_recovered *rec = &p->recovered;
    outcome->n_records = rec->n_records;
    outcome->n_failed = rec->n_failed;
    if (rec->finished) {
        p->nothing_to_do = true;
        outcome->stage = BG_STAGE_RUN;
        outcome->finished = outcome->already = true;
        if (!job->quiet)
            fprintf(messages, "%s: this job is done, %lld records, %lld failed: nothing to do\n",
                    job->output, (long long)rec->n_records, (long long)rec->n_failed);
    } else if (job->max_failed >= 0 && rec->n_failed > job->max_failed) {
        outcome->too_many = true;
        st = bg_fail(err, BG_FORMAT,
                     "%s: %lld records have failed already, more than --max-failed %lld; raise it, "
                     "or try them again with --retry-failed",
                     job->output, (long long)rec->n_failed, (long long)job->max_failed);
    } else if (rec->resumed && !job->quiet) {
        fprintf(messages, "%s: going on after %lld records", job->output,
                (long long)rec->n_records);
        if (rec->cut_bytes)
            fprintf(messages, " (an uncommitted tail of %llu bytes was cut off)",
                    (unsigned long long)rec->cut_bytes);
        fputc('\n', messages);
    }
    return st;
}
