/* RVQ decoding by table look-ups of 64 bytes: one 32-bit lane is a row, its bytes four sub-vectors. */
#ifndef KERNELS_RVQ_NEON_BODY_H
#define KERNELS_RVQ_NEON_BODY_H

#include "quant/rvq.h"

#define RVQ_NATURAL(books) 0

static inline void rvq_reorder(const int8_t *q, int8_t *out)
{
    for (size_t h = 0; h < ACT_BLOCK; h += 32) {
        int8x8x4_t part; /* interleaving four rows of 8 is the transposition */
        for (int i = 0; i < 4; i++)
            part.val[i] = vld1_s8(q + h + 8 * (size_t)i);
        vst4_s8(out + h, part);
    }
}

static inline __attribute__((always_inline)) uint8x16_t rvq_lookup(size_t entries,
                                                                   const uint8_t *table,
                                                                   uint8x16_t index)
{
    uint8x16_t v = vqtbl4q_u8(vld1q_u8_x4(table), index);
    UNROLL(3)
    for (size_t e = 64; e < entries; e += 64) {
        index = vsubq_u8(index, vdupq_n_u8(64));
        v = vqtbx4q_u8(v, vld1q_u8_x4(table + e), index);
    }
    return v;
}

/* 16 rows x 32 columns */
static inline __attribute__((always_inline)) void
rvq_decode_part(size_t stages, size_t entries, size_t planes, const uint8_t *planar,
                const uint8_t *codes, uint8_t *out)
{
    uint8x16_t index[4][4];
    UNROLL(4)
    for (size_t v = 0; v < 4; v++) {
        UNROLL(3)
        for (size_t s = 0; s < planes; s++)
            index[s][v] = vld1q_u8(codes + 64 * s + 16 * v);
        if (stages == planes)
            continue;
        index[3][v] = vorrq_u8(vshrq_n_u8(index[0][v], 6),
                               vorrq_u8(vshlq_n_u8(vshrq_n_u8(index[1][v], 6), 2),
                                        vshlq_n_u8(vshrq_n_u8(index[2][v], 6), 4)));
        UNROLL(3)
        for (size_t s = 0; s < 3; s++)
            index[s][v] = vandq_u8(index[s][v], vdupq_n_u8(63));
    }
    for (size_t d = 0; d < RVQ_DIM; d++) {
        uint8x16_t value[4];
        UNROLL(4)
        for (size_t s = 0; s < stages; s++)
            UNROLL(4)
            for (size_t v = 0; v < 4; v++) {
                const uint8x16_t entry = rvq_lookup(entries, planar + (s * RVQ_DIM + d) * entries,
                                                    index[s][v]);
                value[v] = s ? vaddq_u8(value[v], entry) : entry;
            }
        UNROLL(4)
        for (size_t v = 0; v < 4; v++)
            vst1q_u8(out + d * 4 * INT8_PANEL_ROWS + 16 * v, value[v]);
    }
}

static void rvq_decode(const struct rvq_books *books, const uint8_t *codes, uint8_t *out)
{
    const size_t part = (size_t)books->planes * 64;
    for (size_t h = 0; h < 2; h++)
        for (size_t g = 0; g < 4; g++, codes += part) {
            uint8_t *at = out + h * 2048 + g * 64;
            if (books->entries == 64)
                rvq_decode_part(4, 64, 3, books->planar, codes, at);
            else if (books->stages == 3)
                rvq_decode_part(3, 256, 3, books->planar, codes, at);
            else
                rvq_decode_part(2, 256, 2, books->planar, codes, at);
        }
}

#endif
