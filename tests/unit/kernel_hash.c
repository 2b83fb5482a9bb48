/* Hashes the outputs of every kernel over pseudo-random inputs: one line "isa hash" per table that
 * can run here. All lines, on every architecture, must show the same hash.
 * Build: cc -Iengine tests/unit/kernel_hash.c <the engine's objects> */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "encode/rvq_tables.h"
#include "quant/codec.h"
#include "quant/rvq.h"

enum { K_MAX = 1200, ROWS_MAX = 200, TOKENS_MAX = 9, K_PAD_MAX = 1216 };

static uint64_t state, hash;

static uint32_t random_bits(void)
{
    state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = state;
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(z >> 32);
}

static size_t random_below(size_t n)
{
    return random_bits() % n;
}

static void take(const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * UINT64_C(0x100000001b3);
}

/* A NaN counts as one value: its payload is not part of the promise. */
static void take_floats(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float v = isnan(x[i]) ? NAN : fabsf(x[i]);
        uint32_t sign = !isnan(x[i]) && signbit(x[i]);
        take(&v, sizeof v);
        take(&sign, sizeof sign);
    }
}

/* Ordinary values, with a share of zeros, subnormals and extremes when `wild`. */
static void fill(float *x, size_t n, int wild)
{
    static const float special[] = { 0.0f, -0.0f, 1e-41f, -1e-41f, 1e30f, -1e30f, 88.7f, -103.5f };
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)(int32_t)random_bits() * 0x1p-30f;
        if (wild && random_below(8) == 0)
            x[i] = special[random_below(sizeof special / sizeof *special)];
    }
}

static void *allocate(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        exit(1);
    return p;
}

static float *buffer(size_t n)
{
    return allocate(n * sizeof(float));
}

static void hash_products(const struct kernels *t, int worst)
{
    size_t rows = 1 + random_below(ROWS_MAX), k = 1 + random_below(K_MAX);
    size_t n = 1 + random_below(TOKENS_MAX), k_pad = (k + 63) / 64 * 64, bytes = 0;
    float *w = buffer(rows * k), *x = buffer(n * k), *y = buffer(n * rows);
    fill(w, rows * k, 0);
    fill(x, n * k, 0);
    for (size_t i = 0; i < n * k; i++)
        if (i / 64 % 3 == 0)
            x[i] *= worst ? 1.0f : 0.01f;

    if (!codec_matrix_bytes(CODEC_INT8, rows, k, &bytes))
        exit(1);
    uint8_t *blob = allocate(bytes);
    matrix_encode(CODEC_INT8, w, (uint32_t)rows, (uint32_t)k, blob);
    take(blob, bytes);
    struct matrix m;
    matrix_bind(&m, CODEC_INT8, (uint32_t)rows, (uint32_t)k, blob);
    if (worst)
        for (size_t i = 0; i < (size_t)m.rows_pad * m.cols_pad; i++)
            ((uint8_t *)(uintptr_t)m.data)[i] = random_below(2) ? 1 : 255;

    uint32_t index[TOKENS_MAX];
    for (size_t i = 0; i < n; i++)
        index[i] = (uint32_t)random_below(n);
    struct qbatch q = { .q = allocate(n * k_pad), .shift = allocate(n * k_pad / 64),
                        .scale = buffer(n), .sum = allocate(n * 8),
                        .offset = allocate(n * k_pad / 8), .k = k, .k_pad = k_pad };
    struct qbatch15 h = { .hi = allocate(n * k_pad), .lo = allocate(n * k_pad),
                          .scale = buffer(n), .sum = allocate(n * 8), .k = k, .k_pad = k_pad };
    for (size_t i = 0; i < n; i++) {
        t->quantize(x + i * k, &q, i);
        t->quantize15(x + i * k, &h, i);
    }
    take(q.q, n * k_pad);
    take(q.shift, n * k_pad / 64);
    take_floats(q.scale, n);
    take(q.sum, n * 8);
    take(q.offset, n * k_pad / 8);
    take(h.hi, n * k_pad);
    take(h.lo, n * k_pad);
    take_floats(h.scale, n);
    take(h.sum, n * 8);
    if (worst)
        for (size_t i = 0; i < n; i++) {
            memset(q.q + i * k_pad, i & 1 ? -127 : 127, k_pad);
            memset(q.shift + i * (k_pad / 64), 7, k_pad / 64);
            q.sum[i] = (i & 1 ? -127 : 127) * 128 * (int64_t)k_pad;
        }
    t->int8_panels(m.data, m.scale, rows, 0, m.rows_pad / 64, &q, index, n, y, rows);
    take_floats(y, n * rows);
    t->int8_panels15(m.data, m.scale, rows, 0, m.rows_pad / 64, &h, NULL, n, y, rows);
    take_floats(y, n * rows);

    t->f32_rows(w, k, 0, rows, x, k, index, n, y, rows);
    take_floats(y, n * rows);
    uint16_t *half = allocate(rows * k * 2);
    matrix_encode(CODEC_BF16, w, (uint32_t)rows, (uint32_t)k, half);
    take(half, rows * k * 2);
    t->bf16_rows(half, k, 0, rows, x, k, NULL, n, y, rows);
    take_floats(y, n * rows);

    void *const owned[] = { w, x, y, blob, q.q, q.shift, q.scale, q.sum, q.offset,
                            h.hi, h.lo, h.scale, h.sum, half };
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        free(owned[i]);
}

