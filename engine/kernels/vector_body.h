/* The float kernels over a v16, the same for every ISA. Included after a v16_*.h. */
#ifndef KERNELS_VECTOR_BODY_H
#define KERNELS_VECTOR_BODY_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/fma32.h"
#include "kernels/kernels.h"
#include "kernels/math_body.h"
#include "kernels/unroll.h"

#define WEIGHT float
#define LOAD_WEIGHT v16_load
#define LOAD_WEIGHT_N v16_load_n
#define DOT_BLOCK dot_block_f32
#define ROWS f32_rows
#include "kernels/rows_body.h"

#define WEIGHT uint16_t
#define LOAD_WEIGHT v16_load_bf16
#define LOAD_WEIGHT_N v16_load_bf16_n
#define DOT_BLOCK dot_block_bf16
#define ROWS bf16_rows
#include "kernels/rows_body.h"

/* i walks the vector; part is 16, or what is left. */
#define FOR_PARTS(i, part, n) \
    for (size_t i = 0, part; i < (n) && (part = (n) - i < 16 ? (n) - i : 16); i += 16)

static inline v16 load_part(const float *p, size_t n)
{
    return n == 16 ? v16_load(p) : v16_load_n(p, n);
}

static inline void store_part(float *p, v16 a, size_t n)
{
    if (n == 16)
        v16_store(p, a);
    else
        v16_store_n(p, a, n);
}

static float vector_dot(const float *a, const float *b, size_t n)
{
    v16 acc = v16_set1(0.0f);
    FOR_PARTS(i, part, n)
        acc = v16_fma(load_part(a + i, part), load_part(b + i, part), acc);
    return v16_reduce_add(acc);
}

static float vector_sum(const float *a, size_t n)
{
    v16 acc = v16_set1(0.0f);
    FOR_PARTS(i, part, n)
        acc = v16_add(load_part(a + i, part), acc);
    return v16_reduce_add(acc);
}

static float vector_max(const float *a, size_t n)
{
    if (n < 16) {
        float m = a[0];
        for (size_t i = 1; i < n; i++)
            m = a[i] > m ? a[i] : m;
        return m;
    }
    v16 acc = v16_load(a);
    for (size_t i = 16; i + 16 <= n; i += 16)
        acc = v16_max(v16_load(a + i), acc);
    acc = v16_max(v16_load(a + n - 16), acc);
    return v16_reduce_max(acc);
}

/* max |a|, or something not finite when an element is: the order of magnitudes is that of bits. */
static float magnitude(const float *a, size_t n)
{
    v16 m = v16_set1(0.0f);
    FOR_PARTS(i, part, n)
        m = v16_bits_max(m, v16_abs(load_part(a + i, part)));
    return v16_reduce_bits_max(m);
}

static bool vector_all_finite(const float *a, size_t n)
{
    return magnitude(a, n) < INFINITY;
}

static void vector_rms_norm(const float *x, const float *w, size_t n, float eps, float *y)
{
    v16 r = v16_set1(1.0f / sqrtf(vector_dot(x, x, n) / (float)n + eps));
    FOR_PARTS(i, part, n) {
        v16 scaled = v16_mul(load_part(x + i, part), r);
        store_part(y + i, v16_mul(scaled, load_part(w + i, part)), part);
    }
}

static void vector_l2_norm(const float *x, size_t n, float eps, float mul, float *y)
{
    v16 r = v16_set1(mul / sqrtf(vector_dot(x, x, n) + eps));
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_mul(load_part(x + i, part), r), part);
}

static void vector_add(float *y, const float *x, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_add(load_part(y + i, part), load_part(x + i, part)), part);
}

static void vector_scale(float *y, float a, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_mul(load_part(y + i, part), v16_set1(a)), part);
}

static void vector_axpy(float *y, float a, const float *x, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_fma(v16_set1(a), load_part(x + i, part), load_part(y + i, part)), part);
}

static void vector_exp(float *y, const float *x, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_exp(load_part(x + i, part)), part);
}

static void vector_sigmoid(float *y, const float *x, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_sigmoid(load_part(x + i, part)), part);
}

static void vector_softplus(float *y, const float *x, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_softplus(load_part(x + i, part)), part);
}

static void vector_silu(float *y, const float *x, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_silu(load_part(x + i, part)), part);
}

static void vector_silu_mul(float *y, const float *g, const float *u, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_mul(v16_silu(load_part(g + i, part)), load_part(u + i, part)), part);
}

static void vector_tanh(float *y, const float *x, size_t n)
{
    FOR_PARTS(i, part, n) store_part(y + i, v16_tanh(load_part(x + i, part)), part);
}

static void vector_situ_mul(float *y, const float *g, const float *u, size_t n, float beta,
                            float linear_beta)
{
    const v16 b = v16_set1(beta), lb = v16_set1(linear_beta);
    FOR_PARTS(i, part, n)
    {
        v16 gate = load_part(g + i, part), up = load_part(u + i, part);
        gate = v16_mul(v16_mul(b, v16_tanh(v16_div(gate, b))), v16_sigmoid(gate));
        if (linear_beta > 0) up = v16_mul(lb, v16_tanh(v16_div(up, lb)));
        store_part(y + i, v16_mul(gate, up), part);
    }
}

