#include "kernels/tables.h"

#ifdef __x86_64__

#include "kernels/nibble.h"
#include "kernels/plane.h"
#include "kernels/v16_avx512.h"
#include "kernels/vector_body.h"
#include "kernels/attention_body.h"

#include "kernels/quantize_body.h"
#include "kernels/read_body.h"

#define PANEL_PLANES 4
enum { PLANES_MAX = PANEL_PLANES, PANEL_OFFSET = 128 };

/* Inline assembly keeps both operands in registers: compilers fold the loads into every product
 * and lose a third of the speed. */
static inline __m512i dot_bytes(__m512i sum, __m512i bytes, __m512i q)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(q));
    return sum;
}

static inline __m512i broadcast4(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm512_set1_epi32(four);
}

static inline __attribute__((always_inline)) void panel_block(size_t T, const uint8_t *w,
                                                              const struct plane *planes, size_t b,
                                                              int32_t (*total)[INT8_PANEL_ROWS])
{
    __m512i acc[PANEL_PLANES][4];
    const int8_t *q[PANEL_PLANES];
    UNROLL(4)
    for (size_t t = 0; t < T; t++) {
        q[t] = planes[t].q + b * ACT_BLOCK;
        UNROLL(4)
        for (size_t v = 0; v < 4; v++)
            acc[t][v] = _mm512_setzero_si512();
    }
    size_t columns = ACT_BLOCK;
    __asm__("" : "+r"(columns)); /* with a known count GCC copies every sum in every step */
    for (size_t k = 0; k < columns; k += 4) {
        __m512i bytes[4];
        UNROLL(4)
        for (size_t v = 0; v < 4; v++)
            bytes[v] = _mm512_loadu_si512(w + k * INT8_PANEL_ROWS + 64 * v);
        UNROLL(4)
        for (size_t t = 0; t < T; t++) {
            __m512i x = broadcast4(q[t] + k);
            UNROLL(4)
            for (size_t v = 0; v < 4; v++)
                acc[t][v] = dot_bytes(acc[t][v], bytes[v], x);
        }
    }
    UNROLL(4)
    for (size_t t = 0; t < T; t++) {
        unsigned shift = planes[t].shift ? planes[t].shift[b] - planes[t].low : 0;
        __m128i count = _mm_cvtsi32_si128((int)shift);
        UNROLL(4)
        for (size_t v = 0; v < 4; v++) {
            int32_t *lanes = total[t] + 16 * v;
            __asm__("" : "+r"(lanes)); /* totals stay in memory: the sums need the registers */
            __m512i before = _mm512_load_si512(lanes);
            _mm512_store_si512(lanes, _mm512_add_epi32(before, _mm512_sll_epi32(acc[t][v], count)));
        }
    }
}

static uint64_t dot_peak(uint64_t rounds)
{
    __m512i acc[PANEL_PLANES][4], w = _mm512_setzero_si512(), x = _mm512_setzero_si512();
    UNROLL(4)
    for (size_t t = 0; t < PANEL_PLANES; t++)
        UNROLL(4)
        for (size_t v = 0; v < 4; v++) {
            acc[t][v] = _mm512_setzero_si512();
            __asm__ volatile("" : "+v"(acc[t][v])); /* no sum is known to equal another */
        }
    for (uint64_t i = 0; i < rounds; i++)
        UNROLL(4)
        for (size_t t = 0; t < PANEL_PLANES; t++)
            UNROLL(4)
            for (size_t v = 0; v < 4; v++)
                acc[t][v] = dot_bytes(acc[t][v], w, x);
    UNROLL(4)
    for (size_t t = 0; t < PANEL_PLANES; t++)
        UNROLL(4)
        for (size_t v = 0; v < 4; v++)
            __asm__ volatile("" : : "v"(acc[t][v]));
    return rounds * PANEL_PLANES * 4 * 64;
}

#include "kernels/panel_sums_body.h"
#include "kernels/rvq_avx512_body.h"
#include "kernels/rvq_body.h"
#include "kernels/rvq_search_body.h"

#define NIBBLE_TOKENS 4
#define NIBBLE_ROWS(T, decoded) ((decoded) || (T) > 2 ? 2 : 4) /* more sums than registers spill */
enum { NIBBLE_FUSED = 8 };

/* The unsigned operand of the dot product is weight + NIBBLE_LARGEST. */
struct nibble_operand {
    __m512i table;
};

static inline struct nibble_operand nibble_operand(const int8_t *table)
{
    __m128i t = _mm_loadu_si128((const __m128i *)(const void *)table);
    t = _mm_add_epi8(t, _mm_set1_epi8(NIBBLE_LARGEST));
    return (struct nibble_operand){ _mm512_broadcast_i32x4(t) };
}

/* vpermb uses six bits of an index, and the table repeats after four: no masks are needed. */
static inline __m512i low_weights(__m512i bytes, const struct nibble_operand *operand)
{
    return _mm512_permutexvar_epi8(bytes, operand->table);
}

static inline __m512i high_weights(__m512i bytes, const struct nibble_operand *operand)
{
    return _mm512_permutexvar_epi8(_mm512_srli_epi16(bytes, 4), operand->table);
}

static inline void group_decode(const uint8_t *w, const struct nibble_operand *operand,
                                uint8_t *tile)
{
    for (size_t i = 0; i < NIBBLE_BYTES; i += 64) {
        __m512i bytes = _mm512_loadu_si512(w + i);
        _mm512_store_si512(tile + i, low_weights(bytes, operand));
        _mm512_store_si512(tile + NIBBLE_BYTES + i, high_weights(bytes, operand));
    }
}

static inline v16i group_start(const int32_t *offset)
{
    return v16i_set1(*offset);
}

static inline __attribute__((always_inline)) void
group_dots(size_t R, size_t T, bool decoded, const uint8_t *w, const struct nibble_operand *operand,
           const int8_t *const *q, size_t at, v16i (*dots)[NIBBLE_VECTORS])
{
    for (size_t k = 0; k < NIBBLE_GROUP / 2; k += 4) {
        __m512i low[4], high[4];
        UNROLL(4)
        for (size_t v = 0; v < R; v++) {
            __m512i bytes = _mm512_loadu_si512(w + k * INT8_PANEL_ROWS + 64 * v);
            low[v] = decoded ? bytes : low_weights(bytes, operand);
            high[v] = decoded ? _mm512_loadu_si512(w + NIBBLE_BYTES + k * INT8_PANEL_ROWS + 64 * v)
                              : high_weights(bytes, operand);
        }
        UNROLL(8)
        for (size_t t = 0; t < T; t++) {
            __m512i x0 = broadcast4(q[t] + at + k), x1 = broadcast4(q[t] + at + 16 + k);
            UNROLL(4)
            for (size_t v = 0; v < R; v++)
                dots[t][v] = dot_bytes(dots[t][v], low[v], x0);
            UNROLL(4)
            for (size_t v = 0; v < R; v++)
                dots[t][v] = dot_bytes(dots[t][v], high[v], x1);
        }
    }
}

#include "kernels/mxfp4_body.h"

enum { FINE_TOKENS = 2, FINE_FUSED = 2 };
#define FINE_ROWS(T, decoded) ((decoded) ? 2 : 4)

#include "kernels/mxfp4_fine_body.h"

#define TABLE kernels_table_avx512
#define ISA "avx512"
#include "kernels/table_body.h"

#endif
