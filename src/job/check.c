#include "job/check.h"

#include <string.h>

#include "base/utf8.h"

bg_status bg_check_input(const bg_job *job, const bg_text_model *model, bg_check_counts *n,
                         void (*report)(void *ctx, const bg_request *r), void *ctx, bg_error *err)
{
    *n = (bg_check_counts){0};
    const bg_feed_config fc = {.job = job, .model = model};
    bg_feed *f;
    bg_status st = bg_feed_open(&f, &fc, err);
    if (st) return st;
    for (;;) {
        bg_feed_item *item;
        st = bg_feed_next(f, &item, err);
        if (st || !item) break;
        const bg_request *r = &item->req;
        n->records++;
        n->bytes = item->place.end;
        if (r->error_code) {
            n->bad++;
            if (report) report(ctx, r);
        } else {
            n->choices += (int64_t)bg_job_n_prompts(r) * r->gen.n;
        }
        for (int i = 0; !r->error_code && i < item->n_prompts; i++) {
            int64_t len = (int64_t)item->ids[i].n, limit = job->max_model_len;
            if (!limit) limit = model->desc.n_ctx_train;
            int64_t room = limit - len;
            n->prompt_tokens += len;
            if (len > n->longest_prompt) n->longest_prompt = len;
            n->answer_tokens +=
                r->gen.n *
                (r->gen.max_tokens && r->gen.max_tokens < room ? r->gen.max_tokens : room);
        }
        bg_feed_item_free(item);
    }
    bg_feed_close(f);
    return st;
}

/* Text of the user's, on one line and without control characters: it goes to a terminal. */
static void print_text(FILE *out, const char *s)
{
    size_t n = strlen(s), len;
    for (size_t i = 0; i < n; i += len) {
        uint32_t c;
        len = bg_utf8_next(s + i, n - i, &c);
        if (c == BG_UTF8_BAD)
            fputs("\xef\xbf\xbd", out);
        else if (c == '\n' || c == '\r' || c == '\t')
            fputs(c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t", out);
        else if (c < 0x20 || (c >= 0x7f && c <= 0x9f) || c == 0x2028 || c == 0x2029)
            fprintf(out, "\\u%04x", (unsigned)c);
        else
            fwrite(s + i, 1, len, out);
    }
}

void bg_check_print(FILE *out, const bg_job *job, const bg_request *r)
{
    if (job->inputs.n > 1) fprintf(out, "%s: ", job->inputs.v[r->file]);
    fprintf(out, "line %lld: %s: ", (long long)r->line, r->error_code);
    print_text(out, r->error_message);
    if (r->error_param) {
        fputs(" (", out);
        print_text(out, r->error_param);
        fputc(')', out);
    }
    fputc('\n', out);
}

typedef struct strict_report {
    FILE *out;
    const bg_job *job;
} strict_report;

static void print_bad(void *ctx, const bg_request *r)
{
    const strict_report *s = ctx;
    bg_check_print(s->out, s->job, r);
}

bg_status bg_check_strict(const bg_job *job, const bg_text_model *model, FILE *messages,
                          bg_error *err)
{
    strict_report s = {messages, job};
    bg_check_counts n;
    bg_status st = bg_check_input(job, model, &n, print_bad, &s, err);
    if (!st && n.bad)
        st = bg_fail(err, BG_FORMAT, "%lld of %lld records are bad; nothing was run (--strict)",
                     (long long)n.bad, (long long)n.records);
    return st;
}
