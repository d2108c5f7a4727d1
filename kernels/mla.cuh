/* kernels/mla.cuh - the latent cache in memory, and what its kernels share.
 *
 * Tensor-core form (bgk_mla_fits): a KV block of 16-bit values is [9 panels][block_tokens][64
 * values]: panels 0..7 are the latent, 8 is the rope key; the 16-byte piece p of a panel's row lies
 * at piece p ^ (token % 8). That is a K-major operand of wgmma with the 128-byte swizzle as it is,
 * so a bulk copy of a panel is all it takes. Q8: [block_tokens][512] int8, then [block_tokens][64]
 * halves, then [block_tokens] floats: latent = int8 * float.
 * Else [block_tokens][k_dim] values. */
#ifndef BGK_MLA_CUH
#define BGK_MLA_CUH

#include "attention.cuh"

constexpr int MLA_LATENT = 512, MLA_ROPE = 64, MLA_PANELS = 9;

/* First byte of a KV block. */
__device__ inline char *mla_block(const bgk_cache &c, int layer, int block, int64_t block_bytes)
{
    return (char *)c.k + ((int64_t)layer * c.n_blocks + block) * block_bytes;
}

/* Where 16-byte piece `piece` (0..71) of a token lies in its block, in 16-bit panels. */
__device__ inline uint32_t mla_piece(int block_tokens, int token, int piece)
{
    return (uint32_t)((piece / 8 * block_tokens + token) * 128 + ((piece % 8) ^ (token & 7)) * 16);
}

/* Between floats and what a cache has. */
__device__ inline float wide(float v)
{
    return v;
}

__device__ inline float wide(__half v)
{
    return __half2float(v);
}

__device__ inline float wide(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

__device__ inline void narrow(float *to, float v)
{
    *to = v;
}

__device__ inline void narrow(__half *to, float v)
{
    *to = tile_half(v);
}

__device__ inline void narrow(__nv_bfloat16 *to, float v)
{
    *to = __float2bfloat16_rn(v);
}

__device__ inline float mla_value(const bgk_out &x, int row, int col)
{
    switch (x.layout) {
    case BGK_TILES:
        return __half2float(((const __half *)x.data)[tile_at(x.stride, row, col)]);
    case BGK_HALF_ROWS:
        return __half2float(((const __half *)x.data)[row * x.stride + col]);
    default:
        return ((const float *)x.data)[row * x.stride + col];
    }
}

/* Cosine and sine of pos * freq. */
__device__ inline float2 mla_angle(int pos, float freq, float mscale)
{
    float c, s;
    sincosf(__fmul_rn((float)pos, freq), &s, &c);
    return make_float2(__fmul_rn(c, mscale), __fmul_rn(s, mscale));
}

__device__ inline float2 mla_turned(float x, float y, float2 angle)
{
    return make_float2(__fmaf_rn(x, angle.x, -__fmul_rn(y, angle.y)),
                       __fmaf_rn(x, angle.y, __fmul_rn(y, angle.x)));
}

/* A pair of values turned by pos * freq. */
__device__ inline float2 mla_turn(float x, float y, int pos, float freq, float mscale)
{
    return mla_turned(x, y, mla_angle(pos, freq, mscale));
}

#endif
