/* Architectures as tables: presets (numbers), features of each architecture, and the tensors and
 * keys that a feature brings. Names as llama.cpp's converters write them.
 *
 * What an engine might skip or swap is made large enough to be seen: norm weights differ by 20 %,
 * biases are about half of what they are added to, attention scores and router logits spread by
 * about 2. Matrices are 1/sqrt(fan-in), those that add to the residual stream smaller by
 * 1/sqrt(2 layers), so activations keep their size. */
#include "mkmodel.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- presets --------------------------------------------------------------------------------- */

#define LLAMA                   .arch = "llama", .eps = 1e-5f
#define QWEN2                   .arch = "qwen2", .eps = 1e-6f
#define QWEN3                   .arch = "qwen3", .eps = 1e-6f
#define QWEN3M                  .arch = "qwen3moe", .eps = 1e-6f
#define GEMMA3                  .arch = "gemma3", .eps = 1e-6f, .rope_base_swa = 10000, .tied = true
#define GPTOSS                  .arch = "gpt-oss", .eps = 1e-5f, .yarn_factor = 32, .yarn_context = 4096
#define QWEN2M                  .arch = "qwen2moe", .eps = 1e-6f
#define GLM4                    .arch = "glm4", .eps = 1e-5f
#define GLM4M                   .arch = "glm4moe", .eps = 1e-5f, .n_shared = 1
#define LATENT_KV               .qk_rope = 64, .kv_lora = 512
#define MLA                     LATENT_KV, .eps = 1e-5f, .n_shared = 1
#define DEEPSEEK                .arch = "deepseek2", LATENT_KV, .yarn_factor = 40, .yarn_context = 4096
#define TEXT(tokens, ctx, rope) .tok = tokens, .context = ctx, .rope_base = rope
#define DIMS(layers, model, ff, heads, kv, dim, words)                                    \
    .n_layers = layers, .d_model = model, .d_ff = ff, .n_heads = heads, .n_kv_heads = kv, \
    .head_dim = dim, .vocab = words
#define EXPERTS(n, k, ff)       .n_experts = n, .top_k = k, .d_ff_expert = ff
#define LATENT_DIMS(nope, v, q) .qk_nope = nope, .v_dim = v, .q_lora = q
#define WINDOW(n, period)       .window = n, .window_period = period
#define INDEXER_DIMS(heads, k)  .idx_heads = heads, .idx_dim = 128, .idx_top_k = k

