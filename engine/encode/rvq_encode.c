#include "encode/rvq_encode.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "encode/rvq_tables.h"
#include "quant/bf16.h"

enum { BATCH = 64 }; /* rows searched at a time */

struct run {
    const struct rvq_encode *e;
    const struct rvq_shape *shape;
    const float *w, *importance;
    size_t rows, cols, cols_pad;
    uint16_t *scale;
    uint8_t *codes;
    const float *entries; /* [stages][entries][8] */
    struct rvq_search plain;
    float *own_tables;    /* per worker, for sub-vectors with weights of their own */
    size_t tables;        /* floats */
    float *row;           /* per worker, cols floats */
};

uint16_t rvq_stored_scale(double scale)
{
    if (!(scale >= (double)FLT_MIN)) return 0;
    const uint16_t bits = bf16_encode(scale > (double)FLT_MAX ? FLT_MAX : (float)scale);
    return bits < 0x7f80 ? bits : 0x7f7f;
}

static void scale_task(void *p, uint32_t r, uint32_t worker)
{
    const struct run *c = p;
    const float *w = c->w + r * c->cols;
    double sum = 0;
    (void)worker;
    for (size_t i = 0; i < c->cols; i++) sum += (double)w[i] * (double)w[i];
    c->scale[r] = rvq_stored_scale(sqrt(sum / (double)c->cols) / (double)c->e->unit);
}

void rvq_row_scales(const struct rvq_encode *e, const float *w, uint32_t rows, uint32_t cols,
                    uint16_t *scale)
{
    struct run c = {.e = e, .w = w, .cols = cols, .scale = scale};
    pool_run(e->pool, rows, scale_task, &c);
}

void rvq_entries(const struct rvq_encode *e, float *entries)
{
    const struct rvq_shape *shape = rvq_shape_of(e->codec);
    for (size_t i = 0; i < (size_t)shape->stages * shape->entries * RVQ_DIM; i++)
        entries[i] = (float)(e->books->word[i] - shape->bias[i / (shape->entries * RVQ_DIM)]);
}

/* Weights of sub-vector j, largest 1; inputs beyond the last have 0. */
static void own_weights(const struct run *c, size_t j, float *weight)
{
    float largest = 0;
    for (size_t d = 0; d < RVQ_DIM; d++) {
        const size_t i = j * RVQ_DIM + d;
        weight[d] = i >= c->cols ? 0 : c->importance ? c->importance[i] : 1;
        largest = fmaxf(largest, weight[d]);
    }
    for (size_t d = 0; d < RVQ_DIM; d++)
        weight[d] = largest > 0 ? weight[d] / largest : (float)(j * RVQ_DIM + d < c->cols);
}

static void search_task(void *p, uint32_t j, uint32_t worker)
{
    const struct run *c = p;
    const size_t first = (size_t)j * RVQ_DIM;
    const size_t width = c->cols - first < RVQ_DIM ? c->cols - first : RVQ_DIM;
    struct rvq_search search = c->plain;
    float x[BATCH * RVQ_DIM] = {0};
    uint8_t code[BATCH * RVQ_MAX_STAGES];
    if (c->importance || width < RVQ_DIM) {
        float weight[RVQ_DIM];
        own_weights(c, j, weight);
        rvq_tables_make(&search, c->shape->stages, c->shape->entries, c->entries, weight,
                        c->own_tables + worker * c->tables);
    }
    for (size_t r = 0; r < c->rows; r += BATCH) {
        const size_t count = c->rows - r < BATCH ? c->rows - r : BATCH;
        for (size_t i = 0; i < count; i++) {
            const float scale = bf16_decode(c->scale[r + i]);
            const float *w = c->w + (r + i) * c->cols + first;
            for (size_t d = 0; d < width; d++) x[i * RVQ_DIM + d] = scale > 0 ? w[d] / scale : 0;
        }
        c->e->k->rvq_search(&search, x, count, code);
        for (size_t i = 0; i < count; i++)
            rvq_codes_put(c->shape,
                          c->codes + rvq_code_at(c->shape->planes, c->cols_pad, r + i, j),
                          code + i * c->shape->stages);
    }
}

/* The scale that fits the chosen integers best. */
static void refit_task(void *p, uint32_t r, uint32_t worker)
{
    const struct run *c = p;
    const float *w = c->w + r * c->cols;
    float *q = c->row + worker * c->cols;
    double mixed = 0, square = 0;
    rvq_row(c->e->books, c->codes, c->cols_pad, c->cols, r, 1, q);
    for (size_t i = 0; i < c->cols; i++) {
        const double m = c->importance ? (double)c->importance[i] : 1.0;
        mixed += m * (double)w[i] * (double)q[i];
        square += m * (double)q[i] * (double)q[i];
    }
    if (c->scale[r] != 0 && mixed > 0 && square > 0) c->scale[r] = rvq_stored_scale(mixed / square);
}

hr_status rvq_encode(const struct rvq_encode *e, const float *w, uint32_t rows, uint32_t cols,
                     const float *importance, void *blob, hr_error *err)
{
    const struct rvq_shape *shape = rvq_shape_of(e->codec);
    const size_t codes = (size_t)shape->stages * shape->entries;
    const size_t tables = rvq_tables_floats(shape->stages, shape->entries);
    const size_t threads = pool_threads(e->pool);
    const size_t floats = codes * RVQ_DIM + tables * (threads + 1) + threads * cols;
    float *memory = mem_alloc(e->mem, floats * sizeof(float));
    size_t bytes;
    struct matrix m;
    if (!memory)
        return fail(err, HR_ERR_MEMORY, "no memory for the encoder: %zu bytes",
                    floats * sizeof(float));
    codec_matrix_bytes(e->codec, rows, cols, &bytes);
    memset(blob, 0, bytes);
    matrix_bind(&m, e->codec, rows, cols, blob);
    float *entries = memory;
    rvq_entries(e, entries);
    struct run c = {.e = e, .shape = shape, .w = w, .importance = importance, .rows = rows,
                    .cols = cols, .cols_pad = m.cols_pad, .scale = blob, .entries = entries,
                    .codes = (uint8_t *)blob + (size_t)m.rows_pad * sizeof(uint16_t),
                    .plain = {.beam = e->beam}, .tables = tables,
                    .own_tables = entries + codes * RVQ_DIM + tables};
    c.row = c.own_tables + tables * threads;
    rvq_tables_make(&c.plain, shape->stages, shape->entries, entries, NULL,
                    entries + codes * RVQ_DIM);
    rvq_row_scales(e, w, rows, cols, c.scale);
    pool_run(e->pool, (cols + RVQ_DIM - 1) / RVQ_DIM, search_task, &c);
    pool_run(e->pool, rows, refit_task, &c);
    mem_free(e->mem, memory, floats * sizeof(float));
    return HR_OK;
}
