/* Rates of a kernel beside a plain memory read and the dot peak, taken in turns so that what else
 * the machine does meets all three. */
#ifndef BENCH_MEASURE_H
#define BENCH_MEASURE_H

#include "kernels/kernels.h"

enum { MEASURE_REPEATS = 7, MEASURE_ROWS_MOST = 128 };

/* Memory that reads and kernels walk through in one direction, each from where the other stopped:
 * whatever is touched was last touched a whole pool ago. */
struct meter {
    const struct kernels *k;
    uint8_t *pool;
    size_t bytes, cursor;
    uint64_t sink; /* of what was read: the read is not left out */
    /* every measurement of this run, for its summary */
    double read[MEASURE_ROWS_MOST * MEASURE_REPEATS], peak[MEASURE_ROWS_MOST * MEASURE_REPEATS];
    size_t count;
};

/* A kernel cut into steps of equal work; step i works at i * step_bytes of the pool. */
struct bench_work {
    void (*step)(void *ctx, size_t i);
    void *ctx;
    size_t steps;
    double pool_per_step; /* bytes of the pool from one step to the next; 0: it does not walk */
    double weights, bytes, macs; /* of one step */
};

struct sample {
    double median, spread; /* (highest - lowest) / median */
};

struct bench_rates {
    struct sample steps;      /* per second */
    struct sample read_ratio; /* bytes over bytes of the plain read */
    struct sample peak_ratio; /* macs over those of the dot peak */
    double seconds;
};

/* Takes about `seconds`, but every repeat makes at least a few steps. */
void measure(struct meter *m, const struct bench_work *work, double seconds,
             struct bench_rates *out);

/* Sorts `values` [n]. */
struct sample sample_of(double *values, size_t n);

#endif
