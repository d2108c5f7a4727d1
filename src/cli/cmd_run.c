#include "cli/cli.h"

#include <stdlib.h>
#include <string.h>

#include "job/notify.h"

static int exit_status(const bg_job *job, bg_status st, const bg_outcome *o, const bg_error *err)
{
    if (st && o->locked && job->quiet) return BG_EXIT_AGAIN; /* for cron: the next start will do */
    if (st && o->stage == BG_STAGE_MODEL) return bg_report_config(err);
    if (st && o->stage == BG_STAGE_OUTPUT) return bg_report_output(err);
    if (st) return bg_report(err);
    if (o->too_many) {
        fprintf(stderr,
                "batchgen: %s: stopped, %lld records have failed, more than --max-failed %lld\n",
                job->output, (long long)o->n_failed, (long long)job->max_failed);
        return BG_EXIT_DATA;
    }
    if (!o->finished) return BG_EXIT_AGAIN;
    return o->n_failed ? BG_EXIT_SOME_FAILED : BG_EXIT_OK;
}

static const char *status_word(int code, const bg_outcome *o)
{
    if (o->finished) return code == BG_EXIT_OK ? "completed" : "completed_with_failures";
    if (o->locked) return "locked";
    return code == BG_EXIT_AGAIN ? "stopped" : "failed";
}

static void notify(const bg_job *job, int code, const bg_outcome *o)
{
    const char *summary = o->summary ? o->summary : "{}";
    const bg_notify_command c = {.command = job->notify,
                                 .summary = summary,
                                 .n_summary = strlen(summary),
                                 .status = status_word(code, o),
                                 .output = job->output ? job->output : "",
                                 .exit_status = code};
    bg_error err = {0};
    if (bg_notify_run(&c, &err)) fprintf(stderr, "batchgen: --notify: %s\n", err.text);
}

int bg_cmd_run(const bg_job *job)
{
    bg_error err = {0};
    bg_outcome o;
    bg_status st = bg_job_run(job, stderr, &o, &err);
    int code = exit_status(job, st, &o, &err);
    /* A start that did nothing tells nothing: cron may make many of them. */
    if (job->notify && !o.locked && !o.already) notify(job, code, &o);
    free(o.summary);
    return code;
}
