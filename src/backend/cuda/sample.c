/* Sampling on the device: settings of seats, launches, and results on their way to the host. */
#include "backend/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(bgk_top) == sizeof(bg_top), "a bgk_top is a bg_top");
_Static_assert(offsetof(bgk_sampled, n_top) == offsetof(bg_sampled, n_top) &&
                   sizeof(bgk_sampled) == offsetof(bg_sampled, top),
               "a bgk_sampled is the head of a bg_sampled");
_Static_assert((int)BGK_MAX_TOP == (int)BG_MAX_TOP_LOGPROBS, "as many best tokens");

bg_status bg_cuda_sampling_new(bg_cuda *c, bg_error *err)
{
    const size_t vocab = (size_t)c->config.vocab_size, rows = (size_t)c->config.max_out;
    const size_t slots = (size_t)c->config.max_seqs;
    struct bg_cuda_sampling *s = &c->sampling;
    const size_t scratch = bgk_sample_scratch(c->config.max_out, c->config.vocab_size);
    bg_status st = bg_cuda_take(c, &c->logits, rows * vocab * sizeof(float), "logits", err);
    if (!st) st = bg_cuda_take(c, &c->bad, sizeof *c->bad, "check", err);
    if (!st) st = bg_cuda_take(c, &s->settings, slots * sizeof *s->settings, "sampling", err);
    if (!st) st = bg_cuda_take(c, &s->sampled, rows * sizeof *s->sampled, "sampling", err);
    if (!st) st = bg_cuda_take(c, &s->tops, rows * BGK_MAX_TOP * sizeof *s->tops, "sampling", err);
    if (!st) st = bg_cuda_take(c, &s->scratch, scratch, "sampling", err);
    if (!st) st = bg_cuda_done(err, cudaMemsetAsync(s->scratch, 0, scratch, c->stream), "sampling");
    for (int i = 0; !st && i < BG_CUDA_FLIGHTS; i++) {
        st = bg_cuda_done(err,
                          cudaMallocHost((void **)&s->host[i].sampled, rows * sizeof *s->sampled),
                          "sampling");
        if (!st)
            st = bg_cuda_done(
                err,
                cudaMallocHost((void **)&s->host[i].tops, rows * BGK_MAX_TOP * sizeof *s->tops),
                "sampling");
    }
    if (!st) {
        s->lists = calloc(slots, sizeof *s->lists);
        if (!s->lists) st = bg_fail(err, BG_NOMEM, "sampler: out of memory");
    }
    return st;
}

void bg_cuda_sampling_free(bg_cuda *c)
{
    for (int i = 0; i < BG_CUDA_FLIGHTS; i++) {
        if (c->sampling.host[i].sampled) cudaFreeHost(c->sampling.host[i].sampled);
        if (c->sampling.host[i].tops) cudaFreeHost(c->sampling.host[i].tops);
    }
    free(c->sampling.lists);
}

/* ---- seats ------------------------------------------------------------------------------------
 */

typedef struct placed_bias {
    bgk_bias b;
    int at;
} placed_bias;

static int by_token(const void *a, const void *b)
{
    const placed_bias *x = a, *y = b;
    if (x->b.token != y->b.token) return x->b.token < y->b.token ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}

/* Biases by token, those of one token in their order: a thread of the kernel takes a token's. */
static bg_status sorted_biases(bgk_bias *out, const bg_logit_bias *bias, int n, bg_error *err)
{
    placed_bias *p = malloc((size_t)n * sizeof *p);
    if (!p) return bg_fail(err, BG_NOMEM, "out of memory for %d biases", n);
    for (int i = 0; i < n; i++)
        p[i] = (placed_bias){{bias[i].token, bias[i].bias}, i};
    qsort(p, (size_t)n, sizeof *p, by_token);
    for (int i = 0; i < n; i++)
        out[i] = p[i].b;
    free(p);
    return BG_OK;
}

/* The slot's biases and banned ids, in one piece of device memory that grows when it must. What it
 * was before stays allocated: steps under way may read it. */
