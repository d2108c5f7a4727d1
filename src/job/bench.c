#include "job/bench.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/device.h"
#include "base/clock.h"
#include "base/rng.h"
#include "comm/comm.h"

enum { PROBE_BYTES = 256 << 20, PROBE_RUNS = 3, MAX_THREADS = 256, COMM_FLOATS = 1 << 18 };

/* ---- the floor: how fast this machine reads memory now
 * ------------------------------------------- */

typedef struct probe {
    const uint64_t *data;
    size_t n;
    uint64_t sum;
} probe;

static void *read_all(void *p)
{
    probe *pr = p;
    uint64_t s[8] = {0};
    for (size_t i = 0; i + 8 <= pr->n; i += 8)
        for (int k = 0; k < 8; k++)
            s[k] += pr->data[i + (size_t)k];
    for (int k = 0; k < 8; k++)
        pr->sum += s[k];
    return NULL;
}

static double read_bandwidth(int threads)
{
    void *p = mmap(NULL, PROBE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return 0;
    memset(p, 1, PROBE_BYTES);
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    double best = 0;
    for (int run = 0; run < PROBE_RUNS; run++) {
        pthread_t t[MAX_THREADS];
        probe pr[MAX_THREADS];
        size_t share = PROBE_BYTES / 8 / (size_t)threads;
        int64_t t0 = bg_now_ns();
        int n = 0;
        for (; n < threads; n++) {
            pr[n] = (probe){.data = (const uint64_t *)p + share * (size_t)n, .n = share};
            if (pthread_create(&t[n], NULL, read_all, &pr[n])) break;
        }
        for (int i = 0; i < n; i++)
            pthread_join(t[i], NULL);
        double rate = (double)(share * 8 * (size_t)n) / ((double)(bg_now_ns() - t0) * 1e-9);
        if (rate > best) best = rate;
    }
    munmap(p, PROBE_BYTES);
    return best;
}

/* ---- one rank
 * ---------------------------------------------------------------------- */

typedef struct rank {
    bg_backend *b;
    bg_model *m;
    bool skip_prefill;
    int block_tokens, blocks_per_seq, max_step, vocab;
    int32_t *blocks; /* [batch, blocks_per_seq] */
    int32_t *tokens;
    bg_seq_step *seqs;
    bg_sampled *out;
    int n_under_way;
} rank;

static int32_t some_token(int i, int vocab)
{
    return (int32_t)(bg_mix64((uint64_t)i + 7) % (uint64_t)vocab);
}

/* Waits until no more than `left` steps are under way. */
static bg_status fetch_down_to(rank *r, int left, bg_error *err)
{
    bg_status st = BG_OK;
    for (int n; !st && r->n_under_way > left; r->n_under_way--)
        st = bg_model_fetch(r->m, r->out, &n, err);
    return st;
}

/* As in the engine: where steps can be under way, the next one starts before this one is done. */
static bg_status step(rank *r, int n_seqs, bg_error *err)
{
    const bg_batch batch = {.n_seqs = n_seqs, .seqs = r->seqs};
    bg_status st = bg_model_step(r->m, &batch, err);
    if (st) return st;
    r->n_under_way++;
    return fetch_down_to(r, r->b->ops->step && !r->b->profile ? BG_STEPS_AHEAD - 1 : 0, err);
}

static bg_status prefill(rank *r, int batch, int prompt, bg_error *err)
{
    bg_status st = BG_OK;
    int seq = 0, pos = 0;
    if (r->skip_prefill) {
        r->b->ops->sync(r->b); /* the seats are taken */
        return BG_OK;
    }
    while (!st && seq < batch) {
        int n_seqs = 0, room = r->max_step;
        while (seq < batch && room > 0) {
            int n = prompt - pos < room ? prompt - pos : room;
            r->seqs[n_seqs++] =
                (bg_seq_step){.slot = seq,
                              .pos0 = pos,
                              .n_tokens = n,
                              .n_blocks = r->blocks_per_seq,
                              .blocks = r->blocks + (size_t)seq * (size_t)r->blocks_per_seq,
                              .sample = pos + n == prompt};
            room -= n;
            pos += n;
            if (pos == prompt) {
                pos = 0;
                seq++;
            }
        }
        st = step(r, n_seqs, err);
    }
    return st ? st : fetch_down_to(r, 0, err);
}

static bg_status decode(rank *r, int batch, int prompt, int gen, bg_error *err)
{
    bg_status st = BG_OK;
    for (int g = 0; !st && g < gen; g++) {
        for (int s = 0; s < batch; s++)
            r->seqs[s] = (bg_seq_step){.slot = s,
                                       .pos0 = prompt + g,
                                       .n_tokens = 1,
                                       .n_blocks = r->blocks_per_seq,
                                       .blocks = r->blocks + (size_t)s * (size_t)r->blocks_per_seq,
                                       .sample = true};
        st = step(r, batch, err);
    }
    return st ? st : fetch_down_to(r, 0, err);
}

static bg_status seat_all(rank *r, int batch, int prompt, bg_error *err)
{
    const bg_sampling greedy = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};
    const int n = prompt + r->skip_prefill; /* else the prefill samples one */
    bg_status st = BG_OK;
    for (int s = 0; !st && s < batch; s++) {
        for (int i = 0; i < n; i++)
            r->tokens[i] = some_token(s * n + i, r->vocab);
        st = r->b->ops->slot_seat(r->b, s, &greedy, r->tokens, n, 0, err);
    }
    return st;
}

