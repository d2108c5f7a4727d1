#include <string.h>

#include "base/clock.h"
#include "base/json.h"
#include "cli/cli.h"
#include "job/check.h"

typedef struct report {
    const bg_job *job;
    FILE *out;
    int code; /* of what could not be printed */
} report;

static void bad(void *ctx, const bg_request *r)
{
    report *c = ctx;
    if (c->code) return;
    if (!c->job->json) {
        bg_check_print(c->out, c->job, r);
        return;
    }
    bool many = c->job->inputs.n > 1;
    json_t *file = many ? bg_json_name(c->job->inputs.v[r->file]) : NULL;
    json_t *param = r->error_param ? json_string(r->error_param) : NULL;
    bool short_of_memory = (many && !file) || (r->error_param && !param);
    json_t *o = json_pack("{sI so* ss ss so*}", "line", (json_int_t)r->line, "file", file, "code",
                          r->error_code, "message", r->error_message, "param", param);
    if (short_of_memory) { /* json_pack() leaves out what is not there */
        json_decref(o);
        o = NULL;
    }
    /* ASCII: nothing that some readers take for the end of a line */
    c->code = bg_print_json(c->out, o, JSON_COMPACT | JSON_ENSURE_ASCII);
}

static int print_counts(const bg_job *job, const bg_text_model *m, const bg_check_counts *n)
{
    char size[32];
    if (job->json) {
        json_t *o = json_pack("{sI sI sI sI sI sI sI}", "records", (json_int_t)n->records, "bad",
                              (json_int_t)n->bad, "choices", (json_int_t)n->choices, "bytes",
                              (json_int_t)n->bytes, "prompt_tokens", (json_int_t)n->prompt_tokens,
                              "longest_prompt", (json_int_t)n->longest_prompt, "max_answer_tokens",
                              (json_int_t)n->answer_tokens);
        return bg_print_json(stdout, o, JSON_COMPACT);
    }
    bg_format_bytes(n->bytes, size, sizeof size);
    printf("%lld records in %s, %lld bad\n", (long long)n->records, size, (long long)n->bad);
    if (!m) {
        puts("give -m MODEL to count tokens and find prompts that are too long");
        return BG_EXIT_OK;
    }
    double good = (double)(n->records - n->bad);
    printf("%lld prompt tokens, %.0f a record, longest %lld; up to %lld answer tokens in %lld "
           "choices\n",
           (long long)n->prompt_tokens, good > 0 ? (double)n->prompt_tokens / good : 0,
           (long long)n->longest_prompt, (long long)n->answer_tokens, (long long)n->choices);
    printf("a result takes about 4 bytes of text a token: up to about ");
    bg_format_bytes((uint64_t)n->answer_tokens * 4, size, sizeof size);
    printf("%s before compression; batchgen bench measures the rates to divide by\n", size);
    return BG_EXIT_OK;
}

int bg_cmd_check(const bg_job *job)
{
    bg_error err = {0};
    bg_text_model model;
    bg_check_counts n = {0};
    if (!job->inputs.n) {
        bg_fail(&err, BG_ARG, "no input: name a JSONL file, or - for standard input");
        return bg_report(&err);
    }
    bool with_model = job->model != NULL;
    if (with_model && bg_text_model_open(&model, job, &err)) return bg_report_config(&err);
    report c = {job, stdout, BG_EXIT_OK};
    bg_status st = bg_check_input(job, with_model ? &model : NULL, &n, bad, &c, &err);
    if (!st && !c.code && !job->quiet) c.code = print_counts(job, with_model ? &model : NULL, &n);
    if (with_model) bg_text_model_close(&model);
    if (st) return bg_report(&err);
    if (c.code) return c.code;
    return n.bad ? BG_EXIT_DATA : BG_EXIT_OK;
}
