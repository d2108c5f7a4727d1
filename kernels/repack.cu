/* kernels/repack.cu - weights from GGUF blocks to tiles (bgk.h), or to plain values; random blocks
 * and values.
 *
 *   launch    tiles: a warp a row for the row's exponent, then 128 threads a chunk, each of which
 *             looks up the weights that it will hold in a matrix product; no shared memory
 *   order     every number is a function of its row alone
 *   traffic   blocks twice (the second time mostly from L2), tiles once
 *   proof     tests/gpu/test_repack.c: every type against bg_dequant_row, by a decoder that follows
 *             the layout's text; what threads do (pack.h) on the host too */
#include "pack.h"

#include <cuda_bf16.h>

namespace
{

struct sources {
    bgk_source s[2];
    bool glu;
    int each, tiles_each; /* rows and tiles of one matrix of a stack */
};

__device__ pack_row row_of(const sources &from, int tile, int row)
{
    int i;
    const int at = tile / from.tiles_each * from.each;
    const int n = pack_row_of(from.glu, tile % from.tiles_each, row, &i);
    const bgk_source &s = from.s[i];
    if (n >= from.each) return pack_row{nullptr, s.type, 0};
    return pack_row{(const uint8_t *)s.rows + (at + n) * s.row_bytes, s.type, 0};
}

constexpr int SCALE_WARPS = 8;

/* A warp: row_scale of one tile row. */
__global__ void __launch_bounds__(SCALE_WARPS * 32)
    row_scales(float *row_scale, int format, sources from, int n_rows, int k)
{
    const int at = blockIdx.x * SCALE_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (at >= n_rows) return;
    const pack_row r = row_of(from, at / 64, at % 64);
    float s = 0, m = 0;
    if (r.p && format == BGK_W16)
        for (int c = lane; c < k; c += 32)
            s = fmaxf(s, pack_size(pack_value(r.type, r.p, c)));
    else if (r.p)
        for (int c = 16 * lane; c < k; c += 16 * 32) {
            s = fmaxf(s, pack_size(pack_scale(r.type, r.p, c)));
            m = fmaxf(m, pack_size(pack_min(r.type, r.p, c)));
        }
    for (int i = 16; i; i /= 2) {
        s = fmaxf(s, __shfl_xor_sync(~0u, s, i));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, i));
    }
    if (lane == 0) row_scale[at] = ldexpf(1, pack_exponent(format, s, m));
}

__global__ void __launch_bounds__(128)
    fill_chunks(uint8_t *chunks, const float *row_scale, int format, sources from, int n_chunks,
                int chunk_bytes, int k)
{
    const int tile = blockIdx.x / n_chunks, chunk = blockIdx.x % n_chunks;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    pack_row r0 = row_of(from, tile, row), r1 = row_of(from, tile, row + 8);
    r0.e = (int)(pack_bits(row_scale[tile * 64 + row]) >> 23) - 127;
    r1.e = (int)(pack_bits(row_scale[tile * 64 + row + 8]) >> 23) - 127;
    pack_thread(format, chunks + (int64_t)blockIdx.x * chunk_bytes, threadIdx.x, r0, r1, 64 * chunk,
                k);
}

__device__ void put(float *to, float v)
{
    *to = v;
}

__device__ void put(__half *to, float v)
{
    *to = __float2half_rn(v);
}

template <typename T>
__global__ void __launch_bounds__(256) values(T *out, bgk_source from, int k, int64_t k_padded)
{
    const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    const int64_t row = at / k_padded;
    const int c = (int)(at % k_padded);
    if (row >= from.n_rows) return;
    const uint8_t *p = (const uint8_t *)from.rows + row * from.row_bytes;
    put(out + at, c < k ? pack_value(from.type, p, c) : 0.0f);
}

__global__ void __launch_bounds__(256)
    random_blocks(uint8_t *blocks, int type, int bytes, int64_t n, uint64_t seed, uint64_t block0,
                  float std)
{
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) pack_random_block(type, blocks + i * bytes, bytes, seed, block0 + i, std);
}

template <bgk_type TYPE> struct raw {
    typedef uint16_t bits;
};
template <> struct raw<BGK_F32> {
    typedef uint32_t bits;
};
template <> struct raw<BGK_Q8> {
    typedef uint8_t bits;
};

