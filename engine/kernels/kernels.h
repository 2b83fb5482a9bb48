/* One table of function pointers per ISA. `reference` defines the bits; every other table must
 * produce the same ones (docs/determinism.md).
 *
 * Float rules: a reduction along a vector keeps 16 partial sums, lane j takes elements j, j+16, ...
 * in order with fused multiply-add (a plain sum adds), the tail goes into lanes 0.., then lanes
 * fold +8, +4, +2, +1. A maximum may use any order (inputs hold no NaN, or the NaN is reported by
 * `all_finite`). Everything else is elementwise. exp, log1p, sigmoid are this library's own. */
#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Quantised activations of n tokens, one after another. Block = 64 inputs; k is padded with zeros
 * to k_pad (a multiple of 64). value = scale * sum_b 2^shift[b] * q. */
struct qbatch {
    int8_t *q;      /* [n][k_pad] */
    uint8_t *shift; /* [n][k_pad / 64], 0..7 */
    float *scale;   /* [n] */
    int64_t *sum;   /* [n]: sum_b 2^shift[b] * sum(q) : compensation of the +128 offset */
    int32_t *offset; /* [n][k_pad / 32]: -32 * sum(q), for 4-bit weights stored as w + 32 */
    size_t k, k_pad;
};

/* 15-bit activations for the head: v = 128 * hi + lo. */
struct qbatch15 {
    int8_t *hi, *lo; /* [n][k_pad] */
    float *scale;    /* [n]: t / 16256 */
    int64_t *sum;    /* [n]: sum(v) */
    size_t k, k_pad;
};

/* 22-bit activations: v = 2^14 hi + 2^7 mid + lo. */
struct qbatch22 {
    int8_t *hi, *mid, *lo; /* [n][k_pad] */
    float *scale;          /* [n]: t / 2080768 */
    int32_t *offset;       /* [n][k_pad / 32]: -32 * sum(v), modulo 2^32 */
    size_t k, k_pad;
};

enum { ATTN_BLOCK = 256, ATTN_QUERIES = 8, INT8_PANEL_ROWS = 64, ACT_BLOCK = 64, RVQ_MAX_BEAM = 32 };

struct rvq_books; /* quant/rvq.h */

/* Tables for encoding sub-vectors of 8 with weights m_d >= 0 on their dimensions. */
struct rvq_search {
    uint32_t stages, entries, beam; /* 4x64, 3x256, 2x256, 1x64, 1x256; beam 1..RVQ_MAX_BEAM */
    const float *mix;               /* [stages][8][entries]: -2 m_d c_d */
    const float *energy;            /* [stages][entries]: sum_d m_d c_d^2 */
    const float *cross; /* for s = 1, 2, ..., t < s: [entries of t][entries of s]: 2 sum_d m c c' */
};

/* Query heads that look at the same keys. All rows up to the largest of `keys` are readable. */
struct attn_queries {
    size_t count;                /* 1..ATTN_QUERIES */
    const float *q[ATTN_QUERIES];
    uint32_t keys[ATTN_QUERIES]; /* 1..ATTN_BLOCK */
    float *p;                    /* scratch [count][ATTN_BLOCK] */
    float m[ATTN_QUERIES], l[ATTN_QUERIES];
    float *acc[ATTN_QUERIES];    /* [v_dim] */
};

struct kernels {
    const char *isa;

    /* --- integer products (exact) --- */
    /* Quantises one row x[k] into slot t of the batch: t_max = max|x|; below 2^-100: all zero.
     * s = smallest in 0..7 with blockmax * 2^(7-s) <= t_max; q = rint(x * ((127/t_max) * 2^(7-s)))
     * clamped to +-127; scale = (t_max/127) * 2^-7. */
    void (*quantize)(const float *x, struct qbatch *out, size_t t);
    /* v = rint(x * (16256/t_max)), hi = (v+64) >> 7, lo = v - 128*hi, scale = t_max/16256. */
    void (*quantize15)(const float *x, struct qbatch15 *out, size_t t);
    /* v = rint(x * (2080768/t_max)) = 2^14 hi + 2^7 mid + lo with mid, lo in -64..63,
     * scale = t_max/2080768. */
    void (*quantize22)(const float *x, struct qbatch22 *out, size_t t);
    /* y[i*ldy + r] = (float)(exact sum) * row_scale[r] * token scale for rows of panels
     * [p0, p1), r < rows, token index[i] (or i when index is NULL), i < n. Rows beyond `rows` are
     * not written. */
    void (*int8_panels)(const uint8_t *panels, const float *row_scale, size_t rows, size_t p0,
                        size_t p1, const struct qbatch *x, const uint32_t *index, size_t n,
                        float *y, size_t ldy);
    void (*int8_panels15)(const uint8_t *panels, const float *row_scale, size_t rows, size_t p0,
                          size_t p1, const struct qbatch15 *x, const uint32_t *index, size_t n,
                          float *y, size_t ldy);

