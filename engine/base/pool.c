#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/sanitizer.h"

enum { MOST_THREADS = 1024 };
/* The lowest page is the guard. A checker keeps its own tables at the top of each stack. */
#define STACK_BYTES ((size_t)(HAVE_THREAD_SANITIZER || HAVE_ADDRESS_SANITIZER ? 2048 : 512) << 10)
#define SPIN_SECONDS 60e-6
#define CACHE_LINE 64

struct worker {
    struct pool *pool;
    void *stack;
    pthread_t thread;
    uint32_t index;
};

/* A job is open between two stores to `state`. A worker first counts itself into `inside` and then
 * looks at `state`; the caller first closes `state` and then waits for `inside` to fall to zero.
 * Both orders are sequentially consistent, so a worker that comes late either sees the job closed
 * or is waited for: the fields of a job never change under anyone who reads them. */
struct pool {
    _Alignas(CACHE_LINE) _Atomic uint64_t state; /* job number * 2 + open */
    const uint32_t *end; /* of each stage */
    uint32_t stages;
    pool_span_fn fn;
    void *ctx;
    _Alignas(CACHE_LINE) _Atomic uint32_t next; /* the next task to claim */
    _Alignas(CACHE_LINE) _Atomic uint32_t inside;
    _Alignas(CACHE_LINE) _Atomic uint32_t parked; /* workers on `wake` */
    _Atomic uint32_t caller_parked;
    _Atomic uint32_t quit;
    uint32_t threads, started;
    int spins; /* 0 where there are fewer cores than threads */
    struct mem_budget *budget;
    struct worker *workers;
    pthread_mutex_t turn; /* one job at a time */
    pthread_mutex_t lock;
    pthread_cond_t wake, idle;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static bool is_new_job(struct pool *p, uint64_t last)
{
    const uint64_t state = atomic_load(&p->state);
    return (state & 1) != 0 && state != last;
}

static bool has_news(struct pool *p, uint64_t last)
{
    return is_new_job(p, last) || atomic_load(&p->quit) != 0;
}

static void await_job(struct pool *p, uint64_t last)
{
    if (p->spins) {
        const double until = clock_seconds() + SPIN_SECONDS;
        do {
            for (int i = 0; i < 32; i++) {
                if (has_news(p, last)) return;
                relax();
            }
        } while (clock_seconds() < until);
    }
    (void)pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->parked, 1);
    while (!has_news(p, last)) (void)pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->parked, 1);
    (void)pthread_mutex_unlock(&p->lock);
}