template <bgk_type TYPE> __device__ typename raw<TYPE>::bits rounded(float v)
{
    if constexpr (TYPE == BGK_F32) return __float_as_uint(v);
    if constexpr (TYPE == BGK_F16) return __half_as_ushort(__float2half_rn(v));
    if constexpr (TYPE == BGK_BF16) return __bfloat16_as_ushort(__float2bfloat16_rn(v));
    if constexpr (TYPE == BGK_Q8) return (uint8_t)__float2int_rn(v);
}

constexpr int FILL_BLOCKS = 4096; /* several waves of any GPU */

/* A thread: 16 bytes at a time, from 16 hashed bytes, as many bits for each value as it has. */
template <bgk_type TYPE>
__global__ void __launch_bounds__(256)
    random_values(uint8_t *to, int64_t n_rows, int64_t n, int64_t row_bytes, float mid,
                  float spread, uint64_t base)
{
    typedef typename raw<TYPE>::bits bits;
    constexpr int BITS = 8 * (int)sizeof(bits), EACH = 128 / BITS;
    const int64_t pieces = (n + EACH - 1) / EACH;
    const float step = spread * 0x1p-31f;
    for (int64_t row = blockIdx.y; row < n_rows; row += gridDim.y)
        for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < pieces;
             i += (int64_t)gridDim.x * 256) {
            const uint64_t at = base + 2 * (uint64_t)(row * pieces + i);
            const uint64_t w[2] = {pack_mix(at * 0x9e3779b97f4a7c15ull),
                                   pack_mix((at + 1) * 0x9e3779b97f4a7c15ull)};
            union {
                bits v[EACH];
                uint4 all;
            } piece;
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                /* The value's bits as the upper ones of a number in +- 2^31. */
                const uint32_t r = (uint32_t)(w[j * BITS / 64] >> j * BITS % 64) << (32 - BITS);
                piece.v[j] = rounded<TYPE>(fmaf((float)(int32_t)r, step, mid));
            }
            bits *out = (bits *)(to + row * row_bytes) + i * EACH;
            if (n - i * EACH >= EACH) {
                *(uint4 *)out = piece.all;
                continue;
            }
#pragma unroll
            for (int j = 0; j < EACH; j++)
                if (j < n - i * EACH) out[j] = piece.v[j];
        }
}

/* Columns and bytes of a block; 0: not a type that is read here. */
int block_values(int type, int *bytes)
{
    switch (type) {
    case BGK_GGUF_F32:
        return *bytes = 4, 1;
    case BGK_GGUF_F16:
    case BGK_GGUF_BF16:
        return *bytes = 2, 1;
    case BGK_Q4_0:
    case BGK_IQ4_NL:
        return *bytes = 18, 32;
    case BGK_Q4_1:
        return *bytes = 20, 32;
    case BGK_Q5_0:
        return *bytes = 22, 32;
    case BGK_Q5_1:
        return *bytes = 24, 32;
    case BGK_Q8_0:
        return *bytes = 34, 32;
    case BGK_MXFP4:
        return *bytes = 17, 32;
    case BGK_Q3_K:
        return *bytes = 110, 256;
    case BGK_Q4_K:
        return *bytes = 144, 256;
    case BGK_Q5_K:
        return *bytes = 176, 256;
    case BGK_Q6_K:
        return *bytes = 210, 256;
    case BGK_IQ4_XS:
        return *bytes = 136, 256;
    default:
        return *bytes = 0;
    }
}

bool valid(const bgk_source *s, int k)
{
    int bytes;
    const int n = block_values(s->type, &bytes);
    return n && k >= 0 && k % n == 0 && s->n_rows >= 0 && (s->rows || !s->n_rows) &&
           s->row_bytes >= (int64_t)(k / n) * bytes;
}

bool fits(int type, bgk_format format)
{
    const bgk_format own = bgk_format_of(type);
    return own == format || format == BGK_W16 || (own == BGK_W4 && format == BGK_W5);
}

} // namespace

cudaError_t bgk_repack(void *chunks, float *row_scale, bgk_format format, const bgk_source *rows,
                       const bgk_source *up, int k, cudaStream_t stream)
{
    return bgk_repack_stack(chunks, row_scale, format, rows, up, rows->n_rows, k, stream);
}

