#include "kernels/tables.h"

#ifdef __aarch64__
#define WITH_DOTPROD 1
#define TABLE kernels_table_neon_dotprod
#define ISA "neon-dotprod"
#include "kernels/neon_body.h"
#endif
