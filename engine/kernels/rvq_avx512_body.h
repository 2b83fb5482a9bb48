/* RVQ decoding by byte permutes: one 32-bit lane is a row, its bytes are four sub-vectors. */
#ifndef KERNELS_RVQ_AVX512_BODY_H
#define KERNELS_RVQ_AVX512_BODY_H

#include "quant/rvq.h"

#define RVQ_NATURAL(books) 0
/* Bytes: the hardware's own prefetching falls behind loads of three lines at a time. */
#define RVQ_AHEAD 4096
#define RVQ_FUSED(books) 4

static inline void rvq_reorder(const int8_t *q, int8_t *out)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 32, 33, 34, 35, 36, 37, 38, 39);
    const __m512i from = _mm512_add_epi8(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x01010101)),
                                         _mm512_set1_epi32(0x18100800));
    _mm512_store_si512(out, _mm512_permutexvar_epi8(from, _mm512_loadu_si512(q)));
}

/* Indices of the stages for 16 rows: 6 bits each and the fourth from the upper two, or whole bytes. */
static inline __attribute__((always_inline)) void rvq_indices(size_t planes, size_t stages,
                                                              const uint8_t *codes, __m512i *index)
{
    UNROLL(3)
    for (size_t s = 0; s < planes; s++)
        index[s] = _mm512_loadu_si512(codes + 64 * s);
    if (stages == planes)
        return;
    /* vpermb ignores the upper bits, so stages 0 to 2 need no mask */
    const __m512i two = _mm512_set1_epi8(3);
    __m512i a = _mm512_and_si512(_mm512_srli_epi16(index[0], 6), two);
    __m512i b = _mm512_and_si512(_mm512_srli_epi16(index[1], 4), _mm512_slli_epi16(two, 2));
    __m512i c = _mm512_and_si512(_mm512_srli_epi16(index[2], 2), _mm512_slli_epi16(two, 4));
    index[3] = _mm512_ternarylogic_epi64(a, b, c, 0xfe);
}

/* Values of one dimension for G groups of 16 rows. */
static inline __attribute__((always_inline)) void
rvq_values(size_t G, size_t stages, size_t entries, const uint8_t *table, __m512i (*index)[4],
           __mmask64 (*upper)[4], __m512i *value)
{
    UNROLL(4)
    for (size_t s = 0; s < stages; s++) {
        const uint8_t *t = table + s * RVQ_DIM * entries;
        __m512i t0 = _mm512_loadu_si512(t), t1 = t0, t2 = t0, t3 = t0;
        if (entries == 256) {
            t1 = _mm512_loadu_si512(t + 64);
            t2 = _mm512_loadu_si512(t + 128);
            t3 = _mm512_loadu_si512(t + 192);
        }
        UNROLL(2)
        for (size_t g = 0; g < G; g++) {
            __m512i v;
            if (entries == 256)
                v = _mm512_mask_blend_epi8(upper[g][s], _mm512_permutex2var_epi8(t0, index[g][s], t1),
                                           _mm512_permutex2var_epi8(t2, index[g][s], t3));
            else
                v = _mm512_permutexvar_epi8(index[g][s], t0);
            value[g] = s ? _mm512_add_epi8(value[g], v) : v;
        }
    }
}

static inline __attribute__((always_inline)) void
rvq_group(size_t G, size_t stages, size_t entries, size_t planes, const uint8_t *codes,
          __m512i (*index)[4], __mmask64 (*upper)[4])
{
    UNROLL(2)
    for (size_t g = 0; g < G; g++) {
        rvq_indices(planes, stages, codes + g * planes * 64, index[g]);
        UNROLL(4)
        for (size_t s = 0; s < stages; s++)
            upper[g][s] = entries == 256 ? _mm512_movepi8_mask(index[g][s]) : 0;
    }
}

static inline __attribute__((always_inline)) void rvq_ahead(size_t planes, const uint8_t *codes)
{
    UNROLL(6)
    for (size_t line = 0; line < 2 * planes; line++)
        __builtin_prefetch(codes + RVQ_AHEAD + 64 * line);
}

