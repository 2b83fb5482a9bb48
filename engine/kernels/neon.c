#include "kernels/tables.h"

#ifdef __aarch64__
#define WITH_DOTPROD 0
#define TABLE kernels_table_neon
#define ISA "neon"
#include "kernels/neon_body.h"
#endif
