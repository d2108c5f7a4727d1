/* The same model in another form must give the same bits: tensors listed and stored in any order,
 * q, k and v fused in the file, a split model opened from any of its parts. And what loading
 * promises. */
#include <criterion/criterion.h>

#include "harness.h"
#include "rewrite.h"

#define DIR "tests/golden/models/"

static seq sequence(int n, int32_t *tokens)
{
    seq s = {.name = "tokens", .n_prompt = n, .n = n, .tokens = tokens};
    for (int i = 0; i < n; i++)
        tokens[i] = (int32_t)(bg_mix64((uint64_t)i) % 600);
    return s;
}

static void compare_files(const char *path, const char *other, bg_compute compute, int tp)
{
    int32_t tokens[90];
    const seq s = sequence(90, tokens);
    char where[64];
    bg_error err = {0};
    run a = {.path = path, .compute = compute, .cache = BG_CACHE_F32, .tp = tp, .n_seqs = 1};
    a.seqs = &s;
    a.plan = PLAN_CHUNKS;
    run b = a;
    b.path = other;
    cr_assert(!run_model(&a, &err), "%s: %s", path, err.text);
    cr_assert(!run_model(&b, &err), "%s: %s", other, err.text);
    cr_expect(!differ(&a, &b, where, sizeof where), "%s, tp %d: other bits at %s", path, tp, where);
    cr_expect_eq(a.desc.n_params, b.desc.n_params);
    cr_expect_eq(bg_macs_per_token(&a.desc), bg_macs_per_token(&b.desc));
    cr_expect_eq(b.desc.n_unused, 0, "%s", b.desc.unused_name);
    run_free(&a);
    run_free(&b);
}

static void compare_rewritten(const char *path, rewrite r)
{
    bg_error err = {0};
    bg_gguf *g = NULL;
    char changed[64];
    cr_assert(!bg_gguf_open(&g, path, &err), "%s", err.text);
    cr_assert(!rewrite_file(g, &r, changed, &err), "%s", err.text);
    bg_gguf_close(g);
    for (int tp = 1; tp <= 3; tp += 2) {
        compare_files(path, changed, BG_COMPUTE_F32, tp);
        compare_files(path, changed, BG_COMPUTE_NATIVE, tp);
    }
    unlink(changed);
}

Test(variants, shuffled_tensors)
{
    for (uint64_t seed = 1; seed <= 2; seed++) {
        compare_rewritten(DIR "tiny-llama.q2_k.gguf", (rewrite){.shuffle = seed});
        compare_rewritten(DIR "tiny-qwen2.f16.gguf", (rewrite){.shuffle = seed});
        compare_rewritten(DIR "tiny-gemma3.f16.gguf", (rewrite){.shuffle = seed});
        compare_rewritten(DIR "tiny-dsv3.q8_0.gguf", (rewrite){.shuffle = seed});
        compare_rewritten(DIR "tiny-dsa.q8_0.gguf", (rewrite){.shuffle = seed});
        compare_rewritten(DIR "tiny-gpt-oss.mxfp4.gguf", (rewrite){.shuffle = seed});
    }
}

/* The two forms of files with latent attention: attn_kv_b, or attn_k_b and attn_v_b. */
Test(variants, split_kv_b)
{
#define V2 "deepseek2.attention."
    const edit edits[] = {INT(V2 "key_length", 96),     INT(V2 "value_length", 64),
                          INT(V2 "key_length_mla", 64), INT(V2 "value_length_mla", 32),
                          INT(V2 "head_count_kv", 1),   EDITS_END};
    compare_rewritten(DIR "tiny-v2.legacy.gguf", (rewrite){.edits = edits, .split_kv_b = 32});
}

Test(variants, fused_experts)
{
    compare_rewritten(DIR "tiny-qwen3moe.q8_0.gguf", (rewrite){.fuse_experts = true});
    compare_rewritten(DIR "tiny-glm4moe.q5_0.gguf", (rewrite){.fuse_experts = true, .shuffle = 3});
    compare_rewritten(DIR "tiny-gpt-oss.mxfp4.gguf", (rewrite){.fuse_experts = true});
}

Test(variants, fused_qkv)
{
    compare_rewritten(DIR "tiny-qwen2.f16.gguf", (rewrite){.fuse_qkv = true});
    compare_rewritten(DIR "tiny-qwen3.f16.gguf", (rewrite){.fuse_qkv = true, .shuffle = 5});
    compare_rewritten(DIR "tiny-gemma3.f16.gguf", (rewrite){.fuse_qkv = true});
    compare_rewritten(DIR "tiny-glm4moe.q5_0.gguf", (rewrite){.fuse_qkv = true});
}

/* Where a run cannot be longer than what the indexer chooses, there is none: the same results, and
 * nothing held for it. */
