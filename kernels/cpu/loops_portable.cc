// The loops compiled for the compiler's base instruction set.
#define GRADGATE_LOOPS_TABLE kPortableLoops
#define GRADGATE_LOOPS_NAME "portable"
#include "kernels/cpu/loops/table.h"
