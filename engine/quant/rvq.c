#include "quant/rvq.h"

#include <string.h>

bool rvq_books_set(struct rvq_books *books, const struct rvq_shape *shape, const int8_t *entries)
{
    const size_t n = shape->entries;
    memset(books, 0, sizeof *books);
    books->stages = shape->stages;
    books->entries = shape->entries;
    books->planes = shape->planes;
    for (size_t s = 0; s < shape->stages; s++)
        for (size_t c = 0; c < n; c++)
            for (size_t d = 0; d < RVQ_DIM; d++) {
                const int entry = entries[(s * n + c) * RVQ_DIM + d];
                if (entry > shape->limit || entry < -shape->limit) return false;
                const uint8_t biased = (uint8_t)(entry + shape->bias[s]);
                books->planar[(s * RVQ_DIM + d) * n + c] = biased;
                books->word[(s * n + c) * RVQ_DIM + d] = biased;
            }
    return true;
}

void rvq_codes_get(const struct rvq_books *books, const uint8_t *at, uint8_t code[RVQ_MAX_STAGES])
{
    for (size_t s = 0; s < books->planes; s++) code[s] = at[64 * s];
    if (books->stages == books->planes) return;
    code[3] = (uint8_t)(code[0] >> 6 | code[1] >> 6 << 2 | code[2] >> 6 << 4);
    for (size_t s = 0; s < 3; s++) code[s] &= 63;
}

void rvq_codes_put(const struct rvq_shape *shape, uint8_t *at, const uint8_t *code)
{
    for (size_t s = 0; s < shape->planes; s++) {
        const unsigned high = shape->stages == shape->planes ? 0u : (code[3] >> (2 * s) & 3u) << 6;
        at[64 * s] = (uint8_t)(code[s] | high);
    }
}

void rvq_row(const struct rvq_books *books, const uint8_t *codes, size_t cols_pad, size_t cols,
             size_t r, float scale, float *out)
{
    for (size_t c = 0; c < cols; c += RVQ_DIM) {
        uint8_t code[RVQ_MAX_STAGES];
        rvq_codes_get(books, codes + rvq_code_at(books->planes, cols_pad, r, c / RVQ_DIM), code);
        for (size_t d = 0; d < RVQ_DIM && c + d < cols; d++) {
            int sum = -128;
            for (size_t s = 0; s < books->stages; s++)
                sum += books->word[(s * books->entries + code[s]) * RVQ_DIM + d];
            out[c + d] = scale * (float)sum;
        }
    }
}
