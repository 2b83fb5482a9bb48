/* Sixteen float lanes in one zmm register. Meanings: v16_reference.h. */
#ifndef KERNELS_V16_AVX512_H
#define KERNELS_V16_AVX512_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/unroll.h"

typedef __m512 v16;

enum { ROWS_ONE = 4, ROWS_MANY = 4, TOKENS_MANY = 4, COLUMN_VECTORS = 8 };

static inline __m512i v16_bits(v16 a) { return _mm512_castps_si512(a); }
static inline v16 v16_from_bits(__m512i a) { return _mm512_castsi512_ps(a); }
static inline __mmask16 v16_first(size_t n) { return (__mmask16)((1u << n) - 1); }

static inline v16 v16_set1(float a) { return _mm512_set1_ps(a); }
static inline v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline v16 v16_load_n(const float *p, size_t n)
{
    return _mm512_maskz_loadu_ps(v16_first(n), p);
}
static inline v16 v16_widen_bf16(__m256i a)
{
    return v16_from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
}
static inline v16 v16_load_bf16(const uint16_t *p)
{
    return v16_widen_bf16(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
static inline v16 v16_load_bf16_n(const uint16_t *p, size_t n)
{
    return v16_widen_bf16(_mm256_maskz_loadu_epi16(v16_first(n), p));
}
static inline void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
static inline void v16_store_n(float *p, v16 a, size_t n)
{
    _mm512_mask_storeu_ps(p, v16_first(n), a);
}
static inline void v16_store_i8(int8_t *p, v16 a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(v16_bits(a)));
}

static inline v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
static inline v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
static inline v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
static inline v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline v16 v16_fnma(v16 a, v16 b, v16 c) { return _mm512_fnmadd_ps(a, b, c); }
static inline v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
static inline v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
static inline v16 v16_if_gt(v16 a, v16 b, v16 x, v16 y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}

static inline uint32_t v16_less(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }

static inline v16 v16_bits_and(v16 a, uint32_t m)
{
    return v16_from_bits(_mm512_and_si512(v16_bits(a), _mm512_set1_epi32((int)m)));
}
static inline v16 v16_bits_add(v16 a, uint32_t b)
{
    return v16_from_bits(_mm512_add_epi32(v16_bits(a), _mm512_set1_epi32((int)b)));
}
static inline v16 v16_bits_shl23(v16 a)
{
    return v16_from_bits(_mm512_slli_epi32(v16_bits(a), 23));
}
static inline v16 v16_bits_shr7(v16 a) { return v16_from_bits(_mm512_srli_epi32(v16_bits(a), 7)); }
static inline v16 v16_bits_max(v16 a, v16 b)
{
    return v16_from_bits(_mm512_max_epi32(v16_bits(a), v16_bits(b)));
}

static inline float v16_reduce_add(v16 a)
{
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    c = _mm_add_ss(c, _mm_movehdup_ps(c));
    return _mm_cvtss_f32(c);
}

/* Lanes l + (l + 8) of a, then of b. */
static inline v16 v16_fold_8(v16 a, v16 b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

/* What is left of a, b, c, d after the folds by 8 and 4, one 128-bit block each. */
static inline v16 v16_fold_to_4(v16 a, v16 b, v16 c, v16 d)
{
    v16 ab = v16_fold_8(a, b), cd = v16_fold_8(c, d);
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

/* out[t * ldt + r] = the sum of acc[r][t]'s lanes, folded as v16_reduce_add does. */
static inline __attribute__((always_inline)) void v16_reduce_rows(size_t R, size_t T,
                                                                  v16 (*acc)[4], float *out,
                                                                  size_t ldt)
{
    if (R == 4 && T == 4) {
        v16 rows[4];
        UNROLL(4)
        for (size_t r = 0; r < 4; r++)
            rows[r] = v16_fold_to_4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
        v16 ab = _mm512_add_ps(_mm512_shuffle_ps(rows[0], rows[1], 0x44),
                               _mm512_shuffle_ps(rows[0], rows[1], 0xee));
        v16 cd = _mm512_add_ps(_mm512_shuffle_ps(rows[2], rows[3], 0x44),
                               _mm512_shuffle_ps(rows[2], rows[3], 0xee));
        v16 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
        _mm_storeu_ps(out, _mm512_castps512_ps128(all));
        _mm_storeu_ps(out + ldt, _mm512_extractf32x4_ps(all, 1));
        _mm_storeu_ps(out + 2 * ldt, _mm512_extractf32x4_ps(all, 2));
        _mm_storeu_ps(out + 3 * ldt, _mm512_extractf32x4_ps(all, 3));
    } else if (R == 4 && T == 1) {
        v16 four = v16_fold_to_4(acc[0][0], acc[1][0], acc[2][0], acc[3][0]);
        __m128 a = _mm512_castps512_ps128(four), b = _mm512_extractf32x4_ps(four, 1);
        __m128 c = _mm512_extractf32x4_ps(four, 2), d = _mm512_extractf32x4_ps(four, 3);
        __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
        _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
    } else {
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            UNROLL(4)
            for (size_t t = 0; t < T; t++)
                out[t * ldt + r] = v16_reduce_add(acc[r][t]);
    }
}

static inline float v16_reduce_max(v16 a)
{
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    c = _mm_max_ss(c, _mm_movehdup_ps(c));
    return _mm_cvtss_f32(c);
}

static inline float v16_reduce_bits_max(v16 a)
{
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(v16_bits(a)))));
}

typedef __m512i v16i;
typedef struct {
    __m512i lo, hi;
} v16l;

static inline v16i v16i_set1(int32_t a) { return _mm512_set1_epi32(a); }
static inline v16i v16i_load(const int32_t *p) { return _mm512_loadu_si512(p); }
static inline v16i v16i_load_u8(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
static inline void v16i_store(int32_t *p, v16i a) { _mm512_storeu_si512(p, a); }
static inline v16i v16i_add(v16i a, v16i b) { return _mm512_add_epi32(a, b); }
static inline v16i v16i_shl(v16i a, v16i n) { return _mm512_sllv_epi32(a, n); }
static inline v16 v16_from_i32(v16i a) { return _mm512_cvtepi32_ps(a); }

static inline v16l v16l_load(const int64_t *p)
{
    return (v16l){ _mm512_loadu_si512(p), _mm512_loadu_si512(p + 8) };
}
static inline void v16l_store(int64_t *p, v16l a)
{
    _mm512_storeu_si512(p, a.lo);
    _mm512_storeu_si512(p + 8, a.hi);
}
static inline __m512i v16l_shl(__m256i a, const uint8_t *n)
{
    __m512i counts = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(const void *)n));
    return _mm512_sllv_epi64(_mm512_cvtepi32_epi64(a), counts);
}
static inline v16l v16l_add_shl(v16l sum, v16i a, const uint8_t *n)
{
    return (v16l){ _mm512_add_epi64(sum.lo, v16l_shl(_mm512_castsi512_si256(a), n)),
                   _mm512_add_epi64(sum.hi, v16l_shl(_mm512_extracti64x4_epi64(a, 1), n + 8)) };
}

#endif
