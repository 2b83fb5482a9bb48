#include "nn/residual.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

void residual_carve(struct carve *c, const struct residual_part *p, uint32_t hidden,
                    uint32_t layers, uint32_t n, struct residual_scratch *s)
{
    const size_t f = sizeof(float), width = residual_width(p, hidden);
    memset(s, 0, sizeof *s);
    s->h = carve_take(c, n * width * f);
    if (p->kind == RESIDUAL_ATTN_RES)
        s->snapshots = carve_take(c, (size_t)((layers - 1) / p->block + 1) * n * hidden * f);
    if (p->kind != RESIDUAL_HYPER) return;
    s->normed = carve_take(c, n * width * f);
    s->low = carve_take(c, (size_t)n * p->lowrank * f);
    s->mix = carve_take(c, n * width * f);
    s->inject = carve_take(c, (size_t)n * p->count * f);
}

struct site_ctx {
    const struct residual_call *c;
    const struct residual_site *site;
    const float *y;
    float *x;
    uint32_t first;
    _Atomic int broken;
};

static float *stream_row(const struct residual_call *c, uint32_t t)
{
    return c->s->h + (size_t)t * residual_width(c->part, c->hidden);
}

static void begin_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct site_ctx *s = ctx;
    const uint32_t hidden = s->c->hidden, copies = residual_width(s->c->part, hidden) / hidden;
    (void)worker;
    for (uint32_t i = 0; i < copies; i++)
        memcpy(stream_row(s->c, t) + (size_t)i * hidden, s->y + (size_t)t * hidden,
               hidden * sizeof(float));
}

void residual_begin(const struct residual_call *c, const float *x)
{
    struct site_ctx s = {.c = c, .y = x};
    c->s->sealed = 0;
    pool_run(c->nn->pool, c->n, begin_task, &s);
}

static void plain_task(void *ctx, uint32_t i, uint32_t worker)
{
    const struct site_ctx *s = ctx;
    const uint32_t hidden = s->c->hidden;
    (void)worker;
    s->c->nn->k->rms_norm(stream_row(s->c, s->first + i), s->site->norm, hidden,
                          s->c->part->norm_eps, s->x + (size_t)i * hidden);
}

static const float *source(const struct residual_call *c, uint32_t i, uint32_t t)
{
    if (i == c->s->sealed) return stream_row(c, t);
    return c->s->snapshots + ((size_t)i * c->n + t) * c->hidden;
}

/* Softmax over the normed sources' scores mixes the raw sources, snapshots first. */
static void attn_res_task(void *ctx, uint32_t i, uint32_t worker)
{
    const struct site_ctx *s = ctx;
    const struct residual_call *c = s->c;
    const struct kernels *k = c->nn->k;
    const uint32_t hidden = c->hidden, sources = c->s->sealed + 1, t = s->first + i;
    float *x = s->x + (size_t)i * hidden;
    float p[MAX_SNAPSHOTS + 1];
    (void)worker;
    if (sources == 1) {
        k->rms_norm(stream_row(c, t), s->site->norm, hidden, c->part->norm_eps, x);
        return;
    }
    for (uint32_t j = 0; j < sources; j++) {
        const float *from = source(c, j, t);
        const float mean = k->dot(from, from, hidden) / (float)hidden;
        p[j] = k->dot(from, s->site->res, hidden) * (1.0f / sqrtf(mean + c->part->norm_eps));
    }
    k->softmax(p, sources);
    memset(x, 0, hidden * sizeof(float));
    for (uint32_t j = 0; j < sources; j++) k->axpy(x, p[j], source(c, j, t), hidden);
    k->rms_norm(x, s->site->norm, hidden, c->part->norm_eps, x);
}

static void branch_norm_task(void *ctx, uint32_t i, uint32_t worker)
{
    const struct site_ctx *s = ctx;
    const struct residual_call *c = s->c;
    const size_t hidden = c->hidden, width = hidden * c->part->count;
    (void)worker;
    for (uint32_t b = 0; b < c->part->count; b++)
        c->nn->k->rms_norm(stream_row(c, s->first + i) + b * hidden, s->site->norm + b * hidden,
                           hidden, c->part->norm_eps, c->s->normed + i * width + b * hidden);
}

static void low_task(void *ctx, uint32_t i, uint32_t worker)
{
    const struct site_ctx *s = ctx;
    const struct residual_call *c = s->c;
    float *low = c->s->low + (size_t)i * c->part->lowrank;
    (void)worker;
    c->nn->k->scale(low, 1.0f / (float)c->part->count, c->part->lowrank);
    c->nn->k->silu(low, low, c->part->lowrank);
}

