/* Steps and slots: what begin_step accepts and refuses, the order of ops, logits alone and over
 * ranks. */
#include "unit/backend/cpu_fixture.h"

#include <pthread.h>

#include "comm/comm.h"
#include "gguf/gguf.h"

enum { BT = 16, BLOCKS = 12 };

static bg_backend *with_cache(void)
{
    bg_backend_config config = config_of(NULL, 1);
    config.max_tokens = 40;
    config.max_seqs = 3;
    config.max_out = 2;
    config.max_ctx = 64;
    bg_backend *b = backend_of(&config);
    const bg_cache_spec spec = {.n_layers = 1,
                                .n_blocks = BLOCKS,
                                .block_tokens = BT,
                                .n_kv_heads = 1,
                                .k_dim = 16,
                                .v_dim = 16,
                                .type = BG_CACHE_F16};
    OK(b->ops->cache_new(b, &spec, err));
    return b;
}

static bg_status begin(bg_backend *b, int n, const bg_seq_step *steps, bool all, bg_error *err)
{
    const bg_batch batch = {n, steps, all};
    return b->ops->begin_step(b, &batch, err);
}

Test(step, counts_rows_and_outputs)
{
    bg_backend *b = with_cache();
    bg_cpu *c = (bg_cpu *)b;
    seat(b, 0, 20);
    seat(b, 2, 33);
    int32_t blocks[3] = {5, 6, 7};
    bg_seq_step s[] = {{2, 30, 3, 3, blocks, true}, {0, 4, 10, 1, blocks, false}};
    OK(begin(b, 2, s, false, err));
    cr_expect_eq(b->ops->n_rows(b), 13);
    cr_expect_eq(b->ops->n_out(b), 1);
    cr_expect_eq(c->s.out_row[0], 2);
    blocks[2] = 99; /* the batch was copied */
    cr_expect_eq(c->s.seqs[0].blocks[2], 7);
    cr_expect_eq(c->s.row_pos[2], 32);
    cr_expect_eq(c->s.row_pos[3], 4);
    cr_expect_eq(c->s.row_seq[3], 1);
    s[1].n_tokens = 1;
    OK(begin(b, 1, s + 1, true, err));
    cr_expect_eq(b->ops->n_out(b), 1, "all_logits");
    OK(begin(b, 0, s, false, err));
    cr_expect_eq(b->ops->n_rows(b), 0);
    bg_backend_free(b);
}

Test(step, nonsense_is_refused)
{
    bg_backend *b = with_cache();
    seat(b, 0, 64);
    seat(b, 1, 20);
    const int32_t blocks[] = {1, 2, 3, 4}, high[] = {1, BLOCKS}, low[] = {-1, 1};
    const bg_seq_step good = {1, 0, 20, 2, blocks, true};
    bg_seq_step s[4] = {good, good, good, good};
    OK(begin(b, 1, s, false, err));

#define REFUSES(words, n, all) FAILS(BG_INTERNAL, words, begin(b, n, s, all, err))
    REFUSES("4 sequences", 4, false);
    REFUSES("-1 sequences", -1, false);
    REFUSES("twice", 2, false);
    s[0].slot = 3;
    REFUSES("slot 3", 1, false);
    s[0].slot = -1;
    REFUSES("slot -1", 1, false);
    s[0].slot = 2;
    REFUSES("empty", 1, false);
    s[0] = good;
    s[0].n_tokens = 0;
    REFUSES("0 positions", 1, false);
    s[0].n_tokens = 21;
    REFUSES("the history has 20", 1, false);
    s[0].n_tokens = 19;
    REFUSES("samples after position 18", 1, false);
    s[0] = good;
    s[0].pos0 = -1;
    REFUSES("from -1", 1, false);
    s[0].pos0 = INT32_MAX;
    REFUSES("from 2147483647", 1, false);
    s[0] = good;
    s[0].n_blocks = 1;
    REFUSES("1 blocks", 1, false);
    s[0].n_blocks = 2;
    s[0].blocks = high;
    REFUSES("block 12", 1, false);
    s[0].blocks = low;
    REFUSES("block -1", 1, false);
    s[0] = (bg_seq_step){0, 0, 41, 4, blocks, false};
    REFUSES("more than 40 tokens", 1, false);
    s[0] = (bg_seq_step){0, 0, 30, 4, blocks, false};
    REFUSES("more than 40 tokens", 2, false);
    s[0] = good;
    REFUSES("more than 2 rows of logits", 1, true);
    cr_expect_eq(b->ops->n_rows(b), 0, "a refused step has no rows");
    s[0] = good;
    OK(begin(b, 1, s, false, err)); /* and does not spoil the next one */
    cr_expect_eq(b->ops->n_rows(b), 20);
#undef REFUSES
    bg_backend_free(b);
}