/* clang-format off */
const shape presets[] = {
    /* The first of each architecture is its tiny one. */
    {.name = "tiny-llama", LLAMA, TEXT("llama3", 131072, 500000), DIMS(3, 256, 1024, 8, 4, 64, 1024), .rope_ramp = true},
    {.name = "tiny-qwen2", QWEN2, TEXT("qwen2", 32768, 1000000), DIMS(2, 512, 1024, 8, 2, 64, 1024), .tied = true},
    {.name = "tiny-qwen3", QWEN3, TEXT("qwen2", 40960, 1000000), DIMS(2, 256, 1024, 8, 4, 128, 1024), .tied = true},
    {.name = "tiny-gemma3", GEMMA3, TEXT("gemma", 32768, 1000000), DIMS(4, 256, 1024, 4, 1, 256, 1024), WINDOW(64, 3),
     .rope_linear = 8},
    {.name = "tiny-phi3", .arch = "phi3", .eps = 1e-5f, TEXT("spm", 4096, 10000), DIMS(2, 256, 1024, 4, 2, 64, 1024)},
    {.name = "tiny-qwen3moe", QWEN3M, TEXT("qwen2", 40960, 1000000), DIMS(2, 256, 512, 8, 4, 128, 1024),
     EXPERTS(8, 2, 512)},
    {.name = "tiny-qwen2moe", QWEN2M, TEXT("qwen2", 32768, 1000000), DIMS(2, 256, 512, 4, 2, 64, 1024),
     EXPERTS(8, 2, 256), .d_ff_shared = 768},
    {.name = "tiny-glm4", GLM4, TEXT("glm4", 32768, 10000), DIMS(2, 256, 512, 8, 2, 128, 1024), .rope_dim = 64},
    {.name = "tiny-glm4moe", GLM4M, TEXT("glm4", 131072, 1000000), DIMS(2, 256, 512, 8, 4, 128, 1024),
     EXPERTS(8, 2, 256), .rope_dim = 64, .n_dense = 1, .gate_scale = 2.5f},
    {.name = "tiny-gpt-oss", GPTOSS, TEXT("gptoss", 131072, 150000), DIMS(2, 288, 256, 8, 2, 64, 1024),
     EXPERTS(8, 4, 256), WINDOW(64, 2)},
    {.name = "tiny-mla", .arch = "deepseek2", MLA, TEXT("glm4", 202752, 1000000), DIMS(2, 256, 512, 8, 1, 0, 1024),
     EXPERTS(8, 2, 256), LATENT_DIMS(128, 128, 256), .n_dense = 1, .gate_scale = 1.8f},
    {.name = "tiny-glm-dsa", .arch = "glm-dsa", MLA, TEXT("glm4", 202752, 1000000), DIMS(2, 256, 512, 4, 1, 0, 1024),
     EXPERTS(8, 2, 256), LATENT_DIMS(128, 128, 256), INDEXER_DIMS(16, 64), .n_dense = 1, .gate_scale = 2.5f,
     .n_mtp = 1},
    /* Variants within an architecture. */
    {.name = "tiny-mixtral", LLAMA, TEXT("spm", 32768, 1000000), DIMS(2, 256, 512, 8, 4, 64, 1024),
     .n_experts = 8, .top_k = 2},
    {.name = "tiny-v2-lite", DEEPSEEK, .eps = 1e-6f, TEXT("dsv3", 163840, 10000), DIMS(2, 256, 512, 8, 1, 0, 1024),
     EXPERTS(8, 2, 256), LATENT_DIMS(128, 128, 0), .softmax_router = true, .n_shared = 2, .n_dense = 1,
     .gate_scale = 1, .yarn_log = 0.0707f},
    /* Expert groups, experts narrower than a K-quant's block. */
    {.name = "tiny-dsv3", DEEPSEEK, .eps = 1e-5f, TEXT("dsv3", 163840, 10000), DIMS(2, 256, 512, 8, 1, 0, 1024),
     EXPERTS(16, 4, 128), LATENT_DIMS(128, 128, 256), .n_groups = 4, .n_groups_used = 2, .n_shared = 1, .n_dense = 1,
     .gate_scale = 2.5f, .yarn_log = 0.1f},

    {.name = "smollm2-135m", LLAMA, TEXT("smollm", 8192, 100000), DIMS(30, 576, 1536, 9, 3, 64, 49152), .tied = true},
    {.name = "llama-3.2-1b", LLAMA, TEXT("llama3", 131072, 500000), DIMS(16, 2048, 8192, 32, 8, 64, 128256),
     .tied = true, .rope_ramp = true},
    {.name = "llama-3.1-8b", LLAMA, TEXT("llama3", 131072, 500000), DIMS(32, 4096, 14336, 32, 8, 128, 128256),
     .rope_ramp = true},
    {.name = "llama-3.1-70b", LLAMA, TEXT("llama3", 131072, 500000), DIMS(80, 8192, 28672, 64, 8, 128, 128256),
     .rope_ramp = true},
    {.name = "qwen2.5-0.5b", QWEN2, TEXT("qwen2", 32768, 1000000), DIMS(24, 896, 4864, 14, 2, 64, 151936), .tied = true},
    {.name = "qwen2.5-7b", QWEN2, TEXT("qwen2", 32768, 1000000), DIMS(28, 3584, 18944, 28, 4, 128, 152064)},
    {.name = "qwen3-0.6b", QWEN3, TEXT("qwen2", 40960, 1000000), DIMS(28, 1024, 3072, 16, 8, 128, 151936), .tied = true},
    {.name = "qwen3-4b", QWEN3, TEXT("qwen2", 40960, 1000000), DIMS(36, 2560, 9728, 32, 8, 128, 151936), .tied = true},
    {.name = "qwen3-8b", QWEN3, TEXT("qwen2", 40960, 1000000), DIMS(36, 4096, 12288, 32, 8, 128, 151936)},
    {.name = "qwen3-30b-a3b", QWEN3M, TEXT("qwen2", 40960, 1000000), DIMS(48, 2048, 6144, 32, 4, 128, 151936),
     EXPERTS(128, 8, 768)},
    {.name = "qwen3-235b-a22b", QWEN3M, TEXT("qwen2", 40960, 1000000), DIMS(94, 4096, 12288, 64, 4, 128, 151936),
     EXPERTS(128, 8, 1536)},
    {.name = "mixtral-8x7b", LLAMA, TEXT("spm", 32768, 1000000), DIMS(32, 4096, 14336, 32, 8, 128, 32000),
     .n_experts = 8, .top_k = 2},
    {.name = "gemma3-270m", GEMMA3, TEXT("gemma", 32768, 1000000), DIMS(18, 640, 2048, 4, 1, 256, 262144),
     WINDOW(512, 6)},
    {.name = "gemma3-1b", GEMMA3, TEXT("gemma", 32768, 1000000), DIMS(26, 1152, 6912, 4, 1, 256, 262144),
     WINDOW(512, 6)},
    {.name = "gemma3-4b", GEMMA3, TEXT("gemma", 131072, 1000000), DIMS(34, 2560, 10240, 8, 4, 256, 262144),
     WINDOW(1024, 6), .rope_linear = 8},
    {.name = "gpt-oss-20b", GPTOSS, TEXT("gptoss", 131072, 150000), DIMS(24, 2880, 2880, 64, 8, 64, 201088),
     EXPERTS(32, 4, 2880), WINDOW(128, 2)},
    {.name = "gpt-oss-120b", GPTOSS, TEXT("gptoss", 131072, 150000), DIMS(36, 2880, 2880, 64, 8, 64, 201088),
     EXPERTS(128, 4, 2880), WINDOW(128, 2)},
    {.name = "glm-4-32b", GLM4, TEXT("glm4", 32768, 10000), DIMS(61, 6144, 23040, 48, 2, 128, 151552), .rope_dim = 64},
    {.name = "glm-4.5-air", GLM4M, TEXT("glm4", 131072, 1000000), DIMS(46, 4096, 10944, 96, 8, 128, 151552),
     EXPERTS(128, 8, 1408), .rope_dim = 64, .n_dense = 1, .gate_scale = 1, .no_qk_norm = true, .n_mtp = 1},
    {.name = "glm-4.7-flash", .arch = "deepseek2", MLA, TEXT("glm4", 202752, 1000000),
     DIMS(47, 2048, 10240, 20, 1, 0, 154880), EXPERTS(64, 4, 1536), LATENT_DIMS(192, 256, 768), .n_dense = 1,
     .gate_scale = 1.8f},
    {.name = "deepseek-v2-lite", DEEPSEEK, .eps = 1e-6f, TEXT("dsv3", 163840, 10000), DIMS(27, 2048, 10944, 16, 1, 0, 102400),
     EXPERTS(64, 6, 1408), LATENT_DIMS(128, 128, 0), .softmax_router = true, .n_shared = 2, .n_dense = 1,
     .gate_scale = 1, .yarn_log = 0.0707f},
    {.name = "deepseek-v3", DEEPSEEK, .eps = 1e-6f, TEXT("dsv3", 163840, 10000), DIMS(61, 7168, 18432, 128, 1, 0, 129280),
     EXPERTS(256, 8, 2048), LATENT_DIMS(128, 128, 1536), .n_groups = 8, .n_groups_used = 4, .n_shared = 1,
     .n_dense = 3, .gate_scale = 2.5f, .yarn_log = 0.1f},
    {.name = "glm-5", .arch = "glm-dsa", MLA, TEXT("glm4", 202752, 1000000), DIMS(78, 6144, 12288, 64, 1, 0, 154880),
     EXPERTS(256, 8, 2048), LATENT_DIMS(192, 256, 2048), INDEXER_DIMS(32, 2048), .n_dense = 3, .n_groups = 1,
     .n_groups_used = 1, .gate_scale = 2.5f, .n_mtp = 1},
    /* GLM-5's widths in few layers */
    {.name = "glm5-slice", .arch = "glm-dsa", MLA, TEXT("glm4", 202752, 1000000),
     DIMS(5, 6144, 12288, 64, 1, 0, 154880), EXPERTS(256, 8, 2048), LATENT_DIMS(192, 256, 2048),
     INDEXER_DIMS(32, 2048), .n_dense = 1, .gate_scale = 2.5f},
};
/* clang-format on */
const int n_presets = sizeof presets / sizeof *presets;

