/* gguf/quant.h - private to src/gguf: decoders of one block. */
#ifndef BG_GGUF_QUANT_H
#define BG_GGUF_QUANT_H

#include <stdint.h>
#include <string.h>

#include "base/f16.h"

/* Decodes one block at b into its block_values floats. */
typedef void dequant_block(const uint8_t *b, float *y);

dequant_block dequant_iq2_xxs, dequant_iq2_xs, dequant_iq2_s, dequant_iq3_xxs, dequant_iq3_s,
    dequant_iq1_s, dequant_iq1_m, dequant_iq4_nl, dequant_iq4_xs;

static inline uint16_t load16(const uint8_t *b)
{
    return (uint16_t)(b[0] | b[1] << 8);
}

static inline uint32_t load32(const uint8_t *b)
{
    uint32_t v;
    memcpy(&v, b, 4);
    return v;
}

static inline float load_half(const uint8_t *b)
{
    return bg_f16_to_f32(load16(b));
}

/* Element i of 32 nibbles in 16 bytes: low nibbles hold 0..15, high ones 16..31. */
static inline int nibble(const uint8_t *q, int i)
{
    return q[i % 16] >> 4 * (i / 16) & 15;
}

#endif