    /* 4-bit weights: panels of scales [k_pad/32][64], then nibbles [k_pad/32][4][64][4]
     * (formats/codecs.md). table: the weight of each nibble, |table| <= 32. Rows, panels, tokens as
     * above. Scales of nibble_panels are bfloat16: acc = fma((float)(2^shift * group sum), scale,
     * acc) over ascending groups, y = acc * token scale. Scales of mxfp4_panels are exponents e:
     * y = (float)(sum_g 2^(shift + e_g - base) * group sum) * 2^(base - 128) * token scale, base
     * being the row's smallest, but at least its largest - 25: groups below base count as zero. A
     * row with an e of 255 is NaN. */
    void (*nibble_panels)(const uint8_t *panels, const int8_t *table, size_t rows, size_t p0,
                          size_t p1, const struct qbatch *x, const uint32_t *index, size_t n,
                          float *y, size_t ldy);
    void (*mxfp4_panels)(const uint8_t *panels, const int8_t *table, size_t rows, size_t p0,
                         size_t p1, const struct qbatch *x, const uint32_t *index, size_t n,
                         float *y, size_t ldy);

    /* The same as mxfp4_panels with 22-bit activations, which have no shifts. base is at most
     * mxfp4_fine_spread of the groups below the largest (kernels/nibble.h). */
    void (*mxfp4_panels22)(const uint8_t *panels, const int8_t *table, size_t rows, size_t p0,
                           size_t p1, const struct qbatch22 *x, const uint32_t *index, size_t n,
                           float *y, size_t ldy);

    /* As int8_panels with RVQ weights and bfloat16 row scales; the same integers as if the weights
     * were decoded to int8 panels first. */
    void (*rvq_panels)(const struct rvq_books *books, const uint8_t *codes,
                       const uint16_t *row_scale, size_t rows, size_t p0, size_t p1,
                       const struct qbatch *x, const uint32_t *index, size_t n, float *y,
                       size_t ldy);
    /* Encoder: x [n][8] -> codes [n][stages], the best of a beam search over the stages by
     * sum_d m_d (x_d - sum_s c_sd)^2. Keys are float32: base = energy + mix x (fma, ascending d),
     * + key of the beam, + cross of stages 0, 1, ...; ties go to the earlier candidate. */
    void (*rvq_search)(const struct rvq_search *s, const float *x, size_t n, uint8_t *codes);

    /* --- yardsticks of the benchmark --- */
    /* Reads bytes (a multiple of 256; p aligned to 8) and does next to nothing with them: the sum
     * of their 64-bit words, so that no read is left out. */
    uint64_t (*read)(const void *p, size_t bytes);
    /* The instructions of the int8 dot product on registers alone, `rounds` times: what no product
     * can exceed. Returns the multiply-accumulates done. */
    uint64_t (*dot_peak)(uint64_t rounds);

    /* --- float products (16-lane dot) --- */
    /* y[i*ldy + r] = dot(w row r, x row index[i]) for r in [r0, r1). */
    void (*f32_rows)(const float *w, size_t k, size_t r0, size_t r1, const float *x, size_t ldx,
                     const uint32_t *index, size_t n, float *y, size_t ldy);
    void (*bf16_rows)(const uint16_t *w, size_t k, size_t r0, size_t r1, const float *x,
                      size_t ldx, const uint32_t *index, size_t n, float *y, size_t ldy);

