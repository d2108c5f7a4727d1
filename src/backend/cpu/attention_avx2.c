#define ATTEND       bg_cpu_attend_avx2
#define INDEX_SCORES bg_cpu_index_scores_avx2
#include "backend/cpu/attention_body.h"
