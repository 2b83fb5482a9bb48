#include "nn/glu.h"

void glu_carve(struct carve *c, uint32_t n, uint32_t inner, bool fine, struct glu_scratch *s)
{
    s->n = n;
    s->inner = inner;
    s->h = carve_take(c, (size_t)n * inner * sizeof(float));
    s->u = carve_take(c, (size_t)n * inner * sizeof(float));
    linear_input_carve(c, n, inner, fine, &s->mid);
}

void glu_slice(const struct glu_scratch *s, uint32_t first, struct glu_job *job)
{
    const uint32_t inner = job->gate->rows;
    job->h = s->h + (size_t)first * s->inner;
    job->u = s->u + (size_t)first * s->inner;
    job->mid = s->mid;
    linear_input_skip(&job->mid, first);
    linear_input_set(&job->mid, job->h, inner, job->n, inner);
}

struct glu_ctx {
    const struct nn *nn;
    struct glu_job *jobs;
    uint32_t count;
    uint32_t first[GLU_MAX_JOBS + 1];
};

static uint32_t job_of(const struct glu_ctx *c, uint32_t task)
{
    uint32_t lo = 0, hi = c->count; /* first[lo] <= task < first[hi] */
    while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (c->first[mid] <= task)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static void gate_up_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct glu_ctx *c = ctx;
    const uint32_t j = job_of(c, task);
    const struct glu_job *job = &c->jobs[j];
    const uint32_t inner = job->gate->rows, units = linear_units(job->gate);
    const uint32_t unit = task - c->first[j];
    (void)worker;
    if (unit < units)
        linear_unit(c->nn, job->gate, unit, job->in, job->index, job->n, job->h, inner);
    else
        linear_unit(c->nn, job->up, unit - units, job->in, job->index, job->n, job->u, inner);
}

static void activate(const struct kernels *k, const struct activation *a, float *g, const float *u,
                     size_t n)
{
    switch (a->kind) {
    case ACT_SILU_GLU: k->silu_mul(g, g, u, n); break;
    case ACT_SITU_GLU: k->situ_mul(g, g, u, n, a->a, a->b); break;
    case ACT_CLAMPED_GLU: k->clamped_mul(g, g, u, n, a->a, a->b); break;
    }
}

static void activate_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct glu_ctx *c = ctx;
    const uint32_t j = job_of(c, task), i = task - c->first[j];
    struct glu_job *job = &c->jobs[j];
    const uint32_t inner = job->gate->rows;
    float *h = job->h + (size_t)i * inner, *u = job->u + (size_t)i * inner;
    (void)worker;
    if (job->gate_bias) {
        c->nn->k->add(h, job->gate_bias, inner);
        c->nn->k->add(u, job->up_bias, inner);
    }
    activate(c->nn->k, &job->act, h, u, inner);
    linear_input_quantize(c->nn, &job->mid, job->down, i);
}

static void down_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct glu_ctx *c = ctx;
    const uint32_t j = job_of(c, task);
    const struct glu_job *job = &c->jobs[j];
    const uint32_t unit = task - c->first[j];
    (void)worker;
    linear_unit(c->nn, job->down, unit, &job->mid, NULL, job->n, job->y, job->ldy);
    if (!job->down_bias) return;
    uint32_t r0, r1;
    linear_unit_rows(job->down, unit, &r0, &r1);
    for (uint32_t i = 0; i < job->n; i++)
        c->nn->k->add(job->y + (size_t)i * job->ldy + r0, job->down_bias + r0, r1 - r0);
}

void glu_run(const struct nn *nn, struct glu_job *jobs, uint32_t count)
{
    struct glu_ctx c = {nn, jobs, count, {0}};
    for (uint32_t j = 0; j < count; j++) {
        linear_input_prepare(nn, jobs[j].in, jobs[j].gate);
        linear_input_prepare(nn, jobs[j].in, jobs[j].up);
        c.first[j + 1] = c.first[j] + linear_units(jobs[j].gate) + linear_units(jobs[j].up);
    }
    pool_run(nn->pool, c.first[count], gate_up_task, &c);
    for (uint32_t j = 0; j < count; j++) c.first[j + 1] = c.first[j] + jobs[j].n;
    pool_run(nn->pool, c.first[count], activate_task, &c);
    for (uint32_t j = 0; j < count; j++)
        c.first[j + 1] = c.first[j] + linear_units(jobs[j].down);
    pool_run(nn->pool, c.first[count], down_task, &c);
}
