/* Sixteen float lanes in two ymm registers. Meanings: v16_reference.h. */
#ifndef KERNELS_V16_AVX2_H
#define KERNELS_V16_AVX2_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/unroll.h"

typedef struct {
    __m256 lo, hi;
} v16;

enum { ROWS_ONE = 4, ROWS_MANY = 2, TOKENS_MANY = 2, COLUMN_VECTORS = 4 };

#define V16_BOTH(lo_expression, hi_expression) return (v16){ lo_expression, hi_expression }
#define V16_BITS(operation, a, ...)                                                   \
    return (v16){ _mm256_castsi256_ps(operation(_mm256_castps_si256(a.lo), __VA_ARGS__)), \
                  _mm256_castsi256_ps(operation(_mm256_castps_si256(a.hi), __VA_ARGS__)) }

static const int32_t v16_masks[32] = { -1, -1, -1, -1, -1, -1, -1, -1,
                                       -1, -1, -1, -1, -1, -1, -1, -1 };

static inline __m256i v16_mask(size_t n, size_t from)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)(v16_masks + 16 - n + from));
}

static inline v16 v16_set1(float a) { V16_BOTH(_mm256_set1_ps(a), _mm256_set1_ps(a)); }
static inline v16 v16_load(const float *p) { V16_BOTH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline v16 v16_load_n(const float *p, size_t n)
{
    V16_BOTH(_mm256_maskload_ps(p, v16_mask(n, 0)),
             n > 8 ? _mm256_maskload_ps(p + 8, v16_mask(n, 8)) : _mm256_setzero_ps());
}
static inline __m256 v16_widen_bf16(__m128i a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
}
static inline v16 v16_load_bf16(const uint16_t *p)
{
    V16_BOTH(v16_widen_bf16(_mm_loadu_si128((const __m128i *)(const void *)p)),
             v16_widen_bf16(_mm_loadu_si128((const __m128i *)(const void *)(p + 8))));
}
static inline v16 v16_load_bf16_n(const uint16_t *p, size_t n)
{
    uint16_t all[16] = { 0 };
    memcpy(all, p, n * sizeof *p);
    return v16_load_bf16(all);
}
static inline void v16_store(float *p, v16 a)
{
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
static inline void v16_store_n(float *p, v16 a, size_t n)
{
    _mm256_maskstore_ps(p, v16_mask(n, 0), a.lo);
    if (n > 8)
        _mm256_maskstore_ps(p + 8, v16_mask(n, 8), a.hi);
}
static inline __m128i v16_narrow(__m256 a)
{
    __m256i low = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0xff));
    return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}
static inline void v16_store_i8(int8_t *p, v16 a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm_packus_epi16(v16_narrow(a.lo), v16_narrow(a.hi)));
}

static inline v16 v16_add(v16 a, v16 b)
{
    V16_BOTH(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi));
}
static inline v16 v16_sub(v16 a, v16 b)
{
    V16_BOTH(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi));
}
static inline v16 v16_mul(v16 a, v16 b)
{
    V16_BOTH(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi));
}
static inline v16 v16_div(v16 a, v16 b)
{
    V16_BOTH(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi));
}
static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    V16_BOTH(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
static inline v16 v16_fnma(v16 a, v16 b, v16 c)
{
    V16_BOTH(_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi));
}
static inline v16 v16_max(v16 a, v16 b)
{
    V16_BOTH(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi));
}
static inline v16 v16_min(v16 a, v16 b)
{
    V16_BOTH(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi));
}
static inline v16 v16_if_gt(v16 a, v16 b, v16 x, v16 y)
{
    V16_BOTH(_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
             _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)));
}

static inline uint32_t v16_less(v16 a, v16 b)
{
    int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ));
    int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
    return (uint32_t)lo | (uint32_t)hi << 8;
}

static inline v16 v16_bits_and(v16 a, uint32_t m)
{
    V16_BITS(_mm256_and_si256, a, _mm256_set1_epi32((int)m));
}
static inline v16 v16_bits_add(v16 a, uint32_t b)
{
    V16_BITS(_mm256_add_epi32, a, _mm256_set1_epi32((int)b));
}
static inline v16 v16_bits_shl23(v16 a) { V16_BITS(_mm256_slli_epi32, a, 23); }
static inline v16 v16_bits_shr7(v16 a) { V16_BITS(_mm256_srli_epi32, a, 7); }
static inline v16 v16_bits_max(v16 a, v16 b)
{
    V16_BOTH(_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a.lo),
                                                  _mm256_castps_si256(b.lo))),
             _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a.hi),
                                                  _mm256_castps_si256(b.hi))));
}

static inline float v16_reduce_add(v16 a)
{
    __m256 b = _mm256_add_ps(a.lo, a.hi);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    c = _mm_add_ss(c, _mm_movehdup_ps(c));
    return _mm_cvtss_f32(c);
}