static void rank_close(rank *r)
{
    bg_model_free(r->m);
    bg_backend_free(r->b);
    free(r->blocks);
    free(r->tokens);
    free(r->seqs);
    free(r->out);
}

static bg_status tune(bg_bench *b, rank *r, bg_error *err)
{
    if (!r->b->ops->tune)
        return bg_fail(err, BG_ARG, "--tune: only a GPU has something to choose; see --device");
    bg_status st = r->b->ops->tune(r->b, &b->tune, err);
    if (st) bg_wrap(err, "--tune");
    return st;
}

static bg_status rank_open(rank *r, bg_bench *b, const bg_job *job, const bg_text_model *m,
                           const bg_memory_plan *p, bg_comm *comm, int max_batch, bg_error *err)
{
    int len = b->prompt + b->gen + 1;
    const int number = comm ? bg_comm_rank(comm) : 0;
    *r = (rank){.skip_prefill = b->skip_prefill,
                .block_tokens = p->block_tokens,
                .max_step = p->max_step_tokens,
                .vocab = m->desc.vocab_size};
    r->blocks_per_seq = (len + p->block_tokens - 1) / p->block_tokens;
    size_t n_blocks = (size_t)r->blocks_per_seq * (size_t)max_batch;
    r->blocks = calloc(n_blocks + 1, sizeof *r->blocks);
    r->tokens = calloc((size_t)len + 1, sizeof *r->tokens);
    r->seqs = calloc((size_t)max_batch + 1, sizeof *r->seqs);
    r->out = calloc((size_t)max_batch + 1, sizeof *r->out);
    if (!r->blocks || !r->tokens || !r->seqs || !r->out)
        return bg_fail(err, BG_NOMEM, "out of memory");
    for (size_t i = 0; i < n_blocks; i++)
        r->blocks[i] = (int32_t)i + 1;
    const bg_backend_config bc = {.compute = (bg_compute)job->compute,
                                  .n_threads = p->threads_per_rank,
                                  .first_cpu = job->pin_threads ? number * p->threads_per_rank : -1,
                                  .check = job->check_ops,
                                  .eager = job->eager,
                                  .dummy = job->load_format == BG_LOAD_DUMMY,
                                  .fast_math = job->fast_math,
                                  .comm = comm,
                                  .max_tokens = p->max_step_tokens,
                                  .max_seqs = max_batch,
                                  .max_out = max_batch,
                                  .max_ctx = len,
                                  .tune_table = job->tune_table,
                                  .vocab_size = m->desc.vocab_size,
                                  .isa = job->isa};
    const bg_model_config mc = {.rank = number,
                                .tp = comm ? bg_comm_size(comm) : 1,
                                .n_blocks = (int)n_blocks + 1,
                                .block_tokens = p->block_tokens,
                                .cache_type = p->cache_type,
                                .backend = &bc};
    bg_status st = bg_backend_new(&r->b, p->gpus[number] - 1, &bc, err);
    if (!st) st = bg_model_load(&r->m, m->gguf, &m->desc, r->b, &mc, err);
    if (!st && job->tune) st = tune(b, r, err);
    return st ? st : bg_model_prepare(r->m, err);
}

static void mean(bg_profile *p, int n)
{
    if (n < 1) return;
    for (int k = 0; k < BG_OP_KINDS; k++) {
        p->ns[k] /= n;
        p->calls[k] /= n;
        p->cost[k].bytes /= n;
        p->cost[k].flops /= n;
    }
}

