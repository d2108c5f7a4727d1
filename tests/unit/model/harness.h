/* tests/unit/model/harness.h - runs token sequences through a model file, step by step, on one or
 * more ranks, and hands back the logits of every position; and compares them with golden files.
 *
 * Everything here returns bg_status or numbers: ranks are threads, where Criterion's assertions
 * must not be used. */
#ifndef TESTS_MODEL_HARNESS_H
#define TESTS_MODEL_HARNESS_H

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <jansson.h>

#include "backend/device.h"
#include "backend/ops.h"
#include "base/rng.h"
#include "comm/comm.h"
#include "gguf/gguf.h"
#include "model/model.h"

#define UNUSED __attribute__((unused))

enum { MAX_SEQS = 16, MAX_TP = 8, BLOCK_TOKENS = 16, MAX_STEP_SEQS = MAX_SEQS };

/* ---- golden files -------------------------------------------------------------------------------
 */

typedef struct seq {
    char name[24];
    int n_prompt, n_ids, n; /* n = n_prompt + n_ids: tokens fed, the last id included */
    int32_t *tokens;
    struct {
        int32_t id;
        float logprob;
    } (*top)[5];      /* for each generated position */
    double *margin;   /* the same */
    float *rows;      /* kept logits */
    int n_rows, row0; /* row i: after token row0 + i */
} seq;

typedef struct golden {
    char model[128];
    char arch[32];
    int n_vocab, n_seqs;
    seq seqs[MAX_SEQS];
    bool k_quants, small_quants; /* any such tensor */
} golden;

/* A file of a golden folder: in its sub-folder, or all in one place. */
static FILE *open_in(const char *dir, const char *sub, const char *name, char *path, size_t size)
{
    snprintf(path, size, "%s/%s/%s", dir, sub, name);
    FILE *f = fopen(path, "rb");
    if (f) return f;
    snprintf(path, size, "%s/%s", dir, name);
    return fopen(path, "rb");
}

static bool read_rows(seq *s, const char *dir, const json_t *l, int n_vocab)
{
    char path[512];
    FILE *f =
        open_in(dir, "logits", json_string_value(json_object_get(l, "file")), path, sizeof path);
    if (!f) return false;
    const size_t n = (size_t)json_integer_value(json_object_get(l, "rows"));
    const long row = (long)json_integer_value(json_object_get(l, "row"));
    s->rows = malloc(n * (size_t)n_vocab * 4);
    s->row0 = (int)json_integer_value(json_object_get(l, "first_position"));
    s->n_rows = (int)n;
    const bool ok = fseek(f, row * n_vocab * 4, SEEK_SET) == 0 &&
                    fread(s->rows, (size_t)n_vocab * 4, n, f) == n;
    fclose(f);
    return ok;
}

static bool read_seq(seq *s, const json_t *o, const char *dir, int n_vocab)
{
    const json_t *prompt = json_object_get(o, "prompt"), *ids = json_object_get(o, "ids");
    const json_t *top = json_object_get(o, "top"), *margin = json_object_get(o, "margin");
    const json_t *l = json_object_get(o, "logits");
    *s = (seq){.n_prompt = (int)json_array_size(prompt), .n_ids = (int)json_array_size(ids)};
    snprintf(s->name, sizeof s->name, "%s", json_string_value(json_object_get(o, "name")));
    s->n = s->n_prompt + s->n_ids;
    s->tokens = malloc((size_t)s->n * sizeof *s->tokens);
    s->top = malloc((size_t)s->n_ids * sizeof *s->top);
    s->margin = malloc((size_t)s->n_ids * sizeof *s->margin);
    for (int i = 0; i < s->n; i++)
        s->tokens[i] = (int32_t)json_integer_value(
            i < s->n_prompt ? json_array_get(prompt, (size_t)i)
                            : json_array_get(ids, (size_t)(i - s->n_prompt)));
    for (int i = 0; i < s->n_ids; i++) {
        s->margin[i] = json_number_value(json_array_get(margin, (size_t)i));
        for (int k = 0; k < 5; k++) {
            const json_t *e = json_array_get(json_array_get(top, (size_t)i), (size_t)k);
            s->top[i][k].id = (int32_t)json_integer_value(json_array_get(e, 0));
            s->top[i][k].logprob = (float)json_number_value(json_array_get(e, 1));
        }
    }
    return !l || read_rows(s, dir, l, n_vocab);
}