static void mix_task(void *ctx, uint32_t i, uint32_t worker)
{
    const struct site_ctx *s = ctx;
    const struct residual_call *c = s->c;
    const uint32_t count = c->part->count;
    const size_t hidden = c->hidden, width = hidden * count;
    float *a = c->s->mix + i * width, *x = s->x + i * hidden;
    const float *normed = c->s->normed + i * width;
    (void)worker;
    c->nn->k->sigmoid(a, a, width);
    memset(x, 0, hidden * sizeof(float));
    for (uint32_t b = 0; b < count; b++)
        for (size_t d = 0; d < hidden; d++) {
            const float product = a[b * hidden + d] * normed[b * hidden + d];
            x[d] = x[d] + product;
        }
    c->nn->k->scale(x, 1.0f / (float)count, hidden);
    if (!s->site->inject.rows) return;
    float *inject = c->s->inject + (size_t)i * count;
    c->nn->k->scale(inject, 1.0f / (float)count, count);
    c->nn->k->sigmoid(inject, inject, count);
    c->nn->k->scale(inject, 2.0f, count);
}

static void hyper_read(const struct residual_call *c, struct site_ctx *s, uint32_t rows)
{
    const struct residual_site *site = s->site;
    const uint32_t width = c->hidden * c->part->count, low = c->part->lowrank;
    struct linear_input in = {.x = c->s->normed, .ldx = width, .n = rows, .k = width};
    const struct linear_job jobs[] = {{&site->down, c->s->low, low},
                                      {&site->inject, c->s->inject, c->part->count}};
    pool_run(c->nn->pool, rows, branch_norm_task, s);
    linear_run(c->nn, &in, jobs, site->inject.rows ? 2 : 1);
    pool_run(c->nn->pool, rows, low_task, s);
    in = (struct linear_input){.x = c->s->low, .ldx = low, .n = rows, .k = low};
    const struct linear_job up = {&site->up, c->s->mix, width};
    linear_run(c->nn, &in, &up, 1);
    pool_run(c->nn->pool, rows, mix_task, s);
}

static void seal_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct site_ctx *s = ctx;
    const struct residual_call *c = s->c;
    const size_t bytes = c->hidden * sizeof(float);
    (void)worker;
    memcpy(c->s->snapshots + ((size_t)c->s->sealed * c->n + t) * c->hidden, stream_row(c, t), bytes);
    memset(stream_row(c, t), 0, bytes);
}

void residual_read(const struct residual_call *c, const struct residual_site *site, bool seal,
                   uint32_t first, uint32_t rows, float *x)
{
    struct site_ctx s = {.c = c, .site = site, .x = x, .first = first};
    switch (c->part->kind) {
    case RESIDUAL_PLAIN: pool_run(c->nn->pool, rows, plain_task, &s); break;
    case RESIDUAL_ATTN_RES: pool_run(c->nn->pool, rows, attn_res_task, &s); break;
    case RESIDUAL_HYPER: hyper_read(c, &s, rows); break;
    }
    if (!seal || c->part->kind != RESIDUAL_ATTN_RES) return;
    pool_run(c->nn->pool, c->n, seal_task, &s);
    c->s->sealed++;
}

static void write_task(void *ctx, uint32_t t, uint32_t worker)
{
    struct site_ctx *s = ctx;
    const struct residual_call *c = s->c;
    const struct kernels *k = c->nn->k;
    const size_t hidden = c->hidden, width = residual_width(c->part, c->hidden);
    const float *y = s->y + t * hidden;
    float *h = stream_row(c, t);
    (void)worker;
    if (c->part->kind == RESIDUAL_HYPER)
        for (uint32_t b = 0; b < c->part->count; b++)
            k->axpy(h + b * hidden, c->s->inject[(size_t)t * c->part->count + b], y, hidden);
    else if (c->part->kind == RESIDUAL_PLAIN && c->part->multiplier != 1.0f)
        k->axpy(h, c->part->multiplier, y, hidden);
    else
        k->add(h, y, hidden);
    if (!k->all_finite(h, width)) atomic_store(&s->broken, 1);
}

bool residual_write(const struct residual_call *c, const float *y)
{
    struct site_ctx s = {.c = c, .y = y};
    pool_run(c->nn->pool, c->n, write_task, &s);
    return !atomic_load(&s.broken);
}
