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

static void check_plan(const char *path)
{
    bg_error err = {0};
    bg_desc d;
    bg_gguf *g = open_model(path);
    cr_assert(!bg_desc_read(&d, g, &err), "%s", err.text);
    for (int tp = 1; tp <= 9; tp++) {
        int64_t head = 0, ff = 0, vocab = 0;
        for (int r = 0; r < tp; r++) {
            bg_shard s;
            cr_assert(!bg_shard_plan(&s, &d, g, r, tp, &err), "%s", err.text);
            cr_expect(s.head0 == head && s.ff0 == ff && s.vocab0 == vocab, "%s tp %d rank %d", path,
                      tp, r);
            cr_expect(s.n_heads >= 0 && s.n_ff >= 0 && s.n_vocab >= 0);
            head += s.n_heads;
            ff += s.n_ff;
            vocab += s.n_vocab;
            for (int l = 0; l < d.n_layers; l++) {
                const int64_t o = bg_qtype_get(bg_role_tensor(g, ROLE_O, l)->type)->block_values;
                const int64_t down =
                    bg_qtype_get(bg_role_tensor(g, ROLE_DOWN, l)->type)->block_values;
                cr_expect(s.n_heads * d.v_dim % o == 0 && s.head0 * d.v_dim % o == 0);
                cr_expect(s.n_ff % down == 0 && s.ff0 % down == 0);
            }
            const int group = d.n_heads / d.n_kv_heads;
            for (int h = s.head0; h < s.head0 + s.n_heads; h++)
                cr_expect(h / group >= s.kv_head0 && h / group < s.kv_head0 + s.n_kv_heads);
            cr_expect(s.n_heads ? s.n_kv_heads <= s.n_heads : s.n_kv_heads == 0);
            cr_expect(s.weight_bytes >= d.weight_bytes / (uint64_t)(2 * tp));
        }
        cr_expect(head == d.n_heads && ff == d.d_ff && vocab == d.vocab_size, "%s tp %d", path, tp);
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
}
