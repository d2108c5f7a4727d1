/* The CUDA backend's table of shapes, which needs no GPU and none of CUDA's headers. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdlib.h>

#include "backend/cuda/tune_table.h"

Test(tune_table, classes)
{
    cr_expect_eq(bgk_token_class(0), 0);
    cr_expect_eq(bgk_token_class(1), 0);
    cr_expect_eq(bgk_token_class(INT_MAX), BGK_TOKEN_CLASSES - 1);
    for (int i = 0; i < BGK_TOKEN_CLASSES; i++) {
        cr_expect_eq(bgk_token_class(bgk_class_most(i)), i);
        if (i + 1 == BGK_TOKEN_CLASSES) break;
        cr_expect_eq(bgk_token_class(bgk_class_most(i) + 1), i + 1);
        cr_expect(bgk_class_most(i) < bgk_class_most(i + 1));
    }
}

Test(tune_table, lookup)
{
    /* A head of 128,256 tokens, Q6_K. */
    cr_expect_eq(bg_cuda_table_pick(2004, 64, 1, 1 << 2, bgk_token_class(128)), 1 + BGK_128X4);
    cr_expect_eq(bg_cuda_table_pick(2004, 64, 1, 1 << 2, bgk_token_class(1)), 1 + BGK_8X1);
    cr_expect_eq(bg_cuda_table_pick(2004, 64, 1, 1 << 2, bgk_token_class(32)), 0);
    /* What goes beside each other in GLM-5's layers. */
    cr_expect_eq(bg_cuda_table_pick(64, 32, 2, 1 << 3, bgk_token_class(128)), 1 + BGK_64X2);
    cr_expect_eq(bg_cuda_table_pick(32, 32, 4, 1 << 3, bgk_token_class(96)), 1 + BGK_64X2);
    cr_expect_eq(bg_cuda_table_pick(32, 32, 4, 1 << 3, bgk_token_class(64)), 0);
    /* One of these differs: not in the table. */
    cr_expect_eq(bg_cuda_table_pick(2005, 64, 1, 1 << 2, bgk_token_class(128)), 0);
    cr_expect_eq(bg_cuda_table_pick(2004, 63, 1, 1 << 2, bgk_token_class(128)), 0);
    cr_expect_eq(bg_cuda_table_pick(2004, 64, 2, 1 << 2, bgk_token_class(128)), 0);
    cr_expect_eq(bg_cuda_table_pick(2004, 64, 1, 1 << 0, bgk_token_class(128)), 0);
}

/* By the shape of the weights alone: results' bits hang on these. */
Test(tune_table, splits)
{
    static const struct {
        int64_t n_tiles, k;
        int splits;
    } list[] = {{96, 4096, 2},   {64, 4096, 2},  {64, 14336, 2}, {448, 4096, 1},
                {2004, 4096, 1}, {200, 1024, 2}, {201, 1024, 1}, {9, 576, 1},
                {41, 6144, 4},   {44, 2048, 4},  {45, 2048, 2},  {32, 1984, 2}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        cr_expect_eq(bg_cuda_splits(list[i].n_tiles, list[i].k), list[i].splits);
}

Test(tune_table, names)
{
    cr_expect_str_eq(bg_cuda_shape_name(BGK_8X1), "8x1");
    cr_expect_str_eq(bg_cuda_shape_name(BGK_128X4), "128x4");
    cr_expect_str_eq(bg_cuda_shape_name(BGK_128X2C), "128x2c");
    for (int i = 0; i < BGK_SHAPES; i++) { /* a name begins with the tokens of a block */
        const char *name = bg_cuda_shape_name((bgk_shape)i);
        cr_assert_not_null(name);
        cr_expect_eq(atoi(name), bgk_shape_tokens((bgk_shape)i), "%s", name);
    }
}
