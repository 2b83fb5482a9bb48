/* Residual vector quantisation: eight consecutive weights of a row are a sum of one entry from each
 * stage's codebook, times the row's scale; formats/codecs.md. Entries are integers whose sums fit
 * int8, so a product with quantised activations is the same exact integer as an int8 one. */
#ifndef QUANT_RVQ_H
#define QUANT_RVQ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    RVQ_DIM = 8,
    RVQ_ROWS = 64,
    RVQ_COLS = 64,
    RVQ_MAX_STAGES = 4,
    RVQ_MAX_ENTRIES = 256,
    RVQ_MAX_CODES = 768 /* entries of all stages together */
};

struct rvq_shape {
    uint32_t stages, entries;
    uint32_t planes; /* bytes of codes for one sub-vector */
    int32_t limit;   /* |entry| is at most this: the sum of all stages is within +-127 */
    uint8_t bias[RVQ_MAX_STAGES]; /* together 128; each at least `limit` */
};

/* Codebooks as the kernels read them. An entry is stored with its stage's bias, so that the sum over
 * stages is w + 128 and no byte carries into the next. */
struct rvq_books {
    /* A vector that crosses cache lines halves the speed of decoding. */
    _Alignas(64) uint8_t planar[RVQ_MAX_CODES * RVQ_DIM]; /* [stages][8][entries] */
    uint8_t word[RVQ_MAX_CODES * RVQ_DIM];                /* [stages][entries][8] */
    uint32_t stages, entries, planes;
    uint8_t fill[52]; /* what the alignment adds, for those who read this without it */
};

/* `entries` is [stages][entries][8]; false when one is beyond the limit. */
bool rvq_books_set(struct rvq_books *books, const struct rvq_shape *shape, const int8_t *entries);

/* Offset of the first code byte of sub-vector j of row r; the other planes follow 64 bytes apart. */
static inline size_t rvq_code_at(size_t planes, size_t cols_pad, size_t r, size_t j)
{
    size_t part = (r / RVQ_ROWS * (cols_pad / 32) + j / 4) * 4 + r % RVQ_ROWS / 16;
    return part * planes * 64 + r % 16 * 4 + j % 4;
}

/* The codes of the sub-vector whose first byte is at `at`. */
void rvq_codes_get(const struct rvq_books *books, const uint8_t *at, uint8_t code[RVQ_MAX_STAGES]);
void rvq_codes_put(const struct rvq_shape *shape, uint8_t *at, const uint8_t *code);
/* Row r: scale * w. */
void rvq_row(const struct rvq_books *books, const uint8_t *codes, size_t cols_pad, size_t cols,
             size_t r, float scale, float *out);

#endif