/* Op by op, without graphs or steps ahead: where the time of row i goes. */
static bg_status profile_row(bg_bench *b, rank *r, int i, bool whole, bg_error *err)
{
    const int batch = b->rows[i].batch, gen = whole || b->gen < 16 ? b->gen : 16;
    bg_profile warm, prefilled;
    bg_status st = BG_OK;
    if (r->b->ops->op_begin) { /* kernels are brought to a GPU by their first launch */
        st = seat_all(r, batch, b->prompt, err);
        if (!st) st = prefill(r, batch, b->prompt, err);
        if (!st) st = decode(r, batch, b->prompt, gen < 2 ? gen : 2, err);
    }
    r->b->profile = true;
    bg_profile_take(r->b, &warm);
    if (!st) st = seat_all(r, batch, b->prompt, err);
    if (!st) st = prefill(r, batch, b->prompt, err);
    bg_profile_take(r->b, &prefilled);
    if (i == b->n_rows - 1) b->prefill = prefilled;
    if (!st) st = decode(r, batch, b->prompt, gen, err);
    bg_profile_take(r->b, &b->decode[i]);
    mean(&b->decode[i], gen);
    r->b->profile = false;
    return st;
}

/* Once with op times (also warms caches), once without. */
static bg_status measure(bg_bench *b, rank *r, int i, bool whole, bg_error *err)
{
    bg_bench_row *row = &b->rows[i];
    bg_status st = profile_row(b, r, i, whole, err);
    if (!st) st = seat_all(r, row->batch, b->prompt, err);
    int64_t t0 = bg_now_ns();
    if (!st) st = prefill(r, row->batch, b->prompt, err);
    int64_t t1 = bg_now_ns();
    if (!st) st = decode(r, row->batch, b->prompt, b->gen, err);
    row->prefill_s = (double)(t1 - t0) * 1e-9;
    row->decode_s = (double)(bg_now_ns() - t1) * 1e-9;
    return st;
}

static bg_status run_rank(bg_bench *b, const bg_job *job, const bg_text_model *m,
                          const bg_memory_plan *p, bg_comm *comm, int max_batch, bg_error *err)
{
    rank r;
    const int64_t begin = bg_now_ns();
    bg_status st = rank_open(&r, b, job, m, p, comm, max_batch, err);
    b->start_s = (double)(bg_now_ns() - begin) * 1e-9 - b->tune.seconds;
    if (!st) b->load = *bg_model_load_times(r.m);
    b->roofs.bytes = b->read_bandwidth;
    if (!st && r.b && r.b->ops->roofs) {
        r.b->ops->roofs(r.b, &b->roofs);
        b->read_bandwidth = b->roofs.bytes;
    }
    for (int i = 0; !st && r.b && i < b->n_rows; i++)
        if (!b->rows[i].too_big) st = measure(b, &r, i, job->profile || b->rank_of, err);
    if (r.b) b->memory = b->rank_memory = r.b->ops->memory(r.b);
    rank_close(&r);
    return st;
}

static bg_status run_here(bg_bench *b, const bg_job *job, const bg_text_model *m,
                          const bg_memory_plan *p, int max_batch, bg_error *err)
{
    bg_comm *standin = NULL;
    bg_status st = BG_OK;
    if (b->rank_of)
        st = bg_comm_standin_new(&standin, 0, b->rank_of, (int64_t)(b->all_reduce_us * 1e3), err);
    if (!st) st = run_rank(b, job, m, p, standin, max_batch, err);
    bg_comm_free(standin);
    return st;
}

/* ---- several ranks: processes that do the same, step by step
 * ------------------------------------------------------------------ */

typedef struct shared { /* between them and this process */
    bg_bench bench;     /* rank 0's */
    uint64_t memory[BG_MAX_RANKS];
    bg_error err[BG_MAX_RANKS];
    _Alignas(64) char comm[];
} shared;

static bg_status rank_process(shared *s, const bg_bench *plan, const bg_job *job,
                              const bg_text_model *m, const bg_memory_plan *p, int max_batch,
                              int number)
{
    bg_comm *comm = NULL;
    bg_bench b = *plan;
    bg_error err = {0};
    bg_status st = bg_comm_shm_join(&comm, s->comm, number, p->tp, COMM_FLOATS, &err);
    if (!st) st = run_rank(&b, job, m, p, comm, max_batch, &err);
    if (!st) st = bg_comm_barrier(comm, &err); /* nobody takes its memory from the others */
    s->memory[number] = b.memory;
    s->err[number] = err;
    if (number == 0) s->bench = b;
    return st;
}

