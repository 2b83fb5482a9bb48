#include "bench/weights.h"

#include <string.h>

#include "quant/bf16.h"

/* A linear congruential generator's high half (Knuth's MMIX constants): fast, and random enough. */
uint32_t bench_random_next(struct bench_random *r)
{
    r->state = r->state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(r->state >> 32);
}

void bench_random_floats(struct bench_random *r, float *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int j = 0; j < 4; j++) sum += (float)(bench_random_next(r) >> 8) * 0x1p-24f - 0.5f;
        out[i] = sum * 1.7320508f;
    }
}

size_t bench_weights_stride(enum codec c, uint32_t rows, uint32_t cols)
{
    size_t bytes;
    if (!codec_matrix_bytes(c, rows, cols, &bytes) || bytes > SIZE_MAX - 63) return 0;
    return (bytes + 63) & ~(size_t)63;
}

static void fill_rvq(struct bench_weights *w, uint8_t *blob)
{
    struct bench_random r = {1};
    const struct rvq_shape *shape = rvq_shape_of(w->codec);
    int8_t entries[RVQ_MAX_CODES * RVQ_DIM];
    for (size_t i = 0; i < sizeof entries; i++)
        entries[i] = (int8_t)((int32_t)(bench_random_next(&r) % (uint32_t)(2 * shape->limit + 1)) -
                              shape->limit);
    rvq_books_set(&w->books, shape, entries);
    struct matrix m;
    matrix_bind(&m, w->codec, w->rows, w->cols, blob);
    const size_t scales = m.rows_pad * sizeof(uint16_t);
    const uint16_t scale = bf16_encode(0.01f);
    for (size_t i = 0; i < m.rows_pad; i++) memcpy(blob + 2 * i, &scale, sizeof scale);
    for (size_t i = scales; i < w->stride; i++) blob[i] = (uint8_t)bench_random_next(&r);
}

void bench_weights_fill(struct bench_weights *w, enum codec c, uint32_t rows, uint32_t cols,
                        float *source, uint8_t *pool, size_t bytes)
{
    w->codec = c;
    w->rows = rows;
    w->cols = cols;
    w->stride = bench_weights_stride(c, rows, cols);
    w->count = bytes / w->stride;
    w->pool = pool;
    if (codec_is_rvq(c)) {
        fill_rvq(w, pool);
    } else {
        struct bench_random r = {2};
        bench_random_floats(&r, source, (size_t)rows * cols);
        matrix_encode(c, source, rows, cols, pool);
    }
    for (size_t i = 1; i < w->count; i++) memcpy(pool + i * w->stride, pool, w->stride);
    const size_t rest = bytes - w->count * w->stride;
    memset(pool + w->count * w->stride, 0, rest);
}

void bench_weights_matrix(const struct bench_weights *w, size_t i, struct matrix *m)
{
    matrix_bind(m, w->codec, w->rows, w->cols, w->pool + i * w->stride);
    m->fine = w->fine;
    m->books = codec_is_rvq(w->codec) ? &w->books : NULL;
}
