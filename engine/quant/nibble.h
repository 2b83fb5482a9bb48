/* The 4-bit blobs: panels of scales [cols/32][64] and nibbles [cols/32][4][64][4]
 * (formats/codecs.md). */
#ifndef QUANT_NIBBLE_H
#define QUANT_NIBBLE_H

#include <stddef.h>
#include <stdint.h>

enum { NIBBLE_ROWS = 64, NIBBLE_COLS = 64, MXFP4_COLS_MAX = 1 << 20 };

/* The weight of each nibble in units of its group's scale; of mxfp4, in units of half a scale. */
extern const int8_t nibble_table_mxfp4[16], nibble_table_int4[16], nibble_table_nl4[16];

/* Row r of panels that are cols_pad wide; bfloat16 scales, or E8M0 exponents for mxfp4. */
void nibble_row(const int8_t table[16], const uint8_t *panels, size_t cols_pad, size_t cols,
                size_t r, float *out);
void mxfp4_row(const uint8_t *panels, size_t cols_pad, size_t cols, size_t r, float *out);

/* Scales chosen for the smallest squared error of each group. */
void nibble_encode(const int8_t table[16], const float *w, size_t rows, size_t cols, void *blob);
/* Exponents by the rule of the OCP MX specification, raised to within 25 of the row's largest. */
void mxfp4_encode(const float *w, size_t rows, size_t cols, void *blob);

#endif
