/* Sixteen float lanes as plain C: this file and the bodies define the bits of every other path. */
#ifndef KERNELS_V16_REFERENCE_H
#define KERNELS_V16_REFERENCE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/fma32.h"
#include "kernels/unroll.h"

typedef struct {
    float lane[16];
} v16;

enum { ROWS_ONE = 2, ROWS_MANY = 2, TOKENS_MANY = 2, COLUMN_VECTORS = 2 };

#define V16_EACH(expression)          \
    do {                              \
        v16 r;                        \
        for (int i = 0; i < 16; i++)  \
            r.lane[i] = (expression); \
        return r;                     \
    } while (0)

static inline uint32_t float_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float bits_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline v16 v16_set1(float a) { V16_EACH(a); }
static inline v16 v16_load(const float *p) { V16_EACH(p[i]); }
/* The first n (at most 16) floats, zeros behind; reads nothing beyond them. */
static inline v16 v16_load_n(const float *p, size_t n) { V16_EACH((size_t)i < n ? p[i] : 0.0f); }
static inline v16 v16_load_bf16(const uint16_t *p) { V16_EACH(bits_float((uint32_t)p[i] << 16)); }
static inline v16 v16_load_bf16_n(const uint16_t *p, size_t n)
{
    V16_EACH((size_t)i < n ? bits_float((uint32_t)p[i] << 16) : 0.0f);
}
static inline void v16_store(float *p, v16 a) { memcpy(p, a.lane, sizeof a.lane); }
static inline void v16_store_n(float *p, v16 a, size_t n) { memcpy(p, a.lane, n * sizeof *p); }
/* The low byte of every lane's bits. */
static inline void v16_store_i8(int8_t *p, v16 a)
{
    for (int i = 0; i < 16; i++)
        p[i] = (int8_t)(uint8_t)(float_bits(a.lane[i]) & 0xff);
}

static inline v16 v16_add(v16 a, v16 b) { V16_EACH(a.lane[i] + b.lane[i]); }
static inline v16 v16_sub(v16 a, v16 b) { V16_EACH(a.lane[i] - b.lane[i]); }
static inline v16 v16_mul(v16 a, v16 b) { V16_EACH(a.lane[i] * b.lane[i]); }
static inline v16 v16_div(v16 a, v16 b) { V16_EACH(a.lane[i] / b.lane[i]); }
/* a * b + c, rounded once */
static inline v16 v16_fma(v16 a, v16 b, v16 c) { V16_EACH(fma32(a.lane[i], b.lane[i], c.lane[i])); }
/* c - a * b, rounded once */
static inline v16 v16_fnma(v16 a, v16 b, v16 c) { V16_EACH(fma32(-a.lane[i], b.lane[i], c.lane[i])); }
/* a > b ? a : b and a < b ? a : b: with a NaN, or two zeros, b. */
static inline v16 v16_max(v16 a, v16 b) { V16_EACH(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
static inline v16 v16_min(v16 a, v16 b) { V16_EACH(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
/* a > b ? x : y */
static inline v16 v16_if_gt(v16 a, v16 b, v16 x, v16 y)
{
    V16_EACH(a.lane[i] > b.lane[i] ? x.lane[i] : y.lane[i]);
}

/* Bit i: lane i of a is less than that of b. */
static inline uint32_t v16_less(v16 a, v16 b)
{
    uint32_t mask = 0;
    for (unsigned i = 0; i < 16; i++)
        mask |= (uint32_t)(a.lane[i] < b.lane[i]) << i;
    return mask;
}

/* Operations on the bits of every lane. */
static inline v16 v16_bits_and(v16 a, uint32_t m) { V16_EACH(bits_float(float_bits(a.lane[i]) & m)); }
static inline v16 v16_bits_add(v16 a, uint32_t b) { V16_EACH(bits_float(float_bits(a.lane[i]) + b)); }
static inline v16 v16_bits_shl23(v16 a) { V16_EACH(bits_float(float_bits(a.lane[i]) << 23)); }
static inline v16 v16_bits_shr7(v16 a) { V16_EACH(bits_float(float_bits(a.lane[i]) >> 7)); }
static inline v16 v16_bits_max(v16 a, v16 b)
{
    V16_EACH((int32_t)float_bits(a.lane[i]) > (int32_t)float_bits(b.lane[i]) ? a.lane[i] : b.lane[i]);
}

static inline float v16_reduce_add(v16 a)
{
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++)
            a.lane[i] += a.lane[i + step];
    return a.lane[0];
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
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++)
            a.lane[i] = a.lane[i] > a.lane[i + step] ? a.lane[i] : a.lane[i + step];
    return a.lane[0];
}

static inline float v16_reduce_bits_max(v16 a)
{
    for (int i = 1; i < 16; i++)
        if ((int32_t)float_bits(a.lane[i]) > (int32_t)float_bits(a.lane[0]))
            a.lane[0] = a.lane[i];
    return a.lane[0];
}

#undef V16_EACH

/* Sixteen int32 lanes, and sixteen of int64. Sums wrap. */
typedef struct {
    int32_t lane[16];
} v16i;
typedef struct {
    int64_t lane[16];
} v16l;

#define V16I_EACH(expression)         \
    do {                              \
        v16i r;                       \
        for (int i = 0; i < 16; i++)  \
            r.lane[i] = (expression); \
        return r;                     \
    } while (0)

static inline v16i v16i_set1(int32_t a) { V16I_EACH(a); }
static inline v16i v16i_load(const int32_t *p) { V16I_EACH(p[i]); }
static inline v16i v16i_load_u8(const uint8_t *p) { V16I_EACH(p[i]); }
static inline void v16i_store(int32_t *p, v16i a) { memcpy(p, a.lane, sizeof a.lane); }
static inline v16i v16i_add(v16i a, v16i b)
{
    V16I_EACH((int32_t)((uint32_t)a.lane[i] + (uint32_t)b.lane[i]));
}
/* Each lane by its own count, 0..127; 0 from a count of 32 on. */
static inline v16i v16i_shl(v16i a, v16i n)
{
    V16I_EACH(n.lane[i] < 32 ? (int32_t)((uint32_t)a.lane[i] << n.lane[i]) : 0);
}
static inline v16 v16_from_i32(v16i a)
{
    v16 r;
    for (int i = 0; i < 16; i++)
        r.lane[i] = (float)a.lane[i];
    return r;
}

static inline v16l v16l_load(const int64_t *p)
{
    v16l r;
    memcpy(r.lane, p, sizeof r.lane);
    return r;
}
static inline void v16l_store(int64_t *p, v16l a) { memcpy(p, a.lane, sizeof a.lane); }
/* sum + a * 2^n, nothing from a count of 64 on. */
static inline v16l v16l_add_shl(v16l sum, v16i a, const uint8_t *n)
{
    for (int i = 0; i < 16; i++)
        if (n[i] < 64)
            sum.lane[i] = (int64_t)((uint64_t)sum.lane[i] + ((uint64_t)(int64_t)a.lane[i] << n[i]));
    return sum;
}

#undef V16I_EACH

#endif
