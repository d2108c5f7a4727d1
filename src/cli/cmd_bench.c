#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "job/bench.h"

enum { N_GROUPS = BG_OPS_OTHER + 1 };
static const char *const group_names[N_GROUPS] = {"GEMM", "attention", "collectives", "other"};

typedef struct line { /* of a profile: an op or a kind of ops */
    int64_t calls;
    double s, floor_s; /* floor_s: what bytes or FLOPs take at the roofs, the longer one */
    bg_cost cost;
} line;

static void add_op(line *l, const bg_profile *p, int k, const bg_cost *roofs)
{
    const double read = roofs->bytes > 0 ? p->cost[k].bytes / roofs->bytes : 0;
    const double compute = roofs->flops > 0 ? p->cost[k].flops / roofs->flops : 0;
    l->calls += p->calls[k];
    l->s += (double)p->ns[k] * 1e-9;
    l->floor_s += read > compute ? read : compute;
    l->cost.bytes += p->cost[k].bytes;
    l->cost.flops += p->cost[k].flops;
}

/* Lines by op (BG_OP_KINDS of them), by kind (N_GROUPS), and of all, whose floor is that of
 * weights, keys and values, and products. */
static line sum_up(const bg_profile *p, const bg_cost *roofs, line *ops, line *groups)
{
    line all = {0};
    memset(ops, 0, BG_OP_KINDS * sizeof *ops);
    memset(groups, 0, N_GROUPS * sizeof *groups);
    for (int k = 0; k < BG_OP_KINDS && bg_op_kind_name(k); k++) {
        add_op(&ops[k], p, k, roofs);
        add_op(&groups[bg_op_kind_group(k)], p, k, roofs);
        add_op(&all, p, k, roofs);
    }
    /* What the others move could stay in caches, or go with the op beside it. */
    all.floor_s = groups[BG_OPS_GEMM].floor_s + groups[BG_OPS_ATTENTION].floor_s;
    return all;
}

static json_t *line_json(const char *name, const line *l)
{
    return json_pack("{ss sI sf sf sf sf}", "name", name, "calls", (json_int_t)l->calls, "ms",
                     l->s * 1e3, "gbytes", l->cost.bytes * 1e-9, "gflops", l->cost.flops * 1e-9,
                     "floor_share", l->s > 0 ? l->floor_s / l->s : 0.0);
}

static json_t *profile_json(const bg_profile *p, const bg_cost *roofs, double whole_s)
{
    line ops[BG_OP_KINDS], groups[N_GROUPS];
    const line all = sum_up(p, roofs, ops, groups);
    json_t *by_op = json_array(), *by_kind = json_array();
    for (int k = 0; k < BG_OP_KINDS; k++)
        if (ops[k].calls) json_array_append_new(by_op, line_json(bg_op_kind_name(k), &ops[k]));
    for (int g = 0; g < N_GROUPS; g++)
        json_array_append_new(by_kind, line_json(group_names[g], &groups[g]));
    return json_pack("{sf sf sf so so}", "ms", whole_s * 1e3, "gaps_ms", (whole_s - all.s) * 1e3,
                     "floor_share", whole_s > 0 ? all.floor_s / whole_s : 0.0, "by_op", by_op,
                     "by_kind", by_kind);
}

static json_t *tune_json(const bg_tune *t)
{
    json_t *rows = json_array();
    for (int i = 0; i < t->n; i++) {
        const bg_tune_row *r = &t->rows[i];
        json_t *parts = json_array();
        for (int k = 0; k < BG_TUNE_PARTS && r->part_us[k] > 0; k++)
            json_array_append_new(parts, json_pack("{si ss sf}", "parts", 1 << k, "shape",
                                                   r->part_best[k], "us", r->part_us[k]));
        json_array_append_new(
            rows, json_pack("{ss si si si si si si si si ss sf sf sf ss sf so}", "linear", r->name,
                            "count", r->n_linears, "tiles", r->tiles, "chunks", r->chunks,
                            "formats", r->formats, "parts", r->parts, "from", r->from, "to", r->to,
                            "tokens", r->tokens, "shape", r->best, "us", r->us, "bytes", r->bytes,
                            "flops", r->flops, "untuned_shape", r->before, "untuned_us",
                            r->before_us, "by_parts", parts));
    }
    return json_pack("{sf so}", "seconds", t->seconds, "rows", rows);
}

static bg_status write_tune(const char *path, const bg_tune *t, bg_error *err)
{
    json_t *o = tune_json(t);
    if (!o) return bg_fail(err, BG_NOMEM, "out of memory");
    const int failed = json_dump_file(o, path, JSON_INDENT(1));
    json_decref(o);
    return failed ? bg_fail_os(err, "%s", path) : BG_OK;
}

