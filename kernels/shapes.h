/* kernels/shapes.h - the blocks in which matmul.cu multiplies, and for how many tokens each is
 * picked. Plain C without CUDA's headers. */
#ifndef BGK_SHAPES_H
#define BGK_SHAPES_H

#include <limits.h>

/* `tokens x (64 rows)`: 8X2 is 8 tokens and 128 rows. C: a cluster has a block for each of the
 * parts of K; where there is one, as without. 8W: up to 8 tokens, a warp for 16 rows (few.cu);
 * where there are more, or they do not fit, 8X1. */
typedef enum bgk_shape {
    BGK_8X1,
    BGK_8X2,
    BGK_16X1,
    BGK_16X2,
    BGK_32X1,
    BGK_32X2,
    BGK_64X1,
    BGK_64X2,
    BGK_64X4,
    BGK_128X2,
    BGK_128X4,
    BGK_64X2C,
    BGK_128X2C,
    BGK_8W,
    BGK_SHAPES
} bgk_shape;

static inline int bgk_shape_tokens(bgk_shape shape) /* of a block */
{
    static const int tokens[BGK_SHAPES] = {8, 8, 16, 16, 32, 32, 64, 64, 64, 128, 128, 64, 128, 8};
    return tokens[shape];
}

/* Numbers of tokens for which one shape is picked: 1-8, 9-16, ..., 513-1024, more. */
enum { BGK_TOKEN_CLASSES = 12 };

static inline int bgk_class_most(int token_class) /* its largest number */
{
    static const int most[BGK_TOKEN_CLASSES] = {8,   16,  32,  64,  96,   128,
                                                192, 256, 384, 512, 1024, INT_MAX};
    return most[token_class];
}

static inline int bgk_token_class(int tokens)
{
    int i = 0;
    while (tokens > bgk_class_most(i))
        i++;
    return i;
}

#endif