static bg_status send_lists(bg_cuda *c, int slot, const bg_sampling *p, bgk_sampling *to,
                            bg_error *err)
{
    const size_t bias_bytes = (size_t)to->n_bias * sizeof(bgk_bias);
    const size_t bytes = bias_bytes + (size_t)to->n_stop * sizeof(int32_t);
    if (!bytes) return BG_OK;
    struct bg_cuda_list *list = &c->sampling.lists[slot];
    if (bytes > list->bytes) {
        const size_t more = bytes > 2 * list->bytes ? bytes : 2 * list->bytes;
        bg_status st = bg_cuda_take(c, &list->device, more, "biases of a slot", err);
        if (st) return st;
        list->bytes = more;
    }
    char *host = malloc(bytes);
    if (!host) return bg_fail(err, BG_NOMEM, "slot %d: out of memory for biases", slot);
    bg_status st =
        to->n_bias ? sorted_biases((bgk_bias *)(void *)host, p->bias, to->n_bias, err) : BG_OK;
    if (to->n_stop) memcpy(host + bias_bytes, p->stop_ids, bytes - bias_bytes);
    if (!st) st = bg_cuda_upload(c, list->device, host, bytes, err);
    free(host);
    to->bias = (const bgk_bias *)(const void *)list->device;
    to->stop = (const int32_t *)(const void *)(list->device + bias_bytes);
    return st;
}

bg_status bg_cuda_sample_seat(bg_cuda *c, int slot, bg_error *err)
{
    const bg_slot *seat = &c->s.slots[slot];
    const bg_sampling *p = &seat->sampling;
    const bool bans = seat->n_generated < p->min_tokens && p->n_stop_ids > 0;
    bgk_sampling to = {.temperature = p->temperature,
                       .top_p = p->top_p,
                       .min_p = p->min_p,
                       .repetition_penalty = p->repetition_penalty,
                       .presence_penalty = p->presence_penalty,
                       .frequency_penalty = p->frequency_penalty,
                       .top_k = p->top_k,
                       .n_logprobs = p->n_logprobs,
                       .min_tokens = p->min_tokens,
                       .n_bias = p->n_bias > 0 ? p->n_bias : 0,
                       .n_stop = bans ? p->n_stop_ids : 0,
                       .seed = p->seed};
    bg_status st = send_lists(c, slot, p, &to, err);
    if (!st) st = bg_cuda_upload(c, c->sampling.settings + slot, &to, sizeof to, err);
    return st;
}

/* ---- a step -----------------------------------------------------------------------------------
 */

bg_status bg_cuda_sample_enqueue(bg_cuda *c, bg_error *err)
{
    const bgk_sample_args a = {.logits = c->logits,
                               .n_rows = c->s.n_out,
                               .max_rows = c->config.max_out,
                               .vocab = c->config.vocab_size,
                               .slot = c->out_slot,
                               .len = c->out_len,
                               .generated = c->out_gen,
                               .settings = c->sampling.settings,
                               .history = c->history,
                               .history_stride = c->history_stride,
                               .sampled = c->sampling.sampled,
                               .tops = c->sampling.tops,
                               .scratch = c->sampling.scratch};
    return bg_cuda_done(err, bgk_sample(&a, c->stream), "op sample");
}

/* Best tokens are ten times the rest, and rarely asked for: then they stay where they are. */
bg_status bg_cuda_results_copy(bg_cuda *c, int buffer, int n, bg_error *err)
{
    const struct bg_cuda_sampling *s = &c->sampling;
    bool tops = false;
    for (int i = 0; i < n; i++)
        tops |= c->s.slots[c->s.seqs[c->s.out_seq[i]].slot].sampling.n_logprobs > 0;
    cudaError_t e =
        cudaMemcpyAsync(s->host[buffer].sampled, s->sampled, (size_t)n * sizeof *s->sampled,
                        cudaMemcpyDeviceToHost, c->stream);
    if (e == cudaSuccess && tops)
        e = cudaMemcpyAsync(s->host[buffer].tops, s->tops,
                            (size_t)n * BGK_MAX_TOP * sizeof *s->tops, cudaMemcpyDeviceToHost,
                            c->stream);
    return bg_cuda_done(err, e, "results");
}

void bg_cuda_results_read(bg_cuda *c, int buffer, int n, bg_sampled *out)
{
    const bgk_sampled *from = c->sampling.host[buffer].sampled;
    const bgk_top *tops = c->sampling.host[buffer].tops;
    for (int i = 0; i < n; i++) {
        memcpy(&out[i], &from[i], sizeof from[i]);
        if (from[i].n_top > 0)
            memcpy(out[i].top, tops + (size_t)i * BGK_MAX_TOP,
                   (size_t)from[i].n_top * sizeof *tops);
    }
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
