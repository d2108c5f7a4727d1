/* Hyper-parameters, tensors and plans: what is read, what is refused, and that the ranks of a plan
 * hold everything once. */
#include <math.h>

#include <criterion/criterion.h>

#include "model/arch.h"
#include "rewrite.h"

#define DIR "tests/golden/models/"

static bg_gguf *open_model(const char *path)
{
    bg_error err = {0};
    bg_gguf *g = NULL;
    cr_assert(!bg_gguf_open(&g, path, &err), "%s", err.text);
    return g;
}

/* Reads the description of a changed file. */
static bg_status read_changed(const char *path, rewrite r, bg_desc *d, bg_error *err)
{
    char changed[64];
    bg_gguf *g = open_model(path), *h = NULL;
    cr_assert(!rewrite_file(g, &r, changed, err), "%s", err->text);
    bg_status st = bg_gguf_open(&h, changed, err);
    if (!st) st = bg_desc_read(d, h, err);
    bg_gguf_close(h);
    bg_gguf_close(g);
    unlink(changed);
    return st;
}

Test(desc, values)
{
    bg_error err = {0};
    bg_desc d;
    bg_gguf *g = open_model(DIR "tiny-gemma3.f16.gguf");
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    cr_expect_str_eq(d.arch_name, "gemma3");
    cr_expect(d.n_layers == 3 && d.d_model == 128 && d.d_ff == 512 && d.vocab_size == 1024);
    cr_expect(d.n_heads == 2 && d.n_kv_heads == 1 && d.head_dim == 256 && d.v_dim == 256);
    cr_expect(d.tied && d.rope_neox && d.act_fn == BG_GELU_TANH && d.n_unused == 0);
    cr_expect_float_eq(d.attn_scale, 1.0f / 16, 1e-9);
    cr_expect_float_eq(d.embed_scale, 11.3137085f, 1e-6);
    cr_expect_float_eq(d.rope_scale, 0.125f, 0);
    cr_expect(d.rope_scale_swa == 1 && d.rope_base == 1e6f && d.rope_base_swa == 1e4f);
    cr_expect(d.window == 64 && bg_layer_windowed(&d, 0) && bg_layer_windowed(&d, 1) &&
              !bg_layer_windowed(&d, 2));
    cr_expect_eq(d.n_params, 1313920);
    bg_shard s;
    cr_expect(!bg_shard_plan(&s, &d, g, 0, 1, &err));
    cr_expect_eq(bg_kv_bytes_per_token(&d, &s, BG_CACHE_F16), 3 * 512 * 2);
    cr_expect_eq(bg_macs_per_token(&d), 1310720);
    bg_gguf_close(g);

    g = open_model(DIR "tiny-llama.q2_k.gguf");
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    cr_expect(!d.tied && !d.rope_neox && d.act_fn == BG_SILU && d.embed_scale == 1);
    cr_expect(d.window == 0 && !bg_layer_windowed(&d, 0) && d.n_unused == 0);
    bg_gguf_close(g);
}

