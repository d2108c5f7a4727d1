/* kernels/repack.cu - weights from GGUF blocks to tiles (bgk.h), or to plain values.
 *
 *   launch    tiles: a warp a row for the row's exponent, then 128 threads a chunk, each of which
 *             looks up the weights that it will hold in a matrix product; no shared memory
 *   order     every number is a function of its row alone
 *   traffic   blocks twice (the second time mostly from L2), tiles once
 *   proof     tests/gpu/test_repack.c: every type against bg_dequant_row, by a decoder that follows
 *             the layout's text; what threads do (pack.h) on the host too */
#include "pack.h"

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