static inline __attribute__((always_inline)) void
rvq_decode_shape(size_t stages, size_t entries, size_t planes, const uint8_t *planar,
                 const uint8_t *codes, uint8_t *out)
{
    for (size_t h = 0; h < 2; h++)
        for (size_t g = 0; g < 4; g += 2, codes += 2 * planes * 64) {
            __m512i index[2][4];
            __mmask64 upper[2][4];
            rvq_ahead(planes, codes);
            rvq_group(2, stages, entries, planes, codes, index, upper);
            for (size_t d = 0; d < RVQ_DIM; d++) {
                __m512i value[2];
                uint8_t *at = out + h * 2048 + d * 256 + g * 64;
                rvq_values(2, stages, entries, planar + d * entries, index, upper, value);
                _mm512_store_si512(at, value[0]);
                _mm512_store_si512(at + 64, value[1]);
            }
        }
}

static void rvq_decode(const struct rvq_books *books, const uint8_t *codes, uint8_t *out)
{
    if (books->entries == 64)
        rvq_decode_shape(4, 64, 3, books->planar, codes, out);
    else if (books->stages == 3)
        rvq_decode_shape(3, 256, 3, books->planar, codes, out);
    else
        rvq_decode_shape(2, 256, 2, books->planar, codes, out);
}

static inline __attribute__((always_inline)) void
rvq_fused_shape(size_t T, size_t stages, size_t entries, size_t planes, const uint8_t *planar,
                const uint8_t *codes, const int8_t *const *q, const struct plane *plane, size_t b,
                int32_t (*total)[INT8_PANEL_ROWS])
{
    __m512i acc[4][4];
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(4)
        for (size_t g = 0; g < 4; g++)
            acc[t][g] = _mm512_setzero_si512();
    for (size_t h = 0; h < 2; h++)
        UNROLL(2)
        for (size_t g = 0; g < 4; g += 2, codes += 2 * planes * 64) {
            __m512i index[2][4];
            __mmask64 upper[2][4];
            rvq_ahead(planes, codes);
            rvq_group(2, stages, entries, planes, codes, index, upper);
            for (size_t d = 0; d < RVQ_DIM; d++) {
                __m512i value[2];
                rvq_values(2, stages, entries, planar + d * entries, index, upper, value);
                UNROLL(4)
                for (size_t t = 0; t < T; t++) {
                    const __m512i x = broadcast4(q[t] + 32 * h + 4 * d);
                    acc[t][g] = dot_bytes(acc[t][g], value[0], x);
                    acc[t][g + 1] = dot_bytes(acc[t][g + 1], value[1], x);
                }
            }
        }
    UNROLL(4)
    for (size_t t = 0; t < T; t++) {
        const __m128i count = _mm_cvtsi32_si128((int)(plane[t].shift[b] - plane[t].low));
        UNROLL(4)
        for (size_t g = 0; g < 4; g++) {
            int32_t *lanes = total[t] + 16 * g;
            __m512i before = _mm512_load_si512(lanes);
            _mm512_store_si512(lanes, _mm512_add_epi32(before, _mm512_sll_epi32(acc[t][g], count)));
        }
    }
}

static inline __attribute__((always_inline)) void
rvq_fused_tokens(size_t T, const struct rvq_books *books, const uint8_t *codes,
                 const int8_t *const *q, const struct plane *plane, size_t b,
                 int32_t (*total)[INT8_PANEL_ROWS])
{
    if (books->entries == 64)
        rvq_fused_shape(T, 4, 64, 3, books->planar, codes, q, plane, b, total);
    else if (books->stages == 3)
        rvq_fused_shape(T, 3, 256, 3, books->planar, codes, q, plane, b, total);
    else
        rvq_fused_shape(T, 2, 256, 2, books->planar, codes, q, plane, b, total);
}

static void rvq_fused_block(size_t count, const struct rvq_books *books, const uint8_t *codes,
                            const int8_t *const *q, const struct plane *plane, size_t b,
                            int32_t (*total)[INT8_PANEL_ROWS])
{
    if (count == 1)
        rvq_fused_tokens(1, books, codes, q, plane, b, total);
    else if (count == 2)
        rvq_fused_tokens(2, books, codes, q, plane, b, total);
    else if (count == 3)
        rvq_fused_tokens(3, books, codes, q, plane, b, total);
    else
        rvq_fused_tokens(4, books, codes, q, plane, b, total);
}

#endif
