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

enum { NONE = UINT32_MAX };

struct reader_thread {
    pthread_t thread;
    void *stack;
    struct reader *reader;
    uint32_t drive;
};

struct job_list {
    uint32_t first, last, count;
};

struct drive_queue {
    pthread_cond_t work;
    struct job_list list[2]; /* to be waited for; low priority */
    uint32_t running, depth;
};

struct reader {
    pthread_mutex_t lock;
    reader_fn fn;
    void *ctx;
    struct reader_options options;
    struct drive_queue *queue; /* [drives] */
    uint32_t *next;            /* [jobs] behind each in its list */
    uint32_t random;           /* 0 = in order */
    bool quit;
    uint32_t started;
    struct reader_thread *threads; /* [drives * threads] */
    struct mem_budget *budget;
    size_t bytes;
};

static struct reader *lay_out(struct carve *c, const struct reader_options *o)
{
    struct reader *r = carve_take(c, sizeof *r);
    struct drive_queue *queue = carve_take(c, o->drives * sizeof *queue);
    uint32_t *next = carve_take(c, o->jobs * sizeof *next);
    struct reader_thread *list = carve_take(c, (size_t)o->drives * o->threads * sizeof *list);
    if (c->base == NULL) return NULL;
    r->queue = queue;
    r->next = next;
    r->threads = list;
    return r;
}

static size_t guard_bytes(void)
{
    const long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (size_t)page : 4096;
}

uint64_t reader_cost(const struct reader_options *o)
{
    struct carve c = {0};
    (void)lay_out(&c, o);
    return mem_cost(c.used) + (uint64_t)o->drives * o->threads * mem_cost(STACK_BYTES);
}

/* The job behind `before` (NONE: the first) leaves the list. */
static uint32_t unlink_behind(struct reader *r, struct job_list *l, uint32_t before)
{
    const uint32_t job = before == NONE ? l->first : r->next[before];
    if (before == NONE)
        l->first = r->next[job];
    else
        r->next[before] = r->next[job];
    if (l->last == job) l->last = before;
    l->count--;
    return job;
}

static void append(struct reader *r, struct job_list *l, uint32_t job)
{
    r->next[job] = NONE;
    if (l->count++ == 0)
        l->first = job;
    else
        r->next[l->last] = job;
    l->last = job;
}

static bool unlink_job(struct reader *r, struct job_list *l, uint32_t job)
{
    uint32_t before = NONE;
    for (uint32_t at = l->first, i = 0; i < l->count; before = at, at = r->next[at], i++) {
        if (at != job) continue;
        (void)unlink_behind(r, l, before);
        return true;
    }
    return false;
}

static uint32_t take(struct reader *r, struct drive_queue *q)
{
    struct job_list *l = q->list[0].count > 0 ? &q->list[0] : &q->list[1];
    uint32_t before = NONE;
    if (r->random != 0) {
        r->random ^= r->random << 13;
        r->random ^= r->random >> 17;
        r->random ^= r->random << 5;
        for (uint32_t skip = r->random % l->count; skip > 0; skip--)
            before = before == NONE ? l->first : r->next[before];
    }
    return unlink_behind(r, l, before);
}

static bool may_begin(const struct drive_queue *q)
{
    return q->running < q->depth && q->list[0].count + q->list[1].count > 0;
}

