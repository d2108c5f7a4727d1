#include "base/clock.h"
#include "cli/cli.h"
#include "output/status.h"

static int code_of_state(bg_state s)
{
    switch (s) {
    case BG_STATE_FINISHED:
        return BG_EXIT_OK;
    case BG_STATE_MISSING:
        return BG_EXIT_NO_INPUT;
    case BG_STATE_NEEDS_REPAIR:
    case BG_STATE_DAMAGED:
        return BG_EXIT_DATA;
    case BG_STATE_NOT_STARTED:
    case BG_STATE_RUNNING:
    case BG_STATE_REWRITING:
    case BG_STATE_UNFINISHED:
        break;
    }
    return BG_EXIT_AGAIN;
}

/* What is worst of several outputs: damage, then one that cannot be read, then an unfinished one.
 */
static int worse(int a, int b)
{
    static const int order[] = {BG_EXIT_OK, BG_EXIT_AGAIN, BG_EXIT_NO_INPUT, BG_EXIT_DATA};
    int ra = 4, rb = 4;
    for (int i = 0; i < 4; i++) {
        if (order[i] == a) ra = i;
        if (order[i] == b) rb = i;
    }
    return ra >= rb ? a : b;
}

int bg_cmd_status(const bg_job *job)
{
    bg_error err = {0};
    int code = BG_EXIT_OK;
    if (!job->inputs.n) {
        bg_fail(&err, BG_ARG, "no output: name the file that run -o writes");
        return bg_report(&err);
    }
    for (int i = 0; i < job->inputs.n; i++) {
        bg_job_status s;
        const char *path = job->inputs.v[i];
        err = (bg_error){0};
        if (bg_job_status_read(&s, path, bg_wall_ns(), &err)) {
            code = worse(code, bg_report(&err));
            continue;
        }
        code = worse(code, code_of_state(s.state));
        if (job->json) {
            if (!bg_job_status_json(&s, path, stdout)) {
                bg_fail(&err, BG_NOMEM, "out of memory");
                return bg_report(&err);
            }
        } else if (!job->quiet) {
            if (i) putchar('\n');
            bg_job_status_print(&s, path, stdout);
        }
    }
    return code;
}