const shape *find_preset(const char *name, const char *arch)
{
    for (int i = 0; i < n_presets; i++) {
        const shape *s = &presets[i];
        if (strcmp(name, "tiny") == 0 ? strcmp(s->arch, arch) == 0 : strcmp(s->name, name) == 0)
            return s;
    }
    return NULL;
}

/* ---- features -------------------------------------------------------------------------------- */

enum {
    GQA = 1 << 0,       /* attention with separate q, k, v */
    FUSED_QKV = 1 << 1, /* or with one matrix of the three */
    LATENT = 1 << 2,    /* or MLA */
    QKV_BIAS = 1 << 3,
    QK_NORM = 1 << 4,
    POST_NORMS = 1 << 5, /* also after attention and FFN */
    PAN_IS_FFN = 1 << 6, /* the norm before the FFN is called post_attention_norm */
    SINKS = 1 << 7,      /* gpt-oss: sinks, biases everywhere, MXFP4 experts */
    SIGMOID = 1 << 8,    /* router with sigmoid and a bias for the choice */
    INDEXER = 1 << 9,
    FUSED_FFN = 1 << 10,   /* gate and up in one matrix */
    SHARED_GATE = 1 << 11, /* what the shared expert yields is weighed, too */
    /* of the numbers */
    TIED = 1 << 12,
    RAMP = 1 << 13,
    SHARED = 1 << 14,
    Q_LORA_RANK = 1 << 15,
    KV_B = 1 << 16, /* MLA with keys' and values' matrix in one, as files of old have it */
    /* of a layer */
    DENSE = 1 << 17,
    MOE = 1 << 18,
    DRAFT = 1 << 19,
};

static const struct {
    const char *name;
    unsigned features;
} archs[] = {
    {"llama", GQA},
    {"qwen2", GQA | QKV_BIAS},
    {"qwen3", GQA | QK_NORM},
    {"gemma3", GQA | QK_NORM | POST_NORMS},
    {"phi3", FUSED_QKV | FUSED_FFN},
    {"qwen3moe", GQA | QK_NORM},
    {"qwen2moe", GQA | QKV_BIAS | SHARED_GATE},
    {"glm4", GQA | POST_NORMS | FUSED_FFN},
    {"glm4moe", GQA | QK_NORM | QKV_BIAS | PAN_IS_FFN | SIGMOID},
    {"gpt-oss", GQA | QKV_BIAS | PAN_IS_FFN | SINKS},
    {"deepseek2", LATENT | SIGMOID},
    {"glm-dsa", LATENT | SIGMOID | INDEXER},
};

static unsigned features_of(const shape *s)
{
    unsigned f = 0;
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++)
        if (strcmp(archs[i].name, s->arch) == 0) f = archs[i].features;
    if (s->tied) f |= TIED;
    if (s->rope_ramp) f |= RAMP;
    if (s->n_shared || s->d_ff_shared) f |= SHARED;
    if (s->q_lora) f |= Q_LORA_RANK;
    if (s->legacy_kv_b) f |= KV_B;
    if (s->softmax_router) f &= ~(unsigned)SIGMOID;
    if (s->no_qk_norm) f &= ~(unsigned)QK_NORM;
    return f;
}

const char *check_shape(const shape *s)
{
    const unsigned f = features_of(s);
    if (s->n_layers < 1 || s->d_model < 1 || s->d_ff < 1 || s->n_heads < 1 || s->vocab < 1)
        return "layers, d-model, d-ff, heads and vocab must be at least 1";
    if (!(f & LATENT) && (s->n_kv_heads < 1 || s->n_heads % s->n_kv_heads))
        return "heads must be a multiple of kv-heads";
    if (!(f & LATENT) && (s->head_dim < 2 || s->head_dim % 2)) return "head-dim must be even";
    if (s->n_experts && (s->top_k < 1 || s->top_k > s->n_experts))
        return "top-k must be from 1 to experts";
    if (s->legacy_kv_b && !(f & LATENT)) return "--legacy-kv-b is for deepseek2";
    if ((f & INDEXER) && (!s->q_lora || s->legacy_kv_b))
        return "an indexer needs q-lora, and attn_k_b and attn_v_b";
    return NULL;
}

/* ---- quantisation mixes ---------------------------------------------------------------------- */

typedef enum rule {
    NEVER,
    ALWAYS,
    MORE,    /* the first and last eighth of the layers, every third between: llama.cpp's "M" */
    EIGHTH,  /* the first eighth */
    FIRST_4, /* the first four layers */
    GQA_4,   /* models with four or more heads to a KV head */
} rule;

typedef struct exception {
    rule when;
    uint32_t type;
} exception;

