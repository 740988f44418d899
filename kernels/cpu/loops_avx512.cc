// The loops compiled for AVX-512 F, BW, VL, DQ.
#if defined(__x86_64__)
#define GRADGATE_LOOPS_TABLE kAvx512Loops
#define GRADGATE_LOOPS_NAME "avx512"
#include "kernels/cpu/loops/table.h"
#endif
