#include <errno.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "output/merge.h"

static int print(const bg_job *job, const bg_merged *m)
{
    char size[32];
    if (job->json) {
        json_t *o = json_pack("{ss si sI sI sI sI}", "output", job->output, "shards", m->n_shards,
                              "records", (json_int_t)m->n_records, "failed",
                              (json_int_t)m->n_failed, "from_error_files",
                              (json_int_t)m->n_from_errors, "bytes", (json_int_t)m->bytes);
        return bg_print_json(stdout, o, JSON_COMPACT);
    }
    bg_format_bytes(m->bytes, size, sizeof size);
    printf("%s: %d shards, %lld records, %lld of them failed, %s\n", job->output, m->n_shards,
           (long long)m->n_records, (long long)m->n_failed, size);
    if (m->n_from_errors)
        printf("%lld results of the shards' error files are in it, in their places\n",
               (long long)m->n_from_errors);
    return BG_EXIT_OK;
}

/* Found out before all shards are read. */
static bg_status check_folder(const char *output, bg_error *err)
{
    char *copy = strdup(output);
    bg_status st = BG_OK;
    if (!copy) return bg_fail(err, BG_NOMEM, "%s: out of memory", output);
    if (access(dirname(copy), W_OK) != 0) st = bg_fail_os(err, "%s: cannot create", output);
    free(copy);
    return st;
}

int bg_cmd_merge(const bg_job *job)
{
    bg_error err = {0};
    bg_merged m = {0};
    bg_status st = BG_OK;
    if (!job->inputs.n)
        st = bg_fail(&err, BG_ARG, "no shards: name the outputs of all shards of a job");
    else if (!job->output || strcmp(job->output, "-") == 0)
        st = bg_fail(&err, BG_ARG, "no output: give -o FILE; batchgen cat --ordered prints");
    else if (check_folder(job->output, &err))
        return bg_report_output(&err);
    else
        st = bg_merge((const char *const *)job->inputs.v, job->inputs.n, job->output, &m, &err);
    if (st) return bg_report(&err);
    return job->quiet ? BG_EXIT_OK : print(job, &m);
}