Test(variants, no_indexer_in_short_runs)
{
    int32_t tokens[40];
    const seq s = sequence(40, tokens); /* as many as it chooses */
    bg_error err = {0};
    bg_gguf *g = NULL;
    bg_desc d, small;
    bg_shard with, without;
    run a = {.path = DIR "tiny-dsa.q8_0.gguf", .compute = BG_COMPUTE_F32, .cache = BG_CACHE_F32};
    a.n_seqs = 1;
    a.seqs = &s;
    run b = a;
    b.max_ctx = 40;
    cr_assert(!run_model(&a, &err), "%s", err.text);
    cr_assert(!run_model(&b, &err), "%s", err.text);
    const double e = nmse(b.logits[0], a.logits[0], 40 * a.desc.vocab_size);
    cr_expect(e < 1e-11, "NMSE %.3g", e);
    run_free(&a);
    run_free(&b);

    cr_assert(!bg_gguf_open(&g, DIR "tiny-dsa.q8_0.gguf", &err), "%s", err.text);
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    small = d;
    bg_desc_limit(&d, 41);
    bg_desc_limit(&small, 40);
    cr_assert(!bg_shard_plan(&with, &d, g, 0, 1, &err));
    cr_assert(!bg_shard_plan(&without, &small, g, 0, 1, &err));
    cr_expect(without.weight_bytes < with.weight_bytes);
    cr_expect_eq(bg_kv_bytes_per_token(&d, &with, BG_CACHE_F16), 2 * (96 + 64) * 2);
    cr_expect_eq(bg_kv_bytes_per_token(&small, &without, BG_CACHE_F16), 2 * 96 * 2);
    cr_expect(bg_macs_per_token(&small) < bg_macs_per_token(&d));
    bg_gguf_close(g);
}

Test(variants, split_opened_from_any_part)
{
    compare_files(DIR "tiny-llama.q5_k_m.split-00001-of-00003.gguf",
                  DIR "tiny-llama.q5_k_m.split-00002-of-00003.gguf", BG_COMPUTE_F32, 1);
    compare_files(DIR "tiny-llama.q5_k_m.split-00001-of-00003.gguf",
                  DIR "tiny-llama.q5_k_m.split-00003-of-00003.gguf", BG_COMPUTE_NATIVE, 2);
}

/* Biases of split sums must be added once, whatever the number of ranks. */
Test(variants, biases_everywhere)
{
    int32_t tokens[90];
    const seq s = sequence(90, tokens);
    char changed[64];
    bg_error err = {0};
    bg_gguf *g = NULL;
    rewrite r = {.add_biases = true};
    cr_assert(!bg_gguf_open(&g, DIR "tiny-uneven.q4_k_m.gguf", &err), "%s", err.text);
    cr_assert(!rewrite_file(g, &r, changed, &err), "%s", err.text);
    bg_gguf_close(g);
    run a = {.path = changed, .compute = BG_COMPUTE_F32, .cache = BG_CACHE_F32, .n_seqs = 1};
    a.seqs = &s;
    a.plan = PLAN_CHUNKS;
    run plain = a;
    plain.path = DIR "tiny-uneven.q4_k_m.gguf";
    cr_assert(!run_model(&a, &err), "%s", err.text);
    cr_assert(!run_model(&plain, &err), "%s", err.text);
    cr_expect_eq(a.desc.n_unused, 0);
    cr_expect(nmse(a.logits[0], plain.logits[0], 90 * 1027) > 0.1, "the biases did nothing");
    for (int tp = 2; tp <= 8; tp += 3) {
        run b = a;
        b.tp = tp;
        cr_assert(!run_model(&b, &err), "%s", err.text);
        const double e = nmse(b.logits[0], a.logits[0], 90 * 1027);
        cr_expect(e < 1e-10, "tp %d: NMSE %.3g", tp, e);
        run_free(&b);
    }
    run_free(&a);
    run_free(&plain);
    unlink(changed);
}

/* ---- loading -------------------------------------------------------------------------------- */

typedef struct reports {
    int n;
    uint64_t last, total;
    bool backwards;
} reports;

static void on_progress(void *ctx, uint64_t done, uint64_t total)
{
    reports *r = ctx;
    r->backwards = r->backwards || done < r->last;
    r->last = done;
    r->total = total;
    r->n++;
}

Test(variants, progress_goes_to_the_end)
{
    bg_error err = {0};
    bg_gguf *g = NULL;
    bg_desc d;
    bg_shard s;
    bg_backend *b = NULL;
    bg_model *m = NULL;
    reports seen = {0};
    cr_assert(!bg_gguf_open(&g, DIR "tiny-qwen2.f16.gguf", &err), "%s", err.text);
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    cr_assert(!bg_shard_plan(&s, &d, g, 1, 3, &err), "%s", err.text);
    const bg_backend_config c = {.compute = BG_COMPUTE_F32,
                                 .n_threads = 1,
                                 .first_cpu = -1,
                                 .max_tokens = 8,
                                 .max_seqs = 2,
                                 .max_out = 2,
                                 .max_ctx = 32,
                                 .vocab_size = d.vocab_size};
    cr_assert(!bg_cpu_backend_new(&b, &c, &err), "%s", err.text);
    const bg_model_config mc = {.rank = 1,
                                .tp = 3,
                                .n_blocks = 4,
                                .block_tokens = 16,
                                .cache_type = BG_CACHE_F32,
                                .backend = &c,
                                .progress = on_progress,
                                .ctx = &seen};
    cr_assert(!bg_model_load(&m, g, &d, b, &mc, &err), "%s", err.text);
    cr_expect(seen.n > 10 && !seen.backwards);
    cr_expect_eq(seen.total, s.weight_bytes);
    cr_expect_eq(seen.last, s.weight_bytes);
    cr_expect(bg_act_bytes(&d, &s, &c) > 8 * 128 * 3 * 4);
    bg_model_free(m);
    bg_backend_free(b);
    bg_gguf_close(g);
}