    /* --- vectors --- */
    float (*dot)(const float *a, const float *b, size_t n);
    float (*sum)(const float *a, size_t n);
    float (*max)(const float *a, size_t n); /* n >= 1 */
    bool (*all_finite)(const float *a, size_t n);
    /* y = x / sqrt(dot(x,x)/n + eps) * w : x * (1/sqrt) (one division), then * w. In place allowed. */
    void (*rms_norm)(const float *x, const float *w, size_t n, float eps, float *y);
    /* y = x * (mul / sqrt(dot(x,x) + eps)) */
    void (*l2_norm)(const float *x, size_t n, float eps, float mul, float *y);
    void (*add)(float *y, const float *x, size_t n);              /* y += x */
    void (*scale)(float *y, float a, size_t n);                   /* y *= a */
    void (*axpy)(float *y, float a, const float *x, size_t n);    /* y = fma(a, x, y) */
    void (*exp)(float *y, const float *x, size_t n);              /* <= 2 ulp; 0 below -103.98, inf above 88.73 */
    void (*sigmoid)(float *y, const float *x, size_t n);          /* 1/(1+exp(-x)) without overflow */
    void (*softplus)(float *y, const float *x, size_t n);         /* log(1+e^x); x for x > 20 */
    void (*silu)(float *y, const float *x, size_t n);             /* x * sigmoid(x) */
    void (*silu_mul)(float *y, const float *g, const float *u, size_t n); /* silu(g) * u */
    void (*sigmoid_mul)(float *y, const float *g, size_t n);      /* y *= sigmoid(g) */
    void (*tanh)(float *y, const float *x, size_t n);             /* <= 2 ulp */
    /* beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta); linear_beta 0: times u */
    void (*situ_mul)(float *y, const float *g, const float *u, size_t n, float beta,
                     float linear_beta);
    /* g' = min(g, limit), u' = clamp(u, +-limit): (u' + 1) * (g' * sigmoid(alpha g')) */
    void (*clamped_mul)(float *y, const float *g, const float *u, size_t n, float alpha,
                        float limit);
    /* In place: x = exp(x - max) / sum, sum by rule, one division per element. */
    void (*softmax)(float *x, size_t n);

    /* --- attention over one block of keys: each query over its own first keys ---
     * s_j = dot(q, k_j) * scale; m = max s; p_j = exp(s_j - m); l = sum p; acc = sum_j p_j v_j
     * with fma in ascending j. k, v rows are ldk, ldv floats apart. */
    void (*attn_block)(struct attn_queries *queries, const float *k, size_t ldk, const float *v,
                       size_t ldv, size_t k_dim, size_t v_dim, float scale);
    /* (m, l, acc) <- merge with a later block: M = max; each side scaled by exp(side - M):
     * l = l*a + l2*b (mul, then fma), acc likewise. */
    void (*attn_merge)(float *m, float *l, float *acc, float m2, float l2, const float *acc2,
                       size_t v_dim);

    /* --- gated delta rule, one head, one token; S is [k_dim][v_dim] row-major ---
     * S[i][:] *= decay[i * decay_stride]; u = sum_i k[i] S[i][:] (fma, ascending i);
     * d = beta * (v - u); S[i][:] = fma(k[i], d, S[i][:]); o = sum_i q[i] S[i][:]. */
    void (*delta_step)(float *S, size_t k_dim, size_t v_dim, const float *decay,
                       size_t decay_stride, const float *k, const float *q, const float *v,
                       float beta, float *d, float *o);
    /* y[c] = silu(sum_j w[j*channels + c] * x_j[c]) for taps rows x_0 (oldest) .. x_{taps-1};
     * fma in ascending j from 0. Weights are [taps][channels]. */
    void (*conv_silu)(const float *w, const float *const *x, size_t taps, size_t channels, float *y);
};

const struct kernels *kernels_reference(void);
/* "auto", "reference", "avx2", "avx512", "neon", "neon-dotprod"; NULL when this machine or build
 * lacks it. */
const struct kernels *kernels_find(const char *isa);
/* The same, with an error that lists what there is. */
hr_status kernels_choose(const char *isa, const struct kernels **out, hr_error *err);
/* Names of the tables that can run here, best first, NULL-terminated. */
const char *const *kernels_available(void);

/* cos and sin of `angle` (radians, |angle| < 2^31), computed in double, rounded to float: scalar,
 * identical everywhere. */
void sincos_exact(double angle, float *sine, float *cosine);

#endif