/* 4-bit weights: random bytes are all valid but for exponents, which stay close together. */
static void hash_nibbles(const struct kernels *t, int worst)
{
    static const enum codec codecs[] = { CODEC_MXFP4, CODEC_INT4, CODEC_NL4 };
    size_t rows = 1 + random_below(ROWS_MAX / 2), k = 1 + random_below(K_MAX / 2);
    size_t n = 1 + random_below(40);
    size_t k_pad = (k + 63) / 64 * 64, spread = worst ? 60 : 5;
    float *w = buffer(rows * k), *x = buffer(n * k), *y = buffer(n * rows);
    struct qbatch q = { .q = allocate(n * k_pad), .shift = allocate(n * k_pad / 64),
                        .scale = buffer(n), .sum = allocate(n * 8),
                        .offset = allocate(n * k_pad / 8), .k = k, .k_pad = k_pad };
    struct qbatch22 f = { .hi = allocate(n * k_pad), .mid = allocate(n * k_pad),
                          .lo = allocate(n * k_pad), .scale = buffer(n),
                          .offset = allocate(n * k_pad / 8), .k = k, .k_pad = k_pad };
    fill(w, rows * k, 0);
    fill(x, n * k, 0);
    for (size_t i = 0; i < n; i++) {
        t->quantize(x + i * k, &q, i);
        t->quantize22(x + i * k, &f, i);
    }
    take(f.hi, n * k_pad);
    take(f.mid, n * k_pad);
    take(f.lo, n * k_pad);
    take_floats(f.scale, n);
    take(f.offset, n * k_pad / 8);
    for (size_t c = 0; c < sizeof codecs / sizeof *codecs; c++) {
        size_t bytes = 0;
        if (!codec_matrix_bytes(codecs[c], rows, k, &bytes))
            exit(1);
        uint8_t *blob = allocate(bytes);
        matrix_encode(codecs[c], w, (uint32_t)rows, (uint32_t)k, blob);
        take(blob, bytes);
        struct matrix m;
        matrix_bind(&m, codecs[c], (uint32_t)rows, (uint32_t)k, blob);
        const size_t panels = m.rows_pad / 64, exponents = k_pad / 32 * 64;
        if (codecs[c] == CODEC_MXFP4)
            for (size_t i = 0; i < bytes; i++)
                blob[i] = (uint8_t)(i % (bytes / panels) < exponents ? 90 + random_below(spread)
                                                                    : random_bits());
        (codecs[c] == CODEC_MXFP4 ? t->mxfp4_panels : t->nibble_panels)(
            m.data, m.table, rows, 0, panels, &q, NULL, n, y, rows);
        take_floats(y, n * rows);
        if (codecs[c] == CODEC_MXFP4) {
            t->mxfp4_panels22(m.data, m.table, rows, 0, panels, &f, NULL, n, y, rows);
            take_floats(y, n * rows);
        }
        free(blob);
    }
    void *const owned[] = { w, x, y, q.q, q.shift, q.scale, q.sum, q.offset,
                            f.hi, f.mid, f.lo, f.scale, f.offset };
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        free(owned[i]);
}

