#include "backend/cpu/linear_repack.h"

#include <string.h>

#include "gguf/gguf.h"

const lin_format_info lin_formats[LIN_FORMATS] = {
    [LIN_RAW] = {BG_QTYPE_COUNT, false, 0, LIN_BLOCK, 0, LIN_START_NONE},
    [LIN_F32] = {BG_F32, false, 2048, LIN_BLOCK, 0, LIN_START_NONE},
    [LIN_F16] = {BG_F16, false, 1024, LIN_BLOCK, 0, LIN_START_NONE},
    [LIN_BF16] = {BG_BF16, false, 1024, LIN_BLOCK, 0, LIN_START_NONE},
    [LIN_Q4_0] = {BG_Q4_0, true, 256, LIN_BLOCK, 32, LIN_START_8},
    [LIN_Q4_1] = {BG_Q4_1, true, 256, LIN_BLOCK, 64, LIN_START_NONE},
    [LIN_Q5_0] = {BG_Q5_0, true, 320, LIN_BLOCK, 32, LIN_START_16},
    [LIN_Q5_1] = {BG_Q5_1, true, 320, LIN_BLOCK, 64, LIN_START_NONE},
    [LIN_Q8_0] = {BG_Q8_0, true, 512, LIN_BLOCK, 32, LIN_START_128},
    [LIN_IQ4_NL] = {BG_IQ4_NL, true, 256, LIN_BLOCK, 32, LIN_START_128},
    [LIN_MXFP4] = {BG_MXFP4, true, 256, LIN_BLOCK, 16, LIN_START_128},
    [LIN_Q4_K] = {BG_Q4_K, true, 256, LIN_SUPER, 256, LIN_START_NONE},
    [LIN_Q5_K] = {BG_Q5_K, true, 320, LIN_SUPER, 256, LIN_START_NONE},
    [LIN_Q6_K] = {BG_Q6_K, true, 384, LIN_SUPER, 288, LIN_START_32_HALVES},
    [LIN_IQ4_XS] = {BG_IQ4_XS, true, 256, LIN_SUPER, 160, LIN_START_128},
    [LIN_Q3_K] = {BG_Q3_K, true, 256, LIN_SUPER, 288, LIN_START_4_HALVES},
    [LIN_Q2_K] = {BG_Q2_K, true, 128, LIN_SUPER, 320, LIN_START_NONE},
};

lin_format lin_format_of(uint32_t type)
{
    for (int f = LIN_F32; f < LIN_FORMATS; f++)
        if (lin_formats[f].type == type) return (lin_format)f;
    return LIN_RAW;
}

size_t lin_quants_bytes(lin_format format, int64_t n_cols)
{
    return (size_t)(n_cols * lin_formats[format].quant_bytes / LIN_BLOCK + 63) / 64 * 64;
}

size_t lin_group_bytes(lin_format format, int64_t n_cols)
{
    const lin_format_info *f = &lin_formats[format];
    const size_t scales = (size_t)(n_cols / f->scale_cols * f->scale_bytes);
    return lin_quants_bytes(format, n_cols) + (scales + 63) / 64 * 64;
}

/* The 32 nibbles of 16 bytes as the 32-column types store them: element i low, 16 + i high. */
static void nibbles(uint8_t *q, const uint8_t *src)
{
    for (int i = 0; i < 16; i++) {
        q[i] = src[i] & 15;
        q[16 + i] = src[i] >> 4;
    }
}

static void fifth_bits(uint8_t *q, const uint8_t *src)
{
    for (int i = 0; i < 32; i++)
        q[i] |= (uint8_t)((src[i / 8] >> i % 8 & 1) << 4);
}

/* The quants of 32 columns as stored (unsigned), from block src; j: which 32 of a 256-column block.
 */
static void block_quants(uint8_t *q, lin_format format, const uint8_t *src, int j)
{
    switch (format) {
    case LIN_Q4_0:
    case LIN_IQ4_NL:
        nibbles(q, src + 2);
        break;
    case LIN_MXFP4:
        nibbles(q, src + 1);
        break;
    case LIN_Q4_1:
        nibbles(q, src + 4);
        break;
    case LIN_Q5_0:
        nibbles(q, src + 6);
        fifth_bits(q, src + 2);
        break;
    case LIN_Q5_1:
        nibbles(q, src + 8);
        fifth_bits(q, src + 4);
        break;
    case LIN_Q8_0:
        for (int i = 0; i < 32; i++)
            q[i] = src[2 + i] ^ 0x80;
        break;
    case LIN_IQ4_XS:
        nibbles(q, src + 8 + 16 * j);
        break;
    case LIN_Q4_K:
        for (int i = 0; i < 32; i++)
            q[i] = src[16 + 32 * (j / 2) + i] >> 4 * (j & 1) & 15;
        break;
    case LIN_Q5_K:
        for (int i = 0; i < 32; i++)
            q[i] = (uint8_t)((src[48 + 32 * (j / 2) + i] >> 4 * (j & 1) & 15) |
                             (src[16 + i] >> j & 1) << 4);
        break;
    case LIN_Q2_K:
        for (int i = 0; i < 32; i++)
            q[i] = src[16 + 32 * (j / 4) + i] >> 2 * (j % 4) & 3;
        break;
    case LIN_Q3_K:
        for (int i = 0; i < 32; i++)
            q[i] =
                (uint8_t)((src[32 + 32 * (j / 4) + i] >> 2 * (j % 4) & 3) | (src[i] >> j & 1) << 2);
        break;
    case LIN_Q6_K: {
        const uint8_t *low = src + 64 * (j / 4) + 32 * (j & 1), *high = src + 128 + 32 * (j / 4);
        for (int i = 0; i < 32; i++)
            q[i] = (uint8_t)((low[i] >> 4 * (j % 4 / 2) & 15) | (high[i] >> 2 * (j % 4) & 3) << 4);
        break;
    }
    default:
        memset(q, 0, LIN_BLOCK);
        break;
    }
}