struct mix {
    const char *name;
    uint32_t file_type, base;
    uint32_t out, embd; /* BG_F32: as base */
    exception attn_v, ffn_down, attn_output, qkv;
    uint32_t experts; /* BG_F32: as base */
};

/* After llama-quantize's rules; see LLAMA_FTYPE for the numbers. */
/* clang-format off */
static const mix mixes[] = {
    {.name = "f32", .file_type = 0, .base = BG_F32},
    {.name = "f16", .file_type = 1, .base = BG_F16},
    {.name = "bf16", .file_type = 32, .base = BG_BF16},
    {.name = "q4_0", .file_type = 2, .base = BG_Q4_0, .out = BG_Q6_K},
    {.name = "q4_1", .file_type = 3, .base = BG_Q4_1, .out = BG_Q6_K},
    {.name = "q5_0", .file_type = 8, .base = BG_Q5_0, .out = BG_Q6_K},
    {.name = "q5_1", .file_type = 9, .base = BG_Q5_1, .out = BG_Q6_K},
    {.name = "q8_0", .file_type = 7, .base = BG_Q8_0, .out = BG_Q8_0},
    {.name = "q2_k", .file_type = 10, .base = BG_Q2_K, .out = BG_Q6_K, .attn_v = {ALWAYS, BG_Q3_K}, .ffn_down = {ALWAYS, BG_Q3_K},
     .attn_output = {ALWAYS, BG_Q3_K}},
    {.name = "q3_k_s", .file_type = 11, .base = BG_Q3_K, .out = BG_Q6_K},
    {.name = "q3_k_m", .file_type = 12, .base = BG_Q3_K, .out = BG_Q6_K, .attn_v = {ALWAYS, BG_Q4_K}, .ffn_down = {ALWAYS, BG_Q4_K},
     .attn_output = {ALWAYS, BG_Q4_K}, .qkv = {ALWAYS, BG_Q4_K}},
    {.name = "q4_k_s", .file_type = 14, .base = BG_Q4_K, .out = BG_Q6_K, .attn_v = {FIRST_4, BG_Q5_K}, .ffn_down = {EIGHTH, BG_Q5_K}},
    {.name = "q4_k_m", .file_type = 15, .base = BG_Q4_K, .out = BG_Q6_K, .attn_v = {MORE, BG_Q6_K}, .ffn_down = {MORE, BG_Q6_K},
     .qkv = {ALWAYS, BG_Q5_K}},
    {.name = "q5_k_s", .file_type = 16, .base = BG_Q5_K, .out = BG_Q6_K},
    {.name = "q5_k_m", .file_type = 17, .base = BG_Q5_K, .out = BG_Q6_K, .attn_v = {MORE, BG_Q6_K}, .ffn_down = {MORE, BG_Q6_K},
     .qkv = {ALWAYS, BG_Q6_K}},
    {.name = "q6_k", .file_type = 18, .base = BG_Q6_K, .out = BG_Q6_K},
    {.name = "iq4_nl", .file_type = 25, .base = BG_IQ4_NL, .out = BG_Q6_K, .attn_v = {GQA_4, BG_Q5_K}, .ffn_down = {EIGHTH, BG_Q5_K}},
    {.name = "iq4_xs", .file_type = 30, .base = BG_IQ4_XS, .out = BG_Q6_K, .attn_v = {GQA_4, BG_Q5_K}, .ffn_down = {EIGHTH, BG_Q5_K}},
    {.name = "iq3_s", .file_type = 26, .base = BG_IQ3_S, .out = BG_Q6_K, .attn_v = {GQA_4, BG_Q4_K}},
    {.name = "iq3_xxs", .file_type = 23, .base = BG_IQ3_XXS, .out = BG_Q5_K, .embd = BG_IQ3_S, .attn_v = {GQA_4, BG_Q4_K},
     .attn_output = {ALWAYS, BG_IQ3_S}},
    {.name = "iq2_s", .file_type = 28, .base = BG_IQ2_S, .out = BG_Q5_K, .embd = BG_IQ3_S, .attn_v = {ALWAYS, BG_IQ3_S},
     .ffn_down = {EIGHTH, BG_IQ3_S}, .attn_output = {ALWAYS, BG_IQ3_S}},
    {.name = "iq2_xs", .file_type = 20, .base = BG_IQ2_XS, .out = BG_Q5_K, .embd = BG_Q2_K, .attn_v = {ALWAYS, BG_Q4_K},
     .ffn_down = {EIGHTH, BG_Q2_K}},
    {.name = "iq2_xxs", .file_type = 19, .base = BG_IQ2_XXS, .out = BG_Q5_K, .embd = BG_Q2_K, .attn_v = {ALWAYS, BG_Q4_K},
     .ffn_down = {EIGHTH, BG_Q2_K}},
    {.name = "iq1_m", .file_type = 31, .base = BG_IQ1_M, .out = BG_Q5_K, .embd = BG_Q2_K, .attn_v = {ALWAYS, BG_Q4_K},
     .ffn_down = {EIGHTH, BG_Q2_K}, .attn_output = {ALWAYS, BG_IQ2_XXS}},
    {.name = "iq1_s", .file_type = 24, .base = BG_IQ1_S, .out = BG_Q5_K, .embd = BG_Q2_K, .attn_v = {ALWAYS, BG_Q4_K},
     .ffn_down = {EIGHTH, BG_Q2_K}, .attn_output = {ALWAYS, BG_IQ2_XXS}},
    {.name = "tq1_0", .file_type = 36, .base = BG_TQ1_0, .out = BG_Q6_K, .embd = BG_Q4_K},
    {.name = "tq2_0", .file_type = 37, .base = BG_TQ2_0, .out = BG_Q6_K, .embd = BG_Q4_K},
    {.name = "q1_0", .file_type = 40, .base = BG_Q1_0, .out = BG_Q6_K},
    {.name = "q2_0", .file_type = 41, .base = BG_Q2_0, .out = BG_Q6_K, .embd = BG_Q4_K},
    {.name = "mxfp4", .file_type = 38, .base = BG_Q8_0, .out = BG_Q8_0, .experts = BG_MXFP4},
    /* As files of very large models often are. */
    {.name = "ud_q4_k", .file_type = 15, .base = BG_Q8_0, .out = BG_Q8_0, .experts = BG_Q4_K},
};
/* clang-format on */

