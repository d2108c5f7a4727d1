#include "cli/inspect.h"

#include <string.h>

#include "base/clock.h"
#include "job/floors.h"
#include "job/gpu_sizes.h"

/* An H200, measured: a copy, bytes read and written; a product of bf16 matrices. */
static const bg_roof h200 = {4.3e12, 790e12};
static const int batches[] = {1, 8, 32, 128, 256}, contexts[] = {1024, 4096};
enum {
    N_BATCHES = sizeof batches / sizeof *batches,
    N_CONTEXTS = sizeof contexts / sizeof *contexts
};

/* One rank of the plan. */
typedef struct share {
    bg_shard s;
    bg_kind_sums sums;
    uint64_t kv; /* of a token */
} share;

static bool share_of(share *sh, const bg_text_model *m, const bg_memory_plan *p, int rank, int tp)
{
    bg_error err = {0};
    if (bg_shard_plan(&sh->s, &m->desc, m->gguf, rank, tp, &err)) return false;
    bg_kinds_sum(&sh->sums, m, &sh->s);
    sh->kv = bg_kv_bytes_per_token(&m->desc, &sh->s, p->cache_type);
    return true;
}

/* The rank that reads most in a step of 32. */
static share busiest(const bg_text_model *m, const bg_memory_plan *p)
{
    share most = {0}, sh;
    double seconds = -1;
    for (int r = 0; r < p->tp; r++) {
        if (!share_of(&sh, m, p, r, p->tp)) continue;
        const double s =
            bg_floor_of(&m->desc, &sh.s, &sh.sums, p->cache_type, &h200, 32, 0).seconds;
        if (s > seconds) most = sh;
        seconds = s > seconds ? s : seconds;
    }
    return most;
}

/* ---- what the model is ----------------------------------------------------------------------- */

static void print_shape(const bg_text_model *m)
{
    static const char *const gating[] = {"softmax", "sigmoid", "softmax of the chosen"};
    const bg_desc *d = &m->desc;
    printf("\nShape: %s, %d layers, d_model %d, d_ff %d, %d heads, ", d->arch_name, d->n_layers,
           d->d_model, d->d_ff, d->n_heads);
    if (d->kv_rank)
        printf("latent attention (%d + %d values a token; heads of %d + %d, values of %d), ",
               d->kv_rank, d->n_rot, d->nope, d->n_rot, d->v_dim);
    else
        printf("%d KV heads of %d, ", d->n_kv_heads, d->head_dim);
    printf("vocabulary %d%s\n", d->vocab_size, d->tied ? ", tied output" : "");
    if (d->n_experts) {
        printf("       %d experts of %d columns, %d a token, by %s", d->n_experts, d->d_ff_expert,
               d->n_used, gating[d->gating]);
        if (d->n_groups > 1) printf(" (%d of %d groups)", d->n_groups_used, d->n_groups);
        if (d->d_ff_shared) printf("; shared: %d columns", d->d_ff_shared);
        if (d->n_dense) printf("; the first %d layers are dense", d->n_dense);
        putchar('\n');
    }
    if (d->index_heads)
        printf("       indexer: %d heads of %d choose %d keys, where there are more\n",
               d->index_heads, d->index_dim, d->index_top_k);
    if (d->n_mtp)
        printf("       %d more block%s to predict further tokens: not used\n", d->n_mtp,
               d->n_mtp > 1 ? "s" : "");
}

static void print_kinds(const bg_text_model *m, const bg_memory_plan *p)
{
    const bg_desc *d = &m->desc;
    share all, most = busiest(m, p);
    char a[32], b[32];
    if (!share_of(&all, m, p, 0, 1)) return;
    printf("       %.4g parameters, %.4g of them active for a token; trained for %d tokens%s\n",
           (double)d->n_params, bg_active_params(d, &all.sums), d->n_ctx_train,
           m->chat ? ", chat template" : ", no chat template");
    printf("\n  %-14s %11s %10s %7s%s\n", "", "parameters", "bytes", "bits",
           p->tp > 1 ? "   of one rank" : "");
    for (int k = 0; k < BG_N_KINDS; k++) {
        const uint64_t n = all.sums.params[k], bytes = all.sums.bytes[k];
        const bool again = k == BG_KIND_HEAD && d->tied; /* a rank's rows of the embedding */
        if (!n || (again && p->tp == 1)) continue;
        bg_format_bytes(bytes, a, sizeof a);
        bg_format_bytes(most.sums.bytes[k], b, sizeof b);
        if (again)
            printf("  %-14s %11s %10s %7s", "output, tied", "", "", "");
        else
            printf("  %-14s %11.4g %10s %7.2f", bg_kind_name(k), (double)n, a,
                   8 * (double)bytes / (double)n);
        if (p->tp > 1) printf("   %11s", k == BG_KIND_SKIPPED ? "-" : b);
        putchar('\n');
    }
}

