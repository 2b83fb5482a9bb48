/* Concurrent callers share one pool; meant for a ThreadSanitizer build, checks itself in any.
 * Exit code 0: every task of every call ran exactly once, with a valid worker number, and saw what the
 * tasks wrote that it awaited. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/pool.h"

enum { CALLERS = 4, CALLS = 1000, MOST_TASKS = 97, MOST_WORKERS = 7 };

struct call {
    uint32_t runs[MOST_TASKS];       /* plain on purpose: pool_run must order them */
    uint32_t per_worker[MOST_WORKERS];
    uint32_t threads;
    _Atomic uint32_t faults;
};

struct caller {
    struct pool *pool;
    uint32_t number, faults;
};

static void task(void *ctx, uint32_t index, uint32_t worker)
{
    struct call *call = ctx;
    if (worker >= call->threads || index >= MOST_TASKS) {
        atomic_fetch_add(&call->faults, 1);
        return;
    }
    call->runs[index]++;
    call->per_worker[worker]++;
}

/* The second half of the tasks reads what the first half wrote. */
struct staged {
    struct pool *pool;
    uint32_t half, written[MOST_TASKS], sum[MOST_TASKS]; /* plain on purpose: pool_await orders them */
    _Atomic uint32_t left;
};

static void staged_span(void *ctx, uint32_t first, uint32_t end, uint32_t worker)
{
    struct staged *s = ctx;
    (void)worker;
    for (uint32_t task = first; task < end; task++) {
        if (task < s->half) {
            s->written[task] = task + 1;
            atomic_fetch_sub_explicit(&s->left, 1, memory_order_release);
            continue;
        }
        pool_await(s->pool, &s->left);
        for (uint32_t i = 0; i < s->half; i++) s->sum[task - s->half] += s->written[i];
    }
}

static uint32_t staged_faults(struct pool *pool, uint32_t half)
{
    struct staged s = {.pool = pool, .half = half, .left = half};
    uint32_t faults = 0;
    pool_run_stages(pool, (uint32_t[]){half, half, 2 * half}, 3, staged_span, &s);
    for (uint32_t i = 0; i < half; i++) faults += s.sum[i] != half * (half + 1) / 2;
    return faults;
}

static void *caller_main(void *arg)
{
    struct caller *c = arg;
    for (uint32_t i = 0; i < CALLS; i++) {
        struct call call;
        memset(&call, 0, sizeof call);
        call.threads = pool_threads(c->pool);
        const uint32_t tasks = (i * 31 + c->number * 7) % (MOST_TASKS + 1);
        pool_run(c->pool, tasks, task, &call);
        uint32_t total = 0;
        for (uint32_t t = 0; t < MOST_TASKS; t++) c->faults += call.runs[t] != (t < tasks);
        for (uint32_t w = 0; w < MOST_WORKERS; w++) total += call.per_worker[w];
        c->faults += total != tasks;
        c->faults += atomic_load(&call.faults);
        c->faults += staged_faults(c->pool, tasks / 2);
    }
    return NULL;
}

static uint32_t run(uint32_t threads)
{
    struct pool *pool;
    struct caller callers[CALLERS];
    pthread_t ids[CALLERS];
    uint32_t faults = 0;
    if (pool_create(threads, NULL, &pool, NULL) != HR_OK) return 1;
    for (uint32_t i = 0; i < CALLERS; i++) {
        callers[i] = (struct caller){pool, i, 0};
        if (pthread_create(&ids[i], NULL, caller_main, &callers[i]) != 0) return 1;
    }
    for (uint32_t i = 0; i < CALLERS; i++) {
        (void)pthread_join(ids[i], NULL);
        faults += callers[i].faults;
    }
    pool_free(pool);
    return faults;
}

int main(void)
{
    static const uint32_t threads[] = {1, 2, 3, 7};
    uint32_t faults = 0;
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) faults += run(threads[i]);
    if (faults != 0) (void)fprintf(stderr, "%u faults\n", (unsigned)faults);
    return faults != 0;
}
