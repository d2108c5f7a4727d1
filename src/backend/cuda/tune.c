/* Which shape each linear is multiplied in: from the table when it is loaded, and tried out on
 * request. A pick never changes a result. */
#include "backend/tune.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/tune_table.h"
#include "base/clock.h"

enum {
    TABLE_SMS = 132, /* the table was measured on so many multiprocessors */
    MOST_TOKENS = 4096,
    MOST_COPIES = 64, /* linears of one size that take turns, so that the cache holds none */
    RUNS = 3,
};
static const int64_t ADVICE_NS = 12000000000; /* then no other parts of K are tried */
/* A shape must be so much faster than what is taken without a pick. */
static const double GAIN = 1.01;

void bg_cuda_pick_shapes(const bg_cuda *c, bgk_weights *w)
{
    int sms = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, c->device);
    for (int i = 0; i < BGK_TOKEN_CLASSES; i++) {
        int pick = bg_cuda_picked(c, w, i);
        if (!pick && sms == TABLE_SMS)
            pick = bg_cuda_table_pick(w->n_tiles, w->n_chunks, w->splits, w->formats, i);
        w->shape[i] = (uint8_t)pick;
    }
}

typedef struct tuner {
    bg_cuda *c;
    void *x_memory, *out_memory;
    char *x, *out;
    int64_t stride; /* of x, and of a glu's results */
    cudaEvent_t begin, end;
    int64_t start_ns;
    bg_linear *same[MOST_COPIES];
    int n_same; /* linears of the size that is tried now, of which some take turns */
    int n_turns, turn;
} tuner;

static int smaller(int64_t a, int64_t b)
{
    return (int)(a < b ? a : b);
}

static bool is_head(const bg_cuda *c, const bg_linear *l)
{
    return !l->tiles.n_ff && l->n_rows == c->config.vocab_size;
}

static int most_tokens(const bg_cuda *c, const bg_linear *l)
{
    return is_head(c, l) ? c->config.max_out : c->config.max_tokens;
}

static bool same_size(const bg_linear *a, const bg_linear *b)
{
    return a->k == b->k && a->n_rows == b->n_rows && a->tiles.n_tiles == b->tiles.n_tiles &&
           a->tiles.splits == b->tiles.splits && a->tiles.formats == b->tiles.formats &&
           a->tiles.n_ff == b->tiles.n_ff && a->tiles.block_tiles == b->tiles.block_tiles;
}

/* Random inputs, and room for results (a head's are the logits). */
static bg_status make_room(tuner *t, bg_error *err)
{
    bg_cuda *c = t->c;
    size_t out_bytes = 0;
    int64_t chunks = 0;
    const int tokens =
        smaller(c->config.max_tokens > c->config.max_out ? c->config.max_tokens : c->config.max_out,
                MOST_TOKENS);
    t->stride = (int64_t)(tokens + BGK_TILE_ROWS - 1) / BGK_TILE_ROWS * BGK_TILE_ROWS;
    for (size_t i = 0; i < c->n_linears; i++) {
        const bg_linear *l = c->linears[i];
        const size_t bytes =
            l->tiles.n_ff ? (size_t)l->tiles.n_tiles * 32 * (size_t)t->stride * sizeof(uint16_t)
                          : (size_t)l->n_rows * (size_t)tokens * sizeof(float);
        if (bytes > out_bytes && !is_head(c, l)) out_bytes = bytes;
        const int64_t groups = (l->n_in + BGK_TILE_COLS - 1) / BGK_TILE_COLS;
        if (groups > chunks) chunks = groups;
    }
    const int64_t values = chunks * t->stride * BGK_TILE_COLS;
    cudaError_t e = cudaMalloc(&t->x_memory, (size_t)values * sizeof(uint16_t) + 1024);
    if (e == cudaSuccess) e = cudaMalloc(&t->out_memory, out_bytes + 1024);
    if (e == cudaSuccess) e = cudaEventCreate(&t->begin);
    if (e == cudaSuccess) e = cudaEventCreate(&t->end);
    if (e == cudaSuccess) {
        t->x = (char *)t->x_memory + -(uintptr_t)t->x_memory % 1024;
        t->out = (char *)t->out_memory + -(uintptr_t)t->out_memory % 1024;
        e = bgk_random_blocks(t->x, BGK_GGUF_F16, values, 1, 0, 1, c->stream);
    }
    return bg_cuda_done(err, e, "buffers to tune with");
}

