/* tests/gpu/test_comm.c - sums and gathers between ranks: the kernels by themselves, and ranks as
 * processes that share one GPU (with more GPUs: one each), bit for bit against sums on the host.
 *
 * Ranks are forked before anything here has touched the GPU: a driver does not survive a fork. */
#include "gpu.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/cuda/cuda.h"
#include "base/clock.h"

/* ---- kernels --------------------------------------------------------------------------------- */

Test(comm, sum_in_rank_order)
{
    NEEDS_GPU();
    static const int64_t sizes[] = {1, 7, 64, 1024, 4099, 100004};
    static const int ranks[] = {1, 2, 3, 8, 64};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t k = 0; k < sizeof ranks / sizeof *ranks; k++) {
            const int64_t n = sizes[s], part = n + (s % 2 ? 5 : 0);
            const size_t all = (size_t)part * (size_t)ranks[k];
            float *host = random_f32(all, 3 + s, 1.0f);
            for (size_t i = 0; i < all; i += 3)
                host[i] *= 1e6f; /* so that the order shows */
            float *dev = to_device(host, all * sizeof *host);
            float *out = poisoned(((size_t)n + GUARD) * sizeof *out);
            CU(bgk_sum_ranks(out, dev, part, ranks[k], n, 0));
            float *got = from_device(out, ((size_t)n + GUARD) * sizeof *got);
            CU(bgk_sum_ranks(dev + (ranks[k] - 1) * part, dev, part, ranks[k], n,
                             0)); /* in place */
            float *same = from_device(dev + (ranks[k] - 1) * part, (size_t)n * sizeof *same);
            for (int64_t i = 0; i < n; i++) {
                float want = host[i];
                for (int r = 1; r < ranks[k]; r++)
                    want += host[r * part + i];
                cr_assert_eq(memcmp(&want, &got[i], 4), 0, "%d ranks, element %lld of %lld: %g, %g",
                             ranks[k], (long long)i, (long long)n, (double)got[i], (double)want);
                cr_assert_eq(memcmp(&want, &same[i], 4), 0);
            }
            cr_assert(all_poison(got + n, GUARD * sizeof *got));
            free(host);
            free(got);
            free(same);
            CU(cudaFree(dev));
            CU(cudaFree(out));
        }
    cr_assert_eq(bgk_sum_ranks(NULL, NULL, 1, 2, 2, 0), cudaErrorInvalidValue);
    cr_assert_eq(bgk_sum_ranks(NULL, NULL, 1, 65, 1, 0), cudaErrorInvalidValue);
}

Test(comm, shards_side_by_side)
{
    NEEDS_GPU();
    static const int64_t widths[4] = {333, 0, 1500, 1};
    enum { ROWS = 5, SHARD = 1500, COLS = 334 + 1500 };
    float *host = random_f32((size_t)4 * ROWS * SHARD, 1, 1.0f);
    float *dev = to_device(host, (size_t)4 * ROWS * SHARD * sizeof *host);
    float *out = poisoned((ROWS * COLS + GUARD) * sizeof *out);
    CU(bgk_place_shards(out, COLS, dev, SHARD, widths, 4, ROWS, 0));
    float *got = from_device(out, (ROWS * COLS + GUARD) * sizeof *got);
    for (int t = 0; t < ROWS; t++)
        for (int r = 0, at = 0; r < 4; r++)
            for (int j = 0; j < widths[r]; j++, at++)
                cr_assert_eq(got[t * COLS + at], host[(r * ROWS + t) * SHARD + j]);
    cr_assert(all_poison(got + ROWS * COLS, GUARD * sizeof *got));
    static const int64_t wide[] = {SHARD + 1};
    cr_assert_eq(bgk_place_shards(out, COLS, dev, SHARD, wide, 1, ROWS, 0), cudaErrorInvalidValue);
    free(host);
    free(got);
    CU(cudaFree(dev));
    CU(cudaFree(out));
}

/* ---- ranks ----------------------------------------------------------------------------------- */

enum { COMM_FLOATS = 1 << 12, NO_NCCL = 77 };

typedef struct world {
    int n, vocab, max_out;
    bool time, peers;
    void *memory;
} world;

#define MUST(ok, ...)                           \
    do {                                        \
        if (!(ok)) {                            \
            fprintf(stderr, "rank %d: ", rank); \
            fprintf(stderr, __VA_ARGS__);       \
            fprintf(stderr, "\n");              \
            _exit(1);                           \
        }                                       \
    } while (0)

static float value_of(int rank, uint64_t i)
{
    return gpu_random((uint64_t)rank + 11, i) * (i % 3 ? 1.0f : 1e6f);
}

static bool sums_are_right(const float *got, size_t n, int n_ranks)
{
    for (size_t i = 0; i < n; i++) {
        float want = value_of(0, i);
        for (int r = 1; r < n_ranks; r++)
            want += value_of(r, i);
        if (memcmp(&want, &got[i], sizeof want) != 0) {
            fprintf(stderr, "element %zu of %zu: %g, not %g\n", i, n, (double)got[i], (double)want);
            return false;
        }
    }
    return true;
}