/* bytes/s of an H200, as copies reach them: what floors of memory are measured by here. */
static const double H200_BYTES = 4.3e12;

/* Rank 0 of several. floor_ms: its bytes at H200_BYTES; sums_ms: what the stand-ins take, or, of
 * ranks that are there, what sums took in the profile. */
typedef struct alone {
    double step_ms, sums_ms, floor_ms, ratio, ratio_with_sums;
} alone;

static alone alone_of(const bg_bench *b, const bg_bench_row *r)
{
    const bg_profile *p = &b->decode[r - b->rows];
    double sums_ms = r->sums * b->all_reduce_us * 1e-3;
    if (!b->rank_of) {
        sums_ms = 0;
        for (int k = 0; k < BG_OP_KINDS && bg_op_kind_name(k); k++)
            if (bg_op_kind_group(k) == BG_OPS_COLLECTIVES) sums_ms += (double)p->ns[k] * 1e-6;
    }
    alone a = {.step_ms = r->decode_s / b->gen * 1e3,
               .sums_ms = sums_ms,
               .floor_ms = r->step_bytes / H200_BYTES * 1e3};
    if (a.floor_ms > 0) {
        a.ratio = (a.step_ms - a.sums_ms) / a.floor_ms;
        a.ratio_with_sums = a.step_ms / (a.floor_ms + a.sums_ms);
    }
    return a;
}

/* Whether a rank's own figures are worth showing. */
static bool by_rank(const bg_bench *b)
{
    return b->rank_of || (b->tp > 1 && b->gpu);
}

static json_t *alone_json(const bg_bench *b, const bg_bench_row *r)
{
    const alone a = alone_of(b, r);
    return json_pack("{sf sf si sf sf sf sf sf}", "step_ms", a.step_ms, "step_gbytes",
                     r->step_bytes * 1e-9, "all_reduces", r->sums, "all_reduce_ms", a.sums_ms,
                     "memory_floor_ms", a.floor_ms, "step_over_floor", a.ratio,
                     "step_over_floor_with_all_reduces", a.ratio_with_sums,
                     "machine_tokens_per_second", r->decode_rate);
}

static int print_json(const bg_bench *b, const bg_text_model *m, bool profile)
{
    json_t *rows = json_array();
    for (int i = 0; i < b->n_rows; i++) {
        const bg_bench_row *r = &b->rows[i];
        if (r->too_big) continue;
        json_t *ops = json_object();
        for (int k = 0; k < BG_OP_KINDS && bg_op_kind_name(k); k++)
            json_object_set_new(ops, bg_op_kind_name(k),
                                json_real((double)b->decode[i].ns[k] * 1e-6));
        json_t *row =
            json_pack("{si sf sf sf sf so}", "batch", r->batch, "prefill_tokens_per_second",
                      r->prefill_rate, "decode_tokens_per_second", r->decode_rate, "floor_share",
                      r->floor_share, "gmacs", r->gmacs, "decode_ms_by_op", ops);
        if (profile)
            json_object_set_new(row, "decode_profile",
                                profile_json(&b->decode[i], &b->roofs, r->decode_s / b->gen));
        if (by_rank(b))
            json_object_set_new(row, b->rank_of ? "rank_alone" : "rank_0", alone_json(b, r));
        json_array_append_new(rows, row);
    }
    json_t *o = json_pack("{ss si si sf sf sI sI so}", "model", m->name, "prompt_tokens", b->prompt,
                          "gen_tokens", b->gen, "read_bandwidth", b->read_bandwidth,
                          "start_seconds", b->start_s, "weight_bytes", (json_int_t)b->weight_bytes,
                          "memory", (json_int_t)b->memory, "rows", rows);
    if (b->load.bytes)
        json_object_set_new(o, "load",
                            json_pack("{sI sf sf sf sf sf}", "bytes", (json_int_t)b->load.bytes,
                                      "seconds", (double)b->load.total_ns * 1e-9, "read_seconds",
                                      (double)b->load.read_ns * 1e-9, "wait_seconds",
                                      (double)b->load.wait_ns * 1e-9, "copy_seconds",
                                      (double)b->load.copy_ns * 1e-9, "repack_seconds",
                                      (double)b->load.repack_ns * 1e-9));
    if (b->rank_of)
        json_object_set_new(o, "rank_alone",
                            json_pack("{si si sf sf sb}", "rank", 0, "of", b->rank_of,
                                      "all_reduce_us", b->all_reduce_us, "bytes_per_second",
                                      H200_BYTES, "skip_prefill", b->skip_prefill));
    if (b->tune.n) json_object_set_new(o, "tune", tune_json(&b->tune));
    if (profile) {
        const bg_bench_row *last = &b->rows[b->n_rows - 1];
        json_object_set_new(o, "roofs",
                            json_pack("{sf sf}", "bytes_per_second", b->roofs.bytes,
                                      "flops_per_second", b->roofs.flops));
        if (!b->skip_prefill && !last->too_big)
            json_object_set_new(o, "prefill_profile",
                                profile_json(&b->prefill, &b->roofs, last->prefill_s));
    }
    return bg_print_json(stdout, o, JSON_INDENT(2));
}

