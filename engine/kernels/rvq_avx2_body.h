/* RVQ for AVX2. Books of 64 entries: byte shuffles, four for a look-up, and products in registers;
 * books of 256 would take sixteen, so 64-bit sums in general registers are faster there. */
#ifndef KERNELS_RVQ_AVX2_BODY_H
#define KERNELS_RVQ_AVX2_BODY_H

#include "kernels/rvq_words_body.h"

#define RVQ_NATURAL(books) ((books)->entries == 256)
#define RVQ_FUSED(books) ((books)->entries == 64 ? 4 : 0)

static inline void rvq_reorder(const int8_t *q, int8_t *out)
{
    for (size_t h = 0; h < ACT_BLOCK; h += 32) {
        const __m128i *from = (const __m128i *)(const void *)(q + h);
        __m128i *to = (__m128i *)(void *)(out + h);
        __m128i first = _mm_loadu_si128(from), last = _mm_loadu_si128(from + 1);
        __m128i a = _mm_unpacklo_epi8(first, _mm_srli_si128(first, 8));
        __m128i b = _mm_unpacklo_epi8(last, _mm_srli_si128(last, 8));
        _mm_store_si128(to, _mm_unpacklo_epi16(a, b));
        _mm_store_si128(to + 1, _mm_unpackhi_epi16(a, b));
    }
}

/* Indices of 64 rows x 32 columns into the quarters of each stage's table. A shuffle gives zero
 * where the upper bit of an index is set, so the four results of a look-up add up. */
struct rvq_indices {
    __m256i quarter[4][4][8]; /* [stage][quarter][8 rows] */
};

static inline void rvq_quarters(__m256i code, size_t s, size_t v, struct rvq_indices *out)
{
    const __m256i beyond = _mm256_set1_epi8(0x70); /* 16 and above get the upper bit */
    out->quarter[s][0][v] = _mm256_add_epi8(code, beyond);
    UNROLL(2)
    for (int k = 1; k < 3; k++)
        out->quarter[s][k][v] =
            _mm256_adds_epu8(_mm256_sub_epi8(code, _mm256_set1_epi8((char)(16 * k))), beyond);
    out->quarter[s][3][v] = _mm256_sub_epi8(code, _mm256_set1_epi8(48));
}

static inline void rvq_index(const uint8_t *codes, struct rvq_indices *out)
{
    const __m256i six = _mm256_set1_epi8(63);
    for (size_t v = 0; v < 8; v++) {
        const uint8_t *at = codes + v / 2 * 192 + v % 2 * 32;
        __m256i upper = _mm256_setzero_si256();
        UNROLL(3)
        for (size_t s = 0; s < 3; s++) {
            __m256i code = _mm256_loadu_si256((const __m256i *)(const void *)(at + 64 * s));
            __m256i two = _mm256_srli_epi16(_mm256_andnot_si256(six, code), 6 - 2 * (int)s);
            upper = _mm256_or_si256(upper, two);
            rvq_quarters(_mm256_and_si256(code, six), s, v, out);
        }
        rvq_quarters(upper, 3, v, out);
    }
}

/* value[v] = start + columns d, 8 + d, 16 + d, 24 + d of 8 rows. The table stays in a register while
 * the indices come from memory with the shuffle. */
static inline __attribute__((always_inline)) void rvq_values(const uint8_t *planar, size_t d,
                                                             const struct rvq_indices *index,
                                                             __m256i start, __m256i *value)
{
    UNROLL(8)
    for (size_t v = 0; v < 8; v++)
        value[v] = start;
    for (size_t s = 0; s < 4; s++) {
        const __m128i *table = (const __m128i *)(const void *)(planar + (s * RVQ_DIM + d) * 64);
        UNROLL(4)
        for (size_t k = 0; k < 4; k++) {
            const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(table + k));
            UNROLL(8)
            for (size_t v = 0; v < 8; v++) {
                value[v] = _mm256_add_epi8(
                    value[v], _mm256_shuffle_epi8(entries, index->quarter[s][k][v]));
                __asm__("" : "+x"(value[v])); /* or it sums last and spills every look-up */
            }
        }
    }
}

static void rvq_decode(const struct rvq_books *books, const uint8_t *codes, uint8_t *out)
{
    if (books->entries == 256) {
        rvq_decode_words(books, codes, out);
        return;
    }
    for (size_t h = 0; h < 2; h++, codes += 4 * 192) {
        struct rvq_indices index;
        rvq_index(codes, &index);
        for (size_t d = 0; d < RVQ_DIM; d++, out += 256) {
            __m256i value[8];
            rvq_values(books->planar, d, &index, _mm256_setzero_si256(), value);
            UNROLL(8)
            for (size_t v = 0; v < 8; v++)
                _mm256_store_si256((__m256i *)(void *)(out + 32 * v), value[v]);
        }
    }
}

static inline __attribute__((always_inline)) void
rvq_fused_tokens(size_t T, const uint8_t *planar, const uint8_t *codes, const int8_t *const *q,
                 const struct plane *plane, size_t b, int32_t (*total)[INT8_PANEL_ROWS])
{
    __m256i acc[4][8];
    for (size_t t = 0; t < T; t++)
        for (size_t v = 0; v < 8; v++)
            acc[t][v] = _mm256_setzero_si256();
    for (size_t h = 0; h < 2; h++, codes += 4 * 192) {
        struct rvq_indices index;
        rvq_index(codes, &index);
        for (size_t d = 0; d < RVQ_DIM; d++) {
            __m256i value[8];
            rvq_values(planar, d, &index, _mm256_set1_epi8(-128), value);
            UNROLL(4)
            for (size_t t = 0; t < T; t++) {
                const __m256i x = broadcast4(q[t] + 32 * h + 4 * d);
                const __m256i magnitude = _mm256_abs_epi8(x);
                UNROLL(8)
                for (size_t v = 0; v < 8; v++)
                    acc[t][v] = dot_bytes(acc[t][v], value[v], x, magnitude);
            }
        }
    }
    for (size_t t = 0; t < T; t++) {
        const __m128i count = _mm_cvtsi32_si128((int)(plane[t].shift[b] - plane[t].low));
        for (size_t v = 0; v < 8; v++) {
            __m256i *lanes = (__m256i *)(void *)(total[t] + 8 * v);
            __m256i shifted = _mm256_sll_epi32(acc[t][v], count);
            _mm256_store_si256(lanes, _mm256_add_epi32(_mm256_load_si256(lanes), shifted));
        }
    }
}

static void rvq_fused_block(size_t count, const struct rvq_books *books, const uint8_t *codes,
                            const int8_t *const *q, const struct plane *plane, size_t b,
                            int32_t (*total)[INT8_PANEL_ROWS])
{
    if (count == 1)
        rvq_fused_tokens(1, books->planar, codes, q, plane, b, total);
    else if (count == 2)
        rvq_fused_tokens(2, books->planar, codes, q, plane, b, total);
    else if (count == 3)
        rvq_fused_tokens(3, books->planar, codes, q, plane, b, total);
    else
        rvq_fused_tokens(4, books->planar, codes, q, plane, b, total);
}

#endif
