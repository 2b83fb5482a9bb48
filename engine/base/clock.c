#include "base/clock.h"

#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

static double system_clock(void)
{
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) return 0.0;
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static _Atomic(clock_fn) clock_hook = system_clock;

double clock_seconds(void)
{
    return atomic_load_explicit(&clock_hook, memory_order_relaxed)();
}

void clock_set(clock_fn fn)
{
    atomic_store(&clock_hook, fn != NULL ? fn : system_clock);
}
