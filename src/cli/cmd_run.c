#include "cli/cli.h"

int bg_cmd_run(const bg_job *job)
{
    bg_error err = {0};
    bg_outcome o;
    if (bg_job_run(job, stderr, &o, &err)) {
        if (o.stage == BG_STAGE_MODEL) return bg_report_config(&err);
        if (o.stage == BG_STAGE_OUTPUT) return bg_report_output(&err);
        return bg_report(&err);
    }
    if (!o.finished) return BG_EXIT_AGAIN;
    return o.n_failed ? BG_EXIT_SOME_FAILED : BG_EXIT_OK;
}
