/* What a rank is expected to take of a GPU's memory. */
#include "job/gpu_sizes.h"

#include <string.h>

#include <criterion/criterion.h>

static bg_text_model opened(const char *path)
{
    bg_text_model m = {0};
    bg_error err = {0};
    cr_assert_eq(bg_gguf_open(&m.gguf, path, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_desc_read(&m.desc, m.gguf, &err), BG_OK, "%s", err.text);
    return m;
}

static bg_shard shard(const bg_text_model *m, int rank, int tp)
{
    bg_shard s;
    bg_error err = {0};
    cr_assert_eq(bg_shard_plan(&s, &m->desc, m->gguf, rank, tp, &err), BG_OK, "%s", err.text);
    return s;
}

static const bg_memory_plan plan = {
    .tp = 1, .max_num_seqs = 8, .max_step_tokens = 64, .max_model_len = 320, .block_tokens = 32};

Test(gpu_sizes, weights_by_their_tiles)
{
    /* d_model 256, d_ff 512, 4 heads and 2 KV heads of 64, vocabulary 1024, 2 layers, F16, output
     * tied: every chunk of 64 by 64 takes 8192 bytes. */
    bg_text_model m = opened("tests/golden/models/tiny-qwen3.f16.gguf");
    const bg_desc *d = &m.desc;
    const bg_shard s = shard(&m, 0, 1);
    const uint64_t q = (uint64_t)d->n_heads * (uint64_t)d->head_dim, model = (uint64_t)d->d_model;
    const uint64_t kv = (uint64_t)d->n_kv_heads * (uint64_t)d->head_dim, ff = (uint64_t)d->d_ff;
    const uint64_t values =
        (uint64_t)d->n_layers * (model * (q + 2 * kv) + q * model + 3 * model * ff);
    const uint64_t table = model * (uint64_t)d->vocab_size;
    const uint64_t vectors = (uint64_t)d->n_layers * 2 * (model + (uint64_t)d->head_dim) + model;
    bg_gpu_bytes b = bg_gpu_sizes(&m, &plan, &s, BG_COMPUTE_NATIVE, true);
    cr_expect_eq(b.weights, 2 * (values + table) + 2 * table + 4 * vectors, "%llu",
                 (unsigned long long)b.weights);
    b = bg_gpu_sizes(&m, &plan, &s, BG_COMPUTE_F32, false);
    cr_expect_eq(b.weights, 4 * (values + table) + 4 * table + 4 * vectors);
    /* Two ranks: a half each, and the embeddings twice. */
    bg_memory_plan two = plan;
    two.tp = 2;
    const bg_shard half = shard(&m, 0, 2);
    const uint64_t of_two = bg_gpu_sizes(&m, &two, &half, BG_COMPUTE_NATIVE, true).weights;
    cr_expect_lt(of_two, 2 * (values + table) + 2 * table);
    cr_expect_geq(2 * of_two, 2 * (values + table) + 4 * table);
    bg_gguf_close(m.gguf);
}

Test(gpu_sizes, quantised_weights_are_smaller)
{
    bg_text_model m = opened("tests/golden/models/tiny-uneven.q4_k_m.gguf");
    const bg_shard s = shard(&m, 0, 1);
    const uint64_t tiles = bg_gpu_sizes(&m, &plan, &s, BG_COMPUTE_NATIVE, true).weights;
    const uint64_t halves = bg_gpu_sizes(&m, &plan, &s, BG_COMPUTE_NATIVE, false).weights;
    cr_expect_gt(tiles, s.weight_bytes);
    cr_expect_lt(tiles, halves);
    bg_gguf_close(m.gguf);
}

Test(gpu_sizes, buffers_follow_limits)
{
    bg_text_model m = opened("tests/golden/models/tiny-llama.q2_k.gguf");
    const bg_shard s = shard(&m, 0, 1);
    const uint64_t vocab = (uint64_t)m.desc.vocab_size;
    bg_memory_plan p = plan;
    const uint64_t one = bg_gpu_sizes(&m, &p, &s, BG_COMPUTE_NATIVE, true).buffers;
    p.max_model_len = 640;
    const uint64_t longer = bg_gpu_sizes(&m, &p, &s, BG_COMPUTE_NATIVE, true).buffers;
    cr_expect_eq(longer - one, 8 * (320 * 4 + 10 * 4)); /* histories and tables */
    p = plan;
    p.max_num_seqs = 16;
    const uint64_t more = bg_gpu_sizes(&m, &p, &s, BG_COMPUTE_NATIVE, true).buffers;
    cr_expect_gt(more - one, 8 * (vocab * 4 + 321 * 4)); /* logits */
    p = plan;
    p.max_step_tokens = 256;
    const uint64_t wide = bg_gpu_sizes(&m, &p, &s, BG_COMPUTE_NATIVE, true).buffers;
    cr_expect_gt(wide - one, 192 * 4 * 2 * (uint64_t)m.desc.d_model);
    bg_gguf_close(m.gguf);
}

/* A half of each weight of a linear, of widths filled up to 64; rows for the widest. */
Test(gpu_sizes, fast_math)
{
    bg_text_model m = opened("tests/golden/models/tiny-qwen3.f16.gguf");
    const bg_desc *d = &m.desc;
    const bg_shard s = shard(&m, 0, 1);
    const uint64_t q = (uint64_t)d->n_heads * (uint64_t)d->head_dim, model = (uint64_t)d->d_model;
    const uint64_t kv = (uint64_t)d->n_kv_heads * (uint64_t)d->head_dim, ff = (uint64_t)d->d_ff;
    const uint64_t values =
        (uint64_t)d->n_layers * (model * (q + 2 * kv) + q * model + 3 * model * ff);
    const bg_gpu_bytes b = bg_gpu_fast_sizes(&m, &plan, &s);
    cr_expect_eq(b.weights, 2 * (values + model * (uint64_t)d->vocab_size));
    bg_memory_plan p = plan;
    p.max_step_tokens += 100;
    cr_expect_eq(bg_gpu_fast_sizes(&m, &p, &s).buffers - b.buffers, 100 * (ff * 2 + 2 * ff * 2));
    const bg_shard half = shard(&m, 0, 2);
    bg_memory_plan two = plan;
    two.tp = 2;
    cr_expect_lt(bg_gpu_fast_sizes(&m, &two, &half).weights, b.weights);
    bg_gguf_close(m.gguf);
}

Test(gpu_sizes, budget)
{
    bg_gpu g = {.capability = 90, .total_bytes = UINT64_C(100) << 30};
    g.free_bytes = UINT64_C(99) << 30;
    cr_expect_eq(bg_gpu_budget(&g, 0.5), UINT64_C(50) << 30);
    g.free_bytes = UINT64_C(10) << 30; /* others have the rest */
    cr_expect_eq(bg_gpu_budget(&g, 0.5), (UINT64_C(10) << 30) - (UINT64_C(256) << 20));
    g.free_bytes = 1;
    cr_expect_eq(bg_gpu_budget(&g, 0.5), 0);
    cr_expect(bg_gpu_tiled(&g, BG_COMPUTE_NATIVE));
    cr_expect_not(bg_gpu_tiled(&g, BG_COMPUTE_F32));
    g.capability = 100;
    cr_expect_not(bg_gpu_tiled(&g, BG_COMPUTE_NATIVE));
}
