#define ATTEND bg_cpu_attend_avx512
#include "backend/cpu/attention_body.h"