static inline __m128 v16_fold_to_4(v16 a)
{
    __m256 b = _mm256_add_ps(a.lo, a.hi);
    return _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
}
/* The sums of four vectors' lanes, folded as v16_reduce_add does. */
static inline __m128 v16_fold_4(__m128 a, __m128 b, __m128 c, __m128 d)
{
    __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
    __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}

/* out[t * ldt + r] = the sum of acc[r][t]'s lanes. */
static inline __attribute__((always_inline)) void v16_reduce_rows(size_t R, size_t T,
                                                                  v16 (*acc)[4], float *out,
                                                                  size_t ldt)
{
    if (R == 4) {
        UNROLL(4)
        for (size_t t = 0; t < T; t++)
            _mm_storeu_ps(out + t * ldt,
                          v16_fold_4(v16_fold_to_4(acc[0][t]), v16_fold_to_4(acc[1][t]),
                                     v16_fold_to_4(acc[2][t]), v16_fold_to_4(acc[3][t])));
    } else if (R == 2 && T == 2) {
        __m128 all = v16_fold_4(v16_fold_to_4(acc[0][0]), v16_fold_to_4(acc[1][0]),
                                v16_fold_to_4(acc[0][1]), v16_fold_to_4(acc[1][1]));
        _mm_storel_pi((__m64 *)(void *)out, all);
        _mm_storeh_pi((__m64 *)(void *)(out + ldt), all);
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
    __m256 b = _mm256_max_ps(a.lo, a.hi);
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    c = _mm_max_ss(c, _mm_movehdup_ps(c));
    return _mm_cvtss_f32(c);
}

static inline float v16_reduce_bits_max(v16 a)
{
    __m256i b = _mm256_max_epi32(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi));
    __m128i c = _mm_max_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    c = _mm_max_epi32(c, _mm_shuffle_epi32(c, _MM_SHUFFLE(1, 0, 3, 2)));
    c = _mm_max_epi32(c, _mm_shuffle_epi32(c, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtss_f32(_mm_castsi128_ps(c));
}

typedef struct {
    __m256i lo, hi;
} v16i;
typedef struct {
    __m256i part[4];
} v16l;

static inline __m256i v16_load_bits(const void *p) { return _mm256_loadu_si256(p); }
static inline v16i v16i_set1(int32_t a)
{
    return (v16i){ _mm256_set1_epi32(a), _mm256_set1_epi32(a) };
}
static inline v16i v16i_load(const int32_t *p)
{
    return (v16i){ v16_load_bits(p), v16_load_bits(p + 8) };
}
static inline v16i v16i_load_u8(const uint8_t *p)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (v16i){ _mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)) };
}
static inline void v16i_store(int32_t *p, v16i a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, a.lo);
    _mm256_storeu_si256((__m256i *)(void *)(p + 8), a.hi);
}
static inline v16i v16i_add(v16i a, v16i b)
{
    return (v16i){ _mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi) };
}
static inline v16i v16i_shl(v16i a, v16i n)
{
    return (v16i){ _mm256_sllv_epi32(a.lo, n.lo), _mm256_sllv_epi32(a.hi, n.hi) };
}
static inline v16 v16_from_i32(v16i a)
{
    V16_BOTH(_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi));
}

static inline v16l v16l_load(const int64_t *p)
{
    return (v16l){ { v16_load_bits(p), v16_load_bits(p + 4), v16_load_bits(p + 8),
                     v16_load_bits(p + 12) } };
}
static inline void v16l_store(int64_t *p, v16l a)
{
    for (int i = 0; i < 4; i++)
        _mm256_storeu_si256((__m256i *)(void *)(p + 4 * i), a.part[i]);
}
static inline __m256i v16l_add_quarter(__m256i sum, __m128i a, const uint8_t *n)
{
    __m256i counts = _mm256_cvtepu8_epi64(_mm_loadu_si32(n));
    return _mm256_add_epi64(sum, _mm256_sllv_epi64(_mm256_cvtepi32_epi64(a), counts));
}
static inline v16l v16l_add_shl(v16l sum, v16i a, const uint8_t *n)
{
    return (v16l){ { v16l_add_quarter(sum.part[0], _mm256_castsi256_si128(a.lo), n),
                     v16l_add_quarter(sum.part[1], _mm256_extracti128_si256(a.lo, 1), n + 4),
                     v16l_add_quarter(sum.part[2], _mm256_castsi256_si128(a.hi), n + 8),
                     v16l_add_quarter(sum.part[3], _mm256_extracti128_si256(a.hi, 1), n + 12) } };
}

#undef V16_BOTH
#undef V16_BITS

#endif
