#include "base/clock.h"
#include "cli/cli.h"
#include "job/bench.h"

static int print_json(const bg_bench *b, const bg_text_model *m)
{
    json_t *rows = json_array();
    for (int i = 0; i < b->n_rows; i++) {
        const bg_bench_row *r = &b->rows[i];
        json_t *ops = json_object();
        for (int k = 0; b->has_ops && k < BG_OP_KINDS && bg_op_kind_name(k); k++)
            json_object_set_new(ops, bg_op_kind_name(k),
                                json_real((double)b->decode_ns[i][k] * 1e-6));
        json_array_append_new(rows,
                              json_pack("{si sf sf sf sf so}", "batch", r->batch,
                                        "prefill_tokens_per_second", r->prefill_rate,
                                        "decode_tokens_per_second", r->decode_rate, "floor_share",
                                        r->floor_share, "gmacs", r->gmacs, "decode_ms_by_op", ops));
    }
    json_t *o =
        json_pack("{ss si si sf sI sI so}", "model", m->name, "prompt_tokens", b->prompt,
                  "gen_tokens", b->gen, "read_bandwidth", b->read_bandwidth, "weight_bytes",
                  (json_int_t)b->weight_bytes, "memory", (json_int_t)b->memory, "rows", rows);
    return bg_print_json(stdout, o, JSON_INDENT(2));
}

static void print_ops(const char *what, const int64_t *ns)
{
    int64_t sum = 0;
    for (int k = 0; k < BG_OP_KINDS; k++)
        sum += ns[k];
    if (!sum) return;
    printf("\n%s, %.2f ms by op:\n", what, (double)sum * 1e-6);
    for (int k = 0; k < BG_OP_KINDS && bg_op_kind_name(k); k++)
        if (ns[k])
            printf("  %-14s %9.3f ms  %5.1f %%\n", bg_op_kind_name(k), (double)ns[k] * 1e-6,
                   100.0 * (double)ns[k] / (double)sum);
}

static void print_text(const bg_bench *b, const bg_text_model *m)
{
    char w[32], mem[32];
    bg_format_bytes(b->weight_bytes, w, sizeof w);
    bg_format_bytes(b->memory, mem, sizeof mem);
    printf(
        "%s: %s of weights, %s held; prompts of %d tokens, %d decoded; memory reads %.1f GB/s\n\n",
        m->name, w, mem, b->prompt, b->gen, b->read_bandwidth * 1e-9);
    puts(" batch   prefill tok/s   decode tok/s   ms/step   share of the read floor   GMAC/s");
    for (int i = 0; i < b->n_rows; i++) {
        const bg_bench_row *r = &b->rows[i];
        printf("%6d %15.0f %14.1f %9.2f %21.0f %%   %10.0f\n", r->batch, r->prefill_rate,
               r->decode_rate, r->decode_s / b->gen * 1e3, 100 * r->floor_share, r->gmacs);
    }
    if (!b->has_ops) return;
    char what[64];
    snprintf(what, sizeof what, "prefill of %d x %d tokens", b->rows[b->n_rows - 1].batch,
             b->prompt);
    print_ops(what, b->prefill_ns);
    for (int i = 0; i < b->n_rows; i++) {
        snprintf(what, sizeof what, "decode step of batch %d", b->rows[i].batch);
        print_ops(what, b->decode_ns[i]);
    }
}

int bg_cmd_bench(const bg_job *job)
{
    bg_error err = {0};
    bg_text_model m;
    static bg_bench b;
    int code = BG_EXIT_OK;
    if (bg_text_model_open(&m, job, &err)) return bg_report_config(&err);
    bg_status st = bg_bench_run(&b, job, &m, &err);
    if (!st && job->json)
        code = print_json(&b, &m);
    else if (!st)
        print_text(&b, &m);
    bg_text_model_close(&m);
    return st ? bg_report(&err) : code;
}
