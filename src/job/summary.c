#include "job/summary.h"

#include <errno.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/json.h"

static const char *status_name(const bg_summary *s)
{
    const bg_outcome *o = s->outcome;
    if (o->finished) return "completed";
    if (o->locked) return "locked";
    return s->status ? "failed" : "stopped";
}

static double rate(uint64_t n, int64_t ns)
{
    return ns > 0 ? (double)n / ((double)ns * 1e-9) : 0;
}

static uint64_t sum(const uint64_t v[8], const bg_memory_plan *p)
{
    uint64_t all = 0;
    for (int i = 0; i < p->tp && i < 8; i++)
        all += v[i];
    return all * (uint64_t)p->dp;
}

char *bg_summary_json(const bg_summary *s)
{
    const bg_outcome *o = s->outcome;
    const bg_engine_stats *es = &s->engine;
    long long in = s->counts ? atomic_load(&s->counts->prompt_tokens) : 0;
    long long out = s->counts ? atomic_load(&s->counts->output_tokens) : 0;
    char end[40];
    bg_format_time(bg_wall_ns(), end, sizeof end);
    json_t *j = json_object();
    json_t *parts[] = {
        json_pack("{ss ss so ss}", "version", BG_VERSION, "status", status_name(s), "output",
                  bg_json_name(s->job->output ? s->job->output : ""), "ended", end),
        json_pack("{s{sI sI sI sI}}", "request_counts", "total", (json_int_t)o->n_records,
                  "completed", (json_int_t)(o->n_records - o->n_failed), "failed",
                  (json_int_t)o->n_failed, "this_run", (json_int_t)o->n_now),
        json_pack("{s{sI sI sI s{sI}}}", "usage", "input_tokens", (json_int_t)in, "output_tokens",
                  (json_int_t)out, "total_tokens", (json_int_t)(in + out), "input_tokens_details",
                  "cached_tokens", (json_int_t)es->cached_tokens),
        json_pack("{sf sf sf}", "seconds", (double)s->run_ns * 1e-9, "output_tokens_per_second",
                  rate(es->output_tokens, s->run_ns), "prompt_tokens_per_second",
                  rate(es->prompt_tokens + es->cached_tokens, s->run_ns)),
        json_pack("{s{sI sI sI sI sI sI sI sI sI}}", "engine", "steps", (json_int_t)es->steps,
                  "prefill_steps", (json_int_t)es->prefill_steps, "decode_steps",
                  (json_int_t)es->decode_steps, "preemptions", (json_int_t)es->preemptions,
                  "restarts", (json_int_t)es->restarts, "recomputed_tokens",
                  (json_int_t)es->recomputed_tokens, "busy_ms", (json_int_t)(es->busy_ns / 1000000),
                  "device_work_ms", (json_int_t)(es->device_work_ns / 1000000), "device_idle_ms",
                  (json_int_t)(es->device_idle_ns / 1000000)),
        json_pack("{s{sI sI sI sf sf}}", "output_file", "text_bytes", (json_int_t)s->text_bytes,
                  "file_bytes", (json_int_t)s->file_bytes, "commits", (json_int_t)s->commits,
                  "commit_ms", (double)s->commit_ns * 1e-6, "commit_cpu_ms",
                  (double)s->commit_cpu_ns * 1e-6),
        json_pack("{s{ss sI sI sI si si}}", "device", "name", s->plan->device, "weight_bytes",
                  (json_int_t)sum(s->plan->weights, s->plan), "kv_cache_bytes",
                  (json_int_t)sum(s->plan->kv, s->plan), "other_bytes",
                  (json_int_t)sum(s->plan->activations, s->plan), "max_model_len",
                  s->plan->max_model_len, "max_num_seqs", s->plan->max_num_seqs),
        json_pack("{ss ss ss so}", "model", s->model->name ? s->model->name : "",
                  "system_fingerprint", s->model->fingerprint, "failures", s->failures, "error",
                  bg_json_name(s->error))};
    bool ok = j != NULL;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        ok = ok && parts[i] && json_object_update(j, parts[i]) == 0;
        json_decref(parts[i]);
    }
    char *text = ok ? bg_json_text(j, JSON_INDENT(2)) : NULL;
    json_decref(j);
    return text;
}

bg_status bg_summary_write(const char *json, const char *path, bg_error *err)
{
    FILE *f = fopen(path, "we");
    bool ok = f && fprintf(f, "%s\n", json) > 0;
    if (f && fclose(f) != 0) ok = false;
    return ok ? BG_OK : bg_fail_os(err, "%s: cannot write the summary", path);
}

void bg_summary_print(const bg_summary *s, FILE *out)
{
    const bg_outcome *o = s->outcome;
    const bg_engine_stats *es = &s->engine;
    char time[32];
    bg_format_duration(s->total_ns, time, sizeof time);
    fprintf(out, "%s: %lld of %lld records%s in this run, %lld failed, in %s\n",
            o->finished ? "done" : "stopped", (long long)o->n_now, (long long)o->n_records,
            o->finished ? "" : " so far", (long long)o->n_failed, time);
    if (*s->failures) fprintf(out, "      failed in this run: %s\n", s->failures);
    if (s->run_ns > 0)
        fprintf(
            out,
            "      %llu prompt tokens (%llu cached), %llu output tokens: %.0f output tokens/s\n",
            (unsigned long long)es->prompt_tokens + (unsigned long long)es->cached_tokens,
            (unsigned long long)es->cached_tokens, (unsigned long long)es->output_tokens,
            rate(es->output_tokens, s->run_ns));
    if (!o->finished && !o->too_many)
        fprintf(out, "      %sstart the same command again to go on\n",
                o->time_up ? "the time limit was reached: " : "");
}

void bg_summary_print_failures(const bg_summary *s, FILE *out)
{
    const bg_outcome *o = s->outcome;
    if (*s->failures)
        fprintf(out, "batchgen: %s: %lld of %lld records have error results: %s\n", s->job->output,
                (long long)o->n_failed, (long long)o->n_records, s->failures);
}
