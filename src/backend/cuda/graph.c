/* Decode steps as graphs, and steps under way.
 *
 * A decode step - one token of each of B sequences - runs as the graph of the smallest bucket that
 * holds B: from the gathering of token ids to the sampled token, all in one launch, reading what
 * changes from fixed buffers. Other steps launch their ops one by one. Either way the step ends
 * with a copy of its tokens to pinned memory and an event, and fetch takes the oldest such step. */
#include "backend/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

/* ---- steps under way --------------------------------------------------------------------------
 */

bg_status bg_cuda_flights_new(bg_cuda *c, bg_error *err)
{
    for (int i = 0; i < BG_CUDA_FLIGHTS; i++) {
        struct bg_cuda_flight *f = &c->flights[i];
        f->slots = calloc((size_t)c->config.max_seqs, sizeof *f->slots);
        if (!f->slots) return bg_fail(err, BG_NOMEM, "backend: out of memory");
        bg_status st = bg_cuda_done(err, cudaEventCreate(&f->done), "event");
        if (!st) st = bg_cuda_done(err, cudaEventCreate(&f->begin), "event");
        if (st) return st;
    }
    return BG_OK;
}

void bg_cuda_flights_free(bg_cuda *c)
{
    for (int i = 0; i < BG_CUDA_BUCKETS; i++)
        if (c->graphs[i]) cudaGraphExecDestroy(c->graphs[i]);
    for (int i = 0; i < BG_CUDA_FLIGHTS; i++) {
        if (c->flights[i].done) cudaEventDestroy(c->flights[i].done);
        if (c->flights[i].begin) cudaEventDestroy(c->flights[i].begin);
        free(c->flights[i].slots);
    }
}

static bg_status end_step(bg_cuda *c, bg_error *err)
{
    if (c->n_ended - c->n_fetched == BG_CUDA_FLIGHTS)
        return bg_fail(err, BG_INTERNAL, "%d steps were not fetched", BG_CUDA_FLIGHTS);
    const int i = (int)(c->n_ended % BG_CUDA_FLIGHTS);
    struct bg_cuda_flight *f = &c->flights[i];
    f->n_out = c->sampled ? c->s.n_out : 0;
    f->timed = c->timed;
    c->timed = false;
    for (int k = 0; k < f->n_out; k++)
        f->slots[k] = c->s.seqs[c->s.out_seq[k]].slot;
    bg_status st = bg_cuda_flush(c, err);
    if (!st && f->n_out) st = bg_cuda_results_copy(c, i, f->n_out, err);
    if (!st) st = bg_cuda_done(err, cudaEventRecord(f->done, c->stream), "end of a step");
    c->n_ended++;
    c->ended = true;
    return st;
}

/* The device comes to a step's first event at once when it has nothing else to do: between the
 * last event of the step before and that one it was idle. */
static void add_times(bg_cuda *c, int i)
{
    const struct bg_cuda_flight *f = &c->flights[i];
    const struct bg_cuda_flight *before = &c->flights[(i + BG_CUDA_FLIGHTS - 1) % BG_CUDA_FLIGHTS];
    float ms = 0;
    if (!f->timed) return;
    if (cudaEventElapsedTime(&ms, f->begin, f->done) == cudaSuccess)
        c->work_ns += (int64_t)((double)ms * 1e6);
    if (c->n_fetched > 0 && cudaEventElapsedTime(&ms, before->done, f->begin) == cudaSuccess &&
        ms > 0)
        c->idle_ns += (int64_t)((double)ms * 1e6);
}

void bg_cuda_device_times(const bg_backend *b, int64_t *work_ns, int64_t *idle_ns)
{
    *work_ns = ((const bg_cuda *)b)->work_ns;
    *idle_ns = ((const bg_cuda *)b)->idle_ns;
}

bool bg_cuda_ready(bg_backend *b)
{
    const bg_cuda *c = (const bg_cuda *)b;
    return c->n_fetched == c->n_ended ||
           cudaEventQuery(c->flights[c->n_fetched % BG_CUDA_FLIGHTS].done) != cudaErrorNotReady;
}

bg_status bg_cuda_sample(bg_backend *b, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    if (!c->has_logits || c->s.all_logits || c->sampled)
        return bg_fail(err, BG_INTERNAL, "op sample: %s",
                       c->sampled        ? "twice in a step"
                       : c->s.all_logits ? "all rows yield logits in this step"
                                         : "before the step's logits");
    bg_status st = c->s.n_out ? bg_cuda_sample_enqueue(c, err) : BG_OK;
    if (!st) bg_steps_reserve(&c->s);
    c->sampled = !st;
    return st;
}

bg_status bg_cuda_fetch(bg_backend *b, bg_sampled *out, int *n, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    *n = 0;
    if (!c->ended) { /* begin_step, ops and fetch by themselves */
        if (!c->sampled && c->s.n_out > 0)
            return bg_fail(err, BG_INTERNAL, "fetch: nothing was sampled in this step");
        bg_status st = end_step(c, err);
        if (st) return st;
    }
    if (c->n_fetched == c->n_ended) return bg_fail(err, BG_INTERNAL, "fetch: no step is under way");
    const int i = (int)(c->n_fetched % BG_CUDA_FLIGHTS);
    const struct bg_cuda_flight *f = &c->flights[i];
    bg_status st = bg_cuda_done(err, cudaEventSynchronize(f->done), "a step");
    if (st) return st;
    add_times(c, i);
    bg_cuda_results_read(c, i, f->n_out, out);
    for (int k = 0; k < f->n_out; k++)
        out[k].slot = f->slots[k];
    *n = f->n_out;
    c->n_fetched++;
    return BG_OK;
}

/* ---- buckets and graphs -----------------------------------------------------------------------
 */