const char *mix_name(int i)
{
    return i < (int)(sizeof mixes / sizeof *mixes) ? mixes[i].name : NULL;
}

const mix *find_mix(const char *name)
{
    for (int i = 0; mix_name(i); i++)
        if (strcmp(mixes[i].name, name) == 0) return &mixes[i];
    return NULL;
}

static bool applies(rule r, int layer, const shape *s)
{
    const int n = s->n_layers;
    switch (r) {
    case NEVER:
        return false;
    case ALWAYS:
        return true;
    case MORE:
        return layer < n / 8 || layer >= 7 * n / 8 || (layer - n / 8) % 3 == 2;
    case EIGHTH:
        return layer < n / 8;
    case FIRST_4:
        return layer < 4;
    case GQA_4:
        return s->n_kv_heads && s->n_heads / s->n_kv_heads >= 4;
    }
    return false;
}

/* What a tensor is, as far as its type goes. */
typedef enum role {
    VECTOR,
    ROUTER,
    BASE,
    EMBD,
    OUT,
    ATTN_V,
    ATTN_O,
    QKV,
    DOWN,
    EXPERT,
    EXPERT_DOWN,
    MLA_B
} role;

static uint32_t or_base(uint32_t type, const mix *m)
{
    return type == BG_F32 ? m->base : type;
}

static uint32_t by_rule(exception e, int layer, const shape *s, const mix *m)
{
    return applies(e.when, layer, s) ? e.type : m->base;
}

static uint32_t wanted_type(role r, int layer, const shape *s, const mix *m)
{
    const bool plain = m->base == BG_F32 || m->base == BG_F16 || m->base == BG_BF16;
    switch (r) {
    case VECTOR:
    case ROUTER:
        return BG_F32;
    case BASE:
        return m->base;
    case EMBD:
        return or_base(m->embd, m);
    case OUT:
        return or_base(m->out, m);
    case ATTN_V:
        return by_rule(m->attn_v, layer, s, m);
    case ATTN_O:
        return by_rule(m->attn_output, layer, s, m);
    case QKV:
        return by_rule(m->qkv, layer, s, m);
    case DOWN:
        return by_rule(m->ffn_down, layer, s, m);
    case MLA_B:
        return plain ? m->base : BG_Q8_0;
    case EXPERT:
    case EXPERT_DOWN:
        if (features_of(s) & SINKS) return m->base == BG_F32 ? BG_F32 : BG_MXFP4;
        if (m->experts != BG_F32) return m->experts;
        return r == EXPERT ? m->base : by_rule(m->ffn_down, layer, s, m);
    }
    return m->base;
}

/* For rows that are no whole number of blocks, what llama-quantize takes instead. */
static uint32_t fitting(uint32_t type, int64_t row)
{
    if (row % bg_qtype_get(type)->block_values == 0) return type;
    switch (type) {
    case BG_Q2_K:
    case BG_Q3_K:
    case BG_TQ1_0:
    case BG_TQ2_0:
    case BG_Q2_0:
    case BG_Q1_0:
        type = BG_Q4_0;
        break;
    case BG_Q4_K:
        type = BG_Q5_0;
        break;
    case BG_Q5_K:
        type = BG_Q5_1;
        break;
    case BG_Q6_K:
        type = BG_Q8_0;
        break;
    default:
        type = BG_IQ4_NL;
        break;
    }
    return row % 32 ? BG_F16 : type;
}

/* ---- tensors --------------------------------------------------------------------------------- */

typedef enum dim {
    NIL,
    D_MODEL,
    D_MODEL_2,
    D_FF,
    D_FF_2,
    VOCAB,
    HEADS,
    HEAD_DIM,
    ROPE_HALF,
    Q_DIM,
    KV_DIM,
    QKV_DIM,
    N_EXPERTS,
    D_EXPERT,
    D_SHARED,
    Q_LORA,
    KV_LORA,
    KV_A,
    MLA_Q,
    MLA_KV,
    MLA_O,
    QK_NOPE,
    V_DIM,
    IDX_HEADS,
    IDX_DIM,
    IDX_Q,
} dim;

static int64_t dim_of(const shape *s, dim d)
{
    const int64_t h = s->n_heads, hd = s->head_dim;
    switch (d) {
    case NIL:
        return 1;
    case D_MODEL:
        return s->d_model;
    case D_MODEL_2:
        return 2 * s->d_model;
    case D_FF:
        return s->d_ff;
    case D_FF_2:
        return 2 * s->d_ff;
    case VOCAB:
        return s->vocab;
    case HEADS:
        return h;
    case HEAD_DIM:
        return hd;
    case ROPE_HALF:
        return hd / 2;
    case Q_DIM:
        return h * hd;
    case KV_DIM:
        return s->n_kv_heads * hd;
    case QKV_DIM:
        return (h + 2 * s->n_kv_heads) * hd;
    case N_EXPERTS:
        return s->n_experts;
    case D_EXPERT:
        return s->d_ff_expert ? s->d_ff_expert : s->d_ff;
    case D_SHARED:
        return s->d_ff_shared ? s->d_ff_shared : dim_of(s, D_EXPERT) * s->n_shared;
    case Q_LORA:
        return s->q_lora;
    case KV_LORA:
        return s->kv_lora;
    case KV_A:
        return s->kv_lora + s->qk_rope;
    case MLA_Q:
        return h * (s->qk_nope + s->qk_rope);
    case MLA_KV:
        return h * (s->qk_nope + s->v_dim);
    case MLA_O:
        return h * s->v_dim;
    case QK_NOPE:
        return s->qk_nope;
    case V_DIM:
        return s->v_dim;
    case IDX_HEADS:
        return s->idx_heads;
    case IDX_DIM:
        return s->idx_dim;
    case IDX_Q:
        return (int64_t)s->idx_heads * s->idx_dim;
    }
    return 1;
}