/* Random codes and books; n beyond every kernel's fused path; then the encoder's search. */
static void hash_rvq(const struct kernels *t)
{
    static const enum codec codecs[] = { CODEC_RVQ4X64, CODEC_RVQ3X256, CODEC_RVQ2X256 };
    size_t rows = 1 + random_below(ROWS_MAX / 2), k = 1 + random_below(K_MAX / 2);
    size_t n = 1 + random_below(12), k_pad = (k + 63) / 64 * 64;
    float *x = buffer(n * k), *y = buffer(n * rows), *books = buffer(RVQ_MAX_CODES * RVQ_DIM);
    static struct rvq_books set;
    struct qbatch q = { .q = allocate(n * k_pad), .shift = allocate(n * k_pad / 64),
                        .scale = buffer(n), .sum = allocate(n * 8),
                        .offset = allocate(n * k_pad / 8), .k = k, .k_pad = k_pad };
    fill(x, n * k, 0);
    for (size_t i = 0; i < n; i++)
        t->quantize(x + i * k, &q, i);
    for (size_t c = 0; c < sizeof codecs / sizeof *codecs; c++) {
        const struct rvq_shape *shape = rvq_shape_of(codecs[c]);
        const size_t codes = shape->stages * shape->entries;
        int8_t entries[RVQ_MAX_CODES * RVQ_DIM];
        size_t bytes = 0;
        if (!codec_matrix_bytes(codecs[c], rows, k, &bytes))
            exit(1);
        uint8_t *blob = allocate(bytes);
        for (size_t i = 0; i < codes * RVQ_DIM; i++)
            entries[i] = (int8_t)((int)random_below(2 * (size_t)shape->limit + 1) - shape->limit);
        if (!rvq_books_set(&set, shape, entries))
            exit(1);
        struct matrix m;
        matrix_bind(&m, codecs[c], (uint32_t)rows, (uint32_t)k, blob);
        for (size_t i = 0; i < bytes; i++)
            blob[i] = (uint8_t)random_bits();
        t->rvq_panels(&set, m.data, m.scale16, rows, 0, m.rows_pad / 64, &q, NULL, n, y, rows);
        take_floats(y, n * rows);
        free(blob);

        uint8_t found[16 * RVQ_MAX_STAGES];
        float vectors[16 * RVQ_DIM], weight[RVQ_DIM];
        float *tables = buffer(rvq_tables_floats(shape->stages, shape->entries));
        struct rvq_search search = { .beam = (uint32_t)(1 + random_below(RVQ_MAX_BEAM)) };
        fill(books, codes * RVQ_DIM, 0);
        fill(vectors, 16 * RVQ_DIM, 0);
        for (size_t d = 0; d < RVQ_DIM; d++)
            weight[d] = (float)random_below(5);
        rvq_tables_make(&search, shape->stages, shape->entries, books, weight, tables);
        t->rvq_search(&search, vectors, 16, found);
        take(found, 16 * shape->stages);
        free(tables);
    }
    void *const owned[] = { x, y, books, q.q, q.shift, q.scale, q.sum, q.offset };
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        free(owned[i]);
}

