#define KERNELS      bg_kernels_plain
#define ATTEND       bg_cpu_attend_plain
#define INDEX_SCORES bg_cpu_index_scores_plain
#include "backend/cpu/misc_body.h"
