/* RVQ decoding by 64-bit loads and sums in general registers: no byte carries (quant/rvq.h).
 * The blocks are panels as int8 has them. */
#ifndef KERNELS_RVQ_WORDS_BODY_H
#define KERNELS_RVQ_WORDS_BODY_H

#include <string.h>

#include "quant/rvq.h"

static inline uint64_t rvq_word(const uint8_t *words, size_t at)
{
    uint64_t w;
    memcpy(&w, words + at * RVQ_DIM, sizeof w);
    return w;
}

static inline void rvq_put(uint8_t *out, uint64_t w)
{
    memcpy(out, &w, 4);
    w >>= 32;
    memcpy(out + 4 * INT8_PANEL_ROWS, &w, 4);
}

/* 16 rows x 32 columns; out is at the first row's place in the first column group. */
static inline __attribute__((always_inline)) void rvq_decode_part(size_t stages,
                                                                  const uint8_t *words,
                                                                  const uint8_t *codes, uint8_t *out)
{
    for (size_t r = 0; r < 16; r++)
        UNROLL(4)
        for (size_t i = 0; i < 4; i++) {
            const uint8_t *code = codes + 4 * r + i;
            uint64_t w = rvq_word(words, code[0]) + rvq_word(words, 256 + (size_t)code[64]);
            if (stages > 2)
                w += rvq_word(words, 512 + (size_t)code[128]);
            rvq_put(out + 2 * i * 4 * INT8_PANEL_ROWS + 4 * r, w);
        }
}

/* Books of 256 entries only. */
static void rvq_decode_words(const struct rvq_books *books, const uint8_t *codes, uint8_t *out)
{
    const size_t part = (size_t)books->planes * 64;
    for (size_t h = 0; h < 2; h++)
        for (size_t g = 0; g < 4; g++, codes += part) {
            uint8_t *at = out + h * 2048 + g * 64;
            if (books->stages == 3)
                rvq_decode_part(3, books->word, codes, at);
            else
                rvq_decode_part(2, books->word, codes, at);
        }
}

#endif
