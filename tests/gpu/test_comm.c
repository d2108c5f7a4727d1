/* tests/gpu/test_comm.c - sums and gathers between ranks: the kernels by themselves, and ranks as
 * processes that share one GPU (with more GPUs: one each), bit for bit against sums on the host.
 * bench_sums, with two GPUs or more: how long sums take, by size, way and number of ranks.
 *
 * Ranks are forked before anything here has touched the GPU: a driver does not survive a fork. */
#include "gpu.h"

#include <math.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/cuda/cuda.h"

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
    CU(bgk_place_shards(out, COLS, dev, SHARD, widths, 4, -1, ROWS, 0));
    float *got = from_device(out, (ROWS * COLS + GUARD) * sizeof *got);
    for (int t = 0; t < ROWS; t++)
        for (int r = 0, at = 0; r < 4; r++)
            for (int j = 0; j < widths[r]; j++, at++)
                cr_assert_eq(got[t * COLS + at], host[(r * ROWS + t) * SHARD + j]);
    cr_assert(all_poison(got + ROWS * COLS, GUARD * sizeof *got));
    free(got);
    CU(bgk_place_shards(out, COLS, dev, SHARD, widths, 4, 0, ROWS, 0)); /* rank 0's for all */
    got = from_device(out, (ROWS * COLS + GUARD) * sizeof *got);
    for (int t = 0; t < ROWS; t++)
        for (int r = 0, at = 0; r < 4; r++)
            for (int j = 0; j < widths[r]; j++, at++)
                cr_assert_eq(got[t * COLS + at], host[t * SHARD + (j < widths[0] ? j : 332)]);
    static const int64_t wide[] = {SHARD + 1};
    cr_assert_eq(bgk_place_shards(out, COLS, dev, SHARD, wide, 1, -1, ROWS, 0),
                 cudaErrorInvalidValue);
    free(host);
    free(got);
    CU(cudaFree(dev));
    CU(cudaFree(out));
}

/* ---- a rank alone ---------------------------------------------------------------------------- */

typedef struct row_norm {
    bgk_out out;
    float *x, *y, *w;
    int rows, cols;
    int64_t ns; /* < 0: the norm without a stand-in */
} row_norm;

static void run_norm(void *ctx, cudaStream_t stream)
{
    const row_norm *n = ctx;
    if (n->ns < 0)
        CU(bgk_rms_norm(&n->out, n->x, n->cols, n->y, n->cols, n->w, 1e-5f, n->rows, n->cols,
                        stream));
    else
        CU(bgk_stand_in_norm(&n->out, n->x, n->cols, n->y, n->cols, n->w, 1e-5f, n->rows, n->cols,
                             8, n->ns, stream));
}

static row_norm norm_new(int rows, int cols)
{
    const size_t n = (size_t)rows * (size_t)cols, stride = ((size_t)rows + 255) / 256 * 256;
    const size_t out = (size_t)(cols + 63) / 64 * stride * 128;
    float *x = random_f32(n, 1, 1e3f), *y = random_f32(n, 2, 1),
          *w = random_f32((size_t)cols, 3, 1);
    const row_norm r = {{poisoned(out), BGK_TILES, (int64_t)stride},
                        to_device(x, n * 4),
                        to_device(y, n * 4),
                        to_device(w, (size_t)cols * 4),
                        rows,
                        cols,
                        -1};
    free(x);
    free(y);
    free(w);
    return r;
}

static void norm_free(row_norm *n)
{
    CU(cudaFree(n->out.data));
    CU(cudaFree(n->x));
    CU(cudaFree(n->y));
    CU(cudaFree(n->w));
}