static void vector_clamped_mul(float *y, const float *g, const float *u, size_t n, float alpha,
                               float limit)
{
    const v16 most = v16_set1(limit), least = v16_set1(-limit), one = v16_set1(1.0f);
    FOR_PARTS(i, part, n)
    {
        v16 gate = v16_min(most, load_part(g + i, part));
        v16 up = v16_min(most, v16_max(least, load_part(u + i, part)));
        gate = v16_mul(gate, v16_sigmoid(v16_mul(v16_set1(alpha), gate)));
        store_part(y + i, v16_mul(v16_add(up, one), gate), part);
    }
}

static void vector_sigmoid_mul(float *y, const float *g, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(y + i, v16_mul(load_part(y + i, part), v16_sigmoid(load_part(g + i, part))), part);
}

/* x = exp(x - max); returns the sum. */
static float exp_below(float *x, float max, size_t n)
{
    FOR_PARTS(i, part, n)
        store_part(x + i, v16_exp(v16_sub(load_part(x + i, part), v16_set1(max))), part);
    return vector_sum(x, n);
}

static void vector_softmax(float *x, size_t n)
{
    if (n == 0)
        return;
    float sum = exp_below(x, vector_max(x, n), n);
    FOR_PARTS(i, part, n)
        store_part(x + i, v16_div(load_part(x + i, part), v16_set1(sum)), part);
}

static void attn_merge(float *m, float *l, float *acc, float m2, float l2, const float *acc2,
                       size_t v_dim)
{
    float max = *m > m2 ? *m : m2;
    float side[2] = { *m, m2 };
    exp_below(side, max, 2);
    *m = max;
    *l = fma32(l2, side[1], *l * side[0]);
    v16 a = v16_set1(side[0]), b = v16_set1(side[1]);
    FOR_PARTS(i, part, v_dim) {
        v16 earlier = v16_mul(load_part(acc + i, part), a);
        store_part(acc + i, v16_fma(load_part(acc2 + i, part), b, earlier), part);
    }
}

/* One token of the delta rule for `vectors` * 16 columns of S, or for `part` < 16 of them. */
static inline __attribute__((always_inline)) void
delta_columns(size_t vectors, size_t part, float *S, size_t ld, size_t k_dim, const float *decay,
              size_t decay_stride, const float *k, const float *q, const float *v, float beta,
              float *d, float *o)
{
    v16 u[COLUMN_VECTORS], out[COLUMN_VECTORS];
    UNROLL(8)
    for (size_t c = 0; c < vectors; c++)
        u[c] = out[c] = v16_set1(0.0f);
    for (size_t i = 0; i < k_dim; i++) {
        v16 decays = v16_set1(decay[i * decay_stride]), ks = v16_set1(k[i]);
        UNROLL(8)
        for (size_t c = 0; c < vectors; c++) {
            float *cell = S + i * ld + 16 * c;
            v16 s = v16_mul(load_part(cell, part), decays);
            store_part(cell, s, part);
            u[c] = v16_fma(ks, s, u[c]);
        }
    }
    UNROLL(8)
    for (size_t c = 0; c < vectors; c++) {
        u[c] = v16_mul(v16_set1(beta), v16_sub(load_part(v + 16 * c, part), u[c]));
        store_part(d + 16 * c, u[c], part);
    }
    for (size_t i = 0; i < k_dim; i++) {
        v16 ks = v16_set1(k[i]), qs = v16_set1(q[i]);
        UNROLL(8)
        for (size_t c = 0; c < vectors; c++) {
            float *cell = S + i * ld + 16 * c;
            v16 s = v16_fma(ks, u[c], load_part(cell, part));
            store_part(cell, s, part);
            out[c] = v16_fma(qs, s, out[c]);
        }
    }
    UNROLL(8)
    for (size_t c = 0; c < vectors; c++)
        store_part(o + 16 * c, out[c], part);
}

static void delta_step(float *S, size_t k_dim, size_t v_dim, const float *decay,
                       size_t decay_stride, const float *k, const float *q, const float *v,
                       float beta, float *d, float *o)
{
    /* Half of COLUMN_VECTORS: two accumulators per column. */
    enum { WIDTH = COLUMN_VECTORS / 2 };
    size_t c = 0;
    for (; c + WIDTH * 16 <= v_dim; c += WIDTH * 16)
        delta_columns(WIDTH, 16, S + c, v_dim, k_dim, decay, decay_stride, k, q, v + c, beta, d + c,
                      o + c);
    for (; c < v_dim; c += 16)
        delta_columns(1, v_dim - c < 16 ? v_dim - c : 16, S + c, v_dim, k_dim, decay, decay_stride,
                      k, q, v + c, beta, d + c, o + c);
}

static void conv_silu(const float *w, const float *const *x, size_t taps, size_t channels, float *y)
{
    FOR_PARTS(i, part, channels) {
        v16 acc = v16_set1(0.0f);
        for (size_t j = 0; j < taps; j++)
            acc = v16_fma(load_part(w + j * channels + i, part), load_part(x[j] + i, part), acc);
        store_part(y + i, v16_silu(acc), part);
    }
}

#endif
