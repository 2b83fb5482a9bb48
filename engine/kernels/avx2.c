#include "kernels/tables.h"

#ifdef __x86_64__

#include "kernels/nibble.h"
#include "kernels/plane.h"
#include "kernels/v16_avx2.h"
#include "kernels/vector_body.h"
#include "kernels/attention_body.h"

#include "kernels/quantize_body.h"
#include "kernels/read_body.h"

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

/* The same for weights that may be -128, as those of a damaged record: 128 is still a byte, and pairs
 * stay within 2 * 128 * 127. */
static inline __m256i dot_any_bytes(__m256i sum, __m256i w, __m256i magnitude_w, __m256i x)
{
    __m256i pairs = _mm256_maddubs_epi16(magnitude_w, _mm256_sign_epi8(x, w));
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
        __m256i x[PANEL_PLANES];
        UNROLL(2)
        for (size_t t = 0; t < T; t++)
            x[t] = broadcast4(planes[t].q + b * ACT_BLOCK + k);
        UNROLL(8)
        for (size_t v = 0; v < V; v++) {
            const void *bytes = w + k * INT8_PANEL_ROWS + 4 * first + 32 * v;
            __m256i weights = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)bytes),
                                               _mm256_set1_epi8(-128));
            __m256i magnitude = _mm256_abs_epi8(weights);
            UNROLL(2)
            for (size_t t = 0; t < T; t++)
                acc[t][v] = dot_any_bytes(acc[t][v], weights, magnitude, x[t]);
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

/* As many sums as panel_slice has. Operands pass through empty statements that may change them, or
 * compilers would see that they are equal, and the products leave the loop. */
static uint64_t dot_peak(uint64_t rounds)
{
    __m256i w = _mm256_setzero_si256(), x[2], acc[2][4];
    for (size_t t = 0; t < 2; t++) {
        x[t] = _mm256_setzero_si256();
        __asm__ volatile("" : "+x"(x[t]));
        for (size_t v = 0; v < 4; v++)
            acc[t][v] = _mm256_setzero_si256();
    }
    const __m256i magnitude[2] = { _mm256_abs_epi8(x[0]), _mm256_abs_epi8(x[1]) };
    for (uint64_t i = 0; i < rounds; i++)
        UNROLL(4)
        for (size_t v = 0; v < 4; v++) {
            __asm__("" : "+x"(w));
            UNROLL(2)
            for (size_t t = 0; t < 2; t++)
                acc[t][v] = dot_bytes(acc[t][v], w, x[t], magnitude[t]);
        }
    for (size_t t = 0; t < 2; t++)
        for (size_t v = 0; v < 4; v++)
            __asm__ volatile("" : : "x"(acc[t][v]));
    return rounds * 2 * 4 * 32;
}

#include "kernels/panel_sums_body.h"
#include "kernels/rvq_avx2_body.h"
#include "kernels/rvq_body.h"
#include "kernels/rvq_search_body.h"

#define NIBBLE_TOKENS 2
#define NIBBLE_PLANES 3
#define NIBBLE_ROWS(T, decoded) ((decoded) ? 2 : 4)
enum { NIBBLE_FUSED = 2 };

/* The unsigned operand of the products is weight + NIBBLE_LARGEST. */
struct nibble_operand {
    __m256i table;
};

static inline struct nibble_operand nibble_operand(const int8_t *table)
{
    __m128i t = _mm_loadu_si128((const __m128i *)(const void *)table);
    t = _mm_add_epi8(t, _mm_set1_epi8(NIBBLE_LARGEST));
    return (struct nibble_operand){ _mm256_broadcastsi128_si256(t) };
}

static inline __m256i low_weights(__m256i bytes, const struct nibble_operand *operand)
{
    return _mm256_shuffle_epi8(operand->table, _mm256_and_si256(bytes, _mm256_set1_epi8(15)));
}

static inline __m256i high_weights(__m256i bytes, const struct nibble_operand *operand)
{
    return low_weights(_mm256_srli_epi16(bytes, 4), operand);
}

static inline __m256i load_bytes(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

static inline void group_decode(const uint8_t *w, const struct nibble_operand *operand,
                                uint8_t *tile)
{
    for (size_t i = 0; i < NIBBLE_BYTES; i += 32) {
        __m256i bytes = load_bytes(w + i);
        _mm256_store_si256((__m256i *)(void *)(tile + i), low_weights(bytes, operand));
        _mm256_store_si256((__m256i *)(void *)(tile + NIBBLE_BYTES + i),
                           high_weights(bytes, operand));
    }
}

static inline v16i group_start(const int32_t *offset)
{
    return v16i_set1(*offset);
}

/* Four products of at most 2 * NIBBLE_LARGEST * 127 stay below 2^15: nothing saturates. */
static inline __m256i add_products(__m256i sum, __m256i low, __m256i high, __m256i x0, __m256i x1)
{
    __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, x0), _mm256_maddubs_epi16(high, x1));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

static inline __attribute__((always_inline)) void
group_dots(size_t R, size_t T, bool decoded, const uint8_t *w, const struct nibble_operand *operand,
           const int8_t *const *q, size_t at, v16i (*dots)[NIBBLE_VECTORS])
{
    for (size_t k = 0; k < NIBBLE_GROUP / 2; k += 4) {
        __m256i x0[NIBBLE_PLANES], x1[NIBBLE_PLANES];
        UNROLL(4)
        for (size_t t = 0; t < T; t++) {
            x0[t] = broadcast4(q[t] + at + k);
            x1[t] = broadcast4(q[t] + at + 16 + k);
        }
        UNROLL(8)
        for (size_t v = 0; v < 2 * R; v++) {
            const uint8_t *from = w + k * INT8_PANEL_ROWS + 32 * v;
            __m256i bytes = load_bytes(from);
            __m256i low = decoded ? bytes : low_weights(bytes, operand);
            __m256i high = decoded ? load_bytes(from + NIBBLE_BYTES) : high_weights(bytes, operand);
            UNROLL(4)
            for (size_t t = 0; t < T; t++) {
                v16i *sum = &dots[t][v / 2];
                if (v % 2)
                    sum->hi = add_products(sum->hi, low, high, x0[t], x1[t]);
                else
                    sum->lo = add_products(sum->lo, low, high, x0[t], x1[t]);
            }
        }
    }
}

#include "kernels/mxfp4_body.h"

enum { FINE_TOKENS = 1, FINE_FUSED = 2 };
#define FINE_ROWS(T, decoded) ((decoded) ? 1 : 4)

#include "kernels/mxfp4_fine_body.h"

#define TABLE kernels_table_avx2
#define ISA "avx2"
#include "kernels/table_body.h"

#endif
