/* The benchmark of all kernels: hr_bench_kernels with its arguments checked. */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include "base/status.h"
#include "kernels/kernels.h"

enum {
    BENCH_SIZE_MOST = 65536, /* rows, cols */
    BENCH_SECONDS_MOST = 3600,
    BENCH_POOL_LEAST = 1 << 20
};

struct bench_setup {
    const struct kernels *k;
    double seconds;
    uint32_t rows, cols;
    uint64_t cache; /* only reported */
    uint64_t pool;  /* at least BENCH_POOL_LEAST */
};

/* The pool that lets everything come from memory. */
uint64_t bench_pool_default(uint64_t cache);
hr_status bench_run(const struct bench_setup *s, hr_bench_fn callback, void *user, hr_error *err);

#endif
