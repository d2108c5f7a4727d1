/* The CUDA backend: what it can do, its making and its end.
 *
 * Everything goes out on one stream, in order; only fetches wait. On compute capability 9.x (tiled
 * mode) weights stay quantised, in tiles, and what linears read is halves; elsewhere weights are
 * halves (proof mode: float32) and activations float32. Sums are float32 everywhere. */
#include "backend/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

static void cuda_free(bg_backend *b)
{
    bg_cuda *c = (bg_cuda *)b;
    if (c->stream) cudaStreamSynchronize(c->stream);
    bg_cuda_load_free(c);
    for (size_t i = 0; i < c->n_memory; i++)
        cudaFree(c->memory[i]);
    free(c->memory);
    for (size_t i = 0; i < c->n_linears; i++) {
        free(c->linears[i]->name);
        free(c->linears[i]);
    }
    free(c->linears);
    for (size_t i = 0; i < c->n_embeddings; i++)
        free(c->embeddings[i]);
    free(c->embeddings);
    bg_cuda_profile_free(c);
    free(c->picks);
    bg_cuda_comm_free(c);
    bg_cuda_fault_free(c);
    bg_cuda_fast_free(c);
    bg_cuda_moe_free(c);
    bg_cuda_flights_free(c);
    bg_cuda_step_free(c);
    bg_cuda_sampling_free(c);
    if (c->stream) cudaStreamDestroy(c->stream);
    bg_steps_release(&c->s);
    free(c);
}

static const bg_ops cuda_ops = {
    .name = "cuda",
    .free = cuda_free,
    .act_new = bg_cuda_act_new,
    .act_input_new = bg_cuda_act_input_new,
    .fuses_glu = bg_cuda_fuses_glu,
    .vec_new = bg_cuda_vec_new,
    .linear_new = bg_cuda_linear_new,
    .embedding_new = bg_cuda_embedding_new,
    .router_new = bg_cuda_router_new,
    .experts_new = bg_cuda_experts_new,
    .load_end = bg_cuda_load_end,
    .cache_new = bg_cuda_cache_new,
    .slot_seat = bg_cuda_slot_seat,
    .begin_step = bg_cuda_begin_step,
    .n_rows = bg_cuda_n_rows,
    .n_out = bg_cuda_n_out,
    .embed = bg_cuda_embed,
    .rms_norm = bg_cuda_rms_norm,
    .add = bg_cuda_add,
    .add_rms_norm = bg_cuda_add_rms_norm,
    .norm_add_norm = bg_cuda_norm_add_norm,
    .linear = bg_cuda_linear,
    .rope_store = bg_cuda_rope_store,
    .attention = bg_cuda_attention,
    .mla_store = bg_cuda_mla_store,
    .mla_query = bg_cuda_mla_query,
    .mla_attention = bg_cuda_mla_attention,
    .index = bg_cuda_index,
    .glu = bg_cuda_glu,
    .linear_glu = bg_cuda_linear_glu,
    .route = bg_cuda_route,
    .moe = bg_cuda_moe,
    .all_reduce = bg_cuda_all_reduce,
    .fuses_sum = bg_cuda_fuses_sum,
    .all_reduce_norm = bg_cuda_all_reduce_norm,
    .gather_out = bg_cuda_gather_out,
    .logits = bg_cuda_logits,
    .sample = bg_cuda_sample,
    .fetch = bg_cuda_fetch,
    .prepare = bg_cuda_prepare,
    .step = bg_cuda_step,
    .ready = bg_cuda_ready,
    .fetch_logits = bg_cuda_fetch_logits,
    .poison = bg_cuda_poison,
    .all_finite = bg_cuda_all_finite,
    .sync = bg_cuda_sync,
    .device_times = bg_cuda_device_times,
    .linear_rows = bg_cuda_linear_rows,
    .memory = bg_cuda_memory,
    .op_begin = bg_cuda_op_begin,
    .op_end = bg_cuda_op_end,
    .op_times = bg_cuda_op_times,
    .linear_cost = bg_cuda_linear_cost,
    .moe_cost = bg_cuda_moe_cost,
    .attention_cost = bg_cuda_attention_cost,
    .mla_cost = bg_cuda_mla_cost,
    .roofs = bg_cuda_roofs,
    .tune = bg_cuda_tune,
};

bg_status bg_cuda_backend_new(bg_backend **b, const bg_backend_config *config, int device,
                              bg_error *err)
{
    *b = NULL;
    if (config->max_tokens < 1 || config->max_seqs < 1 || config->max_out < 1 ||
        config->max_ctx < 1 || config->vocab_size < 1)
        return bg_fail(
            err, BG_ARG,
            "backend: %d tokens, %d sequences, %d rows of logits, %d positions, a vocabulary "
            "of %d: all must be positive",
            config->max_tokens, config->max_seqs, config->max_out, config->max_ctx,
            config->vocab_size);
    bg_status st = bg_cuda_done(err, cudaSetDevice(device), "choosing the GPU");
    if (st) return st;
    bg_cuda *c = calloc(1, sizeof *c);
    if (!c) return bg_fail(err, BG_NOMEM, "backend: out of memory");
    c->base.ops = &cuda_ops;
    c->base.check = config->check;
    c->base.profile = config->profile;
    c->config = *config;
    c->device = device;
    c->weights = config->compute == BG_COMPUTE_F32 ? BGK_F32 : BGK_F16;
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    c->tiled = major == 9 && config->compute == BG_COMPUTE_NATIVE;
    st = bg_cuda_done(err, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "stream");
    if (!st) st = bg_steps_init(&c->s, config, false, err);
    if (!st) st = bg_cuda_fast_new(c, err);
    if (!st) st = bg_cuda_flights_new(c, err);
    if (!st) st = bg_cuda_comm_new(c, err);
    if (!st) st = bg_cuda_fault_new(c, err);
    if (!st) st = bg_cuda_sampling_new(c, err);
    if (!st && c->tiled && config->tune_table) st = bg_cuda_picks_read(c, config->tune_table, err);
    if (st) {
        cuda_free(&c->base);
        return st;
    }
    *b = &c->base;
    return BG_OK;
}

int bg_cuda_abi(void)
{
    return BG_CUDA_ABI;
}

bg_status bg_cuda_gpus(bg_gpu *list, int cap, int *n, bg_error *err)
{
    *n = 0;
    int count = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver) return BG_OK;
    if (e != cudaSuccess) return bg_cuda_fail(err, e, "looking for GPUs");
    for (int i = 0; i < count && i < cap; i++) {
        struct cudaDeviceProp p;
        size_t free_bytes = 0, total = 0;
        if (cudaGetDeviceProperties(&p, i) != cudaSuccess || cudaSetDevice(i) != cudaSuccess ||
            cudaMemGetInfo(&free_bytes, &total) != cudaSuccess)
            return bg_fail(err, BG_DEVICE, "GPU %d: cannot be asked", i);
        bg_gpu *g = &list[(*n)++];
        *g = (bg_gpu){.device = i,
                      .free_bytes = free_bytes,
                      .total_bytes = total,
                      .capability = p.major * 10 + p.minor};
        memcpy(g->name, p.name, sizeof g->name - 1);
    }
    return BG_OK;
}
