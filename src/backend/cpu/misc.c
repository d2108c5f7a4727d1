#define KERNELS bg_kernels_plain
#define ATTEND  bg_cpu_attend_plain
#include "backend/cpu/misc_body.h"
