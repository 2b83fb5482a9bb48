#include "nn/linear.h"

#include "kernels/nibble.h"

/* Rows of a float matrix that make one task: enough work to pay for claiming it. Tokens that every
 * kernel takes through its rows at once. */
enum { FLOAT_ROWS = 32, SPAN_TOKENS = 64, MAX_JOBS = 8 };

static size_t pad64(size_t k)
{
    return (k + 63) & ~(size_t)63;
}

void linear_input_carve(struct carve *c, uint32_t n, uint32_t k, bool fine, struct linear_input *in)
{
    const size_t k_pad = pad64(k), bytes = (size_t)n * k_pad;
    const size_t offsets = (size_t)n * (k_pad / NIBBLE_GROUP) * sizeof(int32_t);
    *in = (struct linear_input){.n = n, .k = k};
    in->q.q = carve_take(c, bytes);
    in->q.shift = carve_take(c, (size_t)n * (k_pad / ACT_BLOCK));
    in->q.scale = carve_take(c, (size_t)n * sizeof(float));
    in->q.sum = carve_take(c, (size_t)n * sizeof(int64_t));
    in->q.offset = carve_take(c, offsets);
    in->q.k = in->q22.k = k;
    in->q.k_pad = in->q22.k_pad = k_pad;
    if (!fine) return;
    in->q22.hi = carve_take(c, bytes);
    in->q22.mid = carve_take(c, bytes);
    in->q22.lo = carve_take(c, bytes);
    in->q22.scale = carve_take(c, (size_t)n * sizeof(float));
    in->q22.offset = carve_take(c, offsets);
}

void linear_input_set(struct linear_input *in, const float *x, size_t ldx, uint32_t n, uint32_t k)
{
    in->x = x;
    in->ldx = ldx;
    in->n = n;
    in->k = k;
    in->q.k = in->q22.k = k;
    in->q.k_pad = in->q22.k_pad = pad64(k);
    in->quantized = in->quantized22 = false;
}

void linear_input_skip(struct linear_input *in, uint32_t first)
{
    const size_t bytes = (size_t)first * in->q.k_pad;
    in->q.q += bytes;
    in->q.shift += bytes / ACT_BLOCK;
    in->q.scale += first;
    in->q.sum += first;
    in->q.offset += bytes / NIBBLE_GROUP;
    if (!in->q22.hi) return;
    in->q22.hi += bytes;
    in->q22.mid += bytes;
    in->q22.lo += bytes;
    in->q22.scale += first;
    in->q22.offset += bytes / NIBBLE_GROUP;
}

void linear_input_quantize(const struct nn *nn, struct linear_input *in, const struct matrix *w,
                           uint32_t t)
{
    const float *x = in->x + (size_t)t * in->ldx;
    if (w->fine)
        nn->k->quantize22(x, &in->q22, t);
    else if (codec_reads_quantized(w->codec))
        nn->k->quantize(x, &in->q, t);
}

struct prepare_ctx {
    const struct nn *nn;
    struct linear_input *in;
    const struct matrix *w;
};

static void prepare_task(void *p, uint32_t task, uint32_t worker)
{
    const struct prepare_ctx *c = p;
    (void)worker;
    linear_input_quantize(c->nn, c->in, c->w, task);
}

void linear_input_prepare(const struct nn *nn, struct linear_input *in, const struct matrix *w)
{
    bool *done = w->fine ? &in->quantized22 : &in->quantized;
    if (!codec_reads_quantized(w->codec) || *done) return;
    struct prepare_ctx c = {nn, in, w};
    pool_run(nn->pool, in->n, prepare_task, &c);
    *done = true;
}

uint32_t linear_units(const struct matrix *w)
{
    if (codec_reads_quantized(w->codec)) return w->rows_pad / INT8_PANEL_ROWS;
    return (w->rows + FLOAT_ROWS - 1) / FLOAT_ROWS;
}

void linear_span_rows(const struct matrix *w, uint32_t first, uint32_t end, uint32_t *r0,
                      uint32_t *r1)
{
    const uint32_t rows = codec_reads_quantized(w->codec) ? INT8_PANEL_ROWS : FLOAT_ROWS;
    *r0 = first * rows;
    *r1 = w->rows - *r0 < (end - first) * rows ? w->rows : end * rows;
}

