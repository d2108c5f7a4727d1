/* gguf/iq_tables.h - the trained grids of the IQ quant types, as codes.
 *
 * A grid entry is 8 (IQ1, IQ2) or 4 (IQ3) values of few levels. Element j of entry c is
 *     level[(c >> 2j) & 3]   IQ1, IQ2        level[(c >> 3j) & 7]   IQ3
 * with the levels below. IQ1_M shares IQ1_S's grid. */
#ifndef BG_GGUF_IQ_TABLES_H
#define BG_GGUF_IQ_TABLES_H

#include <stdint.h>

#define BG_IQ1_LEVELS \
    {                 \
        -1, 0, 1      \
    }
#define BG_IQ2_LEVELS \
    {                 \
        8, 25, 43     \
    }
#define BG_IQ3XXS_LEVELS              \
    {                                 \
        4, 12, 20, 28, 36, 44, 52, 62 \
    }
#define BG_IQ3S_LEVELS            \
    {                             \
        1, 3, 5, 7, 9, 11, 13, 15 \
    }
/* Not trained on a grid: the 16 values of IQ4_NL and IQ4_XS, and twice those of FP4 (E2M1). */
#define BG_IQ4NL_VALUES                                                          \
    {                                                                            \
        -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 \
    }
#define BG_FP4_VALUES                                           \
    {                                                           \
        0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 \
    }

extern const uint16_t bg_iq1s_grid[2048];
extern const uint16_t bg_iq2xxs_grid[256];
extern const uint16_t bg_iq2xs_grid[512];
extern const uint16_t bg_iq2s_grid[1024];
extern const uint16_t bg_iq3xxs_grid[256];
extern const uint16_t bg_iq3s_grid[512];

#endif
