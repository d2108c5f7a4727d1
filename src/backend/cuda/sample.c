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

/* On the host, by the CPU backend's sampler: the same tokens from the same logits. */
bg_status bg_cuda_sample(bg_backend *b, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int vocab = c->config.vocab_size;
    if (!c->has_logits || c->s.all_logits || c->sampled)
        return bg_fail(err, BG_INTERNAL, "op sample: %s",
                       c->sampled        ? "twice in a step"
                       : c->s.all_logits ? "all rows yield logits in this step"
                                         : "before the step's logits");
    bg_status st = b->ops->fetch_logits(b, c->host_logits, err);
    const bg_kernels *kernels = bg_isa_best() >= BG_ISA_AVX512 ? &bg_kernels_avx512
                                : bg_isa_best() == BG_ISA_AVX2 ? &bg_kernels_avx2
                                                               : &bg_kernels_plain;
    for (int i = 0; !st && i < c->s.n_out; i++) {
        const int slot = c->s.seqs[c->s.out_seq[i]].slot;
        c->results[i].slot = slot;
        bg_sample_row(&c->sampler, kernels, c->host_logits + (size_t)i * (size_t)vocab, vocab,
                      &c->s.slots[slot], &c->results[i]);
    }
    for (int i = 0; !st && i < c->s.n_out; i++)
        bg_steps_append(&c->s, c->results[i].slot, c->results[i].token);
    c->sampled = !st;
    return st;
}

bg_status bg_cuda_fetch(bg_backend *b, bg_sampled *out, int *n, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    *n = 0;
    if (!c->sampled && c->s.n_out > 0)
        return bg_fail(err, BG_INTERNAL, "fetch: nothing was sampled in this step");
    if (c->sampled && c->s.n_out > 0) memcpy(out, c->results, (size_t)c->s.n_out * sizeof *out);
    *n = c->s.n_out;
    return BG_OK;
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
