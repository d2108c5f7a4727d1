#define KERNELS      bg_kernels_avx2
#define ATTEND       bg_cpu_attend_avx2
#define INDEX_SCORES bg_cpu_index_scores_avx2
#include "backend/cpu/misc_body.h"
