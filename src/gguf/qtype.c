#include "gguf/gguf.h"

#include <strings.h>

static const bg_qtype_info types[BG_QTYPE_COUNT] = {
    [BG_F32] = {"F32", 1, 4, true},
    [BG_F16] = {"F16", 1, 2, true},
    [BG_Q4_0] = {"Q4_0", 32, 18, true},
    [BG_Q4_1] = {"Q4_1", 32, 20, true},
    [BG_Q5_0] = {"Q5_0", 32, 22, true},
    [BG_Q5_1] = {"Q5_1", 32, 24, true},
    [BG_Q8_0] = {"Q8_0", 32, 34, true},
    [BG_Q8_1] = {"Q8_1", 32, 36, false},
    [BG_Q2_K] = {"Q2_K", 256, 84, true},
    [BG_Q3_K] = {"Q3_K", 256, 110, true},
    [BG_Q4_K] = {"Q4_K", 256, 144, true},
    [BG_Q5_K] = {"Q5_K", 256, 176, true},
    [BG_Q6_K] = {"Q6_K", 256, 210, true},
    [BG_Q8_K] = {"Q8_K", 256, 292, true},
    [BG_IQ2_XXS] = {"IQ2_XXS", 256, 66, true},
    [BG_IQ2_XS] = {"IQ2_XS", 256, 74, true},
    [BG_IQ3_XXS] = {"IQ3_XXS", 256, 98, true},
    [BG_IQ1_S] = {"IQ1_S", 256, 50, true},
    [BG_IQ4_NL] = {"IQ4_NL", 32, 18, true},
    [BG_IQ3_S] = {"IQ3_S", 256, 110, true},
    [BG_IQ2_S] = {"IQ2_S", 256, 82, true},
    [BG_IQ4_XS] = {"IQ4_XS", 256, 136, true},
    [BG_I8] = {"I8", 1, 1, true},
    [BG_I16] = {"I16", 1, 2, true},
    [BG_I32] = {"I32", 1, 4, true},
    [BG_I64] = {"I64", 1, 8, true},
    [BG_F64] = {"F64", 1, 8, true},
    [BG_IQ1_M] = {"IQ1_M", 256, 56, true},
    [BG_BF16] = {"BF16", 1, 2, true},
    [BG_TQ1_0] = {"TQ1_0", 256, 54, true},
    [BG_TQ2_0] = {"TQ2_0", 256, 66, true},
    [BG_MXFP4] = {"MXFP4", 32, 17, true},
    [BG_NVFP4] = {"NVFP4", 64, 36, true},
    [BG_Q1_0] = {"Q1_0", 128, 18, true},
    [BG_Q2_0] = {"Q2_0", 64, 18, true},
};

const bg_qtype_info *bg_qtype_get(uint32_t id)
{
    static const bg_qtype_info unknown = {0};
    return id < BG_QTYPE_COUNT ? &types[id] : &unknown;
}

uint32_t bg_qtype_by_name(const char *name)
{
    for (uint32_t i = 0; i < BG_QTYPE_COUNT; i++)
        if (types[i].name && strcasecmp(types[i].name, name) == 0) return i;
    return BG_QTYPE_COUNT;
}

size_t bg_qtype_row_bytes(uint32_t id, int64_t n)
{
    const bg_qtype_info *t = bg_qtype_get(id);
    if (!t->name || n <= 0) return 0;
    return (size_t)(n / t->block_values) * (size_t)t->block_bytes;
}
