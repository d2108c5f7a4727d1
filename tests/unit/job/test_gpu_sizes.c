/* What a rank is expected to take of a GPU's memory. */
#include "job/gpu_sizes.h"

#include <string.h>

#include <criterion/criterion.h>

static bg_text_model opened(const char *path)
{
    bg_text_model m = {0};
    bg_error err = {0};
    cr_assert_eq(bg_gguf_open_header(&m.gguf, path, &err), BG_OK, "%s", err.text);
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
    const uint64_t rows =
        (uint64_t)d->n_layers * (q + 2 * kv + 2 * model + 2 * ff) + (uint64_t)d->vocab_size;
    bg_gpu_bytes b = bg_gpu_sizes(&m, &plan, &s, BG_COMPUTE_NATIVE, true);
    cr_expect_eq(b.weights, 2 * (values + table) + 2 * table + 4 * vectors + rows / 64 * 280,
                 "%llu", (unsigned long long)b.weights);
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

static uint64_t chunks(int64_t n, int64_t rows, int64_t k, uint64_t chunk)
{
    const int64_t tiles = (rows + 63) / 64;
    return (uint64_t)n * (uint64_t)tiles * ((uint64_t)((k + 63) / 64) * chunk + 64 * 4 + 24);
}

/* Stacks: each expert and each head has tiles of its own; a router is two halves a value; what is
 * not used counts nothing. 8 experts of 288 by 256 in MXFP4, of which the first of three ranks has
 * 64 columns; attention in Q5_0, its output and v (some layers) in Q8_0. */
Test(gpu_sizes, experts_in_tiles)
{
    bg_text_model m = opened("tests/golden/headers/tiny-gpt-oss.gguf");
    bg_memory_plan p = plan;
    p.tp = 3;
    const bg_shard s = shard(&m, 0, 3);
    cr_assert_eq(s.n_ffe, 64);
    cr_assert_eq(s.n_heads, 4);
    const uint64_t experts = 2 * (2 * chunks(8, 64, 288, 4352) + chunks(8, 288, 64, 4352));
    const uint64_t expert_bias = 2 * 4 * 8 * (64 + 64 + 288);
    const uint64_t router = 2 * (2 * chunks(1, 8, 288, 8192) + 4 * 8); /* both halves */
    bg_text_model none = m;
    none.desc.n_experts = 0; /* then tensors of experts are of no use */
    const uint64_t with = bg_gpu_sizes(&m, &p, &s, BG_COMPUTE_NATIVE, true).weights;
    const uint64_t without = bg_gpu_sizes(&none, &p, &s, BG_COMPUTE_NATIVE, true).weights;
    cr_expect_eq(with - without, experts + expert_bias + router, "%llu, not %llu",
                 (unsigned long long)(with - without),
                 (unsigned long long)(experts + expert_bias + router));
    bg_gguf_close(m.gguf);
}

/* Beside steps: rows of experts for each token and choice, with an indexer the keys it chose. */
Test(gpu_sizes, experts_and_indexer_at_work)
{
    bg_text_model m = opened("tests/golden/headers/tiny-glm-dsa.gguf");
    const bg_shard s = shard(&m, 0, 1);
    cr_assert(s.merged);
    bg_memory_plan p = plan;
    const uint64_t few = bg_gpu_sizes(&m, &p, &s, BG_COMPUTE_NATIVE, true).buffers;
    p.max_step_tokens += 1024;
    const uint64_t many = bg_gpu_sizes(&m, &p, &s, BG_COMPUTE_NATIVE, true).buffers;
    const uint64_t of_experts = 3 * (6 * 256 + 2 * 256), of_index = 16 * 128 * 4 + 64 * 4 + 320 * 4;
    cr_expect_gt(many - few, 1024 * (of_experts + of_index));
    bg_text_model dense = m;
    bg_desc_limit(&dense.desc, 64);
    const uint64_t without = bg_gpu_sizes(&dense, &p, &s, BG_COMPUTE_NATIVE, true).buffers;
    cr_expect_gt(many - without, 1024 * of_index);
    const bg_gpu_bytes all = bg_gpu_sizes(&m, &p, &s, BG_COMPUTE_NATIVE, true);
    const bg_gpu_bytes limited = bg_gpu_sizes(&dense, &p, &s, BG_COMPUTE_NATIVE, true);
    cr_expect_gt(all.weights, limited.weights);
    bg_gguf_close(m.gguf);
}

/* Of attn_kv_b: k_b of each head, 512 by 128 as halves, and v_b, 128 by 512 in its own form. */
Test(gpu_sizes, kv_b_is_taken_apart)
{
    bg_text_model m = opened("tests/golden/headers/tiny-v2-lite.kv_b.gguf");
    const bg_shard s = shard(&m, 0, 1), half = shard(&m, 0, 2);
    const uint64_t all = bg_gpu_sizes(&m, &plan, &s, BG_COMPUTE_NATIVE, true).weights;
    bg_shard no_heads = s;
    no_heads.n_heads = 0;
    const uint64_t others = bg_gpu_sizes(&m, &plan, &no_heads, BG_COMPUTE_NATIVE, true).weights;
    const uint64_t heads = 2 * (chunks(8, 512, 128, 8192) + chunks(8, 128, 512, 2560) +
                                chunks(1, 8 * 192, 256, 2560) + chunks(1, 256, 8 * 128, 2560));
    cr_expect_eq(all - others, heads, "%llu, not %llu", (unsigned long long)(all - others),
                 (unsigned long long)heads);
    const uint64_t of_half = bg_gpu_sizes(&m, &plan, &half, BG_COMPUTE_NATIVE, true).weights;
    cr_expect_lt(of_half, all);
    cr_expect_eq(bg_kv_bytes_per_token(&m.desc, &half, BG_CACHE_F16), 2 * 576 * 2);
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
