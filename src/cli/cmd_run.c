#include "cli/cli.h"

int bg_cmd_run(const bg_job *job)
{
    bg_error err = {0};
    bg_outcome o;
    if (bg_job_run(job, stderr, &o, &err)) return bg_report(&err);
    if (!o.finished) return BG_EXIT_AGAIN;
    return o.n_failed ? BG_EXIT_SOME_FAILED : BG_EXIT_OK;
}
