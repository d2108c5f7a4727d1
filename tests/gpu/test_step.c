/* Whole steps on the GPU: a step as a graph, as single launches, and op by op give the same bits,
 * whatever else is in the step; so do steps that are started before the one before is fetched; and
 * what is put into the staging ring arrives. On tiny models. */
#include "gpu.h"

#include <stdio.h>

#include "backend/cuda/cuda.h"
#include "gguf/gguf.h"
#include "model/model.h"

enum { SEQS = 8, STEPS = 24, BLOCK = 16, CTX = 128, ROWS = 96, PER_SEQ = CTX / BLOCK };

#define OK(call)                                               \
    do {                                                       \
        bg_error e_ = {0}, *err = &e_;                         \
        cr_assert_eq((call), BG_OK, "%s: %s", #call, e_.text); \
        (void)err;                                             \
    } while (0)

typedef enum way { OPS, EAGER, GRAPH } way; /* OPS: begin, forward, sample, fetch */

typedef struct loaded {
    bg_gguf *g;
    bg_desc d;
    bg_backend *b;
    bg_model *m;
    int32_t tables[SEQS][PER_SEQ];
} loaded;

static void load(loaded *l, const char *path, bg_compute compute, bool eager)
{
    *l = (loaded){0};
    OK(bg_gguf_open(&l->g, path, err));
    OK(bg_desc_read(&l->d, l->g, err));
    const bg_backend_config c = {.compute = compute,
                                 .eager = eager,
                                 .max_tokens = ROWS,
                                 .max_seqs = SEQS,
                                 .max_out = SEQS,
                                 .max_ctx = CTX,
                                 .vocab_size = l->d.vocab_size};
    const bg_model_config mc = {.tp = 1,
                                .n_blocks = SEQS * PER_SEQ + 1,
                                .block_tokens = BLOCK,
                                .cache_type =
                                    compute == BG_COMPUTE_F32 ? BG_CACHE_F32 : BG_CACHE_F16,
                                .backend = &c};
    OK(bg_cuda_backend_new(&l->b, &c, 0, err));
    OK(bg_model_load(&l->m, l->g, &l->d, l->b, &mc, err));
    OK(bg_model_prepare(l->m, err));
    const bg_cuda *cuda = (const bg_cuda *)l->b;
    cr_assert_eq(cuda->n_buckets, eager ? 0 : 4, "%d buckets", cuda->n_buckets);
    for (int i = 0; i < cuda->n_buckets; i++)
        cr_assert_not_null(cuda->graphs[i]);
    for (int i = 0; i < SEQS * PER_SEQ; i++) /* scattered */
        l->tables[i / PER_SEQ][i % PER_SEQ] = 1 + i * 37 % (SEQS * PER_SEQ);
}

static void unload(loaded *l)
{
    bg_model_free(l->m);
    bg_backend_free(l->b);
    bg_gguf_close(l->g);
}

static int prompt_of(const loaded *l, int text, int32_t *tokens)
{
    const int n = 1 + (int)(bg_mix64((uint64_t)text) % 40);
    for (int i = 0; i < n; i++)
        tokens[i] = (int32_t)(bg_mix64((uint64_t)(text * 1000 + i)) % (uint64_t)l->d.vocab_size);
    return n;
}

/* Every kind of setting somewhere. */
static int seat(loaded *l, int slot, int text)
{
    static const bg_logit_bias bias[] = {{5, 2.5f}, {9, -100}};
    static const int32_t stop[] = {2, 7};
    int32_t tokens[64];
    const int n = prompt_of(l, text, tokens);
    const bg_sampling s = {.temperature = text % 3 == 1 ? 0.9f : 0,
                           .top_k = text % 2 ? 40 : 0,
                           .top_p = text % 5 == 1 ? 0.8f : 1,
                           .min_p = text % 4 == 3 ? 0.05f : 0,
                           .repetition_penalty = text % 4 == 1 ? 1.2f : 1,
                           .presence_penalty = text % 4 == 2 ? 0.5f : 0,
                           .n_logprobs = text % 4 - 1,
                           .min_tokens = text % 2 ? 5 : 0,
                           .seed = (uint64_t)text,
                           .n_bias = text % 5 == 0 ? 2 : 0,
                           .bias = bias,
                           .n_stop_ids = 2,
                           .stop_ids = stop};
    OK(l->b->ops->slot_seat(l->b, slot, &s, tokens, n, 0, err));
    return n;
}

typedef struct sequence {
    int slot, len, pos; /* len: tokens that are there or on their way */
    int started;        /* tokens asked for */
    int n;              /* tokens that came */
    bg_sampled out[STEPS + 1];
} sequence;

static void keep(sequence *list, int n_seqs, const bg_sampled *got, int n)
{
    for (int i = 0; i < n; i++)
        for (int q = 0; q < n_seqs; q++)
            if (list[q].slot == got[i].slot) {
                sequence *s = &list[q];
                cr_assert_leq(s->n, STEPS);
                /* What is not set may be anything. */
                bg_sampled *to = &s->out[s->n++];
                memset(to, 0, sizeof *to);
                to->token = got[i].token;
                to->n_top = got[i].n_top;
                to->logprob = isnan(got[i].logprob) ? -1 : got[i].logprob;
                for (int k = 0; k < got[i].n_top; k++)
                    to->top[k] = got[i].top[k];
            }
}

/* The sequences prefilled in pieces of `chunk`, then decoded together; up to `ahead` steps under
 * way.
 */
static void generate(loaded *l, way how, int n_seqs, int ahead, int chunk, sequence *list)
{
    bg_sampled got[SEQS];
    int under_way = 0, n;
    for (int q = 0; q < n_seqs; q++) {
        list[q] = (sequence){.slot = q};
        list[q].len = seat(l, q, q);
    }
    for (;;) {
        bg_seq_step parts[SEQS];
        int n_parts = 0, room = ROWS;
        bool prefill = false;
        for (int q = 0; q < n_seqs; q++)
            prefill = prefill || list[q].started == 0;
        for (int q = 0; q < n_seqs; q++) {
            sequence *s = &list[q];
            if (prefill == (s->started > 0) || s->started > STEPS) continue;
            int k = s->len - s->pos;
            if (k > chunk) k = chunk;
            if (k > room) k = room;
            if (!k) continue;
            room -= k;
            parts[n_parts++] = (bg_seq_step){.slot = s->slot,
                                             .pos0 = s->pos,
                                             .n_tokens = k,
                                             .n_blocks = PER_SEQ,
                                             .blocks = l->tables[q],
                                             .sample = s->pos + k == s->len};
            s->pos += k;
            if (s->pos == s->len) s->started++, s->len++;
        }
        if (!n_parts) break;
        const bg_batch batch = {n_parts, parts, false};
        if (how == OPS) {
            OK(bg_model_begin(l->m, &batch, err));
            OK(bg_model_forward(l->m, err));
            if (l->b->ops->n_out(l->b) > 0) OK(bg_op_sample(l->b, err));
        } else {
            OK(bg_model_step(l->m, &batch, err));
        }
        memset(parts, 0xff, sizeof parts); /* it was copied */
        for (under_way++; under_way >= ahead; under_way--) {
            OK(bg_model_fetch(l->m, got, &n, err));
            keep(list, n_seqs, got, n);
        }
    }
    for (; under_way > 0; under_way--) {
        OK(bg_model_fetch(l->m, got, &n, err));
        keep(list, n_seqs, got, n);
    }
    for (int q = 0; q < n_seqs; q++)
        cr_assert_eq(list[q].n, STEPS + 1, "sequence %d: %d tokens", q, list[q].n);
}

static void same(const sequence *a, const sequence *b, int n_seqs, const char *what)
{
    for (int q = 0; q < n_seqs; q++)
        for (int i = 0; i <= STEPS; i++)
            cr_assert_arr_eq(&a[q].out[i], &b[q].out[i], sizeof a[q].out[i],
                             "%s: sequence %d, token %d: %d, not %d (log-probability %g, not %g)",
                             what, q, i, a[q].out[i].token, b[q].out[i].token,
                             (double)a[q].out[i].logprob, (double)b[q].out[i].logprob);
}

static void all_ways(const char *path, bg_compute compute)
{
    static sequence want[SEQS], got[SEQS];
    char what[200];
    loaded l;
    for (int eager = 0; eager < 2; eager++) {
        load(&l, path, compute, eager);
        if (!eager) generate(&l, OPS, SEQS, 1, ROWS, want);
        int different = 0; /* a model that always says the same would prove nothing */
        for (int i = 1; i <= STEPS; i++)
            different += want[1].out[i].token != want[1].out[i - 1].token;
        cr_assert_gt(different, STEPS / 4);
        static const int counts[] = {1, 3, 8};
        for (int k = gpu_small() ? 2 : 0; k < 3; k++)
            for (int ahead = 1; ahead <= BG_STEPS_AHEAD; ahead++)
                for (int chunk = 7; chunk <= ROWS; chunk += ROWS - 7) {
                    snprintf(what, sizeof what, "%s, %s, %d sequences, %d ahead, chunks of %d",
                             path, eager ? "eager" : "graph", counts[k], ahead, chunk);
                    generate(&l, eager ? EAGER : GRAPH, counts[k], ahead, chunk, got);
                    same(got, want, counts[k], what);
                }
        unload(&l);
    }
}

Test(step, graph_eager_and_ops_give_the_same_bits)
{
    NEEDS_GPU();
    all_ways("tests/golden/models/tiny-llama.q2_k.gguf", BG_COMPUTE_NATIVE);
    if (!gpu_small()) all_ways("tests/golden/models/tiny-llama.q2_k.gguf", BG_COMPUTE_F32);
}

/* A seat is taken by another sequence while a step with the one before is under way. */
Test(step, a_seat_changes_hands_under_way)
{
    NEEDS_GPU();
    static sequence want[SEQS];
    bg_sampled got[SEQS];
    loaded l;
    load(&l, "tests/golden/models/tiny-llama.q2_k.gguf", BG_COMPUTE_NATIVE, false);
    generate(&l, OPS, SEQS, 1, ROWS, want);
    for (int turn = 0; turn < (gpu_small() ? 4 : 20); turn++) {
        const int first = turn % SEQS, second = (turn * 5 + 1) % SEQS;
        int texts[2] = {first, second}, n;
        for (int i = 0; i < 2;
             i++) { /* seat, prefill, one decode step; nothing is fetched between */
            const int len = seat(&l, 0, texts[i]);
            const bg_seq_step p = {0, 0, len, PER_SEQ, l.tables[0], true};
            OK(bg_model_step(l.m, &(bg_batch){1, &p, false}, err));
            const bg_seq_step d = {0, len, 1, PER_SEQ, l.tables[0], true};
            if (i) {
                OK(bg_model_fetch(l.m, got, &n, err));
                cr_assert_eq(got[0].token, want[first].out[1].token);
            }
            OK(bg_model_step(l.m, &(bg_batch){1, &d, false}, err));
            OK(bg_model_fetch(l.m, got, &n, err));
            cr_assert_eq(n, 1);
            cr_assert_eq(got[0].token, want[texts[i]].out[0].token, "turn %d, text %d", turn, i);
        }
        OK(bg_model_fetch(l.m, got, &n, err));
        cr_assert_eq(got[0].token, want[second].out[1].token);
        cr_assert(bg_model_ready(l.m));
    }
    bg_error e = {0};
    int n;
    cr_assert_eq(bg_model_fetch(l.m, got, &n, &e), BG_INTERNAL, "nothing is under way");
    unload(&l);
}

/* More than the ring holds, at odd offsets and sizes, with the source overwritten at once. */
Test(step, uploads_arrive)
{
    NEEDS_GPU();
    loaded l;
    load(&l, "tests/golden/models/tiny-llama.q2_k.gguf", BG_COMPUTE_NATIVE, true);
    bg_cuda *c = (bg_cuda *)l.b;
    enum { ALL = 20 << 20 };
    unsigned char *host = malloc(ALL), *device = poisoned(ALL + GUARD);
    for (size_t at = 0, i = 0; at < ALL; i++) {
        static const size_t sizes[] = {4, 52, 1000, 4096, 70000, 524288, 1500000};
        size_t n = sizes[bg_mix64(i) % 7] + i % 3 * 4;
        if (n > ALL - at) n = ALL - at;
        for (size_t k = 0; k < n; k++)
            host[k] = (unsigned char)bg_mix64((at + k) / 8);
        OK(bg_cuda_upload(c, device + at, host, n, err));
        at += n;
    }
    free(host);
    CU(cudaStreamSynchronize(c->stream));
    unsigned char *got = from_device(device, ALL + GUARD);
    size_t wrong = 0;
    for (size_t i = 0; i < ALL; i++)
        wrong += got[i] != (unsigned char)bg_mix64(i / 8);
    cr_assert_eq(wrong, 0, "%zu bytes differ", wrong);
    cr_assert(all_poison(got + ALL, GUARD));
    free(got);
    cudaFree(device);
    unload(&l);
}

Test(step, ids_come_from_histories)
{
    NEEDS_GPU();
    enum { SLOTS = 5, STRIDE = 33, N = 1000, Q = 7 };
    int32_t history[SLOTS * STRIDE], slot[Q] = {3, -1, 0, 4, 1, 2, -1}, seq[N], pos[N];
    for (int i = 0; i < SLOTS * STRIDE; i++)
        history[i] = 1000 + i;
    for (int i = 0; i < N; i++) {
        seq[i] = (int32_t)(bg_mix64((uint64_t)i) % Q);
        pos[i] = (int32_t)(bg_mix64((uint64_t)i + 77) % STRIDE);
    }
    int32_t *h = to_device(history, sizeof history), *s = to_device(slot, sizeof slot);
    int32_t *q = to_device(seq, sizeof seq), *p = to_device(pos, sizeof pos);
    int32_t *out = poisoned((N + GUARD) * sizeof *out);
    CU(bgk_gather_ids(out, h, STRIDE, s, q, p, N, 0));
    int32_t *got = from_device(out, (N + GUARD) * sizeof *out);
    for (int i = 0; i < N; i++) {
        const int at = slot[seq[i]];
        cr_assert_eq(got[i], at < 0 ? 0 : 1000 + at * STRIDE + pos[i], "row %d", i);
    }
    cr_assert(all_poison(got + N, GUARD * sizeof *got));
    CU(bgk_gather_ids(out, h, STRIDE, s, q, p, 0, 0));
    cr_assert_eq(bgk_gather_ids(out, h, 0, s, q, p, N, 0), cudaErrorInvalidValue);
    free(got);
    cudaFree(h), cudaFree(s), cudaFree(q), cudaFree(p), cudaFree(out);
}
