#include "encode/moments.h"

#include <math.h>
#include <string.h>

enum { ROWS = 8, PIVOTS = 64 };

struct factor {
    const float *x;
    size_t n, cols;
    double *h;       /* lower triangle by rows: H, then A' */
    size_t low, high; /* the pivots at work */
    float *out;
};

size_t moments_floats(uint32_t cols)
{
    return moments_feedback(((size_t)cols + RVQ_DIM - 1) / RVQ_DIM);
}

static double *row_of(const struct factor *c, size_t i)
{
    return c->h + i * (i + 1) / 2;
}

static uint32_t tasks_of(size_t rows)
{
    return (uint32_t)((rows + ROWS - 1) / ROWS);
}

/* to[0..count) += factor * from[0..count) */
static void add_row(double *to, double factor, const double *from, size_t count)
{
    for (size_t j = 0; j < count; j++) to[j] += factor * from[j];
}

static void gram_task(void *p, uint32_t task, uint32_t worker)
{
    const struct factor *c = p;
    const size_t first = (size_t)task * ROWS;
    const size_t last = first + ROWS < c->cols ? first + ROWS : c->cols;
    (void)worker;
    for (size_t s = 0; s < c->n; s++) {
        const float *x = c->x + s * c->cols;
        for (size_t i = first; i < last; i++) {
            double *row = row_of(c, i);
            const double own = (double)x[i];
            if (own != 0)
                for (size_t j = 0; j <= i; j++) row[j] += own * (double)x[j];
        }
    }
}

/* Takes the pivots [low, high), high first, out of the rows before them. */
static void eliminate_task(void *p, uint32_t task, uint32_t worker)
{
    const struct factor *c = p;
    const size_t first = (size_t)task * ROWS;
    const size_t last = first + ROWS < c->low ? first + ROWS : c->low;
    (void)worker;
    for (size_t i = first; i < last; i++)
        for (size_t k = c->high; k-- > c->low;)
            add_row(row_of(c, i), -row_of(c, k)[i], row_of(c, k), i + 1);
}

/* `least`: what damping alone leaves of every pivot, whatever rounding does. */
static void cholesky(struct factor *c, struct pool *pool, double least)
{
    for (c->high = c->cols; c->high > 0; c->high = c->low) {
        c->low = c->high > PIVOTS ? c->high - PIVOTS : 0;
        for (size_t k = c->high; k-- > c->low;) {
            double *row = row_of(c, k);
            const double root = sqrt(fmax(row[k], least));
            for (size_t j = 0; j < k; j++) row[j] /= root;
            row[k] = root;
            for (size_t i = c->low; i < k; i++) add_row(row_of(c, i), -row[i], row, i + 1);
        }
        pool_run(pool, tasks_of(c->low), eliminate_task, c);
    }
}

/* N_j = D_j'^-1 A'_j: what the errors before sub-vector j mean in its own units. */
static void export_task(void *p, uint32_t j, uint32_t worker)
{
    const struct factor *c = p;
    const size_t first = (size_t)j * RVQ_DIM;
    const size_t width = c->cols - first < RVQ_DIM ? c->cols - first : RVQ_DIM;
    float *feedback = c->out + moments_feedback(j), *metric = c->out + moments_metric(j);
    (void)worker;
    memset(feedback, 0, RVQ_DIM * (first + RVQ_DIM) * sizeof *feedback);
    for (size_t d = 0; d < width; d++)
        for (size_t e = 0; e <= d; e++)
            metric[d * RVQ_DIM + e] = (float)row_of(c, first + d)[first + e];
    for (size_t i = 0; i < first; i++) {
        double part[RVQ_DIM];
        for (size_t d = 0; d < width; d++) {
            const double *row = row_of(c, first + d);
            double sum = row[i];
            for (size_t e = 0; e < d; e++) sum -= row[first + e] * part[e];
            part[d] = sum / row[first + d];
            feedback[d * first + i] = (float)part[d];
        }
    }
}

hr_status moments_factor(struct pool *pool, struct mem_budget *mem, const float *x, size_t n,
                         uint32_t cols, double damping, float *moments, hr_error *err)
{
    const size_t count = (size_t)cols * (cols + 1) / 2;
    struct factor c = {.x = x, .n = n, .cols = cols, .out = moments};
    c.h = mem_alloc(mem, count * sizeof *c.h);
    if (!c.h)
        return fail(err, HR_ERR_MEMORY, "no memory for the second moments of %u inputs: %zu bytes",
                    cols, count * sizeof *c.h);
    memset(c.h, 0, count * sizeof *c.h);
    pool_run(pool, tasks_of(cols), gram_task, &c);
    double mean = 0;
    for (size_t i = 0; i < cols; i++) mean += row_of(&c, i)[i] / cols;
    const bool some = mean > 0 && isfinite(mean) && isfinite(1 / mean);
    for (size_t i = 0; i < count; i++) c.h[i] = some ? c.h[i] / mean : 0;
    for (size_t i = 0; i < cols; i++) row_of(&c, i)[i] += some ? damping : 1;
    cholesky(&c, pool, some ? fmin(damping, 1) / 2 : 1);
    pool_run(pool, (uint32_t)(((size_t)cols + RVQ_DIM - 1) / RVQ_DIM), export_task, &c);
    mem_free(mem, c.h, count * sizeof *c.h);
    return HR_OK;
}