Test(comm, stand_in_norm)
{
    NEEDS_GPU();
    static const int shapes[][2] = {{1, 6144}, {5, 6144}, {4, 4096}, {3, 3072},
                                    {8, 2880}, {2, 2044}, {8, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int rows = shapes[i][0], cols = shapes[i][1];
        const size_t n = (size_t)rows * (size_t)cols;
        if (!bgk_sum_peers_norm_fits(rows, cols)) cr_skip_test("not on this GPU");
        row_norm r[2] = {norm_new(rows, cols), norm_new(rows, cols)};
        r[1].ns = i % 2 ? 20000 : 0;
        for (int run = 0; run < 3; run++)
            for (int k = 0; k < 2; k++)
                run_norm(&r[k], 0);
        const size_t out = (size_t)((cols + 63) / 64 * r[0].out.stride) * 128;
        float *x[2], *y[2];
        char *o[2];
        for (int k = 0; k < 2; k++) {
            x[k] = from_device(r[k].x, n * 4);
            y[k] = from_device(r[k].y, n * 4);
            o[k] = from_device(r[k].out.data, out);
        }
        cr_assert_eq(memcmp(x[0], x[1], n * 4), 0, "residual of [%d, %d]", rows, cols);
        cr_assert_eq(memcmp(y[0], y[1], n * 4), 0, "y of [%d, %d]", rows, cols);
        cr_assert_eq(memcmp(o[0], o[1], out), 0, "norm of [%d, %d]", rows, cols);
        for (int k = 0; k < 2; k++) {
            free(x[k]);
            free(y[k]);
            free(o[k]);
            norm_free(&r[k]);
        }
    }
}

/* A norm with its residual; the same behind a stand-in of no time, and of 10 us. */
Test(comm, bench_norm)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    static const int rows[] = {1, 2, 4, 5, 8, 32, 128};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        row_norm r = norm_new(rows[i], 6144);
        double us[3] = {0};
        for (int k = 0; k < 3; k++) {
            r.ns = k == 0 ? -1 : k == 1 ? 0 : 10000;
            if (k && !bgk_sum_peers_norm_fits(r.rows, r.cols)) continue;
            run_norm(&r, 0);
            CU(cudaDeviceSynchronize());
            us[k] = gpu_time_us(run_norm, &r, 64);
        }
        fprintf(stderr,
                "norm of %3d x 6144: %6.2f us; with the sum: of 0 us %6.2f, of 10 us %6.2f\n",
                rows[i], us[0], us[1], us[2]);
        norm_free(&r);
    }
}

/* ---- ranks ----------------------------------------------------------------------------------- */

enum { COMM_FLOATS = 1 << 12, NO_NCCL = 77, NO_PEERS = 78, MAX_TEST_RANKS = 8 };

typedef enum aim { SUMS_AND_LOGITS, PEERS, REPLAYS, TIMES } aim;