static void hash_vectors(const struct kernels *t, int wild)
{
    enum { N_MAX = 150 };
    size_t n = 1 + random_below(N_MAX);
    float a[N_MAX], b[N_MAX], y[N_MAX];
    fill(a, n, wild);
    fill(b, n, wild);
    float single[] = { t->dot(a, b, n), t->sum(a, n), t->max(a, n), (float)t->all_finite(a, n) };
    take_floats(single, sizeof single / sizeof *single);
    t->rms_norm(a, b, n, 1e-6f, y);
    take_floats(y, n);
    t->l2_norm(a, n, 1e-6f, 0.5f, y);
    take_floats(y, n);
    t->add(y, b, n);
    t->scale(y, 0.7f, n);
    t->axpy(y, 1.3f, a, n);
    take_floats(y, n);
    t->sigmoid_mul(y, b, n);
    take_floats(y, n);
    void (*const unary[])(float *, const float *, size_t) = { t->exp, t->sigmoid, t->softplus,
                                                              t->silu, t->tanh };
    for (size_t f = 0; f < sizeof unary / sizeof *unary; f++) {
        unary[f](y, a, n);
        take_floats(y, n);
    }
    t->silu_mul(y, a, b, n);
    take_floats(y, n);
    t->situ_mul(y, a, b, n, 3.0f, wild ? 20.0f : 0.0f);
    take_floats(y, n);
    t->clamped_mul(y, a, b, n, 1.7f, 7.0f);
    take_floats(y, n);
    t->softmax(a, n);
    take_floats(a, n);

    const float *taps[4];
    float w[4 * N_MAX], x[4 * N_MAX];
    fill(w, 4 * n, wild);
    fill(x, 4 * n, wild);
    for (size_t j = 0; j < 4; j++)
        taps[j] = x + j * n;
    t->conv_silu(w, taps, 4, n, y);
    take_floats(y, n);
}

static void hash_states(const struct kernels *t)
{
    enum { DIM_MAX = 150 };
    size_t keys = 1 + random_below(ATTN_BLOCK), k_dim = 1 + random_below(DIM_MAX);
    size_t v_dim = 1 + random_below(DIM_MAX);
    float *k = buffer(keys * k_dim), *v = buffer(keys * v_dim), *S = buffer(k_dim * v_dim);
    float q[DIM_MAX], decay[DIM_MAX], d[DIM_MAX], o[DIM_MAX], p[ATTN_BLOCK], acc[2][DIM_MAX];
    float m[2], l[2];
    fill(q, k_dim, 0);
    fill(k, keys * k_dim, 0);
    fill(v, keys * v_dim, 0);
    for (int i = 0; i < 2; i++) {
        size_t count = i ? keys / 2 + 1 : keys;
        struct attn_queries a = {1, {q}, {(uint32_t)count}, p, {0}, {0}, {acc[i]}};
        t->attn_block(&a, k, k_dim, v, v_dim, k_dim, v_dim, 0.3f);
        m[i] = a.m[0];
        l[i] = a.l[0];
    }
    t->attn_merge(m, l, acc[0], m[1], l[1], acc[1], v_dim);
    take_floats(m, 1);
    take_floats(l, 1);
    take_floats(acc[0], v_dim);

    fill(S, k_dim * v_dim, 0);
    fill(decay, k_dim, 0);
    for (size_t stride = 0; stride < 2; stride++) {
        t->delta_step(S, k_dim, v_dim, decay, stride, k, q, v, 0.4f, d, o);
        take_floats(S, k_dim * v_dim);
        take_floats(d, v_dim);
        take_floats(o, v_dim);
    }
    free(k);
    free(v);
    free(S);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 40;
    for (const char *const *isa = kernels_available(); *isa; isa++) {
        const struct kernels *t = kernels_find(*isa);
        state = 1;
        hash = UINT64_C(0xcbf29ce484222325);
        for (int i = 0; i < rounds; i++) {
            hash_products(t, i % 4 == 3);
            hash_nibbles(t, i % 4 == 3);
            hash_rvq(t);
            hash_vectors(t, i % 2);
            hash_states(t);
            float angle[2];
            sincos_exact((double)random_bits() * 0.37, angle, angle + 1);
            take_floats(angle, 2);
        }
        printf("%s %016llx\n", *isa, (unsigned long long)hash);
    }
    return 0;
}