static void run_tasks(struct pool *p, uint32_t worker)
{
    const uint32_t *end = p->end, *const last = end + p->stages - 1;
    const pool_span_fn fn = p->fn;
    void *const ctx = p->ctx;
    uint32_t first = atomic_load_explicit(&p->next, memory_order_relaxed);
    /* Neighbouring tasks read neighbouring memory, which is fetched ahead for one thread only: so long
     * runs first, single tasks at the end. */
    for (;;) {
        while (first >= *end && end < last) end++;
        if (first >= *end) return;
        const uint32_t share = (*end - first) / (2 * p->threads), count = share > 0 ? share : 1;
        if (!atomic_compare_exchange_weak_explicit(&p->next, &first, first + count, memory_order_relaxed,
                                                   memory_order_relaxed))
            continue;
        fn(ctx, first, first + count, worker);
        first = atomic_load_explicit(&p->next, memory_order_relaxed);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct pool *p = w->pool;
    uint64_t last = 0;
    (void)float_mode_enter();
    for (;;) {
        await_job(p, last);
        if (atomic_load(&p->quit)) return NULL;
        atomic_fetch_add(&p->inside, 1);
        const uint64_t state = atomic_load(&p->state);
        if (state & 1) {
            last = state;
            run_tasks(p, w->index);
        }
        if (atomic_fetch_sub(&p->inside, 1) == 1 && atomic_load(&p->caller_parked)) {
            (void)pthread_mutex_lock(&p->lock);
            (void)pthread_cond_signal(&p->idle);
            (void)pthread_mutex_unlock(&p->lock);
        }
    }
}

static void wake_workers(struct pool *p, uint32_t wanted)
{
    const uint32_t parked = atomic_load(&p->parked);
    if (parked == 0) return;
    (void)pthread_mutex_lock(&p->lock);
    if (wanted >= parked)
        (void)pthread_cond_broadcast(&p->wake);
    else
        for (uint32_t i = 0; i < wanted; i++) (void)pthread_cond_signal(&p->wake);
    (void)pthread_mutex_unlock(&p->lock);
}

static void await_idle(struct pool *p)
{
    if (p->spins) {
        const double until = clock_seconds() + SPIN_SECONDS;
        do {
            for (int i = 0; i < 32; i++) {
                if (atomic_load(&p->inside) == 0) return;
                relax();
            }
        } while (clock_seconds() < until);
    } else if (atomic_load(&p->inside) == 0) {
        return;
    }
    (void)pthread_mutex_lock(&p->lock);
    atomic_store(&p->caller_parked, 1);
    while (atomic_load(&p->inside) != 0) (void)pthread_cond_wait(&p->idle, &p->lock);
    atomic_store(&p->caller_parked, 0);
    (void)pthread_mutex_unlock(&p->lock);
}

void pool_await(const struct pool *p, const _Atomic uint32_t *left)
{
    for (uint32_t turn = 1; atomic_load_explicit(left, memory_order_acquire) != 0; turn++)
        if (!p->spins || turn % 4096 == 0)
            (void)sched_yield(); /* who is awaited may have lost its core */
        else
            relax();
}

struct singly {
    pool_fn fn;
    void *ctx;
};

static void run_singly(void *p, uint32_t first, uint32_t end, uint32_t worker)
{
    const struct singly *s = p;
    for (uint32_t task = first; task < end; task++) s->fn(s->ctx, task, worker);
}

void pool_run(struct pool *p, uint32_t tasks, pool_fn fn, void *ctx)
{
    struct singly s = {fn, ctx};
    pool_run_spans(p, tasks, run_singly, &s);
}

void pool_run_spans(struct pool *p, uint32_t tasks, pool_span_fn fn, void *ctx)
{
    pool_run_stages(p, &tasks, 1, fn, ctx);
}

void pool_run_stages(struct pool *p, const uint32_t *end, uint32_t stages, pool_span_fn fn,
                     void *ctx)
{
    const uint32_t tasks = end[stages - 1];
    if (tasks == 0) return;
    (void)pthread_mutex_lock(&p->turn);
    if (tasks == 1 || p->started == 0) {
        for (uint32_t first = 0; stages > 0; stages--, first = *end++)
            if (first < *end) fn(ctx, first, *end, 0);
    } else {
        p->end = end;
        p->stages = stages;
        p->fn = fn;
        p->ctx = ctx;
        atomic_store_explicit(&p->next, 0, memory_order_relaxed);
        const uint64_t open = (atomic_load_explicit(&p->state, memory_order_relaxed) | 1) + 2;
        atomic_store(&p->state, open);
        wake_workers(p, tasks - 1);
        run_tasks(p, 0);
        atomic_store(&p->state, open & ~(uint64_t)1);
        await_idle(p);
    }
    (void)pthread_mutex_unlock(&p->turn);
}

static size_t guard_bytes(void)
{
    const long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (size_t)page : 4096;
}

static bool start_worker(struct pool *p, struct worker *w)
{
    const size_t guard = guard_bytes();
    w->pool = p;
    w->stack = mem_alloc(p->budget, STACK_BYTES);
    if (!w->stack) return false;
    bool ok = mprotect(w->stack, guard, PROT_NONE) == 0;
    pthread_attr_t attr;
    if (ok && pthread_attr_init(&attr) == 0) {
        ok = pthread_attr_setstack(&attr, (char *)w->stack + guard, STACK_BYTES - guard) == 0 &&
             pthread_create(&w->thread, &attr, worker_main, w) == 0;
        (void)pthread_attr_destroy(&attr);
    } else {
        ok = false;
    }
    if (!ok) {
        (void)mprotect(w->stack, guard, PROT_READ | PROT_WRITE);
        mem_free(p->budget, w->stack, STACK_BYTES);
    }
    return ok;
}

static size_t workers_bytes(uint32_t threads)
{
    return (size_t)(threads - 1) * sizeof(struct worker);
}

hr_status pool_create(uint32_t threads, struct mem_budget *b, struct pool **out, hr_error *err)
{
    *out = NULL;
    if (threads < 1 || threads > MOST_THREADS)
        return fail(err, HR_ERR_USAGE, "threads is %u, must be 1..%d", (unsigned)threads,
                    MOST_THREADS);
    struct pool *p = mem_alloc(b, sizeof *p);
    struct worker *workers = mem_alloc(b, workers_bytes(threads));
    if (!p || !workers) {
        mem_free(b, p, sizeof *p);
        mem_free(b, workers, workers_bytes(threads));
        return fail(err, HR_ERR_MEMORY, "no memory for a pool of %u threads: raise ram",
                    (unsigned)threads);
    }
    p->budget = b;
    p->threads = threads;
    p->workers = workers;
    p->spins = threads <= cpu_physical_cores();
    (void)pthread_mutex_init(&p->turn, NULL);
    (void)pthread_mutex_init(&p->lock, NULL);
    (void)pthread_cond_init(&p->wake, NULL);
    (void)pthread_cond_init(&p->idle, NULL);
    for (uint32_t i = 0; i + 1 < threads; i++) {
        workers[i].index = i + 1;
        if (!start_worker(p, &workers[i])) {
            pool_free(p);
            return fail(err, HR_ERR_MEMORY,
                        "cannot start compute thread %u of %u: raise ram or lower threads",
                        (unsigned)(i + 1), (unsigned)threads);
        }
        p->started++;
    }
    *out = p;
    return HR_OK;
}

void pool_free(struct pool *p)
{
    if (!p) return;
    (void)pthread_mutex_lock(&p->lock);
    atomic_store(&p->quit, 1);
    (void)pthread_cond_broadcast(&p->wake);
    (void)pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->started; i++) {
        struct worker *w = &p->workers[i];
        (void)pthread_join(w->thread, NULL);
        (void)mprotect(w->stack, guard_bytes(), PROT_READ | PROT_WRITE);
        mem_free(p->budget, w->stack, STACK_BYTES);
    }
    (void)pthread_cond_destroy(&p->idle);
    (void)pthread_cond_destroy(&p->wake);
    (void)pthread_mutex_destroy(&p->lock);
    (void)pthread_mutex_destroy(&p->turn);
    struct mem_budget *b = p->budget;
    mem_free(b, p->workers, workers_bytes(p->threads));
    mem_free(b, p, sizeof *p);
}

uint32_t pool_threads(const struct pool *p)
{
    return p->threads;
}

uint64_t pool_cost(uint32_t threads)
{
    if (threads < 1) threads = 1;
    return mem_cost(sizeof(struct pool)) + mem_cost(workers_bytes(threads)) +
           (uint64_t)(threads - 1) * mem_cost(STACK_BYTES);
}
