/* tokenize and render: for looking into a model. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/io.h"
#include "cli/cli.h"
#include "job/feed.h"

static void print_ids(const bg_job *job, const bg_text_model *m, const bg_ids *ids)
{
    if (job->ids) {
        for (size_t i = 0; i < ids->n; i++)
            printf("%s%d", i ? " " : "", ids->v[i]);
        putchar('\n');
        return;
    }
    bg_buf b = {0};
    for (size_t i = 0; i < ids->n; i++) {
        bg_str s = bg_token_bytes(m->vocab, ids->v[i], true);
        bg_buf_printf(&b, "%8d  ", ids->v[i]);
        bg_buf_json(&b, s.p, s.n);
        bg_buf_char(&b, '\n');
    }
    if (!job->quiet) bg_buf_printf(&b, "%zu tokens\n", ids->n);
    if (b.data) fputs(b.data, stdout);
    bg_buf_release(&b);
}

static bg_status read_stdin(bg_buf *b, bg_error *err)
{
    size_t got = 1;
    bg_status st = BG_OK;
    while (!st && got) {
        if (!bg_buf_reserve(b, 65536)) return bg_fail(err, BG_NOMEM, "out of memory");
        st = bg_read_full(STDIN_FILENO, b->data + b->len, 65536, &got, "standard input", err);
        b->len += got;
    }
    return st;
}

int bg_cmd_tokenize(const bg_job *job)
{
    bg_error err = {0};
    bg_text_model m;
    if (bg_text_model_open(&m, job, &err)) return bg_report_config(&err);
    bg_buf in = {0};
    bg_ids ids = {0};
    bg_status st = BG_OK;
    if (job->text && strcmp(job->text, "-") != 0)
        bg_buf_str(&in, job->text);
    else
        st = read_stdin(&in, &err);
    if (!st && in.failed) st = bg_fail(&err, BG_NOMEM, "out of memory");
    const bg_segment seg = {in.data ? in.data : "", in.len, job->special};
    if (!st) st = bg_tokenize(m.vocab, &seg, 1, job->bos, &ids, &err);
    if (!st) print_ids(job, &m, &ids);
    bg_ids_release(&ids);
    bg_buf_release(&in);
    bg_text_model_close(&m);
    return st ? bg_report(&err) : BG_EXIT_OK;
}

/* Prints what one record's prompt becomes; false: it is an error result. */
static bool render_one(const bg_job *job, const bg_text_model *m, const bg_feed_item *item)
{
    const bg_request *r = &item->req;
    if (r->error_code) {
        printf("line %lld: %s: %s\n", (long long)r->line, r->error_code, r->error_message);
        return false;
    }
    for (int i = 0; i < item->n_prompts; i++) {
        if (job->ids) {
            print_ids(job, m, &item->ids[i]);
            continue;
        }
        bg_buf b = {0};
        for (size_t k = 0; k < item->ids[i].n; k++) {
            bg_str s = bg_token_bytes(m->vocab, item->ids[i].v[k], true);
            bg_buf_add(&b, s.p, s.n);
        }
        if (!job->quiet) printf("--- line %lld, %zu tokens\n", (long long)r->line, item->ids[i].n);
        fwrite(b.data, 1, b.len, stdout);
        putchar('\n');
        bg_buf_release(&b);
    }
    return true;
}

int bg_cmd_render(const bg_job *job)
{
    bg_error err = {0};
    bg_text_model m;
    if (!job->inputs.n) {
        bg_fail(&err, BG_ARG, "no input: name a JSONL file, or - for standard input");
        return bg_report(&err);
    }
    if (bg_text_model_open(&m, job, &err)) return bg_report_config(&err);
    bool all_good = true;
    const bg_feed_config fc = {.job = job, .model = &m};
    bg_feed *f = NULL;
    bg_status st = bg_feed_open(&f, &fc, &err);
    while (!st) {
        bg_feed_item *item;
        st = bg_feed_next(f, &item, &err);
        if (st || !item) break;
        if (!render_one(job, &m, item)) all_good = false;
        bg_feed_item_free(item);
    }
    bg_feed_close(f);
    bg_text_model_close(&m);
    if (st) return bg_report(&err);
    return all_good ? BG_EXIT_OK : BG_EXIT_DATA;
}