static void *run(void *arg)
{
    const struct reader_thread *t = arg;
    struct reader *r = t->reader;
    struct drive_queue *q = &r->queue[t->drive];
    pthread_mutex_lock(&r->lock);
    for (;;) {
        while (!r->quit && !may_begin(q)) pthread_cond_wait(&q->work, &r->lock);
        if (r->quit) break;
        const uint32_t job = take(r, q);
        q->running++;
        pthread_mutex_unlock(&r->lock);
        r->fn(r->ctx, job, t->drive);
        pthread_mutex_lock(&r->lock);
        q->running--;
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

#if defined(_WIN32)

/* No signal is ever delivered to a thread that is there already. */
static int create_quiet(struct reader_thread *t, const pthread_attr_t *attr)
{
    return pthread_create(&t->thread, attr, run, t);
}

#else

/* Signals of the process are for the program's own threads, except those a fault raises here. */
static int create_quiet(struct reader_thread *t, const pthread_attr_t *attr)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int s = pthread_create(&t->thread, attr, run, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s;
}

#endif

static bool start(struct reader *r, struct reader_thread *t)
{
    const size_t guard = guard_bytes();
    pthread_attr_t attr;

    t->stack = mem_alloc(r->budget, STACK_BYTES);
    if (t->stack == NULL) return false;
    bool ok = mprotect(t->stack, guard, PROT_NONE) == 0;
    if (ok && pthread_attr_init(&attr) == 0) {
        ok = pthread_attr_setstack(&attr, (char *)t->stack + guard, STACK_BYTES - guard) == 0 &&
             create_quiet(t, &attr) == 0;
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

hr_status reader_create(const struct reader_options *o, reader_fn fn, void *ctx,
                        struct mem_budget *b, struct reader **out, hr_error *err)
{
    struct carve c = {0};

    *out = NULL;
    if (o->threads == 0 || o->threads > MOST_THREADS || o->drives == 0 || o->jobs == 0)
        return fail(err, HR_ERR_USAGE, "io_threads must be 1 to %d", MOST_THREADS);
    (void)lay_out(&c, o);
    const size_t bytes = c.used;
    c = (struct carve){.base = mem_alloc(b, bytes)};
    if (c.base == NULL) return fail(err, HR_ERR_MEMORY, "no memory for the read queue");
    struct reader *r = lay_out(&c, o);
    r->fn = fn;
    r->ctx = ctx;
    r->options = *o;
    r->random = o->shuffle;
    r->budget = b;
    r->bytes = bytes;
    pthread_mutex_init(&r->lock, NULL);
    for (uint32_t i = 0; i < o->drives; i++) {
        pthread_cond_init(&r->queue[i].work, NULL);
        r->queue[i].depth = o->threads;
    }
    const uint32_t all = o->drives * o->threads;
    for (; r->started < all; r->started++) {
        struct reader_thread *t = &r->threads[r->started];
        t->reader = r;
        t->drive = r->started % o->drives;
        if (start(r, t)) continue;
        const uint32_t number = r->started + 1;
        reader_free(r);
        return fail(err, HR_ERR_MEMORY, "reader thread %u of %u cannot be started: no memory or no "
                    "thread left", number, all);
    }
    *out = r;
    return HR_OK;
}

void reader_free(struct reader *r)
{
    if (r == NULL) return;
    pthread_mutex_lock(&r->lock);
    r->quit = true;
    for (uint32_t i = 0; i < r->options.drives; i++) pthread_cond_broadcast(&r->queue[i].work);
    pthread_mutex_unlock(&r->lock);
    for (uint32_t i = 0; i < r->started; i++) {
        pthread_join(r->threads[i].thread, NULL);
        (void)mprotect(r->threads[i].stack, guard_bytes(), PROT_READ | PROT_WRITE);
        mem_free(r->budget, r->threads[i].stack, STACK_BYTES);
    }
    for (uint32_t i = 0; i < r->options.drives; i++) pthread_cond_destroy(&r->queue[i].work);
    pthread_mutex_destroy(&r->lock);
    mem_free(r->budget, r, r->bytes);
}

void reader_set_depth(struct reader *r, uint32_t drive, uint32_t depth)
{
    pthread_mutex_lock(&r->lock);
    r->queue[drive].depth = depth < 1 ? 1 : depth < r->options.threads ? depth : r->options.threads;
    pthread_cond_broadcast(&r->queue[drive].work);
    pthread_mutex_unlock(&r->lock);
}

void reader_submit(struct reader *r, uint32_t drive, uint32_t job, bool low)
{
    struct drive_queue *q = &r->queue[drive];
    pthread_mutex_lock(&r->lock);
    append(r, &q->list[low], job);
    pthread_cond_signal(&q->work);
    pthread_mutex_unlock(&r->lock);
}

bool reader_cancel(struct reader *r, uint32_t drive, uint32_t job)
{
    struct drive_queue *q = &r->queue[drive];
    pthread_mutex_lock(&r->lock);
    const bool found = unlink_job(r, &q->list[0], job) || unlink_job(r, &q->list[1], job);
    pthread_mutex_unlock(&r->lock);
    return found;
}

void reader_promote(struct reader *r, uint32_t drive, uint32_t job)
{
    struct drive_queue *q = &r->queue[drive];
    pthread_mutex_lock(&r->lock);
    if (unlink_job(r, &q->list[1], job)) append(r, &q->list[0], job);
    pthread_mutex_unlock(&r->lock);
}