/* Reads DIR/NAME.jsonl and the logits it names: the lines of arithmetic "exact". */
UNUSED static bool golden_read(golden *g, const char *dir, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s.jsonl", dir, name);
    FILE *f = fopen(path, "rb");
    char *line = NULL, model[128] = "";
    size_t cap = 0;
    bool ok = f != NULL;
    *g = (golden){0};
    while (ok && getline(&line, &cap, f) > 0) {
        json_t *o = json_loads(line, 0, NULL);
        if (!o) {
            ok = false;
            break;
        }
        const char *arith = json_string_value(json_object_get(o, "arith"));
        if (!arith) {
            const json_t *types = json_object_get(o, "tensor_types");
            const char *same = json_string_value(json_object_get(o, "same_as"));
            snprintf(model, sizeof model, "%s", json_string_value(json_object_get(o, "model")));
            if (same) {
                char other[128];
                snprintf(other, sizeof other, "%.*s", (int)(strlen(same) - 6), same);
                ok = golden_read(g, dir, other);
                json_decref(o);
                break;
            }
            snprintf(g->arch, sizeof g->arch, "%s", json_string_value(json_object_get(o, "arch")));
            g->n_vocab = (int)json_integer_value(json_object_get(o, "n_vocab"));
            for (size_t i = 0; i < json_array_size(types); i++) {
                const char *t = json_string_value(json_array_get(types, i));
                if (strstr(t, "_K") || strncmp(t, "IQ", 2) == 0) g->k_quants = true;
                if (t[0] == 'Q' && !strstr(t, "_K")) g->small_quants = true;
            }
        } else if (strcmp(arith, "exact") == 0) {
            ok = g->n_seqs < MAX_SEQS && read_seq(&g->seqs[g->n_seqs], o, dir, g->n_vocab);
            if (ok) g->n_seqs++;
        }
        json_decref(o);
    }
    snprintf(g->model, sizeof g->model, "%s", model);
    free(line);
    if (f) fclose(f);
    return ok && g->n_seqs > 0;
}

UNUSED static void golden_free(golden *g)
{
    for (int i = 0; i < g->n_seqs; i++) {
        free(g->seqs[i].tokens);
        free(g->seqs[i].top);
        free(g->seqs[i].margin);
        free(g->seqs[i].rows);
    }
}

/* ---- running -------------------------------------------------------------------------------- */

typedef enum plan_kind {
    PLAN_GOLDEN, /* each sequence alone: the prompt at once, then token by token */
    PLAN_CHUNKS, /* each sequence alone, in chunks of `chunk` tokens (0: all at once) */
    PLAN_MIXED,  /* all sequences together, chunk sizes as they come */
} plan_kind;

typedef struct run {
    const char *path; /* model file */
    const bg_gguf *g; /* or: an open one */
    bg_compute compute;
    bg_cache_type cache;
    int tp, threads;
    bool check;
    const char *isa;
    plan_kind plan;
    int chunk;
    int n_seqs;
    const seq *seqs;
    int generate;    /* > 0: sample greedily this many tokens after each prompt, all together */
    int step_tokens; /* of the largest step; 0: STEP_TOKENS */
    int max_ctx;     /* 0: MAX_CTX */
    /* Called on each rank with its new backend: to change what it does. NULL: not. */
    void (*tamper)(void *ctx, bg_backend *b, int rank);
    void *tamper_ctx;
    /* Called on rank 0 with each row of logits in place of keeping them. */
    void (*on_row)(void *ctx, int seq, int pos, const float *row);
    void *ctx;
    /* results */
    bg_desc desc;
    float **logits;     /* rank 0's: [seq][n * vocab] */
    int32_t (*out)[64]; /* [seq]: generated ids */
    bool ranks_agree;
} run;

typedef struct step {
    int n_seqs, seq[MAX_STEP_SEQS], pos0[MAX_STEP_SEQS], n[MAX_STEP_SEQS];
} step;

