/* The NEON table. WITH_DOTPROD, TABLE and ISA are defined before. */
#include "kernels/plane.h"
#include "kernels/v16_neon.h"
#include "kernels/vector_body.h"

#include "kernels/quantize_body.h"

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
#include "kernels/table_body.h"