/* One of the linears, in turn. */
static cudaError_t call(tuner *t, int splits, int tokens, bgk_shape shape)
{
    const bg_linear *l = t->same[t->turn];
    bgk_weights w = l->tiles;
    if (++t->turn >= t->n_turns) t->turn = 0;
    w.splits = splits;
    const bgk_out out = {is_head(t->c, l) ? (void *)t->c->logits : t->out,
                         w.n_ff ? BGK_TILES : BGK_ROWS, w.n_ff ? t->stride : l->n_rows};
    return bgk_matmul_as(&out, &w, t->x, t->stride, tokens, BGK_SILU, shape, t->c->stream);
}

static int by_value(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static cudaError_t run_graph(tuner *t, cudaGraphExec_t exec, float *median_ms)
{
    float ms[1 + RUNS]; /* the first brings the graph there */
    cudaError_t e = cudaSuccess;
    for (int i = 0; e == cudaSuccess && i < 1 + RUNS; i++) {
        e = cudaEventRecord(t->begin, t->c->stream);
        if (e == cudaSuccess) e = cudaGraphLaunch(exec, t->c->stream);
        if (e == cudaSuccess) e = cudaEventRecord(t->end, t->c->stream);
        if (e == cudaSuccess) e = cudaStreamSynchronize(t->c->stream);
        if (e == cudaSuccess) e = cudaEventElapsedTime(&ms[i], t->begin, t->end);
    }
    if (e != cudaSuccess) return e;
    qsort(ms + 1, RUNS, sizeof *ms, by_value);
    *median_ms = ms[1 + RUNS / 2];
    return e;
}

/* Microseconds of a call, of several in a graph, as decode steps run. Infinite: there is no kernel
 * of this shape. */
static bg_status measure(tuner *t, int splits, int tokens, bgk_shape shape, double *us,
                         bg_error *err)
{
    const int n = tokens <= 64 ? 48 : tokens <= 512 ? 16 : 6;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    float ms = 0;
    *us = INFINITY;
    cudaError_t e = call(t, splits, tokens, shape); /* loads the kernel, which captures may not */
    if (e == cudaErrorInvalidConfiguration) {
        cudaGetLastError();
        return BG_OK;
    }
    if (e == cudaSuccess) e = cudaStreamSynchronize(t->c->stream);
    if (e == cudaSuccess)
        e = cudaStreamBeginCapture(t->c->stream, cudaStreamCaptureModeThreadLocal);
    if (e == cudaSuccess) {
        for (int i = 0; e == cudaSuccess && i < n; i++)
            e = call(t, splits, tokens, shape);
        const cudaError_t ended = cudaStreamEndCapture(t->c->stream, &graph);
        if (e == cudaSuccess) e = ended;
    }
    if (e == cudaSuccess) e = cudaGraphInstantiate(&exec, graph, 0);
    if (e == cudaSuccess) e = run_graph(t, exec, &ms);
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
    if (e == cudaSuccess) *us = (double)ms * 1e3 / n;
    return bg_cuda_done(err, e, t->same[0]->name);
}

static bool worth_trying(bgk_shape shape, int splits, int tokens)
{
    const int width = bgk_shape_tokens(shape);
    if (splits > 1 &&
        (shape == BGK_8X2 || shape == BGK_16X2 || shape == BGK_32X2 || shape == BGK_128X4))
        return false; /* the kernel of another shape */
    if (splits == 1 && (shape == BGK_64X2C || shape == BGK_128X2C)) return false;
    if (width < tokens) return width >= 64 || (width == 32 && tokens <= 64);
    return width < 2 * tokens || width == 8;
}

/* The fastest shape, or `before` where that is about as fast. */
static bg_status try_shapes(tuner *t, int splits, int tokens, bgk_shape before, bgk_shape *best,
                            double *us, double *before_us, bg_error *err)
{
    bg_status st = measure(t, splits, tokens, before, before_us, err);
    *best = before;
    *us = *before_us;
    for (int s = 0; !st && s < BGK_SHAPES; s++) {
        double this_us;
        if (s == (int)before || !worth_trying((bgk_shape)s, splits, tokens)) continue;
        st = measure(t, splits, tokens, (bgk_shape)s, &this_us, err);
        if (st || this_us * GAIN >= *before_us || this_us >= *us) continue;
        *best = (bgk_shape)s;
        *us = this_us;
    }
    if (!isfinite(*before_us)) *before_us = *us;
    return st;
}

static void put_name(char to[8], bgk_shape s)
{
    snprintf(to, 8, "%s", bg_cuda_shape_name(s));
}

/* Those of the size of linear number `first`; none if that is not the first of them. */
static bool collect(tuner *t, size_t first)
{
    const bg_cuda *c = t->c;
    const bg_linear *l = c->linears[first];
    t->n_same = 0;
    t->turn = 0;
    if (!l->k || !l->n_rows || l->tiles.n_tiles < 1) return false;
    for (size_t i = 0; i < c->n_linears; i++) {
        if (!same_size(c->linears[i], l)) continue;
        if (i < first) return false;
        if (t->n_same < MOST_COPIES) t->same[t->n_same] = c->linears[i];
        t->n_same++;
    }
    t->n_turns = smaller(t->n_same, MOST_COPIES);
    return true;
}

static bg_status advise(tuner *t, bg_tune_row *r, bg_error *err)
{
    bg_status st = BG_OK;
    for (int i = 0; !st && i < BG_TUNE_PARTS; i++) {
        const int parts = 1 << i;
        bgk_weights w = t->same[0]->tiles;
        bgk_shape best;
        double us = r->us, unused;
        if (parts == r->parts) {
            memcpy(r->part_best[i], r->best, sizeof r->best);
        } else {
            w.splits = parts;
            memset(w.shape, 0, sizeof w.shape);
            st = try_shapes(t, parts, r->tokens, bgk_matmul_shape(&w, r->tokens), &best, &us,
                            &unused, err);
            if (!st) put_name(r->part_best[i], best);
        }
        if (!st && isfinite(us)) r->part_us[i] = us;
    }
    return st;
}

static bg_status tune_class(tuner *t, size_t first, int token_class, bg_tune *report, bg_error *err)
{
    const bg_cuda *c = t->c;
    bg_linear *l = c->linears[first];
    const int most = most_tokens(c, l),
              from = token_class ? bgk_class_most(token_class - 1) + 1 : 1;
    if (from > most) return BG_OK;
    bg_tune_row *more = realloc(report->rows, ((size_t)report->n + 1) * sizeof *more);
    if (!more) return bg_fail(err, BG_NOMEM, "out of memory");
    report->rows = more;
    bg_tune_row *r = &report->rows[report->n];
    *r = (bg_tune_row){.n_linears = t->n_same,
                       .parts = l->tiles.splits,
                       .tiles = l->tiles.n_tiles,
                       .chunks = l->tiles.n_chunks,
                       .formats = (int)l->tiles.formats,
                       .from = from,
                       .to = smaller(bgk_class_most(token_class), most),
                       .bytes = (double)l->w_bytes};
    r->tokens = smaller(r->to, MOST_TOKENS);
    r->flops = 2.0 * r->tokens * (double)l->n_weights;
    snprintf(r->name, sizeof r->name, "%s", l->name);
    const bgk_shape before = bgk_matmul_shape(&l->tiles, r->tokens);
    bgk_shape best;
    bg_status st =
        try_shapes(t, l->tiles.splits, r->tokens, before, &best, &r->us, &r->before_us, err);
    if (st) return st;
    put_name(r->best, best);
    put_name(r->before, before);
    report->n++;
    for (size_t i = first; i < c->n_linears; i++)
        if (same_size(c->linears[i], l))
            c->linears[i]->tiles.shape[token_class] = (uint8_t)(1 + best);
    return bg_now_ns() - t->start_ns < ADVICE_NS ? advise(t, r, err) : BG_OK;
}

bg_status bg_cuda_tune(bg_backend *b, bg_tune *report, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    *report = (bg_tune){0};
    if (!c->tiled)
        return bg_fail(
            err, BG_ARG,
            "tuning: there is nothing to choose on this GPU, or with --compute f32: only "
            "compute capability 9.0 multiplies weights as they are in blocks of several shapes");
    if (c->ranks && bg_comm_standin_ns(c->config.comm) < 0)
        return bg_fail(err, BG_ARG, "tuning: of one rank alone");
    if (c->n_buckets) return bg_fail(err, BG_INTERNAL, "tuning: after graphs were made");
    tuner t = {.c = c, .start_ns = bg_now_ns()};
    bg_status st = make_room(&t, err);
    for (size_t i = 0; !st && i < c->n_linears; i++)
        for (int k = 0; !st && collect(&t, i) && k < BGK_TOKEN_CLASSES; k++)
            st = tune_class(&t, i, k, report, err);
    cudaStreamSynchronize(c->stream);
    if (t.begin) cudaEventDestroy(t.begin);
    if (t.end) cudaEventDestroy(t.end);
    cudaFree(t.x_memory);
    cudaFree(t.out_memory);
    report->seconds = (double)(bg_now_ns() - t.start_ns) * 1e-9;
    return st;
}
