/* The NEON table. WITH_DOTPROD, TABLE and ISA are defined before. */
#include "kernels/nibble.h"
#include "kernels/plane.h"
#include "kernels/v16_neon.h"
#include "kernels/vector_body.h"
#include "kernels/attention_body.h"

#include "kernels/quantize_body.h"
#include "kernels/read_body.h"

#define PANEL_PLANES 4
enum { PLANES_MAX = PANEL_PLANES, PANEL_OFFSET = 0 };

static inline int8x16_t signed_weights(const uint8_t *w)
{
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w), vdupq_n_u8(0x80)));
}

static inline void add_shifted(int32_t *lanes, int32x4_t sum, const struct plane *plane, size_t b)
{
    int shift = plane->shift ? (int)(plane->shift[b] - plane->low) : 0;
    vst1q_s32(lanes, vaddq_s32(vld1q_s32(lanes), vshlq_s32(sum, vdupq_n_s32(shift))));
}

#if WITH_DOTPROD

/* V vectors of 4 rows from row `first` on; V * T sums fit the registers. */
static inline __attribute__((always_inline)) void
panel_slice(size_t V, size_t T, const uint8_t *w, const struct plane *planes, size_t b,
            size_t first, int32_t (*total)[INT8_PANEL_ROWS])
{
    int32x4_t acc[PANEL_PLANES][16];
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(16)
        for (size_t v = 0; v < V; v++)
            acc[t][v] = vdupq_n_s32(0);
    for (size_t k = 0; k < ACT_BLOCK; k += 4) {
        int8x16_t x[PANEL_PLANES];
        UNROLL(4)
        for (size_t t = 0; t < T; t++) {
            int32_t four;
            memcpy(&four, planes[t].q + b * ACT_BLOCK + k, sizeof four);
            x[t] = vreinterpretq_s8_s32(vdupq_n_s32(four));
        }
        UNROLL(16)
        for (size_t v = 0; v < V; v++) {
            int8x16_t weights = signed_weights(w + k * INT8_PANEL_ROWS + 4 * first + 16 * v);
            UNROLL(4)
            for (size_t t = 0; t < T; t++)
                acc[t][v] = vdotq_s32(acc[t][v], weights, x[t]);
        }
    }
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(16)
        for (size_t v = 0; v < V; v++)
            add_shifted(total[t] + first + 4 * v, acc[t][v], planes + t, b);
}

enum { SLICE_SUMS = 16 };

/* Operands and sums pass through empty statements that may change them, or compilers would know the
 * products. */
static uint64_t dot_peak(uint64_t rounds)
{
    int8x16_t w = vdupq_n_s8(0), x = vdupq_n_s8(0);
    int32x4_t acc[SLICE_SUMS];
    __asm__ volatile("" : "+w"(x));
    UNROLL(16)
    for (size_t v = 0; v < SLICE_SUMS; v++) {
        acc[v] = vdupq_n_s32(0);
        __asm__ volatile("" : "+w"(acc[v]));
    }
    for (uint64_t i = 0; i < rounds; i++) {
        __asm__("" : "+w"(w));
        UNROLL(16)
        for (size_t v = 0; v < SLICE_SUMS; v++)
            acc[v] = vdotq_s32(acc[v], w, x);
    }
    UNROLL(16)
    for (size_t v = 0; v < SLICE_SUMS; v++)
        __asm__ volatile("" : : "w"(acc[v]));
    return rounds * SLICE_SUMS * 16;
}

#else

/* Without sdot: products of two groups of 4 add up in int16 (2 * 127 * 127 < 2^15), pairs in
 * int32; every 4 rows have two vectors of half sums. */
