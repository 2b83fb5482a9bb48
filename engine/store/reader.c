#include "store/reader.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/carve.h"
#include "base/sanitizer.h"

/* A read, a checksum and an error text need less than 32 KiB. The lowest page is the guard, and a
 * run-time checker keeps tables of its own at the top. */
#define STACK_BYTES ((size_t)(HAVE_THREAD_SANITIZER || HAVE_ADDRESS_SANITIZER ? 2048 : 256) << 10)
enum { MOST_THREADS = 256 };

struct reader_thread {
    pthread_t thread;
    void *stack;
};

struct reader {
    pthread_mutex_t lock;
    pthread_cond_t work;
    reader_fn fn;
    void *ctx;
    uint32_t *queue; /* ring */
    uint32_t capacity, head, waiting;
    uint32_t random; /* 0 = in order */
    bool quit;
    uint32_t started;
    struct reader_thread *threads;
    struct mem_budget *budget;
    size_t bytes;
};

static struct reader *lay_out(struct carve *c, uint32_t threads, uint32_t jobs)
{
    struct reader *r = carve_take(c, sizeof *r);
    uint32_t *queue = carve_take(c, jobs * sizeof *queue);
    struct reader_thread *list = carve_take(c, threads * sizeof *list);
    if (c->base == NULL) return NULL;
    r->queue = queue;
    r->threads = list;
    return r;
}

static size_t guard_bytes(void)
{
    const long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (size_t)page : 4096;
}

uint64_t reader_cost(uint32_t threads, uint32_t jobs)
{
    struct carve c = {0};
    (void)lay_out(&c, threads, jobs);
    return mem_cost(c.used) + threads * mem_cost(STACK_BYTES);
}

static uint32_t *entry(struct reader *r, uint32_t i)
{
    return &r->queue[(r->head + i) % r->capacity];
}

static uint32_t take(struct reader *r)
{
    if (r->random != 0) {
        r->random ^= r->random << 13;
        r->random ^= r->random >> 17;
        r->random ^= r->random << 5;
        uint32_t *chosen = entry(r, r->random % r->waiting), *first = entry(r, 0);
        const uint32_t job = *chosen;
        *chosen = *first;
        *first = job;
    }
    const uint32_t job = *entry(r, 0);
    r->head = (r->head + 1) % r->capacity;
    r->waiting--;
    return job;
}

static void *run(void *arg)
{
    struct reader *r = arg;
    pthread_mutex_lock(&r->lock);
    for (;;) {
        while (!r->quit && r->waiting == 0) pthread_cond_wait(&r->work, &r->lock);
        if (r->quit) break;
        const uint32_t job = take(r);
        pthread_mutex_unlock(&r->lock);
        r->fn(r->ctx, job);
        pthread_mutex_lock(&r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* Signals of the process are for the program's own threads, except those a fault raises here. */
static int create_quiet(pthread_t *thread, const pthread_attr_t *attr, struct reader *r)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int s = pthread_create(thread, attr, run, r);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s;
}

static bool start(struct reader *r, struct reader_thread *t)
{
    const size_t guard = guard_bytes();
    pthread_attr_t attr;

    t->stack = mem_alloc(r->budget, STACK_BYTES);
    if (t->stack == NULL) return false;
    bool ok = mprotect(t->stack, guard, PROT_NONE) == 0;
    if (ok && pthread_attr_init(&attr) == 0) {
        ok = pthread_attr_setstack(&attr, (char *)t->stack + guard, STACK_BYTES - guard) == 0 &&
             create_quiet(&t->thread, &attr, r) == 0;
        pthread_attr_destroy(&attr);
    } else {
        ok = false;
    }
    if (!ok) {
        (void)mprotect(t->stack, guard, PROT_READ | PROT_WRITE);
        mem_free(r->budget, t->stack, STACK_BYTES);
        t->stack = NULL;
    }
    return ok;
}

hr_status reader_create(uint32_t threads, uint32_t jobs, uint32_t shuffle, reader_fn fn, void *ctx,
                        struct mem_budget *b, struct reader **out, hr_error *err)
{
    struct carve c = {0};

    *out = NULL;
    if (threads == 0 || threads > MOST_THREADS || jobs == 0)
        return fail(err, HR_ERR_USAGE, "io_threads must be 1 to %d", MOST_THREADS);
    (void)lay_out(&c, threads, jobs);
    const size_t bytes = c.used;
    c = (struct carve){.base = mem_alloc(b, bytes)};
    if (c.base == NULL) return fail(err, HR_ERR_MEMORY, "no memory for the read queue");
    struct reader *r = lay_out(&c, threads, jobs);
    r->fn = fn;
    r->ctx = ctx;
    r->capacity = jobs;
    r->random = shuffle;
    r->budget = b;
    r->bytes = bytes;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->work, NULL);
    for (; r->started < threads; r->started++) {
        if (start(r, &r->threads[r->started])) continue;
        const uint32_t number = r->started + 1;
        reader_free(r);
        return fail(err, HR_ERR_MEMORY, "reader thread %u of %u cannot be started: no memory or no "
                    "thread left", number, threads);
    }
    *out = r;
    return HR_OK;
}

void reader_free(struct reader *r)
{
    if (r == NULL) return;
    pthread_mutex_lock(&r->lock);
    r->quit = true;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
    for (uint32_t i = 0; i < r->started; i++) {
        pthread_join(r->threads[i].thread, NULL);
        (void)mprotect(r->threads[i].stack, guard_bytes(), PROT_READ | PROT_WRITE);
        mem_free(r->budget, r->threads[i].stack, STACK_BYTES);
    }
    pthread_cond_destroy(&r->work);
    pthread_mutex_destroy(&r->lock);
    mem_free(r->budget, r, r->bytes);
}

void reader_submit(struct reader *r, uint32_t job)
{
    pthread_mutex_lock(&r->lock);
    *entry(r, r->waiting++) = job;
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&r->lock);
}

bool reader_cancel(struct reader *r, uint32_t job)
{
    bool found = false;
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; i < r->waiting && !found; i++) {
        if (*entry(r, i) != job) continue;
        for (uint32_t j = i; j + 1 < r->waiting; j++) *entry(r, j) = *entry(r, j + 1);
        r->waiting--;
        found = true;
    }
    pthread_mutex_unlock(&r->lock);
    return found;
}
