/* The tables of this build; only the ones of its architecture exist. */
#ifndef KERNELS_TABLES_H
#define KERNELS_TABLES_H

#include "kernels/kernels.h"

extern const struct kernels kernels_table_reference;
extern const struct kernels kernels_table_avx2;
extern const struct kernels kernels_table_avx512;
extern const struct kernels kernels_table_neon;
extern const struct kernels kernels_table_neon_dotprod;

#endif