/* Bits [at, at + 2) of each quant to two planes. */
static void put_pairs(uint8_t *dst, int r, const uint8_t *q, int at)
{
    for (int p = 0; p < 2; p++) {
        uint8_t pairs[4] = {0};
        for (int i = 0; i < 4; i++)
            for (int c = 0; c < 4; c++)
                pairs[c] |= (uint8_t)((q[16 * p + 4 * i + c] >> at & 3) << 2 * i);
        memcpy(dst + 64 * p + 4 * r, pairs, 4);
    }
}

static void put_quants(lin_format format, uint8_t *dst, int r, const uint8_t *q)
{
    if (format == LIN_Q8_0) {
        for (int s = 0; s < 8; s++)
            memcpy(dst + 64 * s + 4 * r, q + 4 * s, 4);
        return;
    }
    if (format == LIN_Q2_K) {
        put_pairs(dst, r, q, 0);
        return;
    }
    uint8_t pair[16];
    for (int i = 0; i < 16; i++)
        pair[i] = (uint8_t)((q[i] & 15) | q[16 + i] << 4);
    for (int j = 0; j < 4; j++)
        memcpy(dst + 64 * j + 4 * r, pair + 4 * j, 4);
    if (format == LIN_Q5_0 || format == LIN_Q5_1 || format == LIN_Q5_K) {
        uint8_t up[4] = {0};
        for (int s = 0; s < 8; s++)
            for (int c = 0; c < 4; c++)
                up[c] |= (uint8_t)((q[4 * s + c] >> 4) << s);
        memcpy(dst + 256 + 4 * r, up, 4);
    } else if (format == LIN_Q6_K) {
        put_pairs(dst + 256, r, q, 4);
    }
}

static void put_half(uint8_t *dst, int r, const uint8_t *src)
{
    memcpy(dst + 2 * r, src, 2);
}

static void put_scales(lin_format format, uint8_t *dst, int r, const uint8_t *src)
{
    switch (format) {
    case LIN_Q4_1:
    case LIN_Q5_1:
        put_half(dst, r, src);
        put_half(dst + 32, r, src + 2);
        break;
    case LIN_MXFP4:
        dst[r] = src[0];
        break;
    case LIN_Q4_K:
    case LIN_Q5_K:
        for (int i = 0; i < 12; i++)
            dst[16 * i + r] = src[4 + i];
        put_half(dst + 192, r, src);
        put_half(dst + 224, r, src + 2);
        break;
    case LIN_Q6_K:
        for (int i = 0; i < 16; i++)
            dst[16 * i + r] = src[192 + i];
        put_half(dst + 256, r, src + 208);
        break;
    case LIN_Q2_K:
        for (int i = 0; i < 16; i++)
            dst[16 * i + r] = src[i];
        put_half(dst + 256, r, src + 80);
        put_half(dst + 288, r, src + 82);
        break;
    case LIN_Q3_K:
        for (int i = 0; i < 16; i++) {
            const int low = i < 8 ? src[96 + i] & 15 : src[88 + i] >> 4;
            const int high = (src[104 + i % 4] >> 2 * (i / 4) & 3) << 4;
            dst[16 * i + r] = (uint8_t)((low | high) - 32);
        }
        put_half(dst + 256, r, src + 108);
        break;
    case LIN_IQ4_XS:
        for (int i = 0; i < 8; i++) {
            const int low = src[4 + i / 2] >> 4 * (i & 1) & 15;
            const int high = (src[2 + i / 4] >> 2 * (i % 4) & 3) << 4;
            dst[16 * i + r] = (uint8_t)((low | high) - 32);
        }
        put_half(dst + 128, r, src);
        break;
    default: /* d first */
        put_half(dst, r, src);
        break;
    }
}

void lin_repack_row(lin_format format, uint8_t *dst, int r, const uint8_t *src, int64_t n_cols)
{
    const lin_format_info *f = &lin_formats[format];
    const bg_qtype_info *type = bg_qtype_get(f->type);
    if (!f->integer) {
        const size_t size = (size_t)type->block_bytes;
        for (int64_t k = 0; k < n_cols; k++)
            memcpy(dst + ((size_t)k * LIN_ROWS + (size_t)r) * size, src + (size_t)k * size, size);
        return;
    }
    uint8_t *scales = dst + lin_quants_bytes(format, n_cols);
    for (int64_t c = 0; c < n_cols; c += f->scale_cols) {
        for (int j = 0; j < f->scale_cols / LIN_BLOCK; j++) {
            uint8_t q[LIN_BLOCK];
            block_quants(q, format, src, j);
            put_quants(format, dst, r, q);
            dst += f->quant_bytes;
        }
        put_scales(format, scales, r, src);
        scales += f->scale_bytes;
        src += type->block_bytes;
    }
}