static inline __attribute__((always_inline)) void
panel_slice(size_t V, size_t T, const uint8_t *w, const struct plane *planes, size_t b,
            size_t first, int32_t (*total)[INT8_PANEL_ROWS])
{
    int32x4_t low[PANEL_PLANES][16], high[PANEL_PLANES][16];
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(16)
        for (size_t v = 0; v < V; v++)
            low[t][v] = high[t][v] = vdupq_n_s32(0);
    for (size_t k = 0; k < ACT_BLOCK; k += 8) {
        int8x8_t x[PANEL_PLANES][2];
        UNROLL(4)
        for (size_t t = 0; t < T; t++) {
            int32_t four[2];
            memcpy(four, planes[t].q + b * ACT_BLOCK + k, sizeof four);
            x[t][0] = vreinterpret_s8_s32(vdup_n_s32(four[0]));
            x[t][1] = vreinterpret_s8_s32(vdup_n_s32(four[1]));
        }
        UNROLL(16)
        for (size_t v = 0; v < V; v++) {
            const uint8_t *bytes = w + k * INT8_PANEL_ROWS + 4 * first + 16 * v;
            int8x16_t w0 = signed_weights(bytes), w1 = signed_weights(bytes + 4 * INT8_PANEL_ROWS);
            UNROLL(4)
            for (size_t t = 0; t < T; t++) {
                int16x8_t p = vmull_s8(vget_low_s8(w0), x[t][0]);
                int16x8_t r = vmull_s8(vget_high_s8(w0), x[t][0]);
                low[t][v] = vpadalq_s16(low[t][v], vmlal_s8(p, vget_low_s8(w1), x[t][1]));
                high[t][v] = vpadalq_s16(high[t][v], vmlal_s8(r, vget_high_s8(w1), x[t][1]));
            }
        }
    }
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(16)
        for (size_t v = 0; v < V; v++)
            add_shifted(total[t] + first + 4 * v, vpaddq_s32(low[t][v], high[t][v]), planes + t, b);
}

enum { SLICE_SUMS = 8 };

/* Operands and sums pass through empty statements that may change them, or compilers would know the
 * products. */
static uint64_t dot_peak(uint64_t rounds)
{
    int8x8_t w = vdup_n_s8(0), x = vdup_n_s8(0);
    int32x4_t acc[2 * SLICE_SUMS];
    __asm__ volatile("" : "+w"(x));
    UNROLL(16)
    for (size_t v = 0; v < 2 * SLICE_SUMS; v++) {
        acc[v] = vdupq_n_s32(0);
        __asm__ volatile("" : "+w"(acc[v]));
    }
    for (uint64_t i = 0; i < rounds; i++)
        UNROLL(16)
        for (size_t v = 0; v < 2 * SLICE_SUMS; v++) {
            __asm__("" : "+w"(w));
            acc[v] = vpadalq_s16(acc[v], vmlal_s8(vmull_s8(w, x), w, x));
        }
    UNROLL(16)
    for (size_t v = 0; v < 2 * SLICE_SUMS; v++)
        __asm__ volatile("" : : "w"(acc[v]));
    return rounds * 2 * SLICE_SUMS * 16;
}

#endif

static inline __attribute__((always_inline)) void panel_block(size_t T, const uint8_t *w,
                                                              const struct plane *planes, size_t b,
                                                              int32_t (*total)[INT8_PANEL_ROWS])
{
    const size_t V = T == 1 ? SLICE_SUMS : T == 2 ? SLICE_SUMS / 2 : SLICE_SUMS / 4;
    for (size_t first = 0; first < INT8_PANEL_ROWS; first += 4 * V)
        panel_slice(V, T, w, planes, b, first, total);
}

#include "kernels/panel_sums_body.h"
#include "kernels/rvq_neon_body.h"
#include "kernels/rvq_body.h"
#include "kernels/rvq_search_body.h"

#define NIBBLE_TOKENS 4
#define NIBBLE_PLANES 6
#define NIBBLE_ROWS(T, decoded) ((T) == 1 ? 4 : (T) == 2 ? 2 : 1)
enum { NIBBLE_FUSED = 4 };

struct nibble_operand {
    int8x16_t table;
};

static inline struct nibble_operand nibble_operand(const int8_t *table)
{
    return (struct nibble_operand){ vld1q_s8(table) };
}

static inline int8x16_t low_weights(uint8x16_t bytes, const struct nibble_operand *operand)
{
    return vqtbl1q_s8(operand->table, vandq_u8(bytes, vdupq_n_u8(15)));
}

static inline int8x16_t high_weights(uint8x16_t bytes, const struct nibble_operand *operand)
{
    return vqtbl1q_s8(operand->table, vshrq_n_u8(bytes, 4));
}

static inline void group_decode(const uint8_t *w, const struct nibble_operand *operand,
                                uint8_t *tile)
{
    for (size_t i = 0; i < NIBBLE_BYTES; i += 16) {
        uint8x16_t bytes = vld1q_u8(w + i);
        vst1q_u8(tile + i, vreinterpretq_u8_s8(low_weights(bytes, operand)));
        vst1q_u8(tile + NIBBLE_BYTES + i, vreinterpretq_u8_s8(high_weights(bytes, operand)));
    }
}

