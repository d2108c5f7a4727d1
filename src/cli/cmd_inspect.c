#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cli/inspect.h"

enum { SHOWN = 8, TEXT = 100 };

static void show_scalar(bg_buf *b, const bg_kv *kv, uint64_t i)
{
    int64_t n;
    double f;
    bool t;
    bg_str s;
    if (bg_kv_bool(kv, i, &t))
        bg_buf_str(b, t ? "true" : "false");
    else if (bg_kv_int(kv, i, &n))
        bg_buf_printf(b, "%lld", (long long)n);
    else if (bg_kv_float(kv, i, &f))
        bg_buf_printf(b, "%g", f);
    else if (bg_kv_str(kv, i, &s)) {
        bg_buf_json(b, s.p, s.n < TEXT ? s.n : TEXT);
        if (s.n > TEXT) bg_buf_printf(b, "... (%zu bytes)", s.n);
    } else
        bg_buf_str(b, "?");
}

static void print_metadata(const bg_gguf *g)
{
    puts("\nMetadata:");
    for (int64_t i = 0; i < bg_gguf_n_kv(g); i++) {
        const bg_kv *kv = bg_gguf_kv(g, i);
        bg_buf b = {0};
        bg_buf_json(&b, kv->key.p, kv->key.n);
        bg_buf_str(&b, " = ");
        if (kv->type == BG_KV_ARR) {
            bg_buf_printf(&b, "%llu values [", (unsigned long long)kv->n);
            for (uint64_t k = 0; k < kv->n && k < SHOWN; k++) {
                if (k) bg_buf_str(&b, ", ");
                show_scalar(&b, kv, k);
            }
            bg_buf_str(&b, kv->n > SHOWN ? ", ...]" : "]");
        } else {
            show_scalar(&b, kv, 0);
        }
        if (b.data) printf("  %s\n", b.data);
        bg_buf_release(&b);
    }
}

static void print_tensors(const bg_gguf *g)
{
    puts("\nTensors:");
    for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
        const bg_tensor *t = bg_gguf_tensor(g, i);
        char shape[96], size[32];
        int n = 0;
        for (int d = 0; d < t->n_dims; d++)
            n += snprintf(shape + n, sizeof shape - (size_t)n, "%s%lld", d ? " x " : "",
                          (long long)t->ne[d]);
        bg_format_bytes(t->bytes, size, sizeof size);
        const char *type = bg_qtype_get(t->type)->name;
        bg_buf b = {0};
        bg_buf_json(&b, t->name.p, t->name.n);
        printf("  %-44s %-8s %-22s %8s", b.data ? b.data : "?", type ? type : "?", shape, size);
        bg_buf_release(&b);
        if (bg_gguf_n_parts(g) > 1) printf("  part %d", t->part + 1);
        putchar('\n');
    }
}

static void print_types(const bg_gguf *g)
{
    uint64_t bytes[BG_QTYPE_COUNT] = {0}, count[BG_QTYPE_COUNT] = {0};
    for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
        const bg_tensor *t = bg_gguf_tensor(g, i);
        if (t->type >= BG_QTYPE_COUNT) continue;
        bytes[t->type] += t->bytes;
        count[t->type]++;
    }
    puts("\nTypes:");
    for (uint32_t i = 0; i < BG_QTYPE_COUNT; i++) {
        if (!count[i]) continue;
        char size[32];
        bg_format_bytes(bytes[i], size, sizeof size);
        printf("  %-8s %5llu tensors %10s\n", bg_qtype_get(i)->name, (unsigned long long)count[i],
               size);
    }
}

/* A file that we cannot run (another architecture, no tokenizer) can still be looked at. */
static int inspect_file(const bg_job *job, const bg_error *why)
{
    bg_gguf *g;
    bg_error err = {0};
    if (!job->model || bg_gguf_open_header(&g, job->model, &err)) return bg_report_config(why);
    if (!job->json && !job->quiet) {
        print_metadata(g);
        print_tensors(g);
        print_types(g);
    }
    bg_gguf_close(g);
    return bg_report_config(why);
}

int bg_cmd_inspect(const bg_job *job)
{
    bg_error err = {0};
    bg_text_model m;
    bg_memory_plan p;
    int code = BG_EXIT_OK;
    if (bg_text_model_open(&m, job, &err)) return inspect_file(job, &err);
    bg_status st = bg_plan_memory(&p, job, &m, &err);
    if (!st && job->json) {
        code = bg_inspect_json(job, &m, &p);
    } else if (!st) {
        char size[32];
        bg_format_bytes(bg_gguf_file_bytes(m.gguf), size, sizeof size);
        printf("%s: %d file%s, %s, fingerprint %s\n", job->model, bg_gguf_n_parts(m.gguf),
               bg_gguf_n_parts(m.gguf) > 1 ? "s" : "", size, m.fingerprint);
        if (!job->quiet) {
            print_metadata(m.gguf);
            print_tensors(m.gguf);
            print_types(m.gguf);
        }
        bg_inspect_print(job, &m, &p);
    }
    bg_text_model_close(&m);
    return st ? bg_report(&err) : code;
}