Test(step, seats_are_checked)
{
    bg_backend *b = with_cache();
    int32_t tokens[66] = {0};
    const int32_t stop = 100, far = -1;
    const bg_logit_bias bias = {100, 1};
    bg_sampling s = greedy;
#define REFUSES(words, slot, n, out) \
    FAILS(BG_INTERNAL, words, b->ops->slot_seat(b, slot, &s, tokens, n, out, err))
    REFUSES("slot 3", 3, 1, 0);
    REFUSES("0 tokens", 0, 0, 0);
    REFUSES("66 tokens", 0, 66, 0);
    REFUSES("2 of them generated", 0, 1, 2);
    tokens[3] = 100;
    REFUSES("token 100 at 3", 0, 4, 0);
    tokens[3] = -1;
    REFUSES("token -1", 0, 4, 0);
    tokens[3] = 0;
    s.n_bias = 1;
    s.bias = &bias;
    REFUSES("bias for token 100", 0, 4, 0);
    s = greedy;
    s.n_stop_ids = 1;
    s.stop_ids = &stop;
    REFUSES("stop token 100", 0, 4, 0);
    s.stop_ids = &far;
    REFUSES("stop token -1", 0, 4, 0);
    s = greedy;
    s.temperature = NAN;
    REFUSES("temperature", 0, 4, 0);
    s = greedy;
    s.n_logprobs = 21;
    REFUSES("21 logprobs", 0, 4, 0);
    s = greedy;
    OK(b->ops->slot_seat(b, 0, &s, tokens, 65, 1,
                         err)); /* one past the last position may be sampled */
#undef REFUSES
    bg_backend_free(b);
}

Test(step, settings_are_copied)
{
    bg_backend *b = with_cache();
    bg_cpu *c = (bg_cpu *)b;
    const int32_t tokens[] = {1, 2};
    bg_logit_bias bias[2] = {{4, 50}, {5, 1}};
    int32_t stop[1] = {9};
    bg_sampling s = greedy;
    s.n_bias = 2;
    s.bias = bias;
    s.n_stop_ids = 1;
    s.stop_ids = stop;
    for (int i = 0; i < 3; i++) /* a seat taken again lets go of the last settings */
        OK(b->ops->slot_seat(b, 0, &s, tokens, 2, 0, err));
    memset(bias, 0xff, sizeof bias);
    stop[0] = 77;
    cr_expect_eq(c->s.slots[0].sampling.bias[0].token, 4);
    cr_expect_eq(c->s.slots[0].sampling.stop_ids[0], 9);
    const int32_t blocks[] = {1};
    const bg_seq_step step = {0, 0, 2, 1, blocks, true};
    OK(begin(b, 1, &step, false, err));
    memset(c->logits, 0, 100 * sizeof(float));
    c->has_logits = true;
    bg_sampled got[2];
    int n;
    OK(bg_op_sample(b, err));
    OK(bg_op_fetch(b, got, &n, err));
    cr_assert_eq(n, 1);
    cr_expect_eq(got[0].token, 4);
    bg_backend_free(b);
}

