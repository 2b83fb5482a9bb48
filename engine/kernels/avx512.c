#include "kernels/tables.h"

#ifdef __x86_64__

#include "kernels/plane.h"
#include "kernels/v16_avx512.h"
#include "kernels/vector_body.h"

#include "kernels/quantize_body.h"

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
    for (size_t k = 0; k < ACT_BLOCK; k += 4) {
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

#include "kernels/panel_sums_body.h"

#define TABLE kernels_table_avx512
#define ISA "avx512"
#include "kernels/table_body.h"

#endif