typedef struct rank_job {
    run *r;
    const bg_gguf *g;
    const step *steps;
    int n_steps, rank, max_tokens;
    void *shm;
    float **logits;
    int32_t (*out)[64];
    bg_status st;
    bg_error err;
} rank_job;

enum { STEP_TOKENS = 700, MAX_CTX = 1024 };

static void add_step(step **steps, int *n, const step *s)
{
    *steps = realloc(*steps, (size_t)(*n + 1) * sizeof **steps);
    (*steps)[(*n)++] = *s;
}

static int plan_steps(const run *r, step **steps)
{
    int n = 0;
    *steps = NULL;
    if (r->plan == PLAN_MIXED) {
        int done[MAX_SEQS] = {0};
        for (uint64_t turn = 0;; turn++) {
            step s = {0};
            int room = r->step_tokens;
            for (int i = 0; i < r->n_seqs; i++) {
                const int q = (int)((i + turn) % (uint64_t)r->n_seqs); /* places change too */
                static const int sizes[] = {1, 3, 16, 64, 1, 33, 7, 150, 2, 5};
                int len = sizes[bg_mix64(turn * 31 + (uint64_t)q) % 10];
                if (len > r->seqs[q].n - done[q]) len = r->seqs[q].n - done[q];
                if (len > room) len = room;
                if (len < 1) continue;
                s.seq[s.n_seqs] = q;
                s.pos0[s.n_seqs] = done[q];
                s.n[s.n_seqs++] = len;
                done[q] += len;
                room -= len;
            }
            if (!s.n_seqs) return n;
            add_step(steps, &n, &s);
        }
    }
    for (int q = 0; q < r->n_seqs; q++)
        for (int at = 0, len; at < r->seqs[q].n; at += len) {
            len = r->plan == PLAN_GOLDEN ? (at ? 1 : r->seqs[q].n_prompt)
                  : r->chunk             ? r->chunk
                                         : r->seqs[q].n;
            if (len > r->seqs[q].n - at) len = r->seqs[q].n - at;
            add_step(steps, &n, &(step){1, {q}, {at}, {len}});
        }
    return n;
}

