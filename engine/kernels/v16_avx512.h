/* Sixteen float lanes in one zmm register. Meanings: v16_reference.h. */
#ifndef KERNELS_V16_AVX512_H
#define KERNELS_V16_AVX512_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

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
static inline v16 v16_load_i32(const int32_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_loadu_si512(p));
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

#endif
