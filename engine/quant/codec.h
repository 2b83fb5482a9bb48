/* How a matrix [rows, cols] (y = W x) lies in memory and on disk; formats/codecs.md. */
#ifndef QUANT_CODEC_H
#define QUANT_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum codec {
    CODEC_NONE = 0,
    CODEC_F32 = 1,
    CODEC_F64 = 2,
    CODEC_BF16 = 3,
    CODEC_INT8 = 4,
    CODEC_MXFP4 = 5,
    CODEC_INT4 = 6,
    CODEC_NL4 = 7,
    CODEC_RVQ4X64 = 8,
    CODEC_RVQ3X256 = 9,
    CODEC_RVQ2X256 = 10
};

const char *codec_name(enum codec c);
enum codec codec_from_name(const char *name); /* CODEC_NONE when unknown */

bool codec_is_4bit(enum codec c);
bool codec_is_rvq(enum codec c); /* its matrices need codebooks */
bool codec_reads_quantized(enum codec c); /* its products take quantised activations */
uint32_t codec_activations(enum codec c, bool fine); /* bits of those; 0: float32 */

/* Bytes of a matrix; false on overflow or rows/cols == 0 or > 2^31. f32, f64, bf16: row-major,
 * unpadded. int8: rows padded to 64 and cols to 64; float32 scale[rows_pad], then u8 = w + 128 in
 * panels [rows_pad/64][cols_pad/4][64][4]; padding is w = 0 (stored 128), padded scales are 0.
 * mxfp4, int4, nl4: padded likewise; panels of group scales and nibbles (quant/nibble.h); mxfp4 has
 * at most 2^20 cols. rvq: padded likewise; bfloat16 scales, then codes (quant/rvq.h). */
bool codec_matrix_bytes(enum codec c, uint64_t rows, uint64_t cols, size_t *bytes);

struct rvq_books; /* quant/rvq.h */
struct rvq_shape;
const struct rvq_shape *rvq_shape_of(enum codec c); /* NULL when it is not an rvq codec */

/* A bound matrix: a view into somebody else's memory (64-byte aligned). */
struct matrix {
    enum codec codec;
    uint32_t rows, cols;
    uint32_t rows_pad, cols_pad; /* int8, 4-bit, rvq; otherwise rows, cols */
    const float *scale;          /* int8 */
    const int8_t *table;         /* 4-bit codecs: the weight of each nibble */
    const void *data;            /* panels, codes or rows */
    const uint16_t *scale16;     /* rvq: bfloat16 [rows_pad] */
    const struct rvq_books *books; /* rvq; matrix_bind leaves it NULL, the caller sets it */
    bool fine; /* mxfp4: products take 22-bit activations, not 8-bit ones; left false likewise */
};
void matrix_bind(struct matrix *m, enum codec c, uint32_t rows, uint32_t cols, const void *blob);
/* Row r as float32 (embedding lookup, tests). int8: scale * w, rounded once. */
void matrix_row(const struct matrix *m, uint32_t r, float *out);
/* Reference encoder: w row-major float32 -> blob of codec_matrix_bytes. int8 scale = max|row| / 127
 * (float32 division; 0 for a zero row or a quotient below the smallest normal), q = rint(w / scale)
 * ties to even, clamped to +-127. bf16 rounds to nearest even. 4-bit codecs: quant/nibble.h.
 * rvq needs codebooks and the encoder: nothing is written. */
void matrix_encode(enum codec c, const float *w, uint32_t rows, uint32_t cols, void *blob);

/* One expert's record: 64-byte header, then gate [inner, hidden], up [inner, hidden],
 * down [hidden, inner], and with `biased` float32 biases of gate [inner], up [inner], down [hidden],
 * each at a multiple of 64; the whole padded with zeros to 4096. */
struct record_layout {
    size_t gate, up, down; /* offsets of the matrix blobs */
    size_t bias;           /* offset of the biases; 0 without */
    size_t bytes;          /* record length = stride */
};
bool record_layout(enum codec c, uint32_t hidden, uint32_t inner, bool biased,
                   struct record_layout *out);

#endif