/* The block table of a sequence: scattered, so that neighbours in a sequence are none in memory. */
static int table_of(const seq *seqs, int n_seqs, int q, int extra, int32_t *blocks)
{
    int total = 0, first = 0, mine = 0;
    for (int i = 0; i < n_seqs; i++) {
        const int n = (seqs[i].n + extra + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        if (i == q) first = total, mine = n;
        total += n;
    }
    int stride = 7;
    while (total % stride == 0)
        stride += 2;
    for (int i = 0; blocks && i < mine; i++)
        blocks[i] = 1 + (int32_t)((int64_t)(first + i) * stride % total);
    return q < 0 ? total : mine;
}

static bg_status forward(bg_model *m, const bg_batch *batch, bg_error *err)
{
    bg_status st = bg_model_begin(m, batch, err);
    if (!st) st = bg_model_forward(m, err);
    return st;
}

static bg_status run_steps(rank_job *j, bg_model *m, bg_backend *b, int32_t *const *tables)
{
    const run *r = j->r;
    const size_t vocab = (size_t)r->desc.vocab_size;
    float *rows = malloc(vocab * (size_t)r->step_tokens * sizeof *rows);
    bg_status st = BG_OK;
    for (int i = 0; !st && i < j->n_steps; i++) {
        const step *s = &j->steps[i];
        bg_seq_step parts[MAX_STEP_SEQS];
        for (int k = 0; k < s->n_seqs; k++)
            parts[k] = (bg_seq_step){
                .slot = s->seq[k],
                .pos0 = s->pos0[k],
                .n_tokens = s->n[k],
                .n_blocks = (s->pos0[k] + s->n[k] + BLOCK_TOKENS - 1) / BLOCK_TOKENS,
                .blocks = tables[s->seq[k]],
            };
        st = forward(m, &(bg_batch){s->n_seqs, parts, true}, &j->err);
        if (!st) st = bg_op_fetch_logits(b, rows, &j->err);
        const float *row = rows;
        for (int k = 0; !st && k < s->n_seqs; k++) {
            for (int t = 0; r->on_row && j->rank == 0 && t < s->n[k]; t++)
                r->on_row(r->ctx, s->seq[k], s->pos0[k] + t, row + (size_t)t * vocab);
            if (!r->on_row)
                memcpy(j->logits[s->seq[k]] + (size_t)s->pos0[k] * vocab, row,
                       (size_t)s->n[k] * vocab * sizeof *row);
            row += (size_t)s->n[k] * vocab;
        }
    }
    free(rows);
    return st;
}

/* Greedy: one step takes as many prompts as fit; then all sequences decode together. */
static bg_status run_generate(rank_job *j, bg_model *m, bg_backend *b, int32_t *const *tables)
{
    const run *r = j->r;
    int have[MAX_SEQS] = {0}, started = 0;
    bg_status st = BG_OK;
    for (;;) {
        bg_seq_step parts[MAX_STEP_SEQS];
        int at[MAX_STEP_SEQS], n = 0, tokens = 0;
        for (int q = 0; q < r->n_seqs; q++) {
            const int n_prompt = r->seqs[q].n_prompt;
            const bool prefill = q >= started;
            if (prefill && (q > started || tokens + n_prompt > r->step_tokens)) break;
            if (!prefill && have[q] >= r->generate) continue;
            const int pos0 = prefill ? 0 : n_prompt + have[q] - 1;
            parts[n] = (bg_seq_step){.slot = q,
                                     .pos0 = pos0,
                                     .n_tokens = prefill ? n_prompt : 1,
                                     .n_blocks = (pos0 + n_prompt) / BLOCK_TOKENS + 1,
                                     .blocks = tables[q],
                                     .sample = true};
            parts[n].n_blocks = (pos0 + parts[n].n_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
            tokens += parts[n].n_tokens;
            at[n++] = q;
            if (prefill) {
                started++;
                break; /* one prompt a step, beside those that decode */
            }
        }
        if (!n) return st;
        bg_sampled out[MAX_STEP_SEQS];
        int n_out = 0;
        st = forward(m, &(bg_batch){n, parts, false}, &j->err);
        if (!st) st = bg_op_sample(b, &j->err);
        if (!st) st = bg_op_fetch(b, out, &n_out, &j->err);
        if (!st && n_out != n) st = bg_fail(&j->err, BG_INTERNAL, "%d of %d sampled", n_out, n);
        for (int k = 0; !st && k < n; k++) {
            if (out[k].slot != at[k]) st = bg_fail(&j->err, BG_INTERNAL, "order of slots");
            j->out[at[k]][have[at[k]]++] = out[k].token;
        }
        if (st) return st;
    }
}

static void *run_rank(void *arg)
{
    rank_job *j = arg;
    const run *r = j->r;
    bg_comm *comm = NULL;
    bg_backend *b = NULL;
    bg_model *m = NULL;
    int32_t *tables[MAX_SEQS] = {0};
    const int extra = r->generate, blocks = table_of(r->seqs, r->n_seqs, -1, extra, NULL);
    bg_backend_config c = {
        .compute = r->compute,
        .n_threads = r->threads ? r->threads : 1,
        .first_cpu = -1,
        .check = r->check,
        .max_tokens = r->step_tokens,
        .max_seqs = MAX_SEQS,
        .max_out = r->generate ? MAX_SEQS : r->step_tokens,
        .max_ctx = r->max_ctx ? r->max_ctx : MAX_CTX,
        .vocab_size = r->desc.vocab_size,
        .isa = r->isa,
    };
    bg_status st = BG_OK;
    if (r->tp > 1) st = bg_comm_shm_join(&comm, j->shm, j->rank, r->tp, 1 << 16, &j->err);
    c.comm = comm;
    /* BATCHGEN_TEST_GPU=0: on that GPU, with libbatchgen_cuda.so beside the test program. */
    const char *gpu = r->tp == 1 ? getenv("BATCHGEN_TEST_GPU") : NULL;
    if (!st) st = bg_backend_new(&b, gpu ? atoi(gpu) : -1, &c, &j->err);
    if (!st && r->tamper) r->tamper(r->tamper_ctx, b, j->rank);
    bg_model_config mc = {.rank = j->rank,
                          .tp = r->tp,
                          .n_blocks = blocks + 1,
                          .block_tokens = BLOCK_TOKENS,
                          .cache_type = r->cache,
                          .backend = &c};
    if (!st) st = bg_model_load(&m, j->g, &r->desc, b, &mc, &j->err);
    for (int q = 0; !st && q < r->n_seqs; q++) {
        const bg_sampling greedy = {
            .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1, .seed = 1};
        tables[q] = malloc((size_t)(r->seqs[q].n + extra + 1) * sizeof(int32_t));
        table_of(r->seqs, r->n_seqs, q, extra, tables[q]);
        st = b->ops->slot_seat(b, q, &greedy, r->seqs[q].tokens,
                               r->generate ? r->seqs[q].n_prompt : r->seqs[q].n, 0, &j->err);
    }
    if (!st) st = r->generate ? run_generate(j, m, b, tables) : run_steps(j, m, b, tables);
    if (st && j->shm) bg_comm_shm_abort(j->shm);
    for (int q = 0; q < r->n_seqs; q++)
        free(tables[q]);
    bg_model_free(m);
    bg_backend_free(b);
    bg_comm_free(comm);
    j->st = st;
    return NULL;
}

/* Runs all sequences. r->logits (or r->out) is made here; run_free() ends it. */
UNUSED static bg_status run_model(run *r, bg_error *err)
{
    bg_gguf *opened = NULL;
    step *steps = NULL;
    rank_job jobs[MAX_TP];
    pthread_t threads[MAX_TP];
    bg_status st = BG_OK;
    if (!r->tp) r->tp = 1;
    if (!r->step_tokens) r->step_tokens = STEP_TOKENS;
    if (!r->g) st = bg_gguf_open(&opened, r->path, err);
    const bg_gguf *g = r->g ? r->g : opened;
    if (!st) st = bg_desc_read(&r->desc, g, err);
    if (st) goto out;
    const int n_steps = r->generate ? 0 : plan_steps(r, &steps);
    const size_t shm_bytes = bg_comm_shm_bytes(r->tp, 1 << 16);
    void *shm = mmap(NULL, shm_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int k = 0; k < r->tp; k++) {
        jobs[k] = (rank_job){.r = r, .g = g, .steps = steps, .n_steps = n_steps, .rank = k};
        jobs[k].shm = r->tp > 1 ? shm : NULL;
        jobs[k].logits = calloc((size_t)r->n_seqs, sizeof *jobs[k].logits);
        jobs[k].out = calloc((size_t)r->n_seqs, sizeof *jobs[k].out);
        for (int q = 0; !r->generate && !r->on_row && q < r->n_seqs; q++)
            jobs[k].logits[q] =
                calloc((size_t)r->seqs[q].n * (size_t)r->desc.vocab_size, sizeof(float));
        if (r->tp > 1) pthread_create(&threads[k], NULL, run_rank, &jobs[k]);
    }
    if (r->tp == 1) run_rank(&jobs[0]);
    r->ranks_agree = true;
    for (int k = 0; k < r->tp; k++) {
        if (r->tp > 1) pthread_join(threads[k], NULL);
        /* The others fail because one did: keep its message. */
        if (jobs[k].st && (!st || st == BG_DEVICE)) st = jobs[k].st, *err = jobs[k].err;
        for (int q = 0; q < r->n_seqs; q++) {
            if (!r->generate && !r->on_row &&
                memcmp(jobs[k].logits[q], jobs[0].logits[q],
                       (size_t)r->seqs[q].n * (size_t)r->desc.vocab_size * sizeof(float)) != 0)
                r->ranks_agree = false;
            if (k) free(jobs[k].logits[q]);
        }
        if (memcmp(jobs[k].out, jobs[0].out, (size_t)r->n_seqs * sizeof *jobs[k].out) != 0)
            r->ranks_agree = false;
        if (k) free(jobs[k].logits);
        if (k) free(jobs[k].out);
    }
    r->logits = jobs[0].logits;
    r->out = jobs[0].out;
    munmap(shm, shm_bytes);
out:
    free(steps);
    bg_gguf_close(opened);
    return st;
}

UNUSED static void run_free(run *r)
{
    for (int q = 0; r->logits && q < r->n_seqs; q++)
        free(r->logits[q]);
    free(r->logits);
    free(r->out);
    r->logits = NULL;
    r->out = NULL;
}

/* ---- comparing ------------------------------------------------------------------------------ */

typedef struct figures {
    int n_rows, n_top;
    double nmse_median, nmse_worst, top_median, top_worst;
    double same_token;   /* share of generated positions with the golden's token */
    double worst_margin; /* largest margin at which the token differs */
    double flipped;      /* share of rows whose NMSE is over `flip` */
    char where[64];      /* of the worst row */
} figures;

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Log of the sum of exponentials; NaN in, NaN out. */
static double log_sum_exp(const float *x, int n)
{
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) {
        if (isnan(x[i])) return NAN;
        if (x[i] > max) max = x[i];
    }
    for (int i = 0; i < n; i++)
        sum += exp(x[i] - max);
    return max + log(sum);
}

UNUSED static double nmse(const float *a, const float *b, int n)
{
    double num = 0, den = 0;
    for (int k = 0; k < n; k++) {
        num += ((double)a[k] - b[k]) * ((double)a[k] - b[k]);
        den += (double)b[k] * b[k];
    }
    return num / den >= 0 ? num / den : INFINITY; /* NaN must not slip through */
}

UNUSED static figures compare(const golden *g, const run *r, double flip)
{
    figures f = {0};
    const int v = g->n_vocab;
    double *all = malloc(8192 * sizeof *all), *top = malloc(8192 * sizeof *top);
    int same = 0;
    for (int q = 0; q < r->n_seqs; q++) {
        const seq *s = &r->seqs[q];
        for (int i = 0; i < s->n_rows && s->row0 + i < s->n; i++) {
            const float *a = r->logits[q] + (size_t)(s->row0 + i) * (size_t)v;
            const float *b = s->rows + (size_t)i * (size_t)v;
            const double e = nmse(a, b, v);
            if (e > f.nmse_worst)
                snprintf(f.where, sizeof f.where, "%s position %d", s->name, s->row0 + i);
            if (e > f.nmse_worst) f.nmse_worst = e;
            if (e > flip) f.flipped++;
            all[f.n_rows++] = e;
        }
        for (int i = 0; i < s->n_ids; i++) {
            const float *a = r->logits[q] + (size_t)(s->n_prompt - 1 + i) * (size_t)v;
            const double norm = log_sum_exp(a, v);
            double worst = 0;
            int best = 0;
            for (int k = 0; k < 5; k++) {
                const double e = fabs(a[s->top[i][k].id] - norm - s->top[i][k].logprob);
                if (!(e <= worst)) worst = isnan(e) ? INFINITY : e;
            }
            for (int k = 1; k < v; k++)
                if (a[k] > a[best]) best = k;
            if (best == s->tokens[s->n_prompt + i])
                same++;
            else if (s->margin[i] > f.worst_margin)
                f.worst_margin = s->margin[i];
            if (worst > f.top_worst) f.top_worst = worst;
            top[f.n_top++] = worst;
        }
    }
    qsort(all, (size_t)f.n_rows, sizeof *all, by_size);
    qsort(top, (size_t)f.n_top, sizeof *top, by_size);
    if (f.n_rows) f.nmse_median = all[f.n_rows / 2], f.flipped /= f.n_rows;
    if (f.n_top) f.top_median = top[f.n_top / 2], f.same_token = (double)same / f.n_top;
    free(all);
    free(top);
    return f;
}

/* The first difference between two runs of the same sequences; false: none. */
UNUSED static bool differ(const run *a, const run *b, char *where, size_t size)
{
    for (int q = 0; q < a->n_seqs; q++)
        for (int p = 0; p < a->seqs[q].n; p++) {
            const size_t v = (size_t)a->desc.vocab_size, at = (size_t)p * v;
            if (memcmp(a->logits[q] + at, b->logits[q] + at, v * sizeof(float)) != 0) {
                snprintf(where, size, "%s position %d", a->seqs[q].name, p);
                return true;
            }
        }
    return false;
}

#endif
