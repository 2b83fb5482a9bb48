#include "bench/measure.h"

#include <time.h>

#include "base/clock.h"
#include "base/sort.h"

enum {
    READ_CHUNK = 1 << 20, /* between two looks at the clock */
    PEAK_ROUNDS = 4096,
    STEPS = 4
};

/* Rates are over the thread's own time: another process that takes the core does not count. The loops
 * look at the ordinary clock, which costs less, until its time is up. */
struct timer {
    double wall, own, limit;
};

static double own_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct timer timer_begin(double seconds)
{
    return (struct timer){clock_seconds(), own_seconds(), seconds};
}

/* On a busy machine at most four times the limit passes. */
static bool timer_runs(const struct timer *t)
{
    const double passed = clock_seconds() - t->wall;
    return passed < t->limit || (passed < 4 * t->limit && own_seconds() - t->own < t->limit);
}

/* Per second of the thread's time, which a coarse clock may not have seen move. */
static double timer_rate(const struct timer *t, double count)
{
    const double own = own_seconds() - t->own;
    return count / (own > 0 ? own : clock_seconds() - t->wall);
}

/* Bytes per second. */
static double read_rate(struct meter *m, double seconds)
{
    const struct timer t = timer_begin(seconds);
    const struct kernels *best = kernels_find("auto"); /* a property of the machine, not of m->k */
    double bytes = 0;
    do {
        const size_t left = m->bytes - m->cursor, n = left < READ_CHUNK ? left : READ_CHUNK;
        m->sink += best->read(m->pool + m->cursor, n);
        m->cursor = n == left ? 0 : m->cursor + n;
        bytes += (double)n;
    } while (timer_runs(&t));
    return timer_rate(&t, bytes);
}

static double peak_rate(const struct kernels *k, double seconds)
{
    const struct timer t = timer_begin(seconds);
    double macs = 0;
    do macs += (double)k->dot_peak(PEAK_ROUNDS);
    while (timer_runs(&t));
    return timer_rate(&t, macs);
}

static double step_rate(struct meter *m, const struct bench_work *w, double seconds)
{
    size_t at = w->pool_per_step > 0 ? (size_t)((double)m->cursor / w->pool_per_step) + 1 : 0;
    const struct timer t = timer_begin(seconds);
    double steps = 0;
    do {
        for (size_t i = 0; i < STEPS; i++) {
            if (at >= w->steps) at = 0;
            w->step(w->ctx, at++);
        }
        steps += STEPS;
    } while (timer_runs(&t));
    const double rate = timer_rate(&t, steps);
    if (w->pool_per_step > 0) {
        const double cursor = (double)at * w->pool_per_step;
        m->cursor = cursor < (double)m->bytes ? (size_t)cursor & ~(size_t)63 : 0;
    }
    return rate;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct sample sample_of(double *values, size_t n)
{
    sort_in_place(values, n, sizeof *values, ascending);
    const double median = n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
    return (struct sample){median, median > 0 ? (values[n - 1] - values[0]) / median : 0};
}

void measure(struct meter *m, const struct bench_work *work, double seconds,
             struct bench_rates *out)
{
    double steps[MEASURE_REPEATS], read[MEASURE_REPEATS], peak[MEASURE_REPEATS];
    const double begin = clock_seconds(), part = seconds / (4 * MEASURE_REPEATS + 2);
    step_rate(m, work, part); /* pages, branches and clock rate settle */
    peak_rate(m->k, part);
    for (size_t i = 0; i < MEASURE_REPEATS; i++) {
        const double r = read_rate(m, part), s = step_rate(m, work, 2 * part),
                     p = peak_rate(m->k, part);
        steps[i] = s;
        read[i] = s * work->bytes / r;
        peak[i] = s * work->macs / p;
        if (m->count < sizeof m->read / sizeof *m->read) {
            m->read[m->count] = r;
            m->peak[m->count++] = p;
        }
    }
    out->steps = sample_of(steps, MEASURE_REPEATS);
    out->read_ratio = sample_of(read, MEASURE_REPEATS);
    out->peak_ratio = sample_of(peak, MEASURE_REPEATS);
    out->seconds = clock_seconds() - begin;
}
