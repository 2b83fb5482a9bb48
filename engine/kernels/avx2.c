#include "kernels/tables.h"

#ifdef __x86_64__

#include "kernels/plane.h"
#include "kernels/v16_avx2.h"
#include "kernels/vector_body.h"

#include "kernels/quantize_body.h"

#define PANEL_PLANES 2
enum { PLANES_MAX = PANEL_PLANES, PANEL_OFFSET = 0 };

static inline __m256i broadcast4(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

/* |x| * sign(w, x): pairs stay within 2 * 127 * 127 < 2^15, so nothing saturates. */
static inline __m256i dot_bytes(__m256i sum, __m256i w, __m256i x, __m256i magnitude_x)
{
    __m256i pairs = _mm256_maddubs_epi16(magnitude_x, _mm256_sign_epi8(w, x));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* V vectors of 8 rows, so that V * T sums fit the registers; w and total begin at their rows. */
static inline __attribute__((always_inline)) void
panel_slice(size_t V, size_t T, const uint8_t *w, const struct plane *planes, size_t b,
            size_t first, int32_t (*total)[INT8_PANEL_ROWS])
{
    __m256i acc[PANEL_PLANES][8];
    UNROLL(2)
    for (size_t t = 0; t < T; t++)
        UNROLL(8)
        for (size_t v = 0; v < V; v++)
            acc[t][v] = _mm256_setzero_si256();
    for (size_t k = 0; k < ACT_BLOCK; k += 4) {
        __m256i x[PANEL_PLANES], magnitude_x[PANEL_PLANES];
        UNROLL(2)
        for (size_t t = 0; t < T; t++) {
            x[t] = broadcast4(planes[t].q + b * ACT_BLOCK + k);
            magnitude_x[t] = _mm256_abs_epi8(x[t]);
        }
        UNROLL(8)
        for (size_t v = 0; v < V; v++) {
            const void *bytes = w + k * INT8_PANEL_ROWS + 4 * first + 32 * v;
            __m256i weights = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)bytes),
                                               _mm256_set1_epi8(-128));
            UNROLL(2)
            for (size_t t = 0; t < T; t++)
                acc[t][v] = dot_bytes(acc[t][v], weights, x[t], magnitude_x[t]);
        }
    }
    UNROLL(2)
    for (size_t t = 0; t < T; t++) {
        unsigned shift = planes[t].shift ? planes[t].shift[b] - planes[t].low : 0;
        __m128i count = _mm_cvtsi32_si128((int)shift);
        UNROLL(8)
        for (size_t v = 0; v < V; v++) {
            __m256i *lanes = (__m256i *)(void *)(total[t] + first + 8 * v);
            __m256i shifted = _mm256_sll_epi32(acc[t][v], count);
            _mm256_store_si256(lanes, _mm256_add_epi32(_mm256_load_si256(lanes), shifted));
        }
    }
}

static inline __attribute__((always_inline)) void panel_block(size_t T, const uint8_t *w,
                                                              const struct plane *planes, size_t b,
                                                              int32_t (*total)[INT8_PANEL_ROWS])
{
    if (T == 1) {
        panel_slice(8, 1, w, planes, b, 0, total);
    } else {
        panel_slice(4, 2, w, planes, b, 0, total);
        panel_slice(4, 2, w, planes, b, INT8_PANEL_ROWS / 2, total);
    }
}

#include "kernels/panel_sums_body.h"

#define TABLE kernels_table_avx2
#define ISA "avx2"
#include "kernels/table_body.h"

#endif