/* ---- who holds what -------------------------------------------------------------------------- */

static void range(bg_buf *b, int64_t at, int64_t n, int width)
{
    char text[48];
    snprintf(text, sizeof text, "%lld+%lld", (long long)at, (long long)n);
    bg_buf_printf(b, "  %-*s", width, text);
}

static void amount(bg_buf *b, uint64_t bytes)
{
    char text[32];
    bg_format_bytes(bytes, text, sizeof text);
    bg_buf_printf(b, " %9s", text);
}

/* The columns that a model has, as its head and its ranks' lines share them. */
static void print_head(const bg_desc *d)
{
    bg_buf b = {0};
    bg_buf_printf(&b, "  rank  %-7s", "heads");
    if (!d->kv_rank) bg_buf_printf(&b, "  %-8s", "KV heads");
    if (d->d_ff) bg_buf_printf(&b, "  %-13s", "FFN columns");
    if (d->n_experts) bg_buf_printf(&b, "  %-13s", "of an expert");
    if (d->d_ff_shared) bg_buf_printf(&b, "  %-13s", "of the shared");
    bg_buf_printf(&b, "  %-15s %10s %9s", "vocabulary rows", "replicated", "sharded");
    if (d->n_experts) bg_buf_printf(&b, " %9s", "experts");
    bg_buf_printf(&b, " %9s %9s %9s", "weights", "KV", "rest");
    if (b.data) puts(b.data);
    bg_buf_release(&b);
}

static void print_ranks(const bg_text_model *m, const bg_memory_plan *p)
{
    const bg_desc *d = &m->desc;
    print_head(d);
    for (int r = 0; r < p->tp; r++) {
        share sh;
        bg_buf b = {0};
        if (!share_of(&sh, m, p, r, p->tp)) continue;
        const bg_shard *s = &sh.s;
        const int at = r < 8 ? r : 7;
        bg_buf_printf(&b, "  %4d", r);
        range(&b, s->head0, s->n_heads, 7);
        if (!d->kv_rank) range(&b, s->kv_head0, s->n_kv_heads, 8);
        if (d->d_ff) range(&b, s->ff0, s->n_ff, 13);
        if (d->n_experts) range(&b, s->ffe0, s->n_ffe, 13);
        if (d->d_ff_shared && s->merged) bg_buf_printf(&b, "  %-13s", "as experts");
        if (d->d_ff_shared && !s->merged) range(&b, s->ffs0, s->n_ffs, 13);
        range(&b, s->vocab0, s->n_vocab, 15);
        bg_buf_str(&b, " ");
        amount(&b, sh.sums.replicated);
        amount(&b, sh.sums.sharded);
        if (d->n_experts) amount(&b, sh.sums.bytes[BG_KIND_EXPERTS]);
        amount(&b, r < 8 ? p->weights[at] : s->weight_bytes);
        amount(&b, p->kv[at]);
        amount(&b, p->activations[at]);
        if (b.data) puts(b.data);
        bg_buf_release(&b);
    }
}

static const char *cache_name(const bg_memory_plan *p)
{
    static const char *const names[] = {"f16", "bf16", "f32", "q8"};
    return names[p->cache_type];
}

static void print_plan(const bg_text_model *m, const bg_memory_plan *p)
{
    char a[32], t[32];
    share most = busiest(m, p);
    bg_format_bytes(p->kv_bytes_per_token, a, sizeof a);
    printf("\nKV:    %s a token in %s", a, cache_name(p));
    bg_format_bytes(most.kv, a, sizeof a);
    if (p->tp > 1) printf(", %s of them on one rank", a);
    printf("; %d blocks of %d tokens = %lld tokens; context %d, %d sequences at most\n",
           p->n_blocks - 1, p->block_tokens, (long long)(p->n_blocks - 1) * p->block_tokens,
           p->max_model_len, p->max_num_seqs);
    bg_format_bytes(p->total, t, sizeof t);
    printf("\nPlan for %d rank%s on %s: %s at most", p->tp, p->tp > 1 ? "s" : "", p->device, t);
    bg_format_bytes(p->budget, t, sizeof t);
    if (p->gpu) printf(", a rank may use %s", t);
    printf("; steps of up to %d prompt tokens\n", p->max_batched_tokens);
    print_ranks(m, p);
}

/* ---- what would fit, and how fast it could be -------------------------------------------------
 */

typedef struct room {
    uint64_t weights, buffers, left;
    int64_t tokens;
} room;

