/* A set of codebooks as it lies in codebooks.bin and as hr_quant_fit gives it; formats/codecs.md. */
#ifndef QUANT_CODEBOOKS_H
#define QUANT_CODEBOOKS_H

#include "base/status.h"
#include "quant/codec.h"
#include "quant/rvq.h"

enum { CODEBOOKS_HEADER = 64 };

size_t codebooks_bytes(enum codec c); /* a multiple of 64; 0 for a codec without */
/* `set` has codebooks_bytes. */
void codebooks_write(enum codec c, const int8_t *entries, float unit, void *set);
/* Checks every byte. The detail of a failure has no prefix: the caller knows where the set lies. */
hr_status codebooks_read(enum codec c, const void *set, struct rvq_books *books, float *unit,
                         hr_error *err);

#endif
