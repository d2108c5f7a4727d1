#include "base/clock.h"
#include "cli/cli.h"
#include "output/repair.h"

static bool lost_any(const bg_repaired *r)
{
    return r->damaged_bytes || r->n_lost;
}

static json_t *text_or_null(const bg_buf *b)
{
    return b->len ? json_string(b->data) : json_null();
}

static int print_json(const char *path, const bg_repaired *r)
{
    json_t *o = json_pack(
        "{ss sb sb sI sI sI sI sI sI so so so}", "output", path, "was_good", r->good, "job_known",
        r->known, "records", (json_int_t)r->n_records, "failed", (json_int_t)r->n_failed,
        "cut_bytes", (json_int_t)r->cut_bytes, "damaged_bytes", (json_int_t)r->damaged_bytes,
        "damaged_places", (json_int_t)r->n_damaged, "duplicates", (json_int_t)r->n_duplicates,
        "lost_records", text_or_null(&r->lost), "damaged_file", text_or_null(&r->damaged_path),
        "old_journal", text_or_null(&r->bad_path));
    return bg_print_json(stdout, o, JSON_COMPACT);
}

static void print(const char *path, const bg_repaired *r)
{
    if (r->good) {
        printf("%s: its journal is good: nothing to repair\n", path);
        return;
    }
    printf("%s: journal rebuilt: %lld records, %lld of them failed\n", path,
           (long long)r->n_records, (long long)r->n_failed);
    if (r->cut_bytes)
        printf("  cut off     %llu bytes at the end that were not whole\n",
               (unsigned long long)r->cut_bytes);
    if (r->n_duplicates)
        printf("  twice       %lld results were there twice, and are there once now\n",
               (long long)r->n_duplicates);
    if (r->damaged_bytes)
        printf("  damaged     %llu bytes at %lld place%s, now in %s\n",
               (unsigned long long)r->damaged_bytes, (long long)r->n_damaged,
               r->n_damaged > 1 ? "s" : "", r->damaged_path.data);
    if (r->n_lost)
        printf("  lost        %lld results: records %.200s%s\n", (long long)r->n_lost, r->lost.data,
               r->lost.len > 200 ? "..." : "");
    else if (r->damaged_bytes)
        puts("  lost        which records had their results there is not known");
    if (r->bad_path.len) printf("  old journal %s\n", r->bad_path.data);
    if (r->unverified)
        puts("  note        plain text without a good journal: lines are whole, but nothing says "
             "that no byte in them has changed");
    printf("  next        start the same command again%s%s\n",
           lost_any(r) ? ": it runs the lost records again" : "",
           r->known ? "" : "; it compares ids with its input");
}

int bg_cmd_repair(const bg_job *job)
{
    bg_error err = {0};
    bg_repaired r = {0};
    bg_status st = BG_OK;
    if (job->inputs.n < 1 || job->inputs.n > 2)
        st = bg_fail(&err, BG_ARG,
                     job->inputs.n ? "one output at a time, and its error file"
                                   : "no output: name the file that run -o writes");
    else
        st = bg_repair(job->inputs.v[0], job->inputs.n > 1 ? job->inputs.v[1] : NULL, &r, &err);
    int code = BG_EXIT_OK;
    if (st) {
        code = bg_report(&err);
    } else {
        if (job->json)
            code = print_json(job->inputs.v[0], &r);
        else if (!job->quiet)
            print(job->inputs.v[0], &r);
        if (lost_any(&r)) code = BG_EXIT_DATA;
    }
    bg_repaired_release(&r);
    return code;
}