static void print_ops(const char *what, const bg_profile *p)
{
    int64_t sum = 0;
    for (int k = 0; k < BG_OP_KINDS; k++)
        sum += p->ns[k];
    if (!sum) return;
    printf("\n%s, %.2f ms by op:\n", what, (double)sum * 1e-6);
    for (int k = 0; k < BG_OP_KINDS && bg_op_kind_name(k); k++)
        if (p->ns[k])
            printf("  %-14s %9.3f ms  %5.1f %%\n", bg_op_kind_name(k), (double)p->ns[k] * 1e-6,
                   100.0 * (double)p->ns[k] / (double)sum);
}

static void print_line(const char *name, const line *l, double whole_s)
{
    if (!l->calls) return;
    printf("  %-14s %6lld %10.3f %6.1f %10.4f %9.1f %9.2f", name, (long long)l->calls, l->s * 1e3,
           100 * l->s / whole_s, l->cost.bytes * 1e-9, l->cost.bytes / l->s * 1e-9,
           l->cost.flops / l->s * 1e-12);
    if (l->floor_s > 0 && l->s > 0)
        printf(" %7.1f %%\n", 100 * l->floor_s / l->s);
    else
        puts("");
}

static void print_profile(const char *what, const bg_profile *p, const bg_cost *roofs,
                          double whole_s)
{
    line ops[BG_OP_KINDS], groups[N_GROUPS];
    const line all = sum_up(p, roofs, ops, groups);
    printf("\n%s: %.3f ms as it runs; GEMM and attention at the roofs %.3f ms: %.1f %%\n", what,
           whole_s * 1e3, all.floor_s * 1e3, 100 * all.floor_s / whole_s);
    puts("  by op           calls         ms      %         GB      GB/s   TFLOP/s   of floor");
    for (int k = 0; k < BG_OP_KINDS && bg_op_kind_name(k); k++)
        print_line(bg_op_kind_name(k), &ops[k], whole_s);
    puts("  by kind");
    for (int g = 0; g < N_GROUPS; g++)
        print_line(group_names[g], &groups[g], whole_s);
    printf("  %-14s %6s %10.3f %6.1f%s\n", "gaps", "", (whole_s - all.s) * 1e3,
           100 * (whole_s - all.s) / whole_s,
           all.s > whole_s ? "  (ops overlap when they are not timed one by one)" : "");
}

/* The last columns, K in other parts, are advice: what tuning does leaves bits as they are. */
static void print_tune(const bg_tune *t)
{
    printf(
        "tuned in %.1f s. Shapes: tokens x 64 rows of weights; *: faster than what is built in\n",
        t->seconds);
    puts("  linear                   x   tokens  shape        us   TB/s TFLOP/s  built in   slower"
         "  us with K in 1, 2, 4 parts");
    for (int i = 0; i < t->n; i++) {
        const bg_tune_row *r = &t->rows[i];
        printf("%c %-22s %3d %8d  %-6s %8.1f %6.2f %7.0f  %-6s %8.1f %%",
               r->us < r->before_us ? '*' : ' ', r->name, r->n_linears, r->tokens, r->best, r->us,
               r->bytes / r->us * 1e-6, r->flops / r->us * 1e-6, r->before,
               100 * (r->before_us / r->us - 1));
        for (int k = 0; k < BG_TUNE_PARTS && r->part_us[k] > 0; k++)
            printf(" %8.1f%s", r->part_us[k], 1 << k == r->parts ? "=" : " ");
        puts("");
    }
    puts("");
}