/* What multiplies a row's gain. */
typedef enum scale {
    ONE,
    RESIDUAL, /* 1/sqrt(2 layers) */
    SCORES,   /* q and k: attention scores of about 2, by the matrices where there are no norms */
    EMBED,    /* an embedding: its size does not follow from a row's length */
    LOGITS,   /* the last norm of a tied model */
    KEY_B,    /* a key is a sum over the kv_lora latent values, not over qk_nope */
} scale;

typedef struct row {
    const char *name;
    dim ne[3];
    role role;
    fill fill;
    float gain;
    scale scale;
    unsigned need, unless; /* features */
} row;

#define W FILL_WEIGHT
#define N FILL_NORM
static const row head_rows[] = {
    {"token_embd.weight", {D_MODEL, VOCAB}, EMBD, W, 1, EMBED, 0, TIED},
    {"token_embd.weight", {D_MODEL, VOCAB}, OUT, W, 1, EMBED, TIED, 0},
    {"output_norm.weight", {D_MODEL}, VECTOR, N, 1, LOGITS, 0, 0},
    {"output.weight", {D_MODEL, VOCAB}, OUT, W, 3, ONE, 0, TIED},
    {"rope_freqs.weight", {ROPE_HALF}, VECTOR, FILL_RAMP, 8, ONE, RAMP, 0},
};
static const row layer_rows[] = {
    {"attn_norm.weight", {D_MODEL}, VECTOR, N, 1, ONE, 0, 0},
    /* MLA */
    {"attn_q_a_norm.weight", {Q_LORA}, VECTOR, N, 1, ONE, LATENT | Q_LORA_RANK, 0},
    {"attn_kv_a_norm.weight", {KV_LORA}, VECTOR, N, 1, ONE, LATENT, 0},
    {"attn_q_a.weight", {D_MODEL, Q_LORA}, BASE, W, 1, ONE, LATENT | Q_LORA_RANK, 0},
    {"attn_q_b.weight", {Q_LORA, MLA_Q}, BASE, W, 1.4f, ONE, LATENT | Q_LORA_RANK, 0},
    {"attn_q.weight", {D_MODEL, MLA_Q}, BASE, W, 1.4f, ONE, LATENT, Q_LORA_RANK},
    {"attn_kv_a_mqa.weight", {D_MODEL, KV_A}, BASE, W, 1.4f, ONE, LATENT, 0},
    {"attn_k_b.weight", {QK_NOPE, KV_LORA, HEADS}, MLA_B, W, 1.4f, KEY_B, LATENT, KV_B},
    {"attn_v_b.weight", {KV_LORA, V_DIM, HEADS}, MLA_B, W, 1, ONE, LATENT, KV_B},
    {"attn_kv_b.weight", {KV_LORA, MLA_KV}, BASE, W, 1.2f, ONE, LATENT | KV_B, 0},
    {"attn_output.weight", {MLA_O, D_MODEL}, ATTN_O, W, 1, RESIDUAL, LATENT, 0},
    {"indexer.k_norm.weight", {IDX_DIM}, VECTOR, N, 1, ONE, INDEXER, 0},
    {"indexer.k_norm.bias", {IDX_DIM}, VECTOR, W, 0.2f, ONE, INDEXER, 0},
    {"indexer.proj.weight", {D_MODEL, IDX_HEADS}, ROUTER, W, 1, ONE, INDEXER, 0},
    {"indexer.attn_k.weight", {D_MODEL, IDX_DIM}, BASE, W, 1, ONE, INDEXER, 0},
    {"indexer.attn_q_b.weight", {Q_LORA, IDX_Q}, BASE, W, 1, ONE, INDEXER, 0},
    /* q, k, v */
    {"attn_qkv.weight", {D_MODEL, QKV_DIM}, QKV, W, 1, SCORES, FUSED_QKV, 0},
    {"attn_q.weight", {D_MODEL, Q_DIM}, BASE, W, 1, SCORES, GQA, 0},
    {"attn_k.weight", {D_MODEL, KV_DIM}, BASE, W, 1, SCORES, GQA, 0},
    {"attn_v.weight", {D_MODEL, KV_DIM}, ATTN_V, W, 1, ONE, GQA, 0},
    {"attn_q.bias", {Q_DIM}, VECTOR, W, 0.5f, ONE, QKV_BIAS, 0},
    {"attn_k.bias", {KV_DIM}, VECTOR, W, 0.5f, ONE, QKV_BIAS, 0},
    {"attn_v.bias", {KV_DIM}, VECTOR, W, 0.5f, ONE, QKV_BIAS, 0},
    {"attn_output.weight", {Q_DIM, D_MODEL}, ATTN_O, W, 1, RESIDUAL, 0, LATENT},
    {"attn_q_norm.weight", {HEAD_DIM}, VECTOR, N, 1.4f, ONE, QK_NORM, 0},
    {"attn_k_norm.weight", {HEAD_DIM}, VECTOR, N, 1.4f, ONE, QK_NORM, 0},
    {"attn_output.bias", {D_MODEL}, VECTOR, W, 0.2f, ONE, SINKS, 0},
    {"attn_sinks.weight", {HEADS}, VECTOR, W, 1, ONE, SINKS, 0},
    {"post_attention_norm.weight", {D_MODEL}, VECTOR, N, 1, ONE, POST_NORMS, 0},
    {"post_attention_norm.weight", {D_MODEL}, VECTOR, N, 1, ONE, PAN_IS_FFN, 0},
    {"ffn_norm.weight", {D_MODEL}, VECTOR, N, 1, ONE, 0, PAN_IS_FFN},
    /* FFN */
    {"ffn_gate.weight", {D_MODEL, D_FF}, BASE, W, 1, ONE, DENSE, FUSED_FFN},
    {"ffn_up.weight", {D_MODEL, D_FF}, BASE, W, 1, ONE, DENSE, FUSED_FFN},
    {"ffn_up.weight", {D_MODEL, D_FF_2}, BASE, W, 1, ONE, DENSE | FUSED_FFN, 0},
    {"ffn_down.weight", {D_FF, D_MODEL}, DOWN, W, 1, RESIDUAL, DENSE, 0},
    {"ffn_gate_inp.weight", {D_MODEL, N_EXPERTS}, ROUTER, W, 2, ONE, MOE, 0},
    {"exp_probs_b.bias", {N_EXPERTS}, VECTOR, W, 0.1f, ONE, MOE | SIGMOID, 0},
    {"ffn_gate_exps.weight", {D_MODEL, D_EXPERT, N_EXPERTS}, EXPERT, W, 1, ONE, MOE, 0},
    {"ffn_up_exps.weight", {D_MODEL, D_EXPERT, N_EXPERTS}, EXPERT, W, 1, ONE, MOE, 0},
    {"ffn_down_exps.weight", {D_EXPERT, D_MODEL, N_EXPERTS}, EXPERT_DOWN, W, 1, RESIDUAL, MOE, 0},
    {"ffn_gate_inp.bias", {N_EXPERTS}, VECTOR, W, 0.5f, ONE, MOE | SINKS, 0},
    {"ffn_gate_exps.bias", {D_EXPERT, N_EXPERTS}, VECTOR, W, 0.3f, ONE, MOE | SINKS, 0},
    {"ffn_up_exps.bias", {D_EXPERT, N_EXPERTS}, VECTOR, W, 0.3f, ONE, MOE | SINKS, 0},
    {"ffn_down_exps.bias", {D_MODEL, N_EXPERTS}, VECTOR, W, 0.2f, ONE, MOE | SINKS, 0},
    {"ffn_gate_inp_shexp.weight", {D_MODEL}, ROUTER, W, 1, ONE, MOE | SHARED_GATE, 0},
    {"ffn_gate_shexp.weight", {D_MODEL, D_SHARED}, BASE, W, 1, ONE, MOE | SHARED, 0},
    {"ffn_up_shexp.weight", {D_MODEL, D_SHARED}, BASE, W, 1, ONE, MOE | SHARED, 0},
    {"ffn_down_shexp.weight", {D_SHARED, D_MODEL}, DOWN, W, 1, RESIDUAL, MOE | SHARED, 0},
    {"post_ffw_norm.weight", {D_MODEL}, VECTOR, N, 1, ONE, POST_NORMS, 0},
    /* draft layers, which an engine without speculation must skip */
    {"nextn.eh_proj.weight", {D_MODEL_2, D_MODEL}, BASE, W, 1, ONE, DRAFT, 0},
    {"nextn.enorm.weight", {D_MODEL}, VECTOR, N, 1, ONE, DRAFT, 0},
    {"nextn.hnorm.weight", {D_MODEL}, VECTOR, N, 1, ONE, DRAFT, 0},
    {"nextn.shared_head_norm.weight", {D_MODEL}, VECTOR, N, 1, ONE, DRAFT, 0},
};
#undef W
#undef N