Test(desc, names_what_it_refuses)
{
    static const uint32_t uneven[] = {2, 1}, one[] = {2};
#define QWEN3 "qwen3."
    static const struct {
        edit e;
        bg_status st;
        const char *word;
    } bad[] = {
        {TEXT("general.architecture", "phi3"), BG_ARG, "llama, qwen2, qwen3, gemma3"},
        {DEL("general.architecture"), BG_FORMAT, "general.architecture"},
        {INT("general.architecture", 3), BG_FORMAT, "general.architecture"},
        {DEL(QWEN3 "block_count"), BG_FORMAT, "block_count is missing"},
        {INT(QWEN3 "block_count", 0), BG_FORMAT, "block_count is 0"},
        {INT(QWEN3 "block_count", 513), BG_FORMAT, "block_count is 513"},
        {INT(QWEN3 "block_count", 3), BG_FORMAT, "blk.2.attn_norm.weight is missing"},
        {TEXT(QWEN3 "block_count", "2"), BG_FORMAT, "not an integer"},
        {INT(QWEN3 "nextn_predict_layers", 2), BG_FORMAT, "nextn_predict_layers"},
        {DEL(QWEN3 "context_length"), BG_FORMAT, "context_length"},
        {INT(QWEN3 "embedding_length", 4294967295), BG_FORMAT, "embedding_length"},
        {INT(QWEN3 "embedding_length", 0), BG_FORMAT, "embedding_length"},
        {INT(QWEN3 "embedding_length", 256), BG_FORMAT, "token_embd.weight is [128, 1024"},
        {INT(QWEN3 "feed_forward_length", 0), BG_FORMAT, "feed_forward_length"},
        {INT(QWEN3 "attention.head_count", 0), BG_FORMAT, "head_count"},
        {DEL(QWEN3 "attention.head_count"), BG_FORMAT, "head_count is missing"},
        {INT(QWEN3 "attention.head_count_kv", 0), BG_FORMAT, "head_count_kv"},
        {INT(QWEN3 "attention.head_count_kv", 3), BG_FORMAT, "no multiple of 3"},
        {INT(QWEN3 "attention.head_count_kv", 1), BG_FORMAT, "attn_k.weight"},
        {LIST(QWEN3 "attention.head_count_kv", 2, uneven), BG_ARG, "between layers"},
        {LIST(QWEN3 "attention.head_count_kv", 1, one), BG_FORMAT, "1 values for 2"},
        {INT(QWEN3 "attention.key_length", 1), BG_FORMAT, "key_length"},
        {INT(QWEN3 "attention.key_length", 1 << 30), BG_FORMAT, "key_length"},
        {DEL(QWEN3 "attention.key_length"), BG_FORMAT, "dimension_count"},
        {INT(QWEN3 "rope.dimension_count", 63), BG_FORMAT, "odd"},
        {INT(QWEN3 "rope.dimension_count", 130), BG_FORMAT, "dimension_count"},
        {NUM(QWEN3 "rope.freq_base", NAN), BG_FORMAT, "freq_base"},
        {NUM(QWEN3 "rope.freq_base", -1), BG_FORMAT, "freq_base"},
        {TEXT(QWEN3 "rope.scaling.type", "ntk"), BG_ARG, "ntk"},
        {NUM(QWEN3 "rope.scaling.factor", -2), BG_FORMAT, "factor"},
        {DEL(QWEN3 "attention.layer_norm_rms_epsilon"), BG_FORMAT, "epsilon is missing"},
        {NUM(QWEN3 "attention.layer_norm_rms_epsilon", INFINITY), BG_FORMAT, "epsilon"},
        {FLAG(QWEN3 "attention.causal", 0), BG_ARG, "causal"},
        {INT(QWEN3 "expert_count", 8), BG_ARG, "mixture of experts"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const edit edits[] = {bad[i].e, EDITS_END};
        bg_error err = {0};
        bg_desc d;
        const bg_status st =
            read_changed(DIR "tiny-qwen3.f16.gguf", (rewrite){.edits = edits}, &d, &err);
        cr_expect(st == bad[i].st && strstr(err.text, bad[i].word), "%s: %s \"%s\", wanted \"%s\"",
                  bad[i].e.key, bg_status_name(st), err.text, bad[i].word);
    }
}

Test(desc, experts_and_latent_attention)
{
    bg_error err = {0};
    bg_desc d;
    bg_shard s;
    bg_gguf *g = open_model(DIR "tiny-dsv3.q8_0.gguf");
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    cr_expect(d.n_layers == 2 && d.n_experts == 16 && d.n_used == 4 && d.n_shared == 1 &&
              d.n_dense == 1 && d.d_ff_expert == 128 && d.d_ff_shared == 128 && d.d_ff == 160);
    cr_expect(d.n_groups == 4 && d.n_groups_used == 2 && d.gating == BG_GATING_SIGMOID &&
              d.renormalise && d.expert_scale == 2.5f);
    cr_expect(d.kv_rank == 64 && d.q_rank == 96 && d.nope == 32 && d.n_rot == 32 &&
              d.head_dim == 64 && d.v_dim == 64 && d.n_heads == 3 && !d.kv_b && !d.rope_neox);
    cr_expect(!bg_layer_moe(&d, 0) && bg_layer_moe(&d, 1) && d.n_unused == 0);
    /* Factor 40 and a log multiplier of 1: (1 + 0.1 ln 40)^2 / 8 */
    cr_expect_float_eq(d.attn_scale, 1.3688879 * 1.3688879 / 8, 1e-6);
    cr_assert(!bg_shard_plan(&s, &d, g, 2, 3, &err), "%s", err.text);
    cr_expect(s.head0 == 2 && s.n_heads == 1 && s.n_kv_heads == 1);
    /* Each layer holds 64 + 32 values; in 8 bits 64 of them, and their scale. */
    cr_expect_eq(bg_kv_bytes_per_token(&d, &s, BG_CACHE_BF16), 2 * 96 * 2);
    cr_expect_eq(bg_kv_bytes_per_token(&d, &s, BG_CACHE_F32), 2 * 96 * 4);
    cr_expect_eq(bg_kv_bytes_per_token(&d, &s, BG_CACHE_Q8), 2 * (64 + 32 * 2 + 4));
    const uint64_t attention = 96 * (96 + 96) + 96 * 3 * 64 + 3 * 64 * 96 + 3 * 64 * 96;
    const uint64_t dense = 3 * 96 * 160, experts = 96 * 16 + 3 * 96 * 128 * 5;
    cr_expect_eq(bg_macs_per_token(&d), 2 * attention + dense + experts + 96 * 600);
    bg_gguf_close(g);

    g = open_model(DIR "tiny-v2.legacy.gguf");
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    cr_expect(d.kv_b && d.q_rank == 0 && d.n_kv_heads == 1 && d.kv_rank == 64 && d.nope == 32 &&
              d.v_dim == 32 && d.gating == BG_GATING_SOFTMAX && !d.renormalise);
    /* The log multiplier of V2-Lite. */
    cr_expect_float_eq(d.attn_scale, 1.2608 * 1.2608 / 8, 1e-4);
    bg_gguf_close(g);

    g = open_model(DIR "tiny-dsa.q8_0.gguf");
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    cr_expect(d.n_layers == 2 && d.n_mtp == 1 && d.n_unused == 0 && d.index_heads == 24 &&
              d.index_dim == 64 && d.index_top_k == 40);
    cr_expect(bg_layer_indexed(&d, 0) && bg_layer_indexed(&d, 1));
    uint64_t mtp = 0, held = 0;
    for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
        bg_part part;
        const bg_tensor *t = bg_gguf_tensor(g, i);
        cr_assert(!bg_shard_plan(&s, &d, g, 0, 1, &err));
        if (strncmp(t->cname, "blk.2.", 6) == 0) mtp += t->bytes;
        if (bg_shard_part(&s, &d, g, t, &part)) {
            held += t->bytes;
            cr_expect(part.cols == t->ne[0] && part.rows == t->ne[1] && part.n == t->ne[2], "%s",
                      t->cname);
        }
    }
    cr_expect(mtp > 0);
    cr_expect_eq(held, d.weight_bytes);
    bg_gguf_close(g);

    g = open_model(DIR "tiny-gpt-oss.mxfp4.gguf");
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    cr_expect(d.d_ff == 0 && d.gating == BG_GATING_SOFTMAX_CHOSEN && !d.renormalise &&
              d.act_fn == BG_SWIGLU_CLAMP && d.rope_neox && !d.rope_swa_own);
    cr_expect(bg_layer_windowed(&d, 0) && !bg_layer_windowed(&d, 1));
    bg_gguf_close(g);
}

