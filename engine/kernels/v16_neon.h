/* Sixteen float lanes in four NEON registers. Meanings: v16_reference.h. */
#ifndef KERNELS_V16_NEON_H
#define KERNELS_V16_NEON_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/unroll.h"

typedef float32x4x4_t v16;

enum { ROWS_ONE = 4, ROWS_MANY = 2, TOKENS_MANY = 2, COLUMN_VECTORS = 4 };

#define V16_EACH(expression)         \
    do {                             \
        v16 r;                       \
        for (int i = 0; i < 4; i++)  \
            r.val[i] = (expression); \
        return r;                    \
    } while (0)
#define V16_U32(x) vreinterpretq_u32_f32(x)
#define V16_F32(x) vreinterpretq_f32_u32(x)
#define V16_S32(x) vreinterpretq_s32_f32(x)

static inline v16 v16_set1(float a) { V16_EACH(vdupq_n_f32(a)); }
static inline v16 v16_load(const float *p) { V16_EACH(vld1q_f32(p + 4 * i)); }
static inline v16 v16_load_n(const float *p, size_t n)
{
    float all[16] = { 0 };
    memcpy(all, p, n * sizeof *p);
    return v16_load(all);
}
static inline v16 v16_load_bf16(const uint16_t *p)
{
    V16_EACH(V16_F32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
static inline v16 v16_load_bf16_n(const uint16_t *p, size_t n)
{
    uint16_t all[16] = { 0 };
    memcpy(all, p, n * sizeof *p);
    return v16_load_bf16(all);
}
static inline void v16_store(float *p, v16 a)
{
    for (int i = 0; i < 4; i++)
        vst1q_f32(p + 4 * i, a.val[i]);
}
static inline void v16_store_n(float *p, v16 a, size_t n)
{
    float all[16];
    v16_store(all, a);
    memcpy(p, all, n * sizeof *p);
}
static inline void v16_store_i8(int8_t *p, v16 a)
{
    uint16x8_t lo = vcombine_u16(vmovn_u32(V16_U32(a.val[0])), vmovn_u32(V16_U32(a.val[1])));
    uint16x8_t hi = vcombine_u16(vmovn_u32(V16_U32(a.val[2])), vmovn_u32(V16_U32(a.val[3])));
    vst1q_s8(p, vreinterpretq_s8_u8(vcombine_u8(vmovn_u16(lo), vmovn_u16(hi))));
}

static inline v16 v16_add(v16 a, v16 b) { V16_EACH(vaddq_f32(a.val[i], b.val[i])); }
static inline v16 v16_sub(v16 a, v16 b) { V16_EACH(vsubq_f32(a.val[i], b.val[i])); }
static inline v16 v16_mul(v16 a, v16 b) { V16_EACH(vmulq_f32(a.val[i], b.val[i])); }
static inline v16 v16_div(v16 a, v16 b) { V16_EACH(vdivq_f32(a.val[i], b.val[i])); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { V16_EACH(vfmaq_f32(c.val[i], a.val[i], b.val[i])); }
static inline v16 v16_fnma(v16 a, v16 b, v16 c)
{
    V16_EACH(vfmsq_f32(c.val[i], a.val[i], b.val[i]));
}
static inline v16 v16_if_gt(v16 a, v16 b, v16 x, v16 y)
{
    V16_EACH(vbslq_f32(vcgtq_f32(a.val[i], b.val[i]), x.val[i], y.val[i]));
}
static inline v16 v16_max(v16 a, v16 b) { return v16_if_gt(a, b, a, b); }
static inline v16 v16_min(v16 a, v16 b) { return v16_if_gt(b, a, a, b); }

static inline uint32_t v16_less(v16 a, v16 b)
{
    uint16x8_t low = vcombine_u16(vmovn_u32(vcltq_f32(a.val[0], b.val[0])),
                                  vmovn_u32(vcltq_f32(a.val[1], b.val[1])));
    uint16x8_t high = vcombine_u16(vmovn_u32(vcltq_f32(a.val[2], b.val[2])),
                                   vmovn_u32(vcltq_f32(a.val[3], b.val[3])));
    const uint16x8_t bit = { 1, 2, 4, 8, 16, 32, 64, 128 };
    return vaddvq_u16(vandq_u16(low, bit)) | (uint32_t)vaddvq_u16(vandq_u16(high, bit)) << 8;
}

static inline v16 v16_bits_and(v16 a, uint32_t m)
{
    V16_EACH(V16_F32(vandq_u32(V16_U32(a.val[i]), vdupq_n_u32(m))));
}
static inline v16 v16_bits_add(v16 a, uint32_t b)
{
    V16_EACH(V16_F32(vaddq_u32(V16_U32(a.val[i]), vdupq_n_u32(b))));
}
static inline v16 v16_bits_shl23(v16 a) { V16_EACH(V16_F32(vshlq_n_u32(V16_U32(a.val[i]), 23))); }
static inline v16 v16_bits_shr7(v16 a) { V16_EACH(V16_F32(vshrq_n_u32(V16_U32(a.val[i]), 7))); }
static inline v16 v16_bits_max(v16 a, v16 b)
{
    V16_EACH(vreinterpretq_f32_s32(vmaxq_s32(V16_S32(a.val[i]), V16_S32(b.val[i]))));
}

static inline float v16_reduce_add(v16 a)
{
    float32x4_t b = vaddq_f32(vaddq_f32(a.val[0], a.val[2]), vaddq_f32(a.val[1], a.val[3]));
    float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
    return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}

/* out[t * ldt + r] = the sum of acc[r][t]'s lanes, folded as v16_reduce_add does. */
static inline __attribute__((always_inline)) void v16_reduce_rows(size_t R, size_t T,
                                                                  v16 (*acc)[4], float *out,
                                                                  size_t ldt)
{
    UNROLL(4)
    for (size_t r = 0; r < R; r++)
        UNROLL(4)
        for (size_t t = 0; t < T; t++)
            out[t * ldt + r] = v16_reduce_add(acc[r][t]);
}

static inline float v16_reduce_max(v16 a)
{
    float lane[16];
    v16_store(lane, a);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++)
            lane[i] = lane[i] > lane[i + step] ? lane[i] : lane[i + step];
    return lane[0];
}

static inline float v16_reduce_bits_max(v16 a)
{
    int32x4_t b = vmaxq_s32(vmaxq_s32(V16_S32(a.val[0]), V16_S32(a.val[1])),
                            vmaxq_s32(V16_S32(a.val[2]), V16_S32(a.val[3])));
    return vget_lane_f32(vreinterpret_f32_s32(vdup_n_s32(vmaxvq_s32(b))), 0);
}

typedef int32x4x4_t v16i;
typedef struct {
    int64x2_t val[8];
} v16l;

#define V16I_EACH(expression)        \
    do {                             \
        v16i r;                      \
        for (int i = 0; i < 4; i++)  \
            r.val[i] = (expression); \
        return r;                    \
    } while (0)

static inline v16i v16i_set1(int32_t a) { V16I_EACH(vdupq_n_s32(a)); }
static inline v16i v16i_load(const int32_t *p) { V16I_EACH(vld1q_s32(p + 4 * i)); }
static inline v16i v16i_load_u8(const uint8_t *p)
{
    uint8x16_t a = vld1q_u8(p);
    uint16x8_t lo = vmovl_u8(vget_low_u8(a)), hi = vmovl_u8(vget_high_u8(a));
    v16i r = { { vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo))),
                 vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(lo))),
                 vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi))),
                 vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(hi))) } };
    return r;
}
static inline void v16i_store(int32_t *p, v16i a)
{
    for (int i = 0; i < 4; i++)
        vst1q_s32(p + 4 * i, a.val[i]);
}
static inline v16i v16i_add(v16i a, v16i b) { V16I_EACH(vaddq_s32(a.val[i], b.val[i])); }
static inline v16i v16i_shl(v16i a, v16i n) { V16I_EACH(vshlq_s32(a.val[i], n.val[i])); }
static inline v16 v16_from_i32(v16i a) { V16_EACH(vcvtq_f32_s32(a.val[i])); }

static inline v16l v16l_load(const int64_t *p)
{
    v16l r;
    for (int i = 0; i < 8; i++)
        r.val[i] = vld1q_s64(p + 2 * i);
    return r;
}
static inline void v16l_store(int64_t *p, v16l a)
{
    for (int i = 0; i < 8; i++)
        vst1q_s64(p + 2 * i, a.val[i]);
}
static inline v16l v16l_add_shl(v16l sum, v16i a, const uint8_t *n)
{
    v16i counts = v16i_load_u8(n);
    for (int i = 0; i < 4; i++) {
        int64x2_t lo = vmovl_s32(vget_low_s32(a.val[i])), hi = vmovl_s32(vget_high_s32(a.val[i]));
        int32x4_t c = counts.val[i];
        lo = vshlq_s64(lo, vmovl_s32(vget_low_s32(c)));
        hi = vshlq_s64(hi, vmovl_s32(vget_high_s32(c)));
        sum.val[2 * i] = vaddq_s64(sum.val[2 * i], lo);
        sum.val[2 * i + 1] = vaddq_s64(sum.val[2 * i + 1], hi);
    }
    return sum;
}

#undef V16I_EACH
#undef V16_EACH
#undef V16_U32
#undef V16_F32
#undef V16_S32

#endif
