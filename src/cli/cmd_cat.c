#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/cli.h"
#include "output/cat.h"

static void note(void *ctx, const char *text)
{
    const bg_job *job = ctx;
    if (!job->quiet) fprintf(stderr, "batchgen: %s\n", text);
}

static bool same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static bg_status check(const bg_job *job, bg_error *err)
{
    char journal[4096];
    if (!job->inputs.n) return bg_fail(err, BG_ARG, "no output: name the file that run -o writes");
    for (int i = 0; i < job->inputs.n; i++) {
        const char *in = job->inputs.v[i];
        if (strcmp(in, "-") == 0)
            return bg_fail(err, BG_ARG, "an output is read from a file, not from standard input");
        if (!job->output || strcmp(job->output, "-") == 0) continue;
        snprintf(journal, sizeof journal, "%s.journal", in);
        if (same_file(in, job->output) || same_file(journal, job->output))
            return bg_fail(err, BG_ARG, "%s: would be read and written at once; name another -o",
                           job->output);
    }
    return BG_OK;
}

/* "a,b" and "c" are the fields a, b and c. */
static bool split_fields(const bg_strings *list, bg_strings *fields)
{
    bg_buf b = {0};
    bool ok = true;
    for (int i = 0; ok && i < list->n; i++) {
        for (const char *p = list->v[i]; ok && *p;) {
            size_t n = strcspn(p, ",");
            bg_buf_clear(&b);
            bg_buf_add(&b, p, n);
            if (n) ok = !b.failed && bg_strings_add(fields, b.data);
            p += n + (p[n] == ',');
        }
    }
    bg_buf_release(&b);
    return ok;
}

/* *opened: the output could be opened, so a failure is about something else. */
static bg_status cat(const bg_job *job, const bg_strings *fields, bool *opened, bg_error *err)
{
    const bg_cat_config c = {.paths = (const char *const *)job->inputs.v,
                             .n_paths = job->inputs.n,
                             .ordered = job->ordered,
                             .fields = (const char *const *)fields->v,
                             .n_fields = fields->n,
                             .note = note,
                             .ctx = (void *)(uintptr_t)job};
    bg_sink *sink;
    int64_t n_lines;
    bg_status st = bg_sink_open(&sink, job->output, err);
    *opened = !st;
    if (st) return st;
    st = bg_cat(&c, sink, &n_lines, err);
    /* What was good before the damage may be all that there is: a pipe gets it. */
    bg_error more = {0};
    bool stream = !job->output || strcmp(job->output, "-") == 0;
    if (!st)
        st = bg_sink_finish(sink, err);
    else if (st == BG_FORMAT && stream)
        bg_sink_finish(sink, &more);
    bg_sink_close(sink);
    return st;
}

int bg_cmd_cat(const bg_job *job)
{
    bg_error err = {0};
    bg_strings fields = {0};
    bool opened = true;
    bg_status st = check(job, &err);
    if (!st && !split_fields(&job->fields, &fields)) st = bg_fail(&err, BG_NOMEM, "out of memory");
    if (!st && job->fields.n && !fields.n)
        st = bg_fail(&err, BG_ARG, "--fields: names no field; write id,text");
    signal(SIGPIPE, SIG_IGN); /* a reader that has enough is no failure */
    if (!st) st = cat(job, &fields, &opened, &err);
    bg_strings_release(&fields);
    if (st == BG_IO && err.os == EPIPE) return BG_EXIT_OK;
    if (st) return opened ? bg_report(&err) : bg_report_output(&err);
    return BG_EXIT_OK;
}