typedef struct world {
    int n, vocab, max_out;
    aim aim;
    bool own_gpus; /* one for each rank; skipped where there are too few */
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

/* Sums of other sizes add other values: what one has left behind never passes for another's. */
static float value_of(int rank, uint64_t i)
{
    return gpu_random((uint64_t)rank + 11, i) * (i % 3 ? 1.0f : 1e6f);
}

static float sum_of_values(int n_ranks, uint64_t i)
{
    float sum = value_of(0, i);
    for (int r = 1; r < n_ranks; r++)
        sum += value_of(r, i);
    return sum;
}

static bool sums_are_right(const float *got, size_t n, int n_ranks)
{
    for (size_t i = 0; i < n; i++) {
        const float want = sum_of_values(n_ranks, i + n * 7919);
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
        host[i] = value_of(rank, i + n * 7919);
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

static const struct {
    const char *name;
    bg_cuda_sums sums;
} ways[] = {{"NCCL", BG_CUDA_SUMS_LIBRARY}, {"in order", BG_CUDA_SUMS_NCCL},
            {"lines", BG_CUDA_SUMS_LINES},  {"once", BG_CUDA_SUMS_ONCE},
            {"twice", BG_CUDA_SUMS_TWICE},  {"automatic", BG_CUDA_SUMS_AUTO}};
enum { N_WAYS = sizeof ways / sizeof *ways };

/* Graphs of sums by peers, with eager ones between, again and again and without waiting: what every
 * single one yields is kept and looked at in the end. Each brings new values, in turn. */
static void check_replays(bg_cuda *c, int rank, int n_ranks, int cols, int rows, int n_runs)
{
    enum { SOURCES = 3 };
    const size_t n = (size_t)rows * (size_t)cols, bytes = n * sizeof(float);
    bg_error err = {0};
    bg_act x;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec[2] = {NULL, NULL};
    float *source = NULL, *log = NULL, *host = malloc((size_t)n_runs * bytes);
    MUST(bg_cuda_act_new(&c->base, &x, "x", rows, cols, &err) == BG_OK, "%s", err.text);
    MUST(cudaMalloc((void **)&source, SOURCES * bytes) == cudaSuccess, "memory");
    MUST(cudaMalloc((void **)&log, (size_t)n_runs * bytes) == cudaSuccess, "memory");
    for (int s = 0; s < SOURCES; s++)
        for (size_t i = 0; i < n; i++)
            host[(size_t)s * n + i] = value_of(rank, i + (size_t)s * 7919);
    MUST(cudaMemcpy(source, host, SOURCES * bytes, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
    MUST(cudaDeviceSynchronize() == cudaSuccess, "copy");
    for (int g = 0; g < 2; g++) { /* two, in turn */
        MUST(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
             "capture");
        MUST(bg_cuda_all_reduce_rows(c, &x, rows, &err) == BG_OK, "%s", err.text);
        MUST(cudaStreamEndCapture(c->stream, &graph) == cudaSuccess, "end of the capture");
        MUST(cudaGraphInstantiate(&exec[g], graph, 0) == cudaSuccess, "graph");
        MUST(cudaGraphDestroy(graph) == cudaSuccess, "graph");
    }
    for (int i = 0; i < n_runs; i++) {
        MUST(cudaMemcpyAsync(x.data, source + (size_t)(i % SOURCES) * n, bytes,
                             cudaMemcpyDeviceToDevice, c->stream) == cudaSuccess,
             "copy");
        if (i % 7 == 3)
            MUST(bg_cuda_all_reduce_rows(c, &x, rows, &err) == BG_OK, "%s", err.text);
        else
            MUST(cudaGraphLaunch(exec[i % 2], c->stream) == cudaSuccess, "launch");
        MUST(cudaMemcpyAsync(log + (size_t)i * n, x.data, bytes, cudaMemcpyDeviceToDevice,
                             c->stream) == cudaSuccess,
             "copy");
    }
    MUST(cudaStreamSynchronize(c->stream) == cudaSuccess, "%d runs of [%d, %d]", n_runs, rows,
         cols);
    float *want = malloc(SOURCES * bytes);
    for (int s = 0; s < SOURCES; s++)
        for (size_t i = 0; i < n; i++)
            want[(size_t)s * n + i] = sum_of_values(n_ranks, i + (size_t)s * 7919);
    MUST(cudaMemcpy(host, log, (size_t)n_runs * bytes, cudaMemcpyDeviceToHost) == cudaSuccess,
         "copy");
    for (int i = 0; i < n_runs; i++)
        MUST(memcmp(host + (size_t)i * n, want + (size_t)(i % SOURCES) * n, bytes) == 0,
             "run %d of %d of [%d, %d]", i, n_runs, rows, cols);
    for (int g = 0; g < 2; g++)
        cudaGraphExecDestroy(exec[g]);
    free(host);
    free(want);
    cudaFree(source);
    cudaFree(log);
}

static float residual_of(uint64_t i)
{
    return gpu_random(99, i) * 1e5f; /* everyone's */
}

/* The host's residual; says what a wrong one looks like. */
static bool residuals_are_right(const float *got, size_t n, int cols, int n_ranks)
{
    size_t wrong = 0, first = 0, only_x = 0, only_sum = 0;
    for (size_t i = 0; i < n; i++) {
        const float x = residual_of(i), sum = sum_of_values(n_ranks, i + n * 104729);
        const float want = x + sum;
        if (memcmp(&want, &got[i], sizeof want) == 0) continue;
        if (!wrong++) first = i;
        only_x += got[i] == x;
        only_sum += got[i] == sum;
    }
    if (wrong)
        fprintf(stderr,
                "%zu of %zu are wrong (%zu are x, %zu the sum), from [%zu, %zu] on: %g, not %g + "
                "%g\n",
                wrong, n, only_x, only_sum, first / (size_t)cols, first % (size_t)cols,
                (double)got[first], (double)residual_of(first),
                (double)sum_of_values(n_ranks, first + n * 104729));
    return !wrong;
}

static bool tiles_are_same(const uint16_t *want, const uint16_t *got, size_t n)
{
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i] && !wrong++) first = i;
    if (wrong)
        fprintf(stderr, "%zu of %zu halves differ, from %zu on: %04x, not %04x\n", wrong, n, first,
                got[first], want[first]);
    return !wrong;
}

/* Sum, residual and norm in one kernel: the bits of the three by themselves, eager and captured,
 * many times, and where a mix of both goes on. Run -1 is the three. */
static void check_norm(bg_cuda *c, int rank, int rows, int cols, int n_runs)
{
    const size_t n = (size_t)rows * (size_t)cols, bytes = n * sizeof(float);
    const bool tiled = c->tiled;
    bg_error err = {0};
    bg_act x[2], y, out[2];
    bg_vec w;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    float *source = NULL, *host = malloc(2 * bytes), *got[2] = {malloc(bytes), malloc(bytes)};
    if (!bgk_sum_peers_norm_fits(rows, cols)) return; /* not this GPU */
    for (size_t i = 0; i < n; i++) {
        host[i] = value_of(rank, i + n * 104729);
        host[n + i] = residual_of(i);
    }
    MUST(cudaMalloc((void **)&source, 2 * bytes) == cudaSuccess, "memory");
    MUST(cudaMemcpy(source, host, 2 * bytes, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
    for (int i = 0; i < cols; i++)
        host[i] = gpu_random(7, (uint64_t)i);
    MUST(bg_cuda_vec_new(&c->base, &w, "w", host, cols, &err) == BG_OK, "%s", err.text);
    MUST(bg_cuda_act_new(&c->base, &y, "y", rows, cols, &err) == BG_OK, "%s", err.text);
    c->tiled = true; /* the layout of that mode, whatever this one is */
    for (int i = 0; i < 2; i++) {
        MUST(bg_cuda_act_new(&c->base, &x[i], "x", rows, cols, &err) == BG_OK, "%s", err.text);
        MUST(bg_cuda_act_input_new(&c->base, &out[i], "h", rows, cols, &err) == BG_OK, "%s",
             err.text);
    }
    c->tiled = tiled;
    MUST(cudaDeviceSynchronize() == cudaSuccess, "copies");
    const bgk_out o = bg_cuda_out(&out[0]);
    const size_t out_bytes = (size_t)((cols + 63) / 64 * o.stride) * 64 * 2;
    uint16_t *tiles[2] = {malloc(out_bytes), malloc(out_bytes)};
    c->s.n_rows = rows;
    MUST(bg_cuda_fuses_sum(&c->base, &out[1], &y), "sum and norm are not one here");
    for (int run = -1; run < n_runs; run++) {
        const int to = run < 0 ? 0 : 1; /* first as it should be */
        MUST(cudaMemcpyAsync(y.data, source, bytes, cudaMemcpyDeviceToDevice, c->stream) ==
                 cudaSuccess,
             "copy");
        MUST(cudaMemcpyAsync(x[to].data, source + n, bytes, cudaMemcpyDeviceToDevice, c->stream) ==
                 cudaSuccess,
             "copy");
        if (run == 1)
            MUST(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
                 "capture");
        if (run < 0) {
            MUST(bg_cuda_all_reduce_rows(c, &y, rows, &err) == BG_OK, "%s", err.text);
            MUST(bgk_rms_norm(&o, x[0].data, cols, y.data, cols, w.data, 1e-5f, rows, cols,
                              c->stream) == cudaSuccess,
                 "norm");
        } else if (run <= 1 || run % 5 == 0) {
            MUST(bg_cuda_all_reduce_norm(&c->base, &out[1], &x[1], &y, &w, 1e-5f, &err) == BG_OK,
                 "%s", err.text);
        }
        if (run == 1) {
            MUST(cudaStreamEndCapture(c->stream, &graph) == cudaSuccess, "end of the capture");
            MUST(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "graph");
        }
        if (run >= 1 && (run == 1 || run % 5))
            MUST(cudaGraphLaunch(exec, c->stream) == cudaSuccess, "launch");
        if (run % 3 == 2) MUST(bg_cuda_all_reduce_rows(c, &y, rows, &err) == BG_OK, "%s", err.text);
        if (run > 2 && run + 1 < n_runs) continue; /* without waiting */
        MUST(cudaStreamSynchronize(c->stream) == cudaSuccess, "norm of [%d, %d]", rows, cols);
        MUST(cudaMemcpy(got[to], x[to].data, bytes, cudaMemcpyDeviceToHost) == cudaSuccess, "copy");
        MUST(cudaMemcpy(tiles[to], out[to].data, out_bytes, cudaMemcpyDeviceToHost) == cudaSuccess,
             "copy");
        MUST(residuals_are_right(got[to], n, cols, bg_comm_size(c->config.comm)),
             "residual, run %d of [%d, %d]", run, rows, cols);
        if (run < 0) continue;
        MUST(tiles_are_same(tiles[0], tiles[1], out_bytes / 2), "norm, run %d of [%d, %d]", run,
             rows, cols);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaFree(source);
    free(host);
    for (int i = 0; i < 2; i++) {
        free(got[i]);
        free(tiles[i]);
    }
}

static void check_norms(bg_cuda *c, int rank, int n_runs)
{
    bg_cuda_comm_force(c, BG_CUDA_SUMS_AUTO);
    check_norm(c, rank, 1, 6144, n_runs);
    check_norm(c, rank, 5, 6144, n_runs);
    check_norm(c, rank, 4, 4096, n_runs);
    check_norm(c, rank, 3, 3072, n_runs);
    check_norm(c, rank, 8, 2880, n_runs);
    check_norm(c, rank, 2, 2044, n_runs);
    check_norm(c, rank, 8, 64, n_runs);
}

/* Of 157 in one graph, as a decode step of GLM-5 has them: the best of a few. */
static double time_sums(bg_cuda *c, int rank, bg_act *x, int rows)
{
    enum { N = 157, RUNS = 6 };
    bg_error err = {0};
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaEvent_t e[2];
    float best = INFINITY, ms = 0;
    MUST(bg_cuda_all_reduce_rows(c, x, rows, &err) == BG_OK, "%s", err.text);
    MUST(cudaStreamSynchronize(c->stream) == cudaSuccess, "sum");
    MUST(cudaEventCreate(&e[0]) == cudaSuccess && cudaEventCreate(&e[1]) == cudaSuccess, "event");
    MUST(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
         "capture");
    for (int i = 0; i < N; i++)
        MUST(bg_cuda_all_reduce_rows(c, x, rows, &err) == BG_OK, "%s", err.text);
    MUST(cudaStreamEndCapture(c->stream, &graph) == cudaSuccess, "end of the capture");
    MUST(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "graph");
    for (int i = 0; i < RUNS; i++) {
        MUST(bg_comm_barrier(c->config.comm, &err) == BG_OK, "%s", err.text);
        cudaEventRecord(e[0], c->stream);
        MUST(cudaGraphLaunch(exec, c->stream) == cudaSuccess, "launch");
        cudaEventRecord(e[1], c->stream);
        MUST(cudaStreamSynchronize(c->stream) == cudaSuccess, "sums");
        cudaEventElapsedTime(&ms, e[0], e[1]);
        if (i > 0 && ms < best) best = ms; /* the first one also uploads */
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(e[0]);
    cudaEventDestroy(e[1]);
    return (double)best * 1e3 / N;
}

static void time_ways(bg_cuda *c, int rank, int n_ranks, bool peers)
{
    static const int kib[] = {8,    16,   24,   64,   96,   192,  384,   768,
                              1024, 2048, 3072, 4096, 6144, 8192, 16384, 65536};
    enum { COLS = 1024 };
    bg_error err = {0};
    bg_act x;
    MUST(bg_cuda_act_new(&c->base, &x, "x", 16384, COLS, &err) == BG_OK, "%s", err.text);
    MUST(cudaMemset(x.data, 0, (size_t)16384 * COLS * sizeof(float)) == cudaSuccess, "set");
    MUST(cudaDeviceSynchronize() == cudaSuccess, "set");
    if (rank == 0) {
        fprintf(stderr, "us a sum, %d GPUs, 157 in a graph\n%8s", n_ranks, "KiB");
        for (int w = 0; w < N_WAYS; w++)
            fprintf(stderr, " %10s", ways[w].name);
        fprintf(stderr, "\n");
    }
    for (size_t s = 0; s < sizeof kib / sizeof *kib; s++) {
        if (rank == 0) fprintf(stderr, "%8d", kib[s]);
        for (int w = 0; w < N_WAYS; w++) {
            const bool ours = ways[w].sums >= BG_CUDA_SUMS_LINES;
            const bool lines = ways[w].sums == BG_CUDA_SUMS_LINES;
            double us = -1;
            if ((peers || !ours) && (!lines || kib[s] <= 1024)) {
                bg_cuda_comm_force(c, ways[w].sums);
                us = time_sums(c, rank, &x, kib[s] / 4);
            }
            if (rank == 0 && us < 0) fprintf(stderr, " %10s", "-");
            if (rank == 0 && us >= 0) fprintf(stderr, " %10.1f", us);
        }
        if (rank == 0) fprintf(stderr, "\n");
    }
}

static void check_peers(bg_cuda *c, int rank, const world *w)
{
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < N_WAYS; k++) {
            if (ways[k].sums < BG_CUDA_SUMS_LINES) continue;
            bg_cuda_comm_force(c, ways[k].sums);
            check_sum(c, rank, w->n, 1, 4, true);
            check_sum(c, rank, w->n, 31, 4096, true);
            check_sum(c, rank, w->n, 7, 1020, true);
            check_sum(c, rank, w->n, 32, 4096, true);
            if (i == 0) check_sum(c, rank, w->n, 333, 1028, true);
        }
    check_norms(c, rank, 12);
}

/* Real links: every size up to 64 MB, odd ones too, each way; then many runs without a pause. */
static void check_gpus(bg_cuda *c, int rank, const world *w)
{
    static const int shapes[][2] = {{1, 1},      {1, 3},      {3, 577},    {1, 6144},
                                    {2, 6144},   {31, 4100},  {32, 6144},  {301, 1025},
                                    {128, 6144}, {255, 6148}, {342, 6144}, {2731, 6144}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int k = 1; k < N_WAYS; k++) { /* but NCCL's own order */
            if (ways[k].sums == BG_CUDA_SUMS_LINES && shapes[s][0] > 128) continue;
            bg_cuda_comm_force(c, ways[k].sums);
            check_sum(c, rank, w->n, shapes[s][0], shapes[s][1], true);
        }
    for (int k = 2; k < N_WAYS; k++) {
        bg_cuda_comm_force(c, ways[k].sums);
        check_replays(c, rank, w->n, 6144, 1, 1000);
        check_replays(c, rank, w->n, 6144, 33, 300);
    }
    check_norms(c, rank, 1000);
    check_logits(c, rank, w, w->max_out);
}

static int count_gpus(void)
{
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

static void run_rank(const world *w, int rank)
{
    bg_error err = {0};
    bg_comm *comm;
    bg_backend *b;
    alarm(w->own_gpus ? 300 : 100); /* a collective that hangs must not hang the test */
    MUST(bg_comm_shm_join(&comm, w->memory, rank, w->n, COMM_FLOATS, &err) == BG_OK, "%s",
         err.text);
    const int n_gpus = count_gpus();
    MUST(n_gpus > 0, "no GPU");
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
    const bool peers = bg_cuda_comm_peers(c);
    if (w->aim != SUMS_AND_LOGITS && !peers) {
        if (w->own_gpus && w->aim != TIMES) _exit(NO_PEERS);
        MUST(w->own_gpus, "peers are not used");
    }
    switch (w->aim) {
    case TIMES:
        time_ways(c, rank, w->n, peers);
        break;
    case REPLAYS:
        check_gpus(c, rank, w);
        break;
    case PEERS:
        check_peers(c, rank, w);
        break;
    case SUMS_AND_LOGITS:
        bg_cuda_comm_force(c, BG_CUDA_SUMS_NCCL);
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

/* In a process of its own: asking brings the driver up. */
static int gpus_here(void)
{
    int status = 0;
    const pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) _exit(count_gpus());
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

static void run_world(world w)
{
    const size_t bytes = bg_comm_shm_bytes(w.n, COMM_FLOATS);
    pid_t pids[MAX_TEST_RANKS];
    int failed = 0, no_nccl = 0, no_peers = 0;
    if (!bg_gpus_likely()) cr_skip_test("no GPU");
    if (gpu_small()) cr_skip_test("processes, which tools that watch one process do not follow");
    if (w.own_gpus && gpus_here() < w.n) cr_skip_test("too few GPUs");
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
        no_peers += WIFEXITED(status) && WEXITSTATUS(status) == NO_PEERS;
        failed += !good;
        for (int r = 0; r < w.n; r++) {
            if (pids[r] == pid) pids[r] = 0;
            if (!good && pids[r] > 0) kill(pids[r], SIGKILL); /* they would wait for it */
        }
    }
    munmap(w.memory, bytes);
    if (no_nccl) cr_skip_test("no NCCL");
    if (no_peers) cr_skip_test("GPUs that do not reach each other's memory");
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
    run_world((world){.n = 2, .vocab = 1003, .max_out = 5, .aim = PEERS});
}

Test(comm, four_peers)
{
    run_world((world){.n = 4, .vocab = 1003, .max_out = 5, .aim = PEERS});
}

/* Three: the share of the last one is shorter. */
Test(comm, three_peers)
{
    run_world((world){.n = 3, .vocab = 1003, .max_out = 5, .aim = PEERS});
}

Test(comm, eight_peers)
{
    run_world((world){.n = 8, .vocab = 1003, .max_out = 5, .aim = PEERS});
}

Test(comm, two_gpus)
{
    run_world((world){.n = 2, .vocab = 154880, .max_out = 64, .aim = REPLAYS, .own_gpus = true});
}

Test(comm, three_gpus)
{
    run_world((world){.n = 3, .vocab = 154880, .max_out = 64, .aim = REPLAYS, .own_gpus = true});
}

Test(comm, four_gpus)
{
    run_world((world){.n = 4, .vocab = 154880, .max_out = 64, .aim = REPLAYS, .own_gpus = true});
}

Test(comm, eight_gpus)
{
    run_world((world){.n = 8, .vocab = 154880, .max_out = 64, .aim = REPLAYS, .own_gpus = true});
}

/* 2, 4 and 8 of them, as many as there are. */
Test(comm, bench_sums)
{
    if (!bg_gpus_likely()) cr_skip_test("no GPU");
    const int n_gpus = gpus_here();
    if (n_gpus < 2) cr_skip_test("too few GPUs");
    for (int n = 2; n <= n_gpus && n <= MAX_TEST_RANKS; n *= 2)
        run_world((world){.n = n, .vocab = 1003, .max_out = 5, .aim = TIMES, .own_gpus = true});
}

/* ---- what comm.c says about NCCL without its header ---------------------------------------------
 */

#if __has_include(<nccl.h>)
#include <nccl.h>

Test(comm, nccl_as_declared)
{
    cr_assert_eq(sizeof(ncclUniqueId), 128);
    cr_assert_eq(ncclFloat32, 7);
    cr_assert_eq(ncclSum, 0);
    cr_assert_eq(ncclSuccess, 0);
    cr_assert_eq(sizeof(ncclResult_t), sizeof(int));
    cr_assert_eq(sizeof(ncclDataType_t), sizeof(int));
}
#endif
