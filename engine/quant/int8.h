/* The int8 blob: scales, then panels [rows/64][cols/4][64][4] of u8 = w + 128. */
#ifndef QUANT_INT8_H
#define QUANT_INT8_H

#include <stddef.h>
#include <stdint.h>

enum { INT8_ROWS = 64, INT8_COLS = 64, INT8_OFFSET = 128 };

/* Row r of panels that are cols_pad wide. */
void int8_row(const float *scales, const uint8_t *panels, size_t cols_pad, size_t cols, size_t r,
              float *out);
void int8_encode(const float *w, size_t rows, size_t cols, void *blob);

#endif
