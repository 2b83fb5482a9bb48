#include "nn/glu.h"

#include <stdatomic.h>

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

/* Tasks: panels of all gates and ups, tokens to activate, panels of all downs, each job after job. A
 * job's next stage begins when its last one ends, whatever the other jobs do. */
enum stage { GATE_UP, ACTIVATE, DOWN, STAGES };

struct glu_ctx {
    const struct nn *nn;
    struct glu_job *jobs;
    uint32_t count;
    uint32_t first[STAGES][GLU_MAX_JOBS + 1], end[STAGES];
    _Atomic uint32_t left[STAGES][GLU_MAX_JOBS]; /* tasks that are not done */
};

static uint32_t job_of(const uint32_t *first, uint32_t count, uint32_t task)
{
    uint32_t lo = 0, hi = count; /* first[lo] <= task < first[hi] */
    while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (first[mid] <= task)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static void gate_up(const struct nn *nn, const struct glu_job *job, uint32_t first, uint32_t end)
{
    const uint32_t inner = job->gate->rows, units = linear_units(job->gate);
    if (first < units)
        linear_span(nn, job->gate, first, end < units ? end : units, job->in, job->index, job->n,
                    job->h, inner);
    if (end > units)
        linear_span(nn, job->up, first > units ? first - units : 0, end - units, job->in,
                    job->index, job->n, job->u, inner);
}

static void multiply(const struct kernels *k, const struct activation *a, float *g, const float *u,
                     size_t n)
{
    switch (a->kind) {
    case ACT_SILU_GLU: k->silu_mul(g, g, u, n); break;
    case ACT_SITU_GLU: k->situ_mul(g, g, u, n, a->a, a->b); break;
    case ACT_CLAMPED_GLU: k->clamped_mul(g, g, u, n, a->a, a->b); break;
    }
}

static void activate(const struct nn *nn, struct glu_job *job, uint32_t first, uint32_t end)
{
    const uint32_t inner = job->gate->rows;
    for (uint32_t i = first; i < end; i++) {
        float *h = job->h + (size_t)i * inner, *u = job->u + (size_t)i * inner;
        if (job->gate_bias) {
            nn->k->add(h, job->gate_bias, inner);
            nn->k->add(u, job->up_bias, inner);
        }
        multiply(nn->k, &job->act, h, u, inner);
        linear_input_quantize(nn, &job->mid, job->down, i);
    }
}

static void down(const struct nn *nn, const struct glu_job *job, uint32_t first, uint32_t end)
{
    linear_span(nn, job->down, first, end, &job->mid, NULL, job->n, job->y, job->ldy);
    if (!job->down_bias) return;
    uint32_t r0, r1;
    linear_span_rows(job->down, first, end, &r0, &r1);
    for (uint32_t i = 0; i < job->n; i++)
        nn->k->add(job->y + (size_t)i * job->ldy + r0, job->down_bias + r0, r1 - r0);
}

static void glu_span(void *ctx, uint32_t task, uint32_t end, uint32_t worker)
{
    struct glu_ctx *c = ctx;
    uint32_t stage = GATE_UP;
    (void)worker;
    while (task >= c->end[stage]) stage++;
    const uint32_t *first = c->first[stage];
    while (task < end) {
        const uint32_t j = job_of(first, c->count, task);
        const uint32_t from = task - first[j], to = (end < first[j + 1] ? end : first[j + 1]) - first[j];
        struct glu_job *job = &c->jobs[j];
        if (stage > GATE_UP) pool_await(c->nn->pool, &c->left[stage - 1][j]);
        switch (stage) {
        case GATE_UP: gate_up(c->nn, job, from, to); break;
        case ACTIVATE: activate(c->nn, job, from, to); break;
        default: down(c->nn, job, from, to); break;
        }
        atomic_fetch_sub_explicit(&c->left[stage][j], to - from, memory_order_release);
        task = first[j] + to;
    }
}

/* Numbers the tasks of a stage from `first` on and returns the number behind. */
static uint32_t number_stage(struct glu_ctx *c, enum stage stage, uint32_t first)
{
    for (uint32_t j = 0; j < c->count; j++) {
        const struct glu_job *job = &c->jobs[j];
        const uint32_t tasks = stage == ACTIVATE ? job->n
                               : stage == DOWN   ? linear_units(job->down)
                                                 : linear_units(job->gate) + linear_units(job->up);
        atomic_init(&c->left[stage][j], tasks);
        c->first[stage][j] = first;
        first += tasks;
    }
    return c->end[stage] = c->first[stage][c->count] = first;
}

void glu_run(const struct nn *nn, struct glu_job *jobs, uint32_t count)
{
    struct glu_ctx c = {.nn = nn, .jobs = jobs, .count = count};
    uint32_t tasks = 0;
    for (uint32_t j = 0; j < count; j++) {
        linear_input_prepare(nn, jobs[j].in, jobs[j].gate);
        linear_input_prepare(nn, jobs[j].in, jobs[j].up);
    }
    for (uint32_t stage = GATE_UP; stage < STAGES; stage++) tasks = number_stage(&c, stage, tasks);
    pool_run_stages(nn->pool, c.end, STAGES, glu_span, &c);
}