static void multiply(const struct nn *nn, const struct matrix *w, uint32_t first, uint32_t end,
                     const struct linear_input *in, const uint32_t *index, uint32_t n, float *y,
                     size_t ldy)
{
    const struct kernels *k = nn->k;
    uint32_t r0, r1;
    linear_span_rows(w, first, end, &r0, &r1);
    if (w->codec == CODEC_INT8)
        k->int8_panels(w->data, w->scale, w->rows, first, end, &in->q, index, n, y, ldy);
    else if (codec_is_rvq(w->codec))
        k->rvq_panels(w->books, w->data, w->scale16, w->rows, first, end, &in->q, index, n, y, ldy);
    else if (w->codec == CODEC_MXFP4 && w->fine)
        k->mxfp4_panels22(w->data, w->table, w->rows, first, end, &in->q22, index, n, y, ldy);
    else if (w->codec == CODEC_MXFP4)
        k->mxfp4_panels(w->data, w->table, w->rows, first, end, &in->q, index, n, y, ldy);
    else if (codec_is_4bit(w->codec))
        k->nibble_panels(w->data, w->table, w->rows, first, end, &in->q, index, n, y, ldy);
    else if (w->codec == CODEC_BF16)
        k->bf16_rows(w->data, w->cols, r0, r1, in->x, in->ldx, index, n, y, ldy);
    else
        k->f32_rows(w->data, w->cols, r0, r1, in->x, in->ldx, index, n, y, ldy);
}

void linear_span(const struct nn *nn, const struct matrix *w, uint32_t first, uint32_t end,
                 const struct linear_input *in, const uint32_t *index, uint32_t n, float *y,
                 size_t ldy)
{
    /* Beyond some tokens a kernel goes through its rows again: they should still be in the cache. */
    const uint32_t step = n <= SPAN_TOKENS ? end - first : 1;
    for (; first < end; first += step)
        multiply(nn, w, first, first + step, in, index, n, y, ldy);
}

struct run_ctx {
    const struct nn *nn;
    const struct linear_input *in;
    const struct linear_job *jobs;
    uint32_t first[MAX_JOBS + 1];
};

static void run_span(void *p, uint32_t first, uint32_t end, uint32_t worker)
{
    const struct run_ctx *c = p;
    (void)worker;
    for (uint32_t j = 0; first < end;) {
        while (first >= c->first[j + 1]) j++;
        const uint32_t stop = c->first[j + 1] < end ? c->first[j + 1] : end, from = c->first[j];
        linear_span(c->nn, c->jobs[j].w, first - from, stop - from, c->in, NULL, c->in->n,
                    c->jobs[j].y, c->jobs[j].ldy);
        first = stop;
    }
}

void linear_run(const struct nn *nn, struct linear_input *in, const struct linear_job *jobs,
                uint32_t count)
{
    struct run_ctx c = {nn, in, jobs, {0}};
    for (uint32_t j = 0; j < count; j++) {
        linear_input_prepare(nn, in, jobs[j].w);
        c.first[j + 1] = c.first[j] + linear_units(jobs[j].w);
    }
    pool_run_spans(nn->pool, c.first[count], run_span, &c);
}

void head_carve(struct carve *c, uint32_t n, uint32_t k, struct head_scratch *s)
{
    const size_t k_pad = pad64(k);
    s->q.hi = carve_take(c, (size_t)n * k_pad);
    s->q.lo = carve_take(c, (size_t)n * k_pad);
    s->q.scale = carve_take(c, (size_t)n * sizeof(float));
    s->q.sum = carve_take(c, (size_t)n * sizeof(int64_t));
    s->q.k = k;
    s->q.k_pad = k_pad;
}

struct head_ctx {
    const struct nn *nn;
    struct head_scratch *s;
    const struct matrix *w;
    const float *x;
    size_t ldx;
    uint32_t n;
    float *y;
    size_t ldy;
};

static void head_quantize_task(void *p, uint32_t task, uint32_t worker)
{
    const struct head_ctx *c = p;
    (void)worker;
    c->nn->k->quantize15(c->x + (size_t)task * c->ldx, &c->s->q, task);
}

static void head_task(void *p, uint32_t task, uint32_t worker)
{
    const struct head_ctx *c = p;
    (void)worker;
    c->nn->k->int8_panels15(c->w->data, c->w->scale, c->w->rows, task, task + 1, &c->s->q, NULL,
                            c->n, c->y, c->ldy);
}

void head_run(const struct nn *nn, struct head_scratch *s, const struct matrix *w, const float *x,
              size_t ldx, uint32_t n, float *y, size_t ldy)
{
    if (w->codec == CODEC_INT8) {
        struct head_ctx c = {nn, s, w, x, ldx, n, y, ldy};
        pool_run(nn->pool, n, head_quantize_task, &c);
        pool_run(nn->pool, linear_units(w), head_task, &c);
        return;
    }
    struct linear_input in = {.x = x, .ldx = ldx, .n = n, .k = w->cols};
    const struct linear_job job = {w, y, ldy};
    linear_run(nn, &in, &job, 1);
}