static void plan_buckets(bg_cuda *c)
{
    static const int sizes[] = {1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024};
    const bg_backend_config *f = &c->config;
    int most = f->max_seqs;
    if (f->max_out < most) most = f->max_out;
    if (f->max_tokens < most) most = f->max_tokens;
    c->n_buckets = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && sizes[i] < most; i++)
        c->buckets[c->n_buckets++] = sizes[i];
    c->buckets[c->n_buckets++] = most;
}

/* Its index; -1: not a step for a graph. */
static int bucket_of(const bg_cuda *c, const bg_batch *batch)
{
    if (c->base.check || c->base.profile || batch->all_logits || batch->n_seqs < 1) return -1;
    for (int i = 0; i < batch->n_seqs; i++)
        if (batch->seqs[i].n_tokens != 1 || !batch->seqs[i].sample) return -1;
    for (int i = 0; i < c->n_buckets; i++)
        if (c->buckets[i] >= batch->n_seqs) return c->graphs[i] ? i : -1;
    return -1;
}

static bg_status whole_step(bg_cuda *c, bg_forward *forward, void *ctx, bg_error *err)
{
    bg_status st = bg_cuda_gather_ids(c, err);
    if (!st) st = forward(ctx, err);
    if (!st) st = bg_cuda_sample_enqueue(c, err);
    return st;
}

static bg_status record(bg_cuda *c, cudaGraph_t *graph, bg_forward *forward, void *ctx,
                        bg_error *err)
{
    bg_status st = bg_cuda_done(
        err, cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal), "capture");
    if (st) return st;
    c->capturing = true;
    st = whole_step(c, forward, ctx, err);
    c->capturing = false;
    cudaError_t e = cudaStreamEndCapture(c->stream, graph); /* also after a failure */
    return st ? st : bg_cuda_done(err, e, "capture");
}

/* Of padding alone: once launch by launch, which loads kernels and makes what is made at first use,
 * then recorded. */
static bg_status capture(bg_cuda *c, int i, bg_forward *forward, void *ctx, bg_error *err)
{
    const int n = c->buckets[i];
    cudaGraph_t graph = NULL;
    bg_steps *s = &c->s;
    s->n_seqs = s->n_rows = s->n_out = 0;
    s->n_block_ids = 0;
    s->all_logits = false;
    bg_status st = bg_cuda_send_step(c, n, n, n, err);
    s->n_seqs = s->n_rows = s->n_out = n;
    if (!st) st = whole_step(c, forward, ctx, err);
    if (!st) st = bg_cuda_done(err, cudaStreamSynchronize(c->stream), "first step");
    if (!st) st = record(c, &graph, forward, ctx, err);
    if (!st)
        st = bg_cuda_done(err, cudaGraphInstantiate(&c->graphs[i], graph, 0), "making a graph");
    if (!st) st = bg_cuda_done(err, cudaGraphUpload(c->graphs[i], c->stream), "a graph");
    if (graph) cudaGraphDestroy(graph);
    s->n_seqs = s->n_rows = s->n_out = 0;
    return st;
}

bg_status bg_cuda_prepare(bg_backend *b, bg_forward *forward, void *ctx, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_fast_ready(c, err);
    if (st || c->config.eager || b->check || b->profile) return st;
    if (!c->has_cache || c->n_buckets) return bg_fail(err, BG_INTERNAL, "graphs: not the time");
    size_t before = 0, after = 0, total = 0;
    plan_buckets(c);
    st = bg_cuda_done(err, cudaMemGetInfo(&before, &total), "memory");
    if (!st && bg_cuda_fault_capture(c)) st = bg_fail(err, BG_DEVICE, "a failure on purpose");
    for (int i = c->n_buckets - 1; !st && i >= 0; i--)
        st = capture(c, i, forward, ctx, err);
    if (!st) st = bg_cuda_done(err, cudaStreamSynchronize(c->stream), "graphs");
    if (!st) st = bg_cuda_done(err, cudaMemGetInfo(&after, &total), "memory");
    if (st) {
        bg_wrap(err, "decode steps as graphs (--eager runs without them)");
        return st;
    }
    c->graph_bytes = before > after ? before - after : 0;
    c->bytes += c->graph_bytes;
    c->ended = true;
    c->sampled = c->has_logits = false;
    return BG_OK;
}

/* ---- a step -----------------------------------------------------------------------------------
 */

static bg_status replay(bg_cuda *c, int i, const bg_batch *batch, bg_error *err)
{
    const int n = c->buckets[i];
    c->sampled = c->has_logits = c->ended = false;
    bg_status st = bg_cuda_fault_step(c, err);
    if (!st) st = bg_steps_begin(&c->s, batch, err);
    if (!st) st = bg_cuda_send_step(c, n, n, n, err);
    if (!st) st = bg_cuda_done(err, cudaGraphLaunch(c->graphs[i], c->stream), "decode step");
    if (st) return st;
    bg_steps_reserve(&c->s);
    c->sampled = c->has_logits = true;
    return BG_OK;
}

bg_status bg_cuda_step(bg_backend *b, const bg_batch *batch, bg_forward *forward, void *ctx,
                       bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int bucket = bucket_of(c, batch);
    bg_status st = bg_cuda_done(
        err, cudaEventRecord(c->flights[c->n_ended % BG_CUDA_FLIGHTS].begin, c->stream), "event");
    c->timed = !st;
    if (st) return st;
    if (bucket >= 0) {
        st = replay(c, bucket, batch, err);
    } else {
        st = b->ops->begin_step(b, batch, err);
        if (!st) st = forward(ctx, err);
        if (!st && c->s.n_out > 0 && !batch->all_logits) st = bg_op_sample(b, err);
    }
    return st ? st : end_step(c, err);
}
