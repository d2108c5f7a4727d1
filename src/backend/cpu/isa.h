/* backend/cpu/isa.h - which instructions this processor has, found at run time. */
#ifndef BG_BACKEND_CPU_ISA_H
#define BG_BACKEND_CPU_ISA_H

#include <stdbool.h>

typedef enum bg_isa {
    BG_ISA_PLAIN,       /* portable C */
    BG_ISA_AVX2,        /* AVX2, FMA, F16C */
    BG_ISA_AVX512,      /* F, BW, DQ, VL, CD */
    BG_ISA_AVX512_VNNI, /* and VNNI, VBMI */
} bg_isa;

bg_isa bg_isa_best(void);            /* checks the operating system's support too (XGETBV) */
const char *bg_isa_name(bg_isa isa); /* "plain", "avx2", "avx512", "avx512vnni" */
/* By name; false: unknown name. Whether this processor has it: isa <= bg_isa_best(). */
bool bg_isa_by_name(const char *name, bg_isa *isa);

#endif