/* What a rank's device of so many bytes would hold, with weights as a GPU stores them. The rank
 * with the least room decides. */
static room room_of(const bg_job *job, const bg_text_model *m, const bg_memory_plan *plan)
{
    room least = {.tokens = -1};
    bg_memory_plan p = *plan;
    const uint64_t may = (uint64_t)((double)job->device_memory * job->gpu_memory_utilization);
    bg_gpu_limits(&p, job);
    p.max_model_len = (int)(job->max_model_len ? job->max_model_len : m->desc.n_ctx_train);
    for (int r = 0; r < p.tp; r++) {
        share sh;
        if (!share_of(&sh, m, &p, r, p.tp)) continue;
        const bg_gpu_bytes b = bg_gpu_needs(m, &p, job, &sh.s, job->compute == BG_COMPUTE_NATIVE);
        const uint64_t left = may > b.weights + b.buffers ? may - b.weights - b.buffers : 0;
        const int64_t tokens = sh.kv ? (int64_t)(left / sh.kv) : 0;
        const bool worse =
            tokens < least.tokens || (tokens == least.tokens && b.weights > least.weights);
        if (least.tokens >= 0 && !worse) continue;
        least = (room){b.weights, b.buffers, left, tokens};
    }
    return least;
}

static void print_room(const bg_job *job, const bg_text_model *m, const bg_memory_plan *p)
{
    char all[32], w[32], b[32], l[32];
    const room f = room_of(job, m, p);
    bg_format_bytes((uint64_t)job->device_memory, all, sizeof all);
    bg_format_bytes(f.weights, w, sizeof w);
    bg_format_bytes(f.buffers, b, sizeof b);
    bg_format_bytes(f.left, l, sizeof l);
    printf("\nOn GPUs of %s (%g of it): weights %s, buffers %s, left %s = %lld tokens, %lld "
           "sequences of 4096\n",
           all, job->gpu_memory_utilization, w, b, l, (long long)f.tokens,
           (long long)(f.tokens / 4096));
}

static void print_floors(const bg_text_model *m, const bg_memory_plan *p)
{
    const bg_desc *d = &m->desc;
    const share most = busiest(m, p);
    printf("\nFloors of a decode step%s at %g TB/s and %g TFLOP/s (an H200), weights as the file "
           "has them%s\n",
           p->tp > 1 ? ", of the rank with most to read," : "", h200.bytes * 1e-12,
           h200.flops * 1e-12, d->n_experts ? ", tokens spread evenly over experts" : "");
    if (p->tp > 1)
        printf("(without its %d all-reduces of %d values a sequence)\n", 2 * d->n_layers,
               d->d_model);
    printf("  batch%s  weights GB      ms", d->n_experts ? "  experts" : "");
    for (int c = 0; c < N_CONTEXTS; c++)
        printf("   | context %d: KV GB  TFLOP      ms    tok/s", contexts[c]);
    putchar('\n');
    for (int i = 0; i < N_BATCHES; i++) {
        for (int c = 0; c < N_CONTEXTS; c++) {
            const bg_floor f =
                bg_floor_of(d, &most.s, &most.sums, p->cache_type, &h200, batches[i], contexts[c]);
            if (c == 0) {
                printf("  %5d", batches[i]);
                if (d->n_experts) printf("  %7.1f", f.experts);
                printf("  %10.3f  %6.2f", f.weight_bytes * 1e-9, f.weight_bytes / h200.bytes * 1e3);
            }
            printf("   | %20.3f  %5.2f  %6.2f  %7.0f", f.kv_bytes * 1e-9, f.flops * 1e-12,
                   f.seconds * 1e3, batches[i] / f.seconds);
        }
        putchar('\n');
    }
}

void bg_inspect_print(const bg_job *job, const bg_text_model *m, const bg_memory_plan *p)
{
    print_shape(m);
    print_kinds(m, p);
    print_plan(m, p);
    if (job->device_memory) print_room(job, m, p);
    print_floors(m, p);
}

/* ---- the same as JSON ------------------------------------------------------------------------ */

static json_t *kinds_json(const bg_kind_sums *sums)
{
    json_t *list = json_array();
    for (int k = 0; k < BG_N_KINDS; k++)
        if (sums->params[k])
            json_array_append_new(list, json_pack("{ss sI sI}", "kind", bg_kind_name(k),
                                                  "parameters", (json_int_t)sums->params[k],
                                                  "bytes", (json_int_t)sums->bytes[k]));
    return list;
}