typedef struct refusal {
    edit e;
    bg_status st;
    const char *word;
} refusal;

static void refuse(const char *path, const refusal *bad, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const edit edits[] = {bad[i].e, EDITS_END};
        bg_error err = {0};
        bg_desc d;
        const bg_status st = read_changed(path, (rewrite){.edits = edits}, &d, &err);
        cr_expect(st == bad[i].st && strstr(err.text, bad[i].word), "%s: %s \"%s\", wanted \"%s\"",
                  bad[i].e.key, bg_status_name(st), err.text, bad[i].word);
    }
}

Test(desc, names_what_it_refuses_of_experts)
{
#define DS "deepseek2."
    static const refusal dsv3[] = {
        {INT(DS "expert_count", 513), BG_FORMAT, "expert_count is 513"},
        {INT(DS "expert_count", 8), BG_FORMAT, "ffn_gate_inp.weight is [96, 16"},
        {INT(DS "expert_used_count", 0), BG_FORMAT, "expert_used_count is 0"},
        {INT(DS "expert_used_count", 17), BG_FORMAT, "expert_used_count is 17"},
        {DEL(DS "expert_used_count"), BG_FORMAT, "expert_used_count is missing"},
        {INT(DS "expert_used_count", 9), BG_FORMAT, "9 experts are used"},
        {INT(DS "expert_group_count", 5), BG_FORMAT, "no multiple of 5 groups"},
        {INT(DS "expert_group_used_count", 4), BG_FORMAT, "expert_group_used_count is 4"},
        {INT(DS "expert_group_used_count", 0), BG_FORMAT, "expert_group_used_count is 0"},
        {INT(DS "expert_gating_func", 4), BG_ARG, "expert_gating_func is 4"},
        {INT(DS "expert_feed_forward_length", 32), BG_FORMAT, "ffn_gate_exps.weight is [96, 128"},
        {DEL(DS "expert_feed_forward_length"), BG_FORMAT, "expert_feed_forward_length is missing"},
        {INT(DS "expert_shared_count", 2), BG_FORMAT, "shexp"},
        {INT(DS "expert_shared_count", 500), BG_FORMAT, "shexp"},
        {NUM(DS "expert_weights_scale", NAN), BG_FORMAT, "expert_weights_scale"},
        {INT(DS "leading_dense_block_count", 2), BG_FORMAT, "blk.1.ffn_gate.weight is missing"},
        {INT(DS "leading_dense_block_count", 0), BG_FORMAT, "blk.0.ffn_gate_inp.weight is missing"},
        {DEL(DS "attention.kv_lora_rank"), BG_FORMAT, "kv_lora_rank is missing"},
        {INT(DS "attention.kv_lora_rank", 128), BG_FORMAT, "key_length and value_length"},
        {DEL(DS "attention.q_lora_rank"), BG_FORMAT, "q_lora_rank is missing"},
        {INT(DS "attention.q_lora_rank", 128), BG_FORMAT, "attn_q_a"},
        {INT(DS "attention.key_length_mla", 32), BG_FORMAT, "none are left"},
        {DEL(DS "attention.value_length_mla"), BG_FORMAT, "value_length_mla is missing"},
        {INT(DS "attention.value_length_mla", 32), BG_FORMAT, "attn_output.weight is [192"},
        {DEL(DS "rope.dimension_count"), BG_FORMAT, "dimension_count is missing"},
        {INT(DS "rope.dimension_count", 31), BG_FORMAT, "odd"},
        {NUM(DS "attention.temperature_scale", 0.1), BG_ARG, "temperature_scale"},
        {TEXT("general.architecture", "gptoss"), BG_ARG, "gpt-oss"},
    };
    static const uint32_t no_first[] = {0, 1, 1}, short_list[] = {1};
#define GD "glm-dsa."
    static const refusal dsa[] = {
        {DEL(GD "attention.indexer.top_k"), BG_FORMAT, "top_k is missing"},
        {INT(GD "attention.indexer.top_k", 0), BG_FORMAT, "top_k is 0"},
        {INT(GD "attention.indexer.head_count", 16), BG_FORMAT, "indexer"},
        {INT(GD "attention.indexer.key_length", 16), BG_FORMAT, "key_length is 16"},
        {LIST(GD "attention.indexer.types", 3, no_first), BG_FORMAT, "first layer"},
        {LIST(GD "attention.indexer.types", 1, short_list), BG_FORMAT, "1 values for 2"},
        {DEL(GD "expert_count"), BG_FORMAT, "expert_count is missing"},
        {INT(GD "nextn_predict_layers", 3), BG_FORMAT, "nextn_predict_layers"},
    };
    refuse(DIR "tiny-dsv3.q8_0.gguf", dsv3, sizeof dsv3 / sizeof *dsv3);
    refuse(DIR "tiny-dsa.q8_0.gguf", dsa, sizeof dsa / sizeof *dsa);
}

