#define ATTEND       bg_cpu_attend_avx512
#define INDEX_SCORES bg_cpu_index_scores_avx512
#include "backend/cpu/attention_body.h"