/* Small where the embedding is also the output: else every token would predict itself. */
static float embedding_size(const shape *s)
{
    if (strcmp(s->arch, "gemma3") == 0) return 0.01f; /* which multiplies by sqrt(d_model) */
    return s->tied ? 0.02f : 0.05f;
}

static float scale_of(const shape *s, scale k)
{
    const float root = sqrtf((float)s->d_model);
    switch (k) {
    case ONE:
        return 1;
    case RESIDUAL:
        return 1 / sqrtf(2 * (float)s->n_layers);
    case SCORES:
        return features_of(s) & QK_NORM ? 1 : 1.4f;
    case EMBED:
        return embedding_size(s) * root; /* undoes 1/sqrt(fan-in) */
    case LOGITS:
        return s->tied ? 3 / (embedding_size(s) * root) : 1;
    case KEY_B:
        return sqrtf((float)s->qk_nope / (float)s->kv_lora);
    }
    return 1;
}

static void add_rows(const shape *s, const mix *m, const row *rows, size_t n, int layer,
                     unsigned features, tensor_list *list)
{
    for (size_t i = 0; i < n; i++) {
        const row *r = &rows[i];
        if ((features & r->need) != r->need || (features & r->unless)) continue;
        if (list->n == list->cap) {
            int64_t cap = list->cap ? 2 * list->cap : 256;
            tensor *t = realloc(list->t, (size_t)cap * sizeof *t);
            if (!t) {
                list->failed = true;
                return;
            }
            list->t = t;
            list->cap = cap;
        }
        tensor *t = &list->t[list->n++];
        *t = (tensor){.fill = r->fill, .size = r->gain * scale_of(s, r->scale)};
        if (layer < 0)
            snprintf(t->name, sizeof t->name, "%s", r->name);
        else
            snprintf(t->name, sizeof t->name, "blk.%d.%s", layer, r->name);
        for (int k = 0; k < 4; k++)
            t->ne[k] = k < 3 ? dim_of(s, r->ne[k]) : 1;
        while (t->n_dims < 3 && r->ne[t->n_dims] != NIL)
            t->n_dims++;
        t->type = fitting(wanted_type(r->role, layer, s, m), t->ne[0]);
        if (r->fill == FILL_WEIGHT && r->role != VECTOR) t->size /= sqrtf((float)t->ne[0]);
    }
}

#define COUNT(a) (sizeof(a) / sizeof *(a))

