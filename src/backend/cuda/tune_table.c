#include "backend/cuda/tune_table.h"

#include <stddef.h>

/* With few tiles a multiprocessor of the 132 has one or none, and one long chain over K takes its
 * time: two parts of K side by side halve it. What that costs is memory for two rings of stages,
 * and so narrower blocks where there are many tokens. Measured on an H200, us for 1, 2 and 4 parts
 * with 8, 64, 128 and 512 tokens, Q4_K:
 *
 *                        8                64               128               512
 *   [6144, 4096]    9.9  8.2  7.7   14.8 10.8 17.7   15.6 16.2 16.4   42.9  50.4  51.3
 *   [4096, 4096]       -  6.3  6.0      - 10.6 13.5      - 11.2 15.5      -  25.7  26.6
 *   [4096, 14336]      - 17.2 14.9      - 30.3 37.1      - 33.0 45.2      -  82.2  85.9
 *   [28672, 4096]  20.0 23.4    -  31.8 35.6    -  55.7 52.5    -  202.1 200.3    -
 *
 * Four parts gain a tenth up to 32 tokens and lose a third at 64 to 128, where jobs run; with
 * tiles for everyone (the last) parts gain nothing. With a third of the multiprocessors' tiles or
 * fewer, four blocks of a cluster take a part each; Q8_0, 8, 32, 64 and 128 tokens:
 *
 *   [2624, 6144]   12.1  8.7  6.7   13.3 13.2  9.2   15.2 15.8 14.6   21.3  21.4  21.8
 *   [2048, 2048]    4.9  4.0  3.5    5.1  5.4  4.1    5.7  5.7  7.0    7.1   7.4   7.2 */
int bg_cuda_splits(int64_t n_tiles, int64_t k)
{
    if (n_tiles > 200) return 1;
    if (n_tiles <= 44 && k >= 2048) return 4;
    return k >= 1024 ? 2 : 1;
}

enum { W4 = 1 << 0, W6 = 1 << 2, W8 = 1 << 3 }; /* as bits of bgk_weights.formats */

#define SHAPE(s) (1 + BGK_##s)

/* An H200's. Where the rule in matmul.cu is as good (within 1.5 %), it is left out. First match. */
static const struct {
    int n_tiles, n_chunks, splits;
    unsigned formats;
    uint8_t shape[BGK_TOKEN_CLASSES];
} table[] = {
    /* Heads of 128,256 tokens over 4,096 values, Q6_K. 65-96 and 129-192 tokens fill as many
     * blocks of 128 as 97-128 and 193-256. */
    {2004,
     64,
     1,
     W6,
     {[0] = SHAPE(8X1),
      [3] = SHAPE(64X4),
      [4] = SHAPE(128X4),
      [5] = SHAPE(128X4),
      [6] = SHAPE(128X4),
      [7] = SHAPE(128X4),
      [9] = SHAPE(128X4)}},
    /* [6144, 4096], Q4_K */
    {96, 64, 2, W4, {[9] = SHAPE(64X2)}},
    /* The indexer's queries, [4096, 2048], and GLM-5's q_b of a rank of eight, Q8_0, which are
     * multiplied beside each other: blocks two of which have room on a multiprocessor. A step of
     * 128 at 4096: 34.1 ms; with the first's parts side by side (by itself 7.7 us instead
     * of 8.8) 34.6. */
    {64, 32, 2, W8, {[4] = SHAPE(64X2), [5] = SHAPE(64X2)}},
    {32, 32, 4, W8, {[4] = SHAPE(64X2), [5] = SHAPE(64X2)}},
    /* An eighth of the head of 154,880 tokens over 6,144 values, Q8_0: 33.4 us against 48.2 */
    {303,
     96,
     1,
     W8,
     {[0] = SHAPE(8X1),
      [1] = SHAPE(16X1),
      [2] = SHAPE(32X1),
      [4] = SHAPE(128X4),
      [5] = SHAPE(128X4),
      [6] = SHAPE(64X4)}},
    /* gate and up, [28672, 4096]: 98.4 us against 110.8 at 192 tokens, 398 against 408 at 1,024 */
    {448, 64, 1, W4, {[6] = SHAPE(64X2), [10] = SHAPE(128X4)}},
};

int bg_cuda_table_pick(int n_tiles, int n_chunks, int splits, unsigned formats, int token_class)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].n_tiles == n_tiles && table[i].n_chunks == n_chunks &&
            table[i].splits == splits && table[i].formats == formats)
            return table[i].shape[token_class];
    return 0;
}

const char *bg_cuda_shape_name(bgk_shape shape)
{
    static const char *const names[BGK_SHAPES] = {
        [BGK_8X1] = "8x1",       [BGK_8X2] = "8x2",     [BGK_16X1] = "16x1",
        [BGK_16X2] = "16x2",     [BGK_32X1] = "32x1",   [BGK_32X2] = "32x2",
        [BGK_64X1] = "64x1",     [BGK_64X2] = "64x2",   [BGK_64X4] = "64x4",
        [BGK_128X2] = "128x2",   [BGK_128X4] = "128x4", [BGK_64X2C] = "64x2c",
        [BGK_128X2C] = "128x2c", [BGK_8W] = "8w",
    };
    return names[shape];
}
