#include "bench/operations.h"

enum {
    DIM = BENCH_HEAD_DIM,
    VECTORS = 5,
    KEYS_FLOATS = ATTN_BLOCK * 2 * DIM, /* a block of keys, then its values */
    STATE_FLOATS = DIM * DIM
};

void bench_operands_carve(struct carve *c, uint32_t rows, uint32_t cols, struct bench_operands *o)
{
    o->x = carve_take(c, (size_t)BENCH_TOKENS_MOST * cols * sizeof(float));
    linear_input_carve(c, BENCH_TOKENS_MOST, cols, true, &o->in);
    head_carve(c, BENCH_TOKENS_MOST, cols, &o->head);
    o->y = carve_take(c, (size_t)BENCH_TOKENS_MOST * rows * sizeof(float));
    o->vectors = carve_take(c, VECTORS * DIM * sizeof(float));
    o->scores = carve_take(c, ATTN_BLOCK * sizeof(float));
}

void bench_operands_init(struct bench_operands *o, const struct kernels *k, uint32_t rows,
                         uint32_t cols, uint8_t *pool, size_t pool_bytes)
{
    struct bench_random r = {3};
    o->nn.k = k;
    o->nn.pool = NULL;
    o->rows = rows;
    o->cols = cols;
    o->pool = pool;
    o->pool_bytes = pool_bytes;
    bench_random_floats(&r, o->x, (size_t)BENCH_TOKENS_MOST * cols);
    linear_input_set(&o->in, o->x, cols, BENCH_TOKENS_MOST, cols);
    for (size_t t = 0; t < BENCH_TOKENS_MOST; t++) {
        k->quantize(o->x + t * cols, &o->in.q, t);
        k->quantize22(o->x + t * cols, &o->in.q22, t);
        k->quantize15(o->x + t * cols, &o->head.q, t);
    }
    o->in.quantized = o->in.quantized22 = true;
    bench_random_floats(&r, o->vectors, VECTORS * DIM);
    for (size_t v = 0; v < 2; v++)
        k->l2_norm(o->vectors + v * DIM, DIM, 1e-6f, 1.0f, o->vectors + v * DIM);
}

static uint32_t unit_of(struct bench_operands *o, size_t i)
{
    const size_t index = i / o->units;
    if (index != o->matrix_index) {
        bench_weights_matrix(o->weights, index, &o->matrix);
        o->matrix_index = index;
    }
    return (uint32_t)(i % o->units);
}

static void product_step(void *ctx, size_t i)
{
    struct bench_operands *o = ctx;
    const uint32_t unit = unit_of(o, i);
    linear_span(&o->nn, &o->matrix, unit, unit + 1, &o->in, NULL, o->tokens, o->y, o->rows);
}

static void head_step(void *ctx, size_t i)
{
    struct bench_operands *o = ctx;
    const uint32_t unit = unit_of(o, i);
    o->nn.k->int8_panels15(o->matrix.data, o->matrix.scale, o->rows, unit, unit + 1, &o->head.q,
                           NULL, o->tokens, o->y, o->rows);
}

void bench_product(struct bench_operands *o, const struct bench_weights *w, uint32_t tokens,
                   struct bench_work *out)
{
    size_t bytes = 0;
    codec_matrix_bytes(w->codec, w->rows, w->cols, &bytes);
    o->weights = w;
    o->tokens = tokens;
    o->in.n = tokens;
    o->matrix_index = 0;
    bench_weights_matrix(w, 0, &o->matrix);
    o->units = linear_units(&o->matrix);
    const double units = o->units, weights = (double)w->rows * w->cols / units;
    *out = (struct bench_work){.step = product_step, .ctx = o, .steps = w->count * o->units,
                               .pool_per_step = (double)w->stride / units, .weights = weights,
                               .bytes = (double)bytes / units, .macs = weights * tokens};
}

void bench_head(struct bench_operands *o, const struct bench_weights *w, uint32_t tokens,
                struct bench_work *out)
{
    bench_product(o, w, tokens, out);
    out->step = head_step;
}

static float *pool_floats(const struct bench_operands *o, size_t at)
{
    return (float *)(void *)(o->pool + at * sizeof(float));
}

static void attention_step(void *ctx, size_t i)
{
    struct bench_operands *o = ctx;
    const float *k = pool_floats(o, i * KEYS_FLOATS), *v = k + ATTN_BLOCK * DIM;
    struct attn_queries a = {.count = 1, .q = {o->vectors}, .keys = {ATTN_BLOCK}, .p = o->scores,
                             .acc = {o->vectors + 2 * DIM}};
    o->nn.k->attn_block(&a, k, DIM, v, DIM, DIM, DIM, 0.0883883f);
}

void bench_attention(struct bench_operands *o, struct bench_work *out)
{
    const double bytes = KEYS_FLOATS * sizeof(float);
    *out = (struct bench_work){.step = attention_step, .ctx = o,
                               .steps = o->pool_bytes / (KEYS_FLOATS * sizeof(float)),
                               .pool_per_step = bytes, .bytes = bytes, .macs = KEYS_FLOATS};
}

static void delta_step(void *ctx, size_t i)
{
    struct bench_operands *o = ctx;
    const float decay = 0.9990234f; /* so slow that no state reaches denormal numbers */
    o->nn.k->delta_step(pool_floats(o, i * STATE_FLOATS), DIM, DIM, &decay, 0, o->vectors,
                        o->vectors + DIM, o->vectors + 2 * DIM, 0.5f, o->vectors + 3 * DIM,
                        o->vectors + 4 * DIM);
}

/* Three passes of multiply-accumulates over the state; its decay is not counted. */
void bench_delta(struct bench_operands *o, struct bench_work *out)
{
    const double bytes = STATE_FLOATS * sizeof(float);
    *out = (struct bench_work){.step = delta_step, .ctx = o,
                               .steps = o->pool_bytes / (STATE_FLOATS * sizeof(float)),
                               .pool_per_step = bytes, .bytes = bytes, .macs = 3 * STATE_FLOATS};
}

static void quantize_step(void *ctx, size_t i)
{
    struct bench_operands *o = ctx;
    o->nn.k->quantize(o->x + i * o->cols, &o->in.q, i);
}

static void quantize15_step(void *ctx, size_t i)
{
    struct bench_operands *o = ctx;
    o->nn.k->quantize15(o->x + i * o->cols, &o->head.q, i);
}

static void quantize22_step(void *ctx, size_t i)
{
    struct bench_operands *o = ctx;
    o->nn.k->quantize22(o->x + i * o->cols, &o->in.q22, i);
}

void bench_quantize(struct bench_operands *o, struct bench_work *out)
{
    *out = (struct bench_work){.step = quantize_step, .ctx = o, .steps = BENCH_TOKENS_MOST,
                               .bytes = (double)o->cols * sizeof(float)};
}

void bench_quantize15(struct bench_operands *o, struct bench_work *out)
{
    bench_quantize(o, out);
    out->step = quantize15_step;
}

void bench_quantize22(struct bench_operands *o, struct bench_work *out)
{
    bench_quantize(o, out);
    out->step = quantize22_step;
}