cudaError_t bgk_repack_stack(void *chunks, float *row_scale, bgk_format format,
                             const bgk_source *rows, const bgk_source *up, int each, int k,
                             cudaStream_t stream)
{
    if (format < 0 || format >= BGK_FORMATS || !valid(rows, k) || !fits(rows->type, format) ||
        (up && (!valid(up, k) || !fits(up->type, format) || up->n_rows != rows->n_rows)) ||
        k > INT32_MAX - 64 || (uintptr_t)chunks % 16 || each < 0 ||
        (rows->n_rows && (!each || rows->n_rows % each)))
        return cudaErrorInvalidValue;
    if (!rows->n_rows) return cudaSuccess;
    const int64_t tiles_each = (int64_t)(each + 63) / 64 * (up ? 2 : 1),
                  n_tiles = rows->n_rows / each * tiles_each, n_chunks = (k + 63) / 64;
    if (n_tiles * 64 > INT32_MAX || n_tiles * n_chunks > INT32_MAX) return cudaErrorInvalidValue;
    const sources from = {{*rows, up ? *up : *rows}, up != nullptr, each, (int)tiles_each};
    row_scales<<<(unsigned)(n_tiles * 64 / SCALE_WARPS), SCALE_WARPS * 32, 0, stream>>>(
        row_scale, format, from, (int)n_tiles * 64, k);
    if (n_chunks)
        fill_chunks<<<(unsigned)(n_tiles * n_chunks), 128, 0, stream>>>(
            (uint8_t *)chunks, row_scale, format, from, (int)n_chunks, bgk_chunk_bytes(format), k);
    return cudaGetLastError();
}

cudaError_t bgk_dequant(void *out, bgk_type type, const bgk_source *rows, int k, int64_t k_padded,
                        cudaStream_t stream)
{
    if (!valid(rows, k) || k_padded < k || (type != BGK_F32 && type != BGK_F16))
        return cudaErrorInvalidValue;
    const int64_t n = rows->n_rows * k_padded, blocks = (n + 255) / 256;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    if (type == BGK_F32)
        values<<<(unsigned)blocks, 256, 0, stream>>>((float *)out, *rows, k, k_padded);
    else
        values<<<(unsigned)blocks, 256, 0, stream>>>((__half *)out, *rows, k, k_padded);
    return cudaGetLastError();
}

cudaError_t bgk_random_blocks(void *blocks, int type, int64_t n_blocks, uint64_t seed,
                              uint64_t block0, float std, cudaStream_t stream)
{
    int bytes;
    if (!block_values(type, &bytes) || n_blocks < 0 || n_blocks / 256 >= INT32_MAX)
        return cudaErrorInvalidValue;
    if (!n_blocks) return cudaSuccess;
    random_blocks<<<(unsigned)((n_blocks + 255) / 256), 256, 0, stream>>>(
        (uint8_t *)blocks, type, bytes, n_blocks, seed, block0, std);
    return cudaGetLastError();
}

cudaError_t bgk_random_values(void *to, bgk_type type, int64_t n_rows, int64_t n, int64_t row_bytes,
                              float mid, float spread, uint64_t seed, cudaStream_t stream)
{
    const int64_t value = type == BGK_F32 ? 4 : type == BGK_Q8 ? 1 : 2;
    if (n_rows < 0 || n < 0 || n > INT64_MAX / 8 || (uintptr_t)to % 16 || !(spread >= 0) ||
        !(fabsf(mid) + spread <= (type == BGK_Q8 ? 127 : 65504)) ||
        (n_rows > 1 && (row_bytes % 16 || row_bytes < n * value)))
        return cudaErrorInvalidValue;
    if (!n_rows || !n) return cudaSuccess;
    const int64_t row_blocks = (n * value + 16 * 256 - 1) / (16 * 256);
    dim3 grid((unsigned)(row_blocks < FILL_BLOCKS ? row_blocks : FILL_BLOCKS));
    grid.y = FILL_BLOCKS / grid.x;
    if (n_rows < grid.y) grid.y = (unsigned)n_rows;
    const uint64_t base = pack_mix(seed + 1);
    uint8_t *out = (uint8_t *)to;
    switch (type) {
    case BGK_F32:
        random_values<BGK_F32>
            <<<grid, 256, 0, stream>>>(out, n_rows, n, row_bytes, mid, spread, base);
        break;
    case BGK_F16:
        random_values<BGK_F16>
            <<<grid, 256, 0, stream>>>(out, n_rows, n, row_bytes, mid, spread, base);
        break;
    case BGK_BF16:
        random_values<BGK_BF16>
            <<<grid, 256, 0, stream>>>(out, n_rows, n, row_bytes, mid, spread, base);
        break;
    case BGK_Q8:
        random_values<BGK_Q8>
            <<<grid, 256, 0, stream>>>(out, n_rows, n, row_bytes, mid, spread, base);
        break;
    default:
        return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}