static void print_alone(const bg_bench *b)
{
    int sums = 0;
    for (int i = 0; i < b->n_rows; i++)
        if (b->rows[i].sums > sums) sums = b->rows[i].sums;
    if (b->rank_of)
        printf("rank 0 of %d, alone on its device; all-reduce stand-in %.1f us x %d\n"
               "That is an assumption (--all-reduce-us): nothing is sent, sums leave values as "
               "they are, and this rank's logits stand for all.\n",
               b->rank_of, b->all_reduce_us, sums);
    else
        printf("rank 0 of %d; %d all-reduces a step, timed op by op (that is, with waiting for "
               "the others)\n",
               b->tp, sums);
    if (b->skip_prefill) puts("Nothing was prefilled: keys and values of the context are random.");
    printf("Floor: what linears, experts and attention of a rank must move in a step, at %.2f "
           "TB/s. Rates are those of all %d ranks.\n\n",
           H200_BYTES * 1e-12, b->rank_of ? b->rank_of : b->tp);
    puts(" batch  context    ms/step  of it sums         GB   floor ms  step - sums  step to floor"
         "   tok/s\n"
         "                                                                to floor      and sums");
    for (int i = 0; i < b->n_rows; i++) {
        const bg_bench_row *r = &b->rows[i];
        const alone a = alone_of(b, r);
        if (r->too_big) {
            printf("%6d %8d  its keys and values do not fit\n", r->batch, b->prompt);
            continue;
        }
        printf("%6d %8d %10.3f %11.3f %10.2f %10.3f %12.2f %14.2f %9.0f\n", r->batch, b->prompt,
               a.step_ms, a.sums_ms, r->step_bytes * 1e-9, a.floor_ms, a.ratio, a.ratio_with_sums,
               r->decode_rate);
    }
}

static void print_rates(const bg_bench *b)
{
    puts(" batch   prefill tok/s   decode tok/s   ms/step   share of the read floor   GMAC/s");
    for (int i = 0; i < b->n_rows; i++) {
        const bg_bench_row *r = &b->rows[i];
        if (r->too_big) {
            printf("%6d   its keys and values do not fit\n", r->batch);
            continue;
        }
        printf("%6d %15.0f %14.1f %9.2f %21.0f %%   %10.0f\n", r->batch, r->prefill_rate,
               r->decode_rate, r->decode_s / b->gen * 1e3, 100 * r->floor_share, r->gmacs);
    }
}

static void print_text(const bg_bench *b, const bg_text_model *m, bool profile)
{
    char w[32], mem[32];
    bg_format_bytes(b->weight_bytes, w, sizeof w);
    char most[48] = "";
    if (b->tp > 1) {
        bg_format_bytes(b->rank_memory, mem, sizeof mem);
        snprintf(most, sizeof most, " (%s by one rank)", mem);
    }
    bg_format_bytes(b->memory, mem, sizeof mem);
    printf(
        "%s: %s of weights, %s held%s; prompts of %d tokens, %d decoded; memory reads %.1f GB/s\n",
        m->name, w, mem, most, b->prompt, b->gen, b->read_bandwidth * 1e-9);
    char load[160];
    bg_load_times_text(&b->load, load, sizeof load);
    printf("ready after %.2f s%s%s\n\n", b->start_s, *load ? "; weights: " : "", load);
    if (b->tune.n) print_tune(&b->tune);
    if (by_rank(b)) print_alone(b);
    if (!b->rank_of) print_rates(b);
    char what[96];
    const bg_bench_row *last = &b->rows[b->n_rows - 1];
    if (profile)
        printf("\nroofs: %.0f GB/s measured now%s", b->roofs.bytes * 1e-9,
               b->roofs.flops > 0 ? "" : "; arithmetic not known\n");
    if (profile && b->roofs.flops > 0) printf(", %.0f TFLOP/s\n", b->roofs.flops * 1e-12);
    snprintf(what, sizeof what, "prefill of %d x %d tokens", last->batch, b->prompt);
    const bool prefilled = !b->skip_prefill && !last->too_big;
    if (prefilled && profile) print_profile(what, &b->prefill, &b->roofs, last->prefill_s);
    if (prefilled && !profile) print_ops(what, &b->prefill);
    for (int i = 0; i < b->n_rows; i++) {
        const bg_bench_row *r = &b->rows[i];
        snprintf(what, sizeof what, "decode step of batch %d", r->batch);
        if (r->too_big) continue;
        if (profile)
            print_profile(what, &b->decode[i], &b->roofs, r->decode_s / b->gen);
        else
            print_ops(what, &b->decode[i]);
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
        code = print_json(&b, &m, job->profile || job->rank_of);
    else if (!st)
        print_text(&b, &m, job->profile || job->rank_of);
    if (!st && job->tune_out) st = write_tune(job->tune_out, &b.tune, &err);
    bg_text_model_close(&m);
    bg_bench_release(&b);
    return st ? bg_report(&err) : code;
}