void list_tensors(const shape *s, const mix *m, tensor_list *list)
{
    const unsigned f = features_of(s);
    add_rows(s, m, head_rows, COUNT(head_rows), -1, f, list);
    for (int i = 0; i < s->n_layers + s->n_mtp; i++) {
        unsigned layer = s->n_experts && i >= s->n_dense ? MOE : DENSE;
        if (i >= s->n_layers) layer |= DRAFT;
        add_rows(s, m, layer_rows, COUNT(layer_rows), i, f | layer, list);
    }
}

/* ---- metadata -------------------------------------------------------------------------------- */

static void put_u32(bg_gguf_writer *w, const shape *s, const char *key, int64_t v)
{
    char full[96];
    if (!v) return; /* not there */
    snprintf(full, sizeof full, "%s.%s", s->arch, key);
    bg_gguf_put_u32(w, full, (uint32_t)v);
}

static void put_f32(bg_gguf_writer *w, const shape *s, const char *key, float v)
{
    char full[96];
    if (v == 0) return;
    snprintf(full, sizeof full, "%s.%s", s->arch, key);
    bg_gguf_put_f32(w, full, v);
}

static void put_text(bg_gguf_writer *w, const char *key, const char *text)
{
    bg_gguf_put_str(w, key, text, strlen(text));
}

static void put_attention(bg_gguf_writer *w, const shape *s)
{
    if (features_of(s) & LATENT) {
        const bool old = s->legacy_kv_b;
        put_u32(w, s, "attention.head_count_kv", old ? s->n_heads : 1);
        put_u32(w, s, "attention.key_length", (old ? s->qk_nope : s->kv_lora) + s->qk_rope);
        put_u32(w, s, "attention.value_length", old ? s->v_dim : s->kv_lora);
        put_u32(w, s, "attention.key_length_mla", old ? 0 : s->qk_nope + s->qk_rope);
        put_u32(w, s, "attention.value_length_mla", old ? 0 : s->v_dim);
        put_u32(w, s, "attention.q_lora_rank", s->q_lora);
        put_u32(w, s, "attention.kv_lora_rank", s->kv_lora);
        put_u32(w, s, "rope.dimension_count", s->qk_rope);
        put_u32(w, s, "attention.indexer.head_count", s->idx_heads);
        put_u32(w, s, "attention.indexer.key_length", s->idx_heads ? s->idx_dim : 0);
        put_u32(w, s, "attention.indexer.top_k", s->idx_top_k);
    } else {
        put_u32(w, s, "attention.head_count_kv", s->n_kv_heads);
        put_u32(w, s, "attention.key_length", s->head_dim);
        put_u32(w, s, "attention.value_length", s->head_dim);
        put_u32(w, s, "rope.dimension_count", s->rope_dim ? s->rope_dim : s->head_dim);
    }
    put_u32(w, s, "attention.sliding_window", s->window);
    put_u32(w, s, "attention.sliding_window_pattern", s->window_period);
}

static void put_experts(bg_gguf_writer *w, const shape *s)
{
    char key[96];
    if (!s->n_experts) return;
    put_u32(w, s, "expert_count", s->n_experts);
    put_u32(w, s, "expert_used_count", s->top_k);
    put_u32(w, s, "expert_feed_forward_length", s->d_ff_expert);
    put_u32(w, s, "expert_shared_feed_forward_length", s->d_ff_shared);
    put_u32(w, s, "expert_shared_count", s->n_shared);
    put_u32(w, s, "leading_dense_block_count", s->n_dense);
    put_u32(w, s, "expert_group_count", s->n_groups);
    put_u32(w, s, "expert_group_used_count", s->n_groups_used);
    const bool sigmoid = features_of(s) & SIGMOID; /* softmax: the default of the others */
    put_u32(w, s, "expert_gating_func", sigmoid ? 2 : 0);
    put_f32(w, s, "expert_weights_scale", s->gate_scale);
    if (!sigmoid) return;
    snprintf(key, sizeof key, "%s.expert_weights_norm", s->arch);
    bg_gguf_put_bool(w, key, true);
}

static void put_rope(bg_gguf_writer *w, const shape *s)
{
    char key[96];
    put_f32(w, s, "rope.freq_base", s->rope_base);
    put_f32(w, s, "rope.freq_base_swa", s->rope_base_swa);
    if (s->rope_linear == 0 && s->yarn_factor == 0) return;
    snprintf(key, sizeof key, "%s.rope.scaling.type", s->arch);
    put_text(w, key, s->yarn_factor != 0 ? "yarn" : "linear");
    put_f32(w, s, "rope.scaling.factor", s->yarn_factor != 0 ? s->yarn_factor : s->rope_linear);
    put_u32(w, s, "rope.scaling.original_context_length", s->yarn_context);
    put_f32(w, s, "rope.scaling.yarn_log_multiplier", s->yarn_log);
}

void put_metadata(bg_gguf_writer *w, const shape *s, const mix *m)
{
    char name[96];
    put_text(w, "general.architecture", s->arch);
    snprintf(name, sizeof name, "synthetic %s", s->name);
    put_text(w, "general.name", name);
    bg_gguf_put_u32(w, "general.file_type", m->file_type);
    bg_gguf_put_u32(w, "general.quantization_version", 2);
    put_u32(w, s, "block_count", s->n_layers + s->n_mtp);
    put_u32(w, s, "nextn_predict_layers", s->n_mtp);
    put_u32(w, s, "context_length", s->context);
    put_u32(w, s, "embedding_length", s->d_model);
    put_u32(w, s, "feed_forward_length", s->d_ff);
    put_u32(w, s, "vocab_size", s->vocab);
    put_u32(w, s, "attention.head_count", s->n_heads);
    put_f32(w, s, "attention.layer_norm_rms_epsilon", s->eps);
    put_attention(w, s);
    put_experts(w, s);
    put_rope(w, s);
}