static inline __attribute__((always_inline)) void
load_weights(bool decoded, const uint8_t *w, const struct nibble_operand *operand, int8x16_t *low,
             int8x16_t *high)
{
    uint8x16_t bytes = vld1q_u8(w);
    *low = decoded ? vreinterpretq_s8_u8(bytes) : low_weights(bytes, operand);
    *high = decoded ? vreinterpretq_s8_u8(vld1q_u8(w + NIBBLE_BYTES)) : high_weights(bytes, operand);
}

static inline int8x16_t broadcast4(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

static inline v16i group_start(const int32_t *offset)
{
    (void)offset;
    return v16i_set1(0);
}

static inline __attribute__((always_inline)) void
group_dots(size_t R, size_t T, bool decoded, const uint8_t *w, const struct nibble_operand *operand,
           const int8_t *const *q, size_t at, v16i (*dots)[NIBBLE_VECTORS])
{
#if WITH_DOTPROD
    for (size_t k = 0; k < NIBBLE_GROUP / 2; k += 4) {
        int8x16_t x0[NIBBLE_PLANES], x1[NIBBLE_PLANES];
        UNROLL(8)
        for (size_t t = 0; t < T; t++) {
            x0[t] = broadcast4(q[t] + at + k);
            x1[t] = broadcast4(q[t] + at + 16 + k);
        }
        UNROLL(16)
        for (size_t v = 0; v < 4 * R; v++) {
            int8x16_t low, high;
            load_weights(decoded, w + k * INT8_PANEL_ROWS + 16 * v, operand, &low, &high);
            UNROLL(8)
            for (size_t t = 0; t < T; t++) {
                int32x4_t *sum = &dots[t][v / 4].val[v % 4];
                *sum = vdotq_s32(vdotq_s32(*sum, low, x0[t]), high, x1[t]);
            }
        }
    }
#else
    /* All 8 products of an int16 lane fit: 8 * NIBBLE_LARGEST * 127 < 2^15. */
    int16x8_t left[NIBBLE_PLANES][16], right[NIBBLE_PLANES][16];
    UNROLL(8)
    for (size_t t = 0; t < T; t++)
        UNROLL(16)
        for (size_t v = 0; v < 4 * R; v++)
            left[t][v] = right[t][v] = vdupq_n_s16(0);
    for (size_t k = 0; k < NIBBLE_GROUP / 2; k += 4) {
        int8x8_t x0[NIBBLE_PLANES], x1[NIBBLE_PLANES];
        UNROLL(8)
        for (size_t t = 0; t < T; t++) {
            x0[t] = vget_low_s8(broadcast4(q[t] + at + k));
            x1[t] = vget_low_s8(broadcast4(q[t] + at + 16 + k));
        }
        UNROLL(16)
        for (size_t v = 0; v < 4 * R; v++) {
            int8x16_t low, high;
            load_weights(decoded, w + k * INT8_PANEL_ROWS + 16 * v, operand, &low, &high);
            UNROLL(8)
            for (size_t t = 0; t < T; t++) {
                left[t][v] = vmlal_s8(left[t][v], vget_low_s8(low), x0[t]);
                left[t][v] = vmlal_s8(left[t][v], vget_low_s8(high), x1[t]);
                right[t][v] = vmlal_s8(right[t][v], vget_high_s8(low), x0[t]);
                right[t][v] = vmlal_s8(right[t][v], vget_high_s8(high), x1[t]);
            }
        }
    }
    UNROLL(8)
    for (size_t t = 0; t < T; t++)
        UNROLL(16)
        for (size_t v = 0; v < 4 * R; v++) {
            int32x4_t *sum = &dots[t][v / 4].val[v % 4];
            *sum = vaddq_s32(*sum, vpaddq_s32(vpaddlq_s16(left[t][v]), vpaddlq_s16(right[t][v])));
        }
#endif
}

#include "kernels/mxfp4_body.h"

enum { FINE_TOKENS = 2, FINE_FUSED = 2 };
#define FINE_ROWS(T, decoded) ((T) == 1 ? 2 : 1)

#include "kernels/mxfp4_fine_body.h"
#include "kernels/table_body.h"
