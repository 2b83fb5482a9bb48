/* Numbers of a blob that must be finite: the scales of a quantised codec, which in int8 and rvq are
 * not negative either, and every weight of a float one. */
#ifndef QUANT_FINITE_H
#define QUANT_FINITE_H

#include "quant/codec.h"

struct unfit {
    uint64_t count;
    uint64_t first; /* offset in the blob of the first one found */
};

/* What such a number is called: "scale" or "weight". */
const char *finite_noun(enum codec c);
/* Adds what the bytes [at, at + n) of the blob of a matrix hold. `at` is a multiple of 8, and n too
 * except at the blob's end. */
void finite_scan(enum codec c, uint64_t rows, uint64_t cols, uint64_t at, const void *bytes, size_t n,
                 struct unfit *out);

#endif
