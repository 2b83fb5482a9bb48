/* The int8 blob: scales, then panels [rows/64][cols/4][64][4] of u8 = w + 128. */
#ifndef QUANT_INT8_H
#define QUANT_INT8_H

#include "quant/codec.h"

enum { INT8_ROWS = 64, INT8_COLS = 64, INT8_OFFSET = 128 };

void int8_row(const struct matrix *m, uint32_t r, float *out);
void int8_encode(const float *w, uint32_t rows, uint32_t cols, void *blob);

#endif
