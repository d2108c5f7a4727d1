#define KERNELS      bg_kernels_avx512
#define ATTEND       bg_cpu_attend_avx512
#define INDEX_SCORES bg_cpu_index_scores_avx512
#include "backend/cpu/misc_body.h"