/* The first failure ends the others, which would wait for that rank for ever. */
static bg_status wait_for_all(const shared *s, pid_t *pids, int n, bg_error *err)
{
    bg_status st = BG_OK;
    for (int left = n; left > 0;) {
        int status = 0;
        const pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0 && errno == EINTR) continue;
        if (pid < 0) return st ? st : bg_fail_os(err, "waiting for the ranks");
        for (int r = 0; r < n; r++) {
            if (pids[r] != pid) continue;
            pids[r] = 0;
            left--;
            if (st || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
            if (WIFEXITED(status) && s->err[r].status) {
                *err = s->err[r];
                st = err->status;
                bg_wrap(err, "rank %d", r);
            } else {
                st = bg_fail(err, BG_DEVICE, "rank %d ended with status %d", r, status);
            }
            for (int o = 0; o < n; o++)
                if (pids[o] > 0) kill(pids[o], SIGKILL);
        }
    }
    return st;
}

static bg_status run_ranks(bg_bench *b, const bg_job *job, const bg_text_model *m,
                           const bg_memory_plan *p, int max_batch, bg_error *err)
{
    const size_t bytes = sizeof(shared) + bg_comm_shm_bytes(p->tp, COMM_FLOATS);
    pid_t pids[BG_MAX_RANKS] = {0};
    bg_status st = BG_OK;
    int n = 0;
    shared *s = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) return bg_fail(err, BG_NOMEM, "out of memory");
    const pid_t parent = getpid();
    for (; !st && n < p->tp; n++) {
        pids[n] = fork();
        if (pids[n] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) _exit(1);
            _exit(rank_process(s, b, job, m, p, max_batch, n) ? 1 : 0);
        }
        if (pids[n] < 0) st = bg_fail_os(err, "cannot fork");
    }
    for (int r = 0; st && r < n; r++)
        if (pids[r] > 0) kill(pids[r], SIGKILL);
    const bg_status ended = wait_for_all(s, pids, st ? n - 1 : n, err);
    if (!st) st = ended;
    if (!st) {
        *b = s->bench;
        for (int r = 1; r < p->tp; r++) {
            b->memory += s->memory[r];
            if (s->memory[r] > b->rank_memory) b->rank_memory = s->memory[r];
        }
    }
    munmap(s, bytes);
    return st;
}

/* ---- the whole
 * ------------------------------------------------------------------------------------------- */

static bg_status parse_batches(bg_bench *b, const bg_job *job, int *max_batch, bg_error *err)
{
    static const int defaults[] = {1, 8, 32};
    *max_batch = 0;
    for (int i = 0; i < job->batch.n; i++) {
        for (const char *s = job->batch.v[i]; *s;) {
            char *end;
            long v = strtol(s, &end, 10);
            if (end == s || v < 1 || v > 4096 || (*end && *end != ','))
                return bg_fail(err, BG_ARG,
                               "--batch: \"%s\": write numbers of 1 to 4096, as 1,8,32",
                               job->batch.v[i]);
            if (b->n_rows == BG_BENCH_MAX)
                return bg_fail(err, BG_ARG, "--batch: %d sizes at most", BG_BENCH_MAX);
            b->rows[b->n_rows++].batch = (int)v;
            s = end + (*end == ',');
        }
    }
    if (!b->n_rows)
        for (int i = 0; i < 3; i++)
            b->rows[b->n_rows++].batch = defaults[i];
    for (int i = 0; i < b->n_rows; i++)
        if (b->rows[i].batch > *max_batch) *max_batch = b->rows[i].batch;
    return BG_OK;
}

static bg_status check_options(const bg_job *job, const bg_memory_plan *p, bg_error *err)
{
    if (job->tune_out && !job->tune) return bg_fail(err, BG_ARG, "--tune-out: only with --tune");
    if (job->tune && p->tp > 1 && !job->rank_of)
        return bg_fail(err, BG_ARG, "--tune: of one rank alone (--tp 1 or --rank-of)");
    if (job->rank_of && job->tp > 1)
        return bg_fail(err, BG_ARG, "--rank-of %lld: it is one rank, not --tp %lld as well",
                       (long long)job->rank_of, (long long)job->tp);
    if (job->skip_prefill && job->load_format != BG_LOAD_DUMMY)
        return bg_fail(err, BG_ARG,
                       "--skip-prefill: only with --load-format dummy: what real weights make of a "
                       "context that nobody computed need not be numbers");
    return BG_OK;
}

