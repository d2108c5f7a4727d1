#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cli/cli.h"

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

static void print_plan(const bg_text_model *m, const bg_memory_plan *p)
{
    static const char *const cache[] = {"f16", "bf16", "f32", "q8"};
    const bg_desc *d = &m->desc;
    char a[32], b[32], c[32], t[32];
    printf("\nShape: %s, %d layers, d_model %d, d_ff %d, %d heads, %d KV heads of %d, vocabulary "
           "%d%s\n",
           d->arch_name, d->n_layers, d->d_model, d->d_ff, d->n_heads, d->n_kv_heads, d->head_dim,
           d->vocab_size, d->tied ? ", tied output" : "");
    printf("       %.3g parameters, %.3g multiply-adds a token, trained for %d tokens%s\n",
           (double)d->n_params, (double)bg_macs_per_token(d), d->n_ctx_train,
           m->chat ? ", chat template" : ", no chat template");
    bg_format_bytes(p->kv_bytes_per_token, a, sizeof a);
    printf("KV:    %s a token in %s; %d blocks of %d tokens = %lld tokens; context %d, %d "
           "sequences at most\n",
           a, cache[p->cache_type], p->n_blocks - 1, p->block_tokens,
           (long long)(p->n_blocks - 1) * p->block_tokens, p->max_model_len, p->max_num_seqs);
    bg_format_bytes(p->total, t, sizeof t);
    printf("\nPlan for %d rank%s on %s: %s at most", p->tp, p->tp > 1 ? "s" : "", p->device, t);
    bg_format_bytes(p->budget, t, sizeof t);
    if (p->gpu) printf(", a rank may use %s", t);
    printf("; steps of up to %d prompt tokens\n", p->max_batched_tokens);
    puts("  rank   heads      KV heads   FFN columns      vocabulary rows      weights       KV    "
         "  rest");
    for (int r = 0; r < p->tp; r++) {
        bg_shard s;
        bg_error err = {0};
        if (bg_shard_plan(&s, d, m->gguf, r, p->tp, &err)) continue;
        bg_format_bytes(r < 8 ? p->weights[r] : s.weight_bytes, a, sizeof a);
        bg_format_bytes(r < 8 ? p->kv[r] : 0, b, sizeof b);
        bg_format_bytes(r < 8 ? p->activations[r] : 0, c, sizeof c);
        printf("  %4d   %3d+%-3d    %3d+%-3d    %6d+%-6d   %8lld+%-8lld %10s %9s %9s\n", r, s.head0,
               s.n_heads, s.kv_head0, s.n_kv_heads, s.ff0, s.n_ff, (long long)s.vocab0,
               (long long)s.n_vocab, a, b, c);
    }
}

static int print_json(const bg_text_model *m, const bg_memory_plan *p)
{
    const bg_desc *d = &m->desc;
    json_t *ranks = json_array();
    for (int r = 0; r < p->tp; r++) {
        bg_shard s;
        bg_error err = {0};
        if (bg_shard_plan(&s, d, m->gguf, r, p->tp, &err)) continue;
        json_array_append_new(ranks, json_pack("{si si si si si si si sI sI sI}", "rank", r,
                                               "head0", s.head0, "n_heads", s.n_heads, "kv_head0",
                                               s.kv_head0, "n_kv_heads", s.n_kv_heads, "ff0", s.ff0,
                                               "n_ff", s.n_ff, "vocab0", (json_int_t)s.vocab0,
                                               "n_vocab", (json_int_t)s.n_vocab, "weight_bytes",
                                               (json_int_t)s.weight_bytes));
    }
    json_t *o = json_pack(
        "{ss ss ss ss si si si si si si si si sI sI sI sI sI si si si si so}", "model", m->name,
        "device", p->device, "arch", d->arch_name, "fingerprint", m->fingerprint, "n_layers",
        d->n_layers, "d_model", d->d_model, "d_ff", d->d_ff, "n_heads", d->n_heads, "n_kv_heads",
        d->n_kv_heads, "head_dim", d->head_dim, "vocab_size", d->vocab_size, "n_ctx_train",
        d->n_ctx_train, "n_params", (json_int_t)d->n_params, "weight_bytes",
        (json_int_t)d->weight_bytes, "kv_bytes_per_token", (json_int_t)p->kv_bytes_per_token,
        "total_bytes", (json_int_t)p->total, "budget_bytes", (json_int_t)p->budget, "max_model_len",
        p->max_model_len, "max_num_seqs", p->max_num_seqs, "max_num_batched_tokens",
        p->max_batched_tokens, "n_blocks", p->n_blocks, "ranks", ranks);
    return bg_print_json(stdout, o, JSON_INDENT(2));
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
        code = print_json(&m, &p);
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
        print_plan(&m, &p);
    }
    bg_text_model_close(&m);
    return st ? bg_report(&err) : code;
}
