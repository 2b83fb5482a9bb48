#include "encode/rvq_feedback.h"

#include <math.h>
#include <string.h>

#include "encode/rvq_tables.h"
#include "quant/bf16.h"

enum { BATCH = 64 }; /* rows of a task */

struct run {
    const struct rvq_encode *e;
    const struct rvq_shape *shape;
    const float *w, *moments;
    size_t rows, cols, cols_pad, width; /* width: cols rounded up to whole sub-vectors */
    uint16_t *scale;
    uint8_t *codes;
    float *entries;        /* [stages][entries][8] */
    float *error, *chosen; /* [rows][width]: w - scale * q, and q */
    double *mixed, *square; /* [rows]: of the whole error with q, and of q, both times A */
    struct rvq_search search;
    size_t j;
    float size; /* of D_j, divided out */
};

/* y = v D_j, with D_j as its transpose. */
static void turn(const float *metric, const float *v, float *y)
{
    for (size_t d = 0; d < RVQ_DIM; d++) {
        y[d] = 0;
        for (size_t p = 0; p <= d; p++) y[d] += v[p] * metric[d * RVQ_DIM + p];
    }
}

/* The tables of sub-vector j: the search measures by D_j. */
static void prepare(struct run *c, float *turned, float *tables)
{
    const float *metric = c->moments + moments_metric(c->j);
    const size_t codes = (size_t)c->shape->stages * c->shape->entries;
    c->size = 0;
    for (size_t i = 0; i < RVQ_DIM * RVQ_DIM; i++) c->size = fmaxf(c->size, fabsf(metric[i]));
    for (size_t i = 0; i < codes; i++) {
        float *to = turned + i * RVQ_DIM;
        turn(metric, c->entries + i * RVQ_DIM, to);
        for (size_t d = 0; d < RVQ_DIM; d++) to[d] /= c->size;
    }
    rvq_tables_make(&c->search, c->shape->stages, c->shape->entries, turned, NULL, tables);
}

static void choose(const struct run *c, size_t r, const uint8_t *code, float *q)
{
    rvq_codes_put(c->shape, c->codes + rvq_code_at(c->shape->planes, c->cols_pad, r, c->j), code);
    for (size_t d = 0; d < RVQ_DIM; d++) q[d] = 0;
    for (size_t s = 0; s < c->shape->stages; s++) {
        const float *entry = c->entries + (s * c->shape->entries + code[s]) * RVQ_DIM;
        for (size_t d = 0; d < RVQ_DIM; d++) q[d] += entry[d];
    }
}

static void batch_task(void *p, uint32_t task, uint32_t worker)
{
    struct run *c = p;
    const size_t first = c->j * RVQ_DIM, r0 = (size_t)task * BATCH;
    const size_t count = c->rows - r0 < BATCH ? c->rows - r0 : BATCH;
    const size_t inputs = c->cols - first < RVQ_DIM ? c->cols - first : RVQ_DIM;
    const float *feedback = c->moments + moments_feedback(c->j);
    const float *metric = c->moments + moments_metric(c->j);
    float owed[BATCH * RVQ_DIM], gone[BATCH * RVQ_DIM], x[BATCH * RVQ_DIM];
    uint8_t code[BATCH * RVQ_MAX_STAGES];
    (void)worker;
    c->e->k->f32_rows(feedback, first, 0, RVQ_DIM, c->error + r0 * c->width, c->width, NULL, count,
                      owed, RVQ_DIM);
    c->e->k->f32_rows(feedback, first, 0, RVQ_DIM, c->chosen + r0 * c->width, c->width, NULL, count,
                      gone, RVQ_DIM);
    for (size_t i = 0; i < count; i++) {
        const float scale = bf16_decode(c->scale[r0 + i]);
        float wanted[RVQ_DIM], *to = x + i * RVQ_DIM;
        for (size_t d = 0; d < RVQ_DIM; d++) {
            const float w = d < inputs ? c->w[(r0 + i) * c->cols + first + d] : 0;
            wanted[d] = owed[i * RVQ_DIM + d] + w;
        }
        turn(metric, wanted, to);
        for (size_t d = 0; d < RVQ_DIM; d++) to[d] = scale > 0 ? to[d] / (scale * c->size) : 0;
    }
    c->e->k->rvq_search(&c->search, x, count, code);
    for (size_t i = 0; i < count; i++) {
        const size_t r = r0 + i;
        const float scale = bf16_decode(c->scale[r]);
        float *q = c->chosen + r * c->width + first, *error = c->error + r * c->width + first;
        float left[RVQ_DIM], part[RVQ_DIM], whole[RVQ_DIM], made[RVQ_DIM];
        choose(c, r, code + i * c->shape->stages, q);
        for (size_t d = 0; d < RVQ_DIM; d++) {
            error[d] = (d < inputs ? c->w[r * c->cols + first + d] : 0) - scale * q[d];
            left[d] = owed[i * RVQ_DIM + d] + error[d];
            part[d] = gone[i * RVQ_DIM + d] + q[d];
        }
        turn(metric, left, whole);
        turn(metric, part, made);
        for (size_t d = 0; d < RVQ_DIM; d++) {
            c->mixed[r] += (double)whole[d] * (double)made[d];
            c->square[r] += (double)made[d] * (double)made[d];
        }
    }
}

