#include "bench/throughput.h"

#include "base/clock.h"
#include "base/pool.h"
#include "bench/measure.h"
#include "bench/weights.h"
#include "nn/glu.h"

enum { REPEATS = 7, READ_PIECE = 1 << 20, KINDS = 4 };

struct bench {
    const struct throughput_setup *s;
    struct nn nn;
    uint8_t *pool;
    size_t at; /* where the last step stopped */
    _Atomic uint64_t sink;
    struct bench_weights wide, down; /* gate and up, or the trunk's; down */
    float *source, *x, *y;
    struct linear_input in;
    struct glu_scratch glu;
    double step_bytes;
};

/* One step is what the engine does between two looks at its clock; it moves through the pool. */
typedef void (*bench_step)(struct bench *b);

static void read_task(void *ctx, uint32_t task, uint32_t worker)
{
    struct bench *b = ctx;
    (void)worker;
    const size_t piece = READ_PIECE;
    atomic_fetch_add(&b->sink, b->nn.k->read(b->pool + (b->at + task) * piece, piece));
}

static void read_step(struct bench *b)
{
    const size_t pieces = (size_t)b->s->pool / READ_PIECE;
    const uint32_t n = b->s->threads * 4;
    if (n >= pieces) {
        b->at = 0;
        pool_run(b->nn.pool, (uint32_t)pieces, read_task, b);
        b->step_bytes = (double)pieces * READ_PIECE;
        return;
    }
    if (b->at + n > pieces) b->at = 0;
    pool_run(b->nn.pool, n, read_task, b);
    b->at += n;
    b->step_bytes = (double)n * READ_PIECE;
}

static void empty_task(void *ctx, uint32_t task, uint32_t worker)
{
    (void)ctx, (void)task, (void)worker;
}

static void empty_step(struct bench *b)
{
    pool_run(b->nn.pool, b->s->threads, empty_task, b);
    b->step_bytes = 1;
}

static double blob_bytes(const struct bench_weights *w)
{
    size_t bytes = 0;
    codec_matrix_bytes(w->codec, w->rows, w->cols, &bytes);
    return (double)bytes;
}

static void trunk_step(struct bench *b)
{
    struct matrix m;
    if (b->at >= b->wide.count) b->at = 0;
    bench_weights_matrix(&b->wide, b->at++, &m);
    linear_input_set(&b->in, b->x, b->s->cols, 1, b->s->cols);
    const struct linear_job job = {&m, b->y, b->s->rows};
    linear_run(&b->nn, &b->in, &job, 1);
    b->step_bytes = blob_bytes(&b->wide);
}

static void expert_step(struct bench *b)
{
    const struct throughput_setup *s = b->s;
    struct glu_job jobs[THROUGHPUT_EXPERTS_MOST];
    struct matrix gate[THROUGHPUT_EXPERTS_MOST], up[THROUGHPUT_EXPERTS_MOST],
        down[THROUGHPUT_EXPERTS_MOST];
    const size_t held = b->down.count < b->wide.count / 2 ? b->down.count : b->wide.count / 2;
    linear_input_set(&b->in, b->x, s->width, 1, s->width);
    for (uint32_t i = 0; i < s->experts; i++) {
        if (b->at >= held) b->at = 0;
        bench_weights_matrix(&b->wide, 2 * b->at, &gate[i]);
        bench_weights_matrix(&b->wide, 2 * b->at + 1, &up[i]);
        bench_weights_matrix(&b->down, b->at++, &down[i]);
        jobs[i] = (struct glu_job){.gate = &gate[i], .up = &up[i], .down = &down[i],
                                   .act = {ACT_SILU_GLU, 0, 0}, .in = &b->in, .n = 1,
                                   .y = b->y + (size_t)i * s->width, .ldy = s->width};
        glu_slice(&b->glu, i, &jobs[i]);
    }
    glu_run(&b->nn, jobs, s->experts);
    b->step_bytes = s->experts * (2 * blob_bytes(&b->wide) + blob_bytes(&b->down));
}

/* Steps a second times what a step stands for: the second best of the repeats, which another program
 * that takes a core for a while leaves as it is. */