Test(step, ops_out_of_order_are_refused)
{
    bg_backend *b = with_cache();
    bg_cpu *c = (bg_cpu *)b;
    seat(b, 0, 2);
    const int32_t blocks[] = {1};
    const bg_seq_step step = {0, 0, 2, 1, blocks, true};
    float logits[200];
    bg_sampled got[2];
    int n;
    OK(begin(b, 1, &step, false, err));
    FAILS(BG_INTERNAL, "before the step's logits", bg_op_sample(b, err));
    FAILS(BG_INTERNAL, "nothing was sampled", bg_op_fetch(b, got, &n, err));
    FAILS(BG_INTERNAL, "before the step's logits", bg_op_fetch_logits(b, logits, err));
    c->has_logits = true;
    OK(bg_op_sample(b, err));
    FAILS(BG_INTERNAL, "twice", bg_op_sample(b, err));
    OK(begin(b, 1, &(bg_seq_step){0, 2, 1, 1, blocks, false}, true, err));
    c->has_logits = true;
    FAILS(BG_INTERNAL, "all rows", bg_op_sample(b, err));
    /* a step in the middle of a prompt samples nothing */
    OK(begin(b, 1, &(bg_seq_step){0, 0, 1, 1, blocks, false}, false, err));
    OK(bg_op_fetch(b, got, &n, err));
    cr_expect_eq(n, 0);
    bg_backend_free(b);
}

Test(step, a_backend_asked_for_the_impossible)
{
    bg_backend *b;
    bg_backend_config config = config_of("mmx", 1);
    FAILS(BG_ARG, "'mmx'", bg_cpu_backend_new(&b, &config, err));
    cr_expect_null(b);
    config = config_of(NULL, 0);
    FAILS(BG_ARG, "0 threads", bg_cpu_backend_new(&b, &config, err));
    config = config_of(NULL, 1);
    b = backend_of(&config);
    const uint64_t empty = b->ops->memory(b);
    bg_act a;
    OK(b->ops->act_new(b, &a, "a", 10, 100, err));
    cr_expect_eq(b->ops->memory(b) - empty, 4000);
    cr_expect_eq((uintptr_t)a.data % 64, 0);
    /* far more than the machine has: blocks that nobody touches cost nothing */
    const bg_cache_spec spec = {.n_layers = 4,
                                .n_blocks = 1 << 20,
                                .block_tokens = 16,
                                .n_kv_heads = 4,
                                .k_dim = 64,
                                .v_dim = 64,
                                .type = BG_CACHE_F16};
    OK(b->ops->cache_new(b, &spec, err));
    cr_expect(b->ops->memory(b) > (uint64_t)60 << 30);
    FAILS(BG_INTERNAL, "one KV cache", b->ops->cache_new(b, &spec, err));
    const bg_tensor t = {
        .cname = (char[]){"token_embd.weight"}, .type = BG_F32, .n_dims = 2, .ne = {8, 99, 1, 1}};
    bg_embedding *e;
    FAILS(BG_ARG, "99 rows", b->ops->embedding_new(b, &e, &t, err));
    bg_backend_free(b);
    bg_backend_free(NULL);
}

/* ---- logits over ranks ----------------------------------------------------------------------- */

enum { VOCAB = 333, D = 64, OUT = 19, MAX_RANKS = 3 };

typedef struct rank_job {
    int rank, n_ranks;
    void *memory;
    const float *head, *x;
    const int64_t *rows;
    float *logits; /* [OUT, VOCAB] */
    float sum[OUT * D];
} rank_job;