static json_t *ranks_json(const bg_text_model *m, const bg_memory_plan *p)
{
    json_t *ranks = json_array();
    for (int r = 0; r < p->tp; r++) {
        share sh;
        if (!share_of(&sh, m, p, r, p->tp)) continue;
        const bg_shard *s = &sh.s;
        json_t *o = json_pack("{si si si si si si si si si si si sb sI sI}", "rank", r, "head0",
                              s->head0, "n_heads", s->n_heads, "kv_head0", s->kv_head0,
                              "n_kv_heads", s->n_kv_heads, "ff0", s->ff0, "n_ff", s->n_ff,
                              "expert_ff0", s->ffe0, "n_expert_ff", s->n_ffe, "shared_ff0", s->ffs0,
                              "n_shared_ff", s->n_ffs, "shared_as_experts", s->merged, "vocab0",
                              (json_int_t)s->vocab0, "n_vocab", (json_int_t)s->n_vocab);
        json_t *bytes = json_pack("{sI sI sI sI sI}", "weight_bytes", (json_int_t)s->weight_bytes,
                                  "replicated_bytes", (json_int_t)sh.sums.replicated,
                                  "sharded_bytes", (json_int_t)sh.sums.sharded, "expert_bytes",
                                  (json_int_t)sh.sums.bytes[BG_KIND_EXPERTS], "kv_bytes_per_token",
                                  (json_int_t)sh.kv);
        if (o && bytes) json_object_update(o, bytes);
        json_decref(bytes);
        json_array_append_new(ranks, o);
    }
    return ranks;
}

static json_t *floors_json(const bg_text_model *m, const bg_memory_plan *p)
{
    const share most = busiest(m, p);
    json_t *list = json_array();
    for (int i = 0; i < N_BATCHES * N_CONTEXTS; i++) {
        const int batch = batches[i / N_CONTEXTS], ctx = contexts[i % N_CONTEXTS];
        const bg_floor f =
            bg_floor_of(&m->desc, &most.s, &most.sums, p->cache_type, &h200, batch, ctx);
        json_array_append_new(list, json_pack("{si si sf sf sf sf sf}", "batch", batch, "context",
                                              ctx, "experts", f.experts, "weight_bytes",
                                              f.weight_bytes, "kv_bytes", f.kv_bytes, "flops",
                                              f.flops, "ms", f.seconds * 1e3));
    }
    return list;
}

static json_t *room_json(const bg_job *job, const bg_text_model *m, const bg_memory_plan *p)
{
    const room f = room_of(job, m, p);
    return json_pack("{sI sI sI sI sI}", "bytes", (json_int_t)job->device_memory, "weight_bytes",
                     (json_int_t)f.weights, "buffer_bytes", (json_int_t)f.buffers, "kv_bytes",
                     (json_int_t)f.left, "tokens", (json_int_t)f.tokens);
}

int bg_inspect_json(const bg_job *job, const bg_text_model *m, const bg_memory_plan *p)
{
    const bg_desc *d = &m->desc;
    share all = {0};
    share_of(&all, m, p, 0, 1);
    json_t *o = json_pack(
        "{ss ss ss ss si si si si si si si si sI sI sI sI sI si si si si}", "model", m->name,
        "device", p->device, "arch", d->arch_name, "fingerprint", m->fingerprint, "n_layers",
        d->n_layers, "d_model", d->d_model, "d_ff", d->d_ff, "n_heads", d->n_heads, "n_kv_heads",
        d->n_kv_heads, "head_dim", d->head_dim, "vocab_size", d->vocab_size, "n_ctx_train",
        d->n_ctx_train, "n_params", (json_int_t)d->n_params, "weight_bytes",
        (json_int_t)d->weight_bytes, "kv_bytes_per_token", (json_int_t)p->kv_bytes_per_token,
        "total_bytes", (json_int_t)p->total, "budget_bytes", (json_int_t)p->budget, "max_model_len",
        p->max_model_len, "max_num_seqs", p->max_num_seqs, "max_num_batched_tokens",
        p->max_batched_tokens, "n_blocks", p->n_blocks);
    json_t *more = json_pack(
        "{si si si si si sf so so so}", "n_experts", d->n_experts, "n_experts_used", d->n_used,
        "d_ff_expert", d->d_ff_expert, "d_ff_shared", d->d_ff_shared, "kv_lora_rank", d->kv_rank,
        "active_params", bg_active_params(d, &all.sums), "kinds", kinds_json(&all.sums), "ranks",
        ranks_json(m, p), "floors", floors_json(m, p));
    if (more && job->device_memory)
        json_object_set_new(more, "device_memory", room_json(job, m, p));
    const bool whole = o && more && json_object_update(o, more) == 0;
    json_decref(more);
    if (!whole) {
        json_decref(o);
        o = NULL;
    }
    return bg_print_json(stdout, o, JSON_INDENT(2));
}