static double rate_of(struct bench *b, bench_step step)
{
    double rates[REPEATS];
    const double each = b->s->seconds / (KINDS * (REPEATS + 1));
    b->at = 0;
    for (int i = -1; i < REPEATS; i++) { /* the first settles pages and clock rate */
        const double begin = clock_seconds();
        double bytes = 0, passed;
        do {
            step(b);
            bytes += b->step_bytes;
            passed = clock_seconds() - begin;
        } while (passed < each);
        if (i >= 0) rates[i] = bytes / passed;
    }
    (void)sample_of(rates, REPEATS); /* sorts */
    return rates[REPEATS - 2];
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static void carve_all(struct carve *c, const struct throughput_setup *s, struct bench *b)
{
    const size_t matrix = larger((size_t)s->rows * s->cols, (size_t)s->width * s->inner);
    b->source = carve_take(c, matrix * sizeof(float));
    b->x = carve_take(c, larger(s->cols, s->width) * sizeof(float));
    b->y = carve_take(c, larger(s->rows, (size_t)s->experts * s->width) * sizeof(float));
    linear_input_carve(c, 1, (uint32_t)larger(s->cols, s->width), s->fine, &b->in);
    glu_carve(c, s->experts, s->inner, s->fine, &b->glu);
}

static void measure_all(struct bench *b, struct throughput *out)
{
    const struct throughput_setup *s = b->s;
    struct bench_random random = {3};
    bench_random_floats(&random, b->x, larger(s->cols, s->width));
    if (s->expert_codec != CODEC_NONE) {
        const size_t third = ((size_t)s->pool / 3) & ~(size_t)63;
        bench_weights_fill(&b->wide, s->expert_codec, s->inner, s->width, b->source, b->pool,
                           2 * third);
        bench_weights_fill(&b->down, s->expert_codec, s->width, s->inner, b->source,
                           b->pool + 2 * third, third);
        b->wide.fine = b->down.fine = s->fine;
        out->experts = rate_of(b, expert_step);
        b->wide.fine = false;
    }
    if (s->trunk_codec != CODEC_NONE) {
        bench_weights_fill(&b->wide, s->trunk_codec, s->rows, s->cols, b->source, b->pool,
                           (size_t)s->pool);
        out->trunk = rate_of(b, trunk_step);
    }
    out->memory = rate_of(b, read_step);
    out->dispatch = 1 / rate_of(b, empty_step);
}

/* Whether a third of the pool holds a matrix of the experts, and the whole one of the trunk. */
static hr_status check(const struct throughput_setup *s, hr_error *err)
{
    const size_t third = ((size_t)s->pool / 3) & ~(size_t)63;
    const size_t up = s->expert_codec ? bench_weights_stride(s->expert_codec, s->inner, s->width) : 64,
                 down = s->expert_codec ? bench_weights_stride(s->expert_codec, s->width, s->inner) : 64,
                 trunk = s->trunk_codec ? bench_weights_stride(s->trunk_codec, s->rows, s->cols) : 64;
    if (s->pool < THROUGHPUT_POOL_LEAST || s->experts > THROUGHPUT_EXPERTS_MOST || up == 0 ||
        down == 0 || trunk == 0 || up > third || down > third || trunk > s->pool)
        return fail(err, HR_ERR_USAGE, "a pool of %llu bytes is too small for matrices [%u, %u] and "
                    "[%u, %u]", (unsigned long long)s->pool, s->inner, s->width, s->rows, s->cols);
    return HR_OK;
}

hr_status throughput_measure(const struct throughput_setup *s, struct mem_budget *budget,
                             struct throughput *out, hr_error *err)
{
    struct bench b = {.s = s, .nn = {.k = s->k}};
    struct carve carve = {0};
    *out = (struct throughput){0};
    TRY(check(s, err));
    carve_all(&carve, s, &b);
    const size_t bytes = carve.used;
    uint8_t *block = mem_alloc(budget, bytes);
    b.pool = mem_alloc(budget, (size_t)s->pool);
    hr_status status = HR_OK;
    if (!block || !b.pool)
        status = fail(err, HR_ERR_MEMORY, "no memory for %llu bytes of weights to measure with",
                      (unsigned long long)s->pool);
    if (status == HR_OK) status = pool_create(s->threads, budget, &b.nn.pool, err);
    if (status == HR_OK) {
        carve = (struct carve){block, 0};
        carve_all(&carve, s, &b);
        measure_all(&b, out);
        out->allocated = mem_cost(bytes) + mem_cost((size_t)s->pool) + pool_cost(s->threads);
        pool_free(b.nn.pool);
    }
    mem_free(budget, b.pool, (size_t)s->pool);
    mem_free(budget, block, bytes);
    return status;
}