/* Rows for whose keys and values the GPU has no room are left out. */
static bg_status leave_out(bg_bench *b, const bg_memory_plan *p, int *max_batch, bg_error *err)
{
    const int64_t len = b->prompt + b->gen + 1;
    const int64_t per_seq = (len + p->block_tokens - 1) / p->block_tokens;
    *max_batch = 0;
    for (int i = 0; i < b->n_rows; i++) {
        bg_bench_row *r = &b->rows[i];
        r->too_big = p->gpu && per_seq * r->batch + 1 > p->n_blocks;
        if (!r->too_big && r->batch > *max_batch) *max_batch = r->batch;
    }
    if (*max_batch) return BG_OK;
    return bg_fail(err, BG_ARG,
                   "no --batch has room: %d sequences of %lld tokens fit beside the weights",
                   (int)((p->n_blocks - 1) / per_seq), (long long)len);
}

/* What a step of this rank reads once: as its profile says, which knows how many experts are
 * chosen; else all weights, and keys and values. */
static double bytes_of_step(const bg_bench *b, int i, const bg_memory_plan *p)
{
    const bg_bench_row *r = &b->rows[i];
    double bytes = 0;
    for (int k = 0; k < BG_OP_KINDS && bg_op_kind_name(k); k++) {
        const bg_op_group g = bg_op_kind_group(k);
        if (g == BG_OPS_GEMM || g == BG_OPS_ATTENTION) bytes += b->decode[i].cost[k].bytes;
    }
    const double kv = (double)p->kv_bytes_per_token * r->batch * (b->prompt + b->gen / 2.0);
    if (!p->gpu) bytes *= p->tp; /* ranks share what memory brings */
    return bytes > 0 ? bytes : (double)b->weight_bytes + kv;
}

static int sums_of_step(const bg_bench *b, int i)
{
    int64_t n = 0;
    for (int k = 0; k < BG_OP_KINDS && bg_op_kind_name(k); k++)
        if (bg_op_kind_group(k) == BG_OPS_COLLECTIVES) n += b->decode[i].calls[k];
    return (int)n;
}

static bg_status run_planned(bg_bench *b, const bg_job *job, const bg_text_model *m,
                             const bg_memory_plan *p, bg_error *err)
{
    int max_batch;
    bg_shard shard;
    bg_status st = check_options(job, p, err);
    if (!st) st = leave_out(b, p, &max_batch, err);
    if (!st && b->rank_of) st = bg_shard_plan(&shard, &m->desc, m->gguf, 0, b->rank_of, err);
    if (st) return st;
    b->tp = p->tp;
    b->gpu = p->gpu != 0;
    if (b->rank_of) b->weight_bytes = shard.weight_bytes;
    b->read_bandwidth = read_bandwidth(p->threads_per_rank * p->tp);
    st = p->tp == 1 ? run_here(b, job, m, p, max_batch, err)
                    : run_ranks(b, job, m, p, max_batch, err);
    for (int i = 0; !st && i < b->n_rows; i++) {
        bg_bench_row *r = &b->rows[i];
        if (r->too_big) continue;
        r->prefill_rate = b->skip_prefill ? 0 : r->batch * b->prompt / r->prefill_s;
        r->decode_rate = r->batch * b->gen / r->decode_s;
        double step_s = r->decode_s / b->gen;
        r->step_bytes = bytes_of_step(b, i, p);
        r->sums = sums_of_step(b, i);
        if (b->read_bandwidth > 0) r->floor_share = r->step_bytes / b->read_bandwidth / step_s;
        r->gmacs = (double)bg_macs_per_token(&m->desc) * r->batch / step_s * 1e-9;
    }
    return st;
}

bg_status bg_bench_run(bg_bench *b, const bg_job *job, const bg_text_model *m, bg_error *err)
{
    *b = (bg_bench){.prompt = (int)job->bench_prompt,
                    .gen = (int)job->bench_tokens,
                    .weight_bytes = m->desc.weight_bytes,
                    .rank_of = (int)job->rank_of,
                    .all_reduce_us = job->all_reduce_us,
                    .skip_prefill = job->skip_prefill};
    enum { SKIPPED_TOKENS = 256 }; /* of a step, where there are no prompts */
    int max_batch;
    bg_status st = parse_batches(b, job, &max_batch, err);
    bg_memory_plan p = {0};
    bg_job sized = *job; /* shallow: only numbers are changed */
    sized.max_num_seqs = max_batch > job->max_num_seqs ? max_batch : job->max_num_seqs;
    sized.max_model_len = b->prompt + b->gen + 2;
    if (b->skip_prefill && !job->max_num_batched_tokens)
        sized.max_num_batched_tokens = SKIPPED_TOKENS;
    if (!st) st = bg_plan_memory(&p, &sized, m, err);
    return st ? st : run_planned(b, job, m, &p, err);
}

void bg_bench_release(bg_bench *b)
{
    free(b->tune.rows);
    b->tune = (bg_tune){0};
}
