#define ATTEND bg_cpu_attend_avx2
#include "backend/cpu/attention_body.h"