static void encode(struct run *c, float *turned, float *tables)
{
    const struct rvq_encode *e = c->e;
    rvq_row_scales(e, c->w, (uint32_t)c->rows, (uint32_t)c->cols, c->scale);
    for (c->j = 0; c->j * RVQ_DIM < c->cols; c->j++) {
        prepare(c, turned, tables);
        pool_run(e->pool, (uint32_t)((c->rows + BATCH - 1) / BATCH), batch_task, c);
    }
    for (size_t r = 0; r < c->rows; r++) {
        const double scale = (double)bf16_decode(c->scale[r]);
        const double better = c->square[r] > 0 ? scale + c->mixed[r] / c->square[r] : 0;
        if (c->scale[r] != 0 && better > 0) c->scale[r] = rvq_stored_scale(better);
    }
}

hr_status rvq_encode_feedback(const struct rvq_encode *e, const float *w, uint32_t rows,
                              uint32_t cols, const float *moments, void *blob, hr_error *err)
{
    const struct rvq_shape *shape = rvq_shape_of(e->codec);
    const size_t codes = (size_t)shape->stages * shape->entries * RVQ_DIM;
    const size_t width = ((size_t)cols + RVQ_DIM - 1) / RVQ_DIM * RVQ_DIM;
    const size_t sums = 2 * (size_t)rows * sizeof(double), places = (size_t)rows * width;
    const size_t floats =
        2 * codes + rvq_tables_floats(shape->stages, shape->entries) + 2 * places;
    const size_t bytes = sums + floats * sizeof(float);
    size_t size;
    struct matrix m;
    void *memory = mem_alloc(e->mem, bytes);
    if (!memory) return fail(err, HR_ERR_MEMORY, "no memory for the encoder: %zu bytes", bytes);
    memset(memory, 0, bytes);
    codec_matrix_bytes(e->codec, rows, cols, &size);
    memset(blob, 0, size);
    matrix_bind(&m, e->codec, rows, cols, blob);
    double *sum = memory;
    float *entries = (float *)(sum + 2 * (size_t)rows);
    struct run c = {.e = e, .shape = shape, .w = w, .moments = moments, .rows = rows, .cols = cols,
                    .cols_pad = m.cols_pad, .width = width, .scale = blob,
                    .codes = (uint8_t *)blob + (size_t)m.rows_pad * sizeof(uint16_t),
                    .entries = entries, .error = entries + codes,
                    .chosen = entries + codes + places, .mixed = sum, .square = sum + rows,
                    .search = {.beam = e->beam}};
    float *turned = c.chosen + places;
    rvq_entries(e, entries);
    encode(&c, turned, turned + codes);
    mem_free(e->mem, memory, bytes);
    return HR_OK;
}