/* Eager, then captured and run three times. */
static void check_sum(bg_cuda *c, int rank, int n_ranks, int rows, int cols, bool captured)
{
    const size_t n = (size_t)rows * (size_t)cols;
    bg_error err = {0};
    bg_act x;
    float *host = malloc(n * sizeof *host), *source = NULL;
    for (size_t i = 0; i < n; i++)
        host[i] = value_of(rank, i);
    MUST(bg_cuda_act_new(&c->base, &x, "x", rows, cols, &err) == BG_OK, "%s", err.text);
    MUST(cudaMalloc((void **)&source, n * sizeof *source) == cudaSuccess, "memory");
    MUST(cudaMemcpy(source, host, n * sizeof *host, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
    MUST(cudaDeviceSynchronize() == cudaSuccess, "copy"); /* it is not of the stream */
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    for (int run = 0; run < (captured ? 4 : 1); run++) {
        if (run == 1)
            MUST(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
                 "capture");
        if (run <= 1) {
            MUST(cudaMemcpyAsync(x.data, source, n * sizeof *host, cudaMemcpyDeviceToDevice,
                                 c->stream) == cudaSuccess,
                 "copy");
            MUST(bg_cuda_all_reduce_rows(c, &x, rows, &err) == BG_OK, "%s", err.text);
        }
        if (run == 1) {
            MUST(cudaStreamEndCapture(c->stream, &graph) == cudaSuccess, "end of the capture");
            MUST(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "graph");
        }
        if (run >= 1) {
            MUST(cudaMemsetAsync(x.data, 0xff, n * sizeof *host, c->stream) == cudaSuccess, "set");
            MUST(cudaGraphLaunch(exec, c->stream) == cudaSuccess, "launch");
        }
        MUST(cudaStreamSynchronize(c->stream) == cudaSuccess, "sum of [%d, %d]", rows, cols);
        MUST(cudaMemcpy(host, x.data, n * sizeof *host, cudaMemcpyDeviceToHost) == cudaSuccess,
             "copy");
        MUST(sums_are_right(host, n, n_ranks), "run %d of [%d, %d]", run, rows, cols);
    }
    free(host);
    cudaFree(source);
}

static void check_logits(bg_cuda *c, int rank, const world *w, int n_out)
{
    int64_t widths[BGK_MAX_RANKS], first = 0;
    const int64_t shard = bg_cuda_shard_cols(c);
    bg_error err = {0};
    for (int r = 0; r < w->n; r++) {
        const int64_t from = (int64_t)w->vocab * r / w->n;
        widths[r] = (int64_t)w->vocab * (r + 1) / w->n - from;
        if (r == rank) first = from;
    }
    float *host = malloc((size_t)n_out * (size_t)w->vocab * sizeof *host);
    for (int t = 0; t < n_out; t++) {
        for (int64_t j = 0; j < widths[rank]; j++)
            host[j] = gpu_random((uint64_t)t, (uint64_t)(first + j));
        MUST(cudaMemcpy(c->logits + t * shard, host, (size_t)widths[rank] * sizeof *host,
                        cudaMemcpyHostToDevice) == cudaSuccess,
             "copy");
    }
    MUST(cudaDeviceSynchronize() == cudaSuccess, "copy");
    MUST(bg_cuda_gather_logits(c, n_out, widths, &err) == BG_OK, "%s", err.text);
    MUST(cudaStreamSynchronize(c->stream) == cudaSuccess, "logits");
    MUST(cudaMemcpy(host, c->logits, (size_t)n_out * (size_t)w->vocab * sizeof *host,
                    cudaMemcpyDeviceToHost) == cudaSuccess,
         "copy");
    for (int t = 0; t < n_out; t++)
        for (int j = 0; j < w->vocab; j++)
            MUST(host[(size_t)t * (size_t)w->vocab + (size_t)j] ==
                     gpu_random((uint64_t)t, (uint64_t)j),
                 "logits[%d, %d] of %d rows", t, j, n_out);
    free(host);
}

static void time_sum(bg_cuda *c, int rank, int rows, int cols)
{
    enum { N = 50 };
    bg_act x;
    bg_error err = {0};
    MUST(bg_cuda_act_new(&c->base, &x, "x", rows, cols, &err) == BG_OK, "%s", err.text);
    MUST(cudaMemset(x.data, 0, (size_t)rows * (size_t)cols * 4) == cudaSuccess, "set");
    MUST(cudaDeviceSynchronize() == cudaSuccess, "set");
    MUST(bg_comm_barrier(c->config.comm, &err) == BG_OK, "%s", err.text);
    const int64_t from = bg_now_ns();
    for (int i = 0; i < N; i++)
        MUST(bg_cuda_all_reduce_rows(c, &x, rows, &err) == BG_OK, "%s", err.text);
    MUST(cudaStreamSynchronize(c->stream) == cudaSuccess, "sums");
    if (rank == 0)
        fprintf(stderr, "%d ranks, [%d, %d]: %.1f us a sum\n", bg_comm_size(c->config.comm), rows,
                cols, (double)(bg_now_ns() - from) * 1e-3 / N);
}

static void run_rank(const world *w, int rank)
{
    bg_error err = {0};
    bg_comm *comm;
    bg_backend *b;
    int n_gpus = 0;
    alarm(100); /* a collective that hangs must not hang the test */
    MUST(bg_comm_shm_join(&comm, w->memory, rank, w->n, COMM_FLOATS, &err) == BG_OK, "%s",
         err.text);
    MUST(cudaGetDeviceCount(&n_gpus) == cudaSuccess && n_gpus > 0, "no GPU");
    const bg_backend_config config = {.compute = BG_COMPUTE_F32,
                                      .n_threads = 1,
                                      .first_cpu = -1,
                                      .comm = comm,
                                      .max_tokens = 256,
                                      .max_seqs = 4,
                                      .max_out = w->max_out,
                                      .max_ctx = 64,
                                      .vocab_size = w->vocab};
    const int device = n_gpus >= w->n ? rank : 0;
    if (bg_cuda_backend_new(&b, &config, device, &err)) {
        fprintf(stderr, "rank %d: %s\n", rank, err.text);
        _exit(strstr(err.text, "libnccl.so.2 is not found") ? NO_NCCL : 1);
    }
    bg_cuda *c = (bg_cuda *)b;
    bool used = false;
    if (w->peers) {
        MUST(bg_cuda_comm_peers(c, &used, &err) == BG_OK, "%s", err.text);
        MUST(used, "peers are not used");
    }
    if (w->time) {
        time_sum(c, rank, 1, 4096);
        time_sum(c, rank, 16, 4096);
        time_sum(c, rank, 64, 4096);
    } else if (w->peers) {
        for (int i = 0; i < 5; i++) {
            check_sum(c, rank, w->n, 1, 4, true);
            check_sum(c, rank, w->n, 31, 4096, true);
            check_sum(c, rank, w->n, 7, 1020, true);
            check_sum(c, rank, w->n, 32, 4096, true); /* as many as there may be */
        }
    } else {
        check_sum(c, rank, w->n, 1, 100, true);
        check_sum(c, rank, w->n, 3, 577, true);
        check_sum(c, rank, w->n, 64, 1024, true);
        check_sum(c, rank, w->n, 301, 1025, true); /* long, with more than two ranks */
        if (w->n == 2) check_sum(c, rank, w->n, 2100, 1024, false); /* in pieces */
        check_logits(c, rank, w, 1);
        check_logits(c, rank, w, w->max_out);
    }
    MUST(bg_comm_barrier(comm, &err) == BG_OK, "%s", err.text);
    _exit(0);
}

static void run_world(world w)
{
    const size_t bytes = bg_comm_shm_bytes(w.n, COMM_FLOATS);
    pid_t pids[8];
    int failed = 0, no_nccl = 0;
    if (!bg_gpus_likely()) cr_skip_test("no GPU");
    if (gpu_small()) cr_skip_test("processes, which tools that watch one process do not follow");
    w.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert(w.memory != MAP_FAILED);
    for (int r = 0; r < w.n; r++) {
        pids[r] = fork();
        cr_assert(pids[r] >= 0);
        if (pids[r] == 0) run_rank(&w, r);
    }
    for (int i = 0; i < w.n; i++) {
        int status = 0;
        pid_t pid = wait(&status);
        const bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        no_nccl += WIFEXITED(status) && WEXITSTATUS(status) == NO_NCCL;
        failed += !good;
        for (int r = 0; r < w.n; r++) {
            if (pids[r] == pid) pids[r] = 0;
            if (!good && pids[r] > 0) kill(pids[r], SIGKILL); /* they would wait for it */
        }
    }
    munmap(w.memory, bytes);
    if (no_nccl) cr_skip_test("no NCCL");
    cr_assert_eq(failed, 0, "%d of %d ranks failed", failed, w.n);
}

Test(comm, two_ranks)
{
    run_world((world){.n = 2, .vocab = 1003, .max_out = 5});
}

/* Logits in two pieces, shares of different sizes. */
Test(comm, three_ranks)
{
    run_world((world){.n = 3, .vocab = 200003, .max_out = 100});
}

Test(comm, two_peers)
{
    run_world((world){.n = 2, .vocab = 1003, .max_out = 5, .peers = true});
}

Test(comm, four_peers)
{
    run_world((world){.n = 4, .vocab = 1003, .max_out = 5, .peers = true});
}

Test(comm, bench_peers)
{
    run_world((world){.n = 2, .vocab = 1003, .max_out = 5, .peers = true, .time = true});
}

Test(comm, bench_sums)
{
    run_world((world){.n = 2, .vocab = 1003, .max_out = 5, .time = true});
}

/* ---- what comm.c says about NCCL without its header ---------------------------------------------
 */

#if __has_include(<nccl.h>)
#include <nccl.h>

Test(comm, nccl_as_declared)
{
    cr_assert_eq(sizeof(ncclUniqueId), 128);
    cr_assert_eq(ncclFloat32, 7);
    cr_assert_eq(ncclSuccess, 0);
    cr_assert_eq(sizeof(ncclResult_t), sizeof(int));
    cr_assert_eq(sizeof(ncclDataType_t), sizeof(int));
}
#endif
