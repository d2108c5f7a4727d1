/* Sampling, and what comes back to the host. */
#include "backend/cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/f16.h"
#include "gguf/gguf.h"

bg_status bg_cuda_sampling_new(bg_cuda *c, bg_error *err)
{
    const size_t vocab = (size_t)c->config.vocab_size, max_out = (size_t)c->config.max_out;
    bg_sampler *s = &c->sampler;
    s->logits = calloc(vocab, sizeof *s->logits);
    s->keys = calloc(vocab, sizeof *s->keys);
    s->count = calloc(vocab, sizeof *s->count);
    s->chunk_max = calloc(vocab / BG_CHUNK_TOKENS + 1, sizeof *s->chunk_max);
    c->results = calloc(max_out, sizeof *c->results);
    if (!s->logits || !s->keys || !s->count || !s->chunk_max || !c->results)
        return bg_fail(err, BG_NOMEM, "sampler: out of memory");
    bg_status st = bg_cuda_take(c, &c->logits, max_out * vocab * sizeof(float), "logits", err);
    if (!st) st = bg_cuda_take(c, &c->bad, sizeof *c->bad, "check", err);
    if (!st)
        st = bg_cuda_done(err,
                          cudaMallocHost((void **)&c->host_logits, max_out * vocab * sizeof(float)),
                          "logits");
    return st;
}

bg_status bg_cuda_sample_seat(bg_cuda *c, int slot, bg_error *err)
{
    (void)c, (void)slot, (void)err;
    return BG_OK;
}

bg_status bg_cuda_sample_enqueue(bg_cuda *c, bg_error *err)
{
    (void)c;
    return bg_fail(err, BG_INTERNAL, "sampling on the GPU is not there yet");
}

bg_status bg_cuda_results_copy(bg_cuda *c, int buffer, int n, bg_error *err)
{
    (void)c, (void)buffer, (void)n, (void)err;
    return BG_OK;
}

void bg_cuda_results_read(bg_cuda *c, int buffer, int n, bg_sampled *out)
{
    (void)c, (void)buffer, (void)n, (void)out;
}

bg_status bg_cuda_fetch_logits(bg_backend *b, float *out, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    if (!c->has_logits) return bg_fail(err, BG_INTERNAL, "fetch_logits: before the step's logits");
    const size_t bytes = (size_t)c->s.n_out * (size_t)c->config.vocab_size * sizeof *out;
    cudaError_t e = cudaMemcpyAsync(out, c->logits, bytes, cudaMemcpyDeviceToHost, c->stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(c->stream);
    return bg_cuda_done(err, e, "fetch_logits");
}