static void *rank_main(void *arg)
{
    rank_job *j = arg;
    bg_comm *comm = NULL;
    if (j->n_ranks > 1) OK(bg_comm_shm_join(&comm, j->memory, j->rank, j->n_ranks, 4096, err));
    bg_backend_config config = config_of("plain", 1);
    config.vocab_size = VOCAB;
    config.comm = comm;
    config.check = true;
    bg_backend *b = backend_of(&config);
    int64_t first = 0;
    for (int r = 0; r < j->rank; r++)
        first += j->rows[r];
    bg_linear_spec spec = {.name = "output", .n_parts = 1};
    spec.parts[0] = (bg_linear_part){.name = "output.weight",
                                     .type = BG_F32,
                                     .data = j->head,
                                     .k_total = D,
                                     .n_total = VOCAB,
                                     .row0 = first,
                                     .n_rows = j->rows[j->rank],
                                     .n_cols = D};
    bg_linear *head;
    OK(b->ops->linear_new(b, &head, &spec, err));
    bg_act x;
    OK(b->ops->act_new(b, &x, "x", OUT, D, err));
    memcpy(x.data, j->x, OUT * D * sizeof(float));
    const bg_seq_step step = {.n_tokens = OUT};
    seat(b, 0, OUT);
    OK(begin(b, 1, &step, true, err));
    OK(bg_op_logits(b, head, &x, j->n_ranks > 1 ? j->rows : NULL, 7, err));
    OK(bg_op_fetch_logits(b, j->logits, err));
    for (int i = 0; i < OUT * D; i++)
        ((float *)x.data)[i] *= (float)(j->rank + 1);
    OK(bg_op_all_reduce(b, &x, err));
    memcpy(j->sum, x.data, sizeof j->sum);
    const int64_t wrong[MAX_RANKS] = {1, 1, 1};
    FAILS(BG_INTERNAL, "op logits: rank", bg_op_logits(b, head, &x, wrong, 0, err));
    bg_backend_free(b);
    if (comm) bg_comm_free(comm);
    return NULL;
}

Test(step, logits_are_the_same_on_any_number_of_ranks)
{
    static const int64_t shares[][MAX_RANKS] = {{VOCAB}, {100, 233}, {0, VOCAB}, {111, 1, 221}};
    static const int n_ranks[] = {1, 2, 2, 3};
    float *head = malloc(VOCAB * D * sizeof *head), *x = malloc(OUT * D * sizeof *x);
    float *one = malloc(OUT * VOCAB * sizeof *one);
    fill_normal(head, VOCAB * D, 1);
    fill_normal(x, OUT * D, 2);
    for (int t = 0; t < 4; t++) {
        rank_job jobs[MAX_RANKS];
        pthread_t threads[MAX_RANKS];
        const size_t bytes = (bg_comm_shm_bytes(n_ranks[t], 4096) + 63) / 64 * 64;
        void *memory = aligned_alloc(64, bytes);
        memset(memory, 0, bytes);
        for (int r = 0; r < n_ranks[t]; r++) {
            float *logits = malloc(OUT * VOCAB * sizeof *logits);
            for (int i = 0; i < OUT * VOCAB; i++)
                logits[i] = NAN;
            jobs[r] = (rank_job){r, n_ranks[t], memory, head, x, shares[t], logits, {0}};
            cr_assert_eq(pthread_create(&threads[r], NULL, rank_main, &jobs[r]), 0);
        }
        for (int r = 0; r < n_ranks[t]; r++)
            pthread_join(threads[r], NULL);
        if (t == 0) {
            memcpy(one, jobs[0].logits, OUT * VOCAB * sizeof *one);
            for (int i = 0; i < OUT; i++)
                for (int v = 0; v < VOCAB; v++) {
                    double want = 0, size = 0;
                    for (int k = 0; k < D; k++) {
                        want += (double)x[i * D + k] * (double)head[v * D + k];
                        size += fabs((double)x[i * D + k] * (double)head[v * D + k]);
                    }
                    want = 7 * tanh(want / 7);
                    cr_assert(fabs((double)one[i * VOCAB + v] - want) <= 1e-6 * size);
                }
        }
        for (int r = 0; r < n_ranks[t]; r++) {
            cr_expect(same_bits(jobs[r].logits, one, OUT * VOCAB), "share %d, rank %d", t, r);
            for (int i = 0; i < OUT * D; i++) {
                float sum = x[i];
                for (int k = 1; k < n_ranks[t]; k++)
                    sum += x[i] * (float)(k + 1);
                cr_assert_eq(jobs[r].sum[i], sum);
            }
            free(jobs[r].logits);
        }
        free(memory);
    }
    free(head);
    free(x);
    free(one);
}
