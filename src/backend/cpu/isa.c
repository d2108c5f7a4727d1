#include "backend/cpu/isa.h"

#include <stdint.h>
#include <string.h>

static const char *const names[] = {"plain", "avx2", "avx512", "avx512vnni"};

#if defined(__x86_64__)
#include <cpuid.h>

/* The register state that the operating system saves on a task switch (XCR0). */
static uint64_t saved_state(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static bool all(uint32_t reg, uint32_t bits)
{
    return (reg & bits) == bits;
}

bg_isa bg_isa_best(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return BG_ISA_PLAIN;
    if (!all(c, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C)) return BG_ISA_PLAIN;
    const uint64_t xcr0 = saved_state();
    if ((xcr0 & 0x6) != 0x6) return BG_ISA_PLAIN; /* xmm, upper halves of ymm */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return BG_ISA_PLAIN;
    if (!all(b, bit_AVX2 | bit_BMI | bit_BMI2)) return BG_ISA_PLAIN;
    if ((xcr0 & 0xe6) != 0xe6) return BG_ISA_AVX2; /* masks, upper zmm halves, zmm16-31 */
    if (!all(b, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL | bit_AVX512CD))
        return BG_ISA_AVX2;
    return all(c, bit_AVX512VNNI | bit_AVX512VBMI) ? BG_ISA_AVX512_VNNI : BG_ISA_AVX512;
}

#else

bg_isa bg_isa_best(void)
{
    return BG_ISA_PLAIN;
}

#endif

const char *bg_isa_name(bg_isa isa)
{
    return (unsigned)isa < sizeof names / sizeof *names ? names[isa] : "?";
}

bool bg_isa_by_name(const char *name, bg_isa *isa)
{
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) {
            *isa = (bg_isa)i;
            return true;
        }
    }
    return false;
}