Test(desc, tensors_of_experts)
{
    static const struct {
        const char *path, *drop, *rename, *to;
        bg_status st;
        const char *word;
    } cases[] = {
#define DSV3 DIR "tiny-dsv3.q8_0.gguf"
#define DSA  DIR "tiny-dsa.q8_0.gguf"
        {DSV3, "blk.1.ffn_down_exps.weight", NULL, NULL, BG_FORMAT,
         "blk.1.ffn_down_exps.weight is"},
        {DSV3, "blk.0.attn_k_b.weight", NULL, NULL, BG_FORMAT, "blk.0.attn_k_b.weight is missing"},
        {DSV3, "blk.1.attn_kv_a_norm.weight", NULL, NULL, BG_FORMAT, "attn_kv_a_norm.weight is"},
        {DSV3, NULL, "blk.0.attn_q_b.weight", "blk.0.attn_q.weight", BG_FORMAT, "another form"},
        {DSA, "blk.1.exp_probs_b.bias", NULL, NULL, BG_FORMAT, "blk.1.exp_probs_b.bias is missing"},
        {DSA, "blk.1.indexer.proj.weight", NULL, NULL, BG_FORMAT, "indexer.proj.weight is missing"},
        {DIR "tiny-gpt-oss.mxfp4.gguf", "blk.0.attn_sinks.weight", NULL, NULL, BG_FORMAT, "sinks"},
        {DIR "tiny-glm4.q5_0.gguf", NULL, "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight", BG_FORMAT,
         "blk.0.ffn_up.weight is missing"},
        {DIR "tiny-mixtral.q5_0.gguf", NULL, "blk.0.ffn_gate_exps.weight",
         "blk.0.ffn_gate.0.weight", BG_ARG, "one tensor for each expert"},
        /* V2 has no bias for the choice. */
        {DSV3, "blk.1.exp_probs_b.bias", NULL, NULL, BG_OK, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bg_error err = {0};
        bg_desc d;
        const bg_status st = read_changed(
            cases[i].path,
            (rewrite){.drop_tensor = cases[i].drop, .rename = cases[i].rename, .to = cases[i].to},
            &d, &err);
        cr_expect(st == cases[i].st && strstr(err.text, cases[i].word), "case %zu: %s \"%s\"", i,
                  bg_status_name(st), err.text);
    }
    /* A layer without an indexer of its own may hold one's tensors: they are not used. */
    static const uint32_t types[] = {1, 0};
    const edit edits[] = {LIST("glm-dsa.attention.indexer.types", 2, types), EDITS_END};
    bg_error err = {0};
    bg_desc d, all;
    cr_assert(!read_changed(DSA, (rewrite){.edits = NULL}, &all, &err), "%s", err.text);
    cr_assert(!read_changed(DSA, (rewrite){.edits = edits}, &d, &err), "%s", err.text);
    cr_expect(bg_layer_indexed(&d, 0) && !bg_layer_indexed(&d, 1) && d.n_unused == 0);
    cr_expect(d.weight_bytes < all.weight_bytes);
    const edit ctx[] = {INT("glm-dsa.context_length", 1 << 20), EDITS_END};
    cr_assert(!read_changed(DSA, (rewrite){.edits = ctx}, &d, &err), "%s", err.text);
    cr_expect(bg_layer_indexed(&d, 0) && bg_layer_indexed(&d, 1) && !bg_layer_indexed(&d, 3));
}

Test(desc, tensors)
{
    bg_error err = {0};
    bg_desc d;
    bg_status st = read_changed(DIR "tiny-qwen3.f16.gguf",
                                (rewrite){.drop_tensor = "blk.1.attn_k_norm.weight"}, &d, &err);
    cr_expect(st == BG_FORMAT && strstr(err.text, "blk.1.attn_k_norm.weight is missing"), "%s",
              err.text);
    err = (bg_error){0};
    st = read_changed(DIR "tiny-llama.q2_k.gguf",
                      (rewrite){.rename = "rope_freqs.weight", .to = "blk.0.surprise.weight"}, &d,
                      &err);
    cr_expect(!st, "%s", err.text);
    cr_expect_eq(d.n_unused, 1);
    cr_expect_str_eq(d.unused_name, "blk.0.surprise.weight");
    /* A layer number in another spelling is another name. */
    st = read_changed(DIR "tiny-llama.q2_k.gguf",
                      (rewrite){.rename = "rope_freqs.weight", .to = "blk.00.attn_norm.weight"}, &d,
                      &err);
    cr_expect(!st && d.n_unused == 1, "%s", err.text);
    st = read_changed(DIR "tiny-qwen2.f16.gguf",
                      (rewrite){.rename = "blk.0.attn_q.bias", .to = "blk.0.attn_qkv.bias"}, &d,
                      &err);
    cr_expect(st == BG_FORMAT, "%s", err.text);
}

Test(desc, windows)
{
    static const uint32_t list[] = {0, 1, 0};
    static const struct {
        edit e;
        const char *windowed; /* by layer */
    } cases[] = {
        {INT("gemma3.attention.sliding_window_pattern", 0), "111"},
        {INT("gemma3.attention.sliding_window_pattern", 1), "000"},
        {INT("gemma3.attention.sliding_window_pattern", 2), "101"},
        {DEL("gemma3.attention.sliding_window_pattern"), "111"}, /* 6 */
        {LIST("gemma3.attention.sliding_window_pattern", 3, list), "010"},
        {INT("gemma3.attention.sliding_window", 0), "000"},
        {DEL("gemma3.attention.sliding_window"), "000"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const edit edits[] = {cases[i].e, EDITS_END};
        bg_error err = {0};
        bg_desc d;
        cr_assert(!read_changed(DIR "tiny-gemma3.f16.gguf", (rewrite){.edits = edits}, &d, &err),
                  "%s", err.text);
        for (int l = 0; l < 3; l++)
            cr_expect_eq(bg_layer_windowed(&d, l), cases[i].windowed[l] == '1',
                         "case %zu, layer %d", i, l);
    }
}

/* ---- rotation ------------------------------------------------------------------------------- */

static bg_desc rope_desc(void)
{
    return (bg_desc){.n_rot = 128,
                     .rope_base = 1e6f,
                     .rope_base_swa = 1e4f,
                     .rope_scale = 1,
                     .rope_scale_swa = 1,
                     .rope_swa_own = true,
                     .rope_scaling = {.factor = 1, .mul = 1, .attn_factor = 1, .log_mul = -1}};
}

Test(rope, plain_linear_and_windowed)
{
    float freq[64], mscale, factors[64];
    bg_desc d = rope_desc();
    d.rope_scale = 0.25f;
    for (int i = 0; i < 64; i++)
        factors[i] = 1 + (float)i;
    bg_rope_table(&d, false, NULL, freq, &mscale);
    cr_expect_eq(mscale, 1);
    for (int i = 0; i < 64; i++)
        cr_expect_float_eq(freq[i], 0.25 * exp(-i / 64.0 * log(1e6)), 1e-7 * freq[i]);
    bg_rope_table(&d, false, factors, freq, &mscale);
    cr_expect_float_eq(freq[9], 0.025 * exp(-9 / 64.0 * log(1e6)), 1e-7 * freq[9]);
    bg_rope_table(&d, true, NULL, freq, &mscale);
    cr_expect_float_eq(freq[9], exp(-9 / 64.0 * log(1e4)), 1e-7 * freq[9]);
}

/* Qwen2.5 with factor 4 over 32768: the ramp goes from pair 23 to pair 40 (23.6 and 39.7). */
Test(rope, yarn)
{
    float freq[64], mscale;
    bg_desc d = rope_desc();
    d.rope_scale = 0.25f;
    d.rope_scaling = (bg_rope_scaling){.yarn = true,
                                       .factor = 4,
                                       .n_orig = 32768,
                                       .attn_factor = 1,
                                       .ext_factor = 1,
                                       .beta_fast = 32,
                                       .beta_slow = 1,
                                       .log_mul = -1,
                                       .mul = 1};
    bg_rope_table(&d, false, NULL, freq, &mscale);
    cr_expect_float_eq(mscale, 1.1386294, 1e-6);
    for (int i = 0; i < 64; i++) {
        const double ramp = i <= 23 ? 1 : i >= 40 ? 0 : 1 - (i - 23) / 17.0;
        const double want = exp(-i / 64.0 * log(1e6)) * (0.25 * (1 - ramp) + ramp);
        cr_expect_float_eq(freq[i], want, 1e-6 * want, "pair %d: %g, not %g", i, freq[i], want);
    }
    d.rope_scaling.log_mul = 1; /* as the magnitude itself: they cancel */
    bg_rope_table(&d, false, NULL, freq, &mscale);
    cr_expect_float_eq(mscale, 1, 1e-6);
}

/* ---- plans ---------------------------------------------------------------------------------- */

static int64_t block_of(const bg_gguf *g, bg_role r, int layer)
{
    const bg_tensor *t = bg_role_tensor(g, r, layer);
    return t ? bg_qtype_get(t->type)->block_values : 1;
}

static void check_plan(const char *path)
{
    bg_error err = {0};
    bg_desc d;
    bg_gguf *g = open_model(path);
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    for (int tp = 1; tp <= 9; tp++) {
        int64_t head = 0, ff = 0, vocab = 0, ffe = 0, ffs = 0;
        for (int r = 0; r < tp; r++) {
            bg_shard s;
            cr_assert(!bg_shard_plan(&s, &d, g, r, tp, &err), "%s", err.text);
            cr_expect(s.head0 == head && s.ff0 == ff && s.vocab0 == vocab, "%s tp %d rank %d", path,
                      tp, r);
            cr_expect(s.ffe0 == ffe && (s.merged || s.ffs0 == ffs), "%s tp %d rank %d", path, tp,
                      r);
            cr_expect(!s.merged || s.n_ffs == 0);
            ffe += s.n_ffe;
            ffs += s.merged ? d.n_shared * s.n_ffe : s.n_ffs;
            cr_expect(s.n_heads >= 0 && s.n_ff >= 0 && s.n_vocab >= 0);
            head += s.n_heads;
            ff += s.n_ff;
            vocab += s.n_vocab;
            for (int l = 0; l < d.n_layers; l++) {
                const int64_t o = block_of(g, ROLE_O, l), down = block_of(g, ROLE_DOWN, l);
                const int64_t exps = block_of(g, ROLE_DOWN_EXPS, l);
                const int64_t shared = block_of(g, ROLE_DOWN_SHEXP, l);
                cr_expect(s.n_heads * d.v_dim % o == 0 && s.head0 * d.v_dim % o == 0);
                cr_expect(s.n_ff % down == 0 && s.ff0 % down == 0);
                cr_expect(s.n_ffe % exps == 0 && s.ffe0 % exps == 0);
                cr_expect(s.n_ffs % shared == 0 && s.ffs0 % shared == 0);
                if (s.merged) cr_expect(s.n_ffe % shared == 0 && s.ffe0 % shared == 0);
            }
            const int group = d.n_heads / d.n_kv_heads;
            for (int h = s.head0; h < s.head0 + s.n_heads; h++)
                cr_expect(h / group >= s.kv_head0 && h / group < s.kv_head0 + s.n_kv_heads);
            if (d.kv_rank)
                cr_expect(s.n_kv_heads == 1 && s.kv_head0 == 0);
            else
                cr_expect(s.n_heads ? s.n_kv_heads <= s.n_heads : s.n_kv_heads == 0);
            cr_expect(s.weight_bytes >= d.weight_bytes / (uint64_t)(2 * tp));
        }
        cr_expect(head == d.n_heads && ff == d.d_ff && vocab == d.vocab_size, "%s tp %d", path, tp);
        cr_expect(ffe == d.d_ff_expert && ffs == d.d_ff_shared, "%s tp %d", path, tp);
    }
    bg_shard s;
    cr_expect_eq(bg_shard_plan(&s, &d, g, 0, 0, &err), BG_ARG);
    err = (bg_error){0};
    cr_expect_eq(bg_shard_plan(&s, &d, g, 2, 2, &err), BG_ARG);
    err = (bg_error){0};
    cr_assert(!bg_shard_plan(&s, &d, g, 0, 1, &err));
    if (!d.tied) cr_expect_eq(s.weight_bytes, d.weight_bytes);
    bg_gguf_close(g);
}

Test(plan, covers_everything_once)
{
    check_plan(DIR "tiny-llama.q2_k.gguf");
    check_plan(DIR "tiny-llama.q5_k_m.split-00002-of-00003.gguf");
    check_plan(DIR "tiny-uneven.q4_k_m.gguf");
    check_plan(DIR "tiny-qwen2.f16.gguf");
    check_plan(DIR "tiny-qwen3.f16.gguf");
    check_plan(DIR "tiny-gemma3.f16.gguf");
    check_plan(DIR "tiny-qwen2moe.q5_1.gguf");
    check_plan(DIR "tiny-qwen3moe.q8_0.gguf");
    check_plan(DIR "tiny-glm4.q5_0.gguf");
    check_plan(DIR "tiny-glm4moe.q5_0.gguf");
    check_plan(DIR "tiny-gpt-oss.mxfp4.gguf");
    check_plan(DIR "tiny-dsv3.q8_0.gguf");
    check_plan(DIR "tiny-v2.legacy.gguf");
    check_plan(DIR "tiny-dsa.q8_0.gguf");
}
