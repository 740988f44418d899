// The loops compiled for AVX2.
#if defined(__x86_64__)
#define GRADGATE_LOOPS_TABLE kAvx2Loops
#define GRADGATE_LOOPS_NAME "avx2"
#include "kernels/cpu/loops/table.h"
#endif
