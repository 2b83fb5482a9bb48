/* exp, sigmoid, softplus, silu over a v16: polynomials, FMA and exact exponent operations.
 * Included after a v16_*.h. */
#ifndef KERNELS_MATH_BODY_H
#define KERNELS_MATH_BODY_H

/* Adding 1.5 * 2^23 rounds |x| < 2^22 to an integer (ties to even), held in the low bits. */
#define ROUND_MAGIC 0x1.8p23f

static inline v16 v16_abs(v16 x) { return v16_bits_and(x, 0x7fffffffu); }

/* 2^n for m = ROUND_MAGIC + n, -126 <= n <= 127. */
static inline v16 v16_pow2(v16 m) { return v16_bits_add(v16_bits_shl23(m), 0x3f800000u); }

static inline v16 v16_exp(v16 x)
{
    const v16 magic = v16_set1(ROUND_MAGIC);
    /* Beyond these bounds the result is 0 or infinity all the same; a NaN passes. */
    x = v16_min(v16_set1(89.0f), v16_max(v16_set1(-105.0f), x));
    v16 n = v16_sub(v16_fma(x, v16_set1(0x1.715476p+0f), magic), magic);
    v16 r = v16_fnma(n, v16_set1(0x1.62e430p-1f), x);
    r = v16_fnma(n, v16_set1(-0x1.05c610p-29f), r);
    v16 p = v16_fma(v16_set1(0x1.6a4d6cp-10f), r, v16_set1(0x1.12398ap-7f));
    p = v16_fma(p, r, v16_set1(0x1.5558b0p-5f));
    p = v16_fma(p, r, v16_set1(0x1.555492p-3f));
    p = v16_fma(p, r, v16_set1(0x1.fffffcp-2f));
    p = v16_fma(v16_mul(r, r), p, r);
    p = v16_add(p, v16_set1(1.0f));
    /* Two factors, so that a subnormal result is rounded once, by the last product. */
    v16 half = v16_fma(n, v16_set1(0.5f), magic);
    v16 rest = v16_add(v16_sub(n, v16_sub(half, magic)), magic);
    return v16_mul(v16_mul(p, v16_pow2(half)), v16_pow2(rest));
}

/* Quotient and correction, to be added: n / (1 + e) with n = 1 or, below zero, e = exp(-|x|). The
 * correction is the division's remainder and what 1 + e lost; the error left is that of e. */
static inline v16 sigmoid_parts(v16 x, v16 *correction)
{
    const v16 one = v16_set1(1.0f), zero = v16_set1(0.0f);
    v16 e = v16_exp(v16_sub(zero, v16_abs(x)));
    v16 n = v16_if_gt(zero, x, e, one);
    v16 s = v16_add(one, e);
    v16 lost = v16_sub(e, v16_sub(s, one));
    v16 inverse = v16_div(one, s);
    v16 q = v16_mul(n, inverse);
    *correction = v16_mul(v16_fnma(q, lost, v16_fnma(q, s, n)), inverse);
    return q;
}

static inline v16 v16_sigmoid(v16 x)
{
    v16 correction, q = sigmoid_parts(x, &correction);
    return v16_add(q, correction);
}

/* An odd polynomial near zero, (1 - e^-2|x|) / (1 + e^-2|x|) beyond: no cancellation in either. */
static inline v16 v16_tanh(v16 x)
{
    const v16 one = v16_set1(1.0f), zero = v16_set1(0.0f);
    v16 a = v16_abs(x), z = v16_mul(x, x);
    v16 p = v16_fma(v16_set1(-0x1.7a2ad0p-8f), z, v16_set1(0x1.532faep-6f));
    p = v16_fma(p, z, v16_set1(-0x1.b868b4p-5f));
    p = v16_fma(p, z, v16_set1(0x1.1108a0p-3f));
    p = v16_fma(p, z, v16_set1(-0x1.55553ap-2f));
    v16 near = v16_fma(v16_mul(x, z), p, x);
    v16 e = v16_exp(v16_mul(a, v16_set1(-2.0f)));
    v16 far = v16_div(v16_sub(one, e), v16_add(one, e));
    far = v16_if_gt(zero, x, v16_sub(zero, far), far);
    return v16_if_gt(v16_set1(0.625f), a, near, far);
}

/* x * sigmoid(x), rounded once. The bound only keeps infinity * 0 out of the correction. */
static inline v16 v16_silu(v16 x)
{
    v16 correction, q = sigmoid_parts(x, &correction);
    return v16_fma(x, q, v16_mul(v16_min(v16_set1(0x1p100f), x), correction));
}

/* log(1 + f) for 0 <= f <= 1, by atanh(f / (2 + f)). */
static inline v16 v16_log1p(v16 f)
{
    v16 s = v16_div(f, v16_add(v16_set1(2.0f), f));
    v16 z = v16_mul(s, s);
    v16 p = v16_fma(v16_set1(2.424492e-01f), z, v16_set1(2.144395e-01f));
    p = v16_fma(p, z, v16_set1(2.861521e-01f));
    p = v16_fma(p, z, v16_set1(3.999895e-01f));
    p = v16_fma(p, z, v16_set1(6.6666675e-01f));
    v16 h = v16_mul(v16_mul(v16_set1(0.5f), f), f);
    v16 inner = v16_fma(p, z, h);
    return v16_sub(f, v16_fnma(s, inner, h));
}

static inline v16 v16_softplus(v16 x)
{
    const v16 zero = v16_set1(0.0f);
    v16 tail = v16_log1p(v16_exp(v16_sub(zero, v16_abs(x))));
    return v16_add(v16_max(zero, x), tail);
}

#endif
