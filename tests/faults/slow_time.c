/* As throttle.c, in a time of its own, so that other programs change nothing: the monotonic clock goes
 * by the processor time of the program, that of all its threads, and leaps to the end of the drive's
 * present read while all are asleep. */
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef ssize_t (*pread_type)(int, void *, size_t, off_t);

/* A thread whose read is over at `end`. */
struct reading {
    struct reading *next;
    double end;
};

static double rate; /* 0: nothing is changed */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, moved = PTHREAD_COND_INITIALIZER;
static struct reading *readings;
static double next_free; /* when the drive will have done what it was asked for */
static double leapt, latest;
static pthread_t keeper;
static long keeper_tid;

static double seconds_of(clockid_t id)
{
    struct timespec t = {0};
    syscall(SYS_clock_gettime, id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* With the lock held. */
static double now(void)
{
    clockid_t own;
    double t = seconds_of(CLOCK_PROCESS_CPUTIME_ID) + leapt + 1;
    if (pthread_getcpuclockid(keeper, &own) == 0) t -= seconds_of(own);
    if (t > latest) latest = t;
    return latest;
}

static bool first_line(const char *tid, const char *name, char *text, size_t bytes)
{
    char path[300];
    snprintf(path, sizeof path, "/proc/self/task/%s/%s", tid, name);
    FILE *file = fopen(path, "re");
    const bool ok = file && fgets(text, (int)bytes, file);
    if (file) fclose(file);
    return ok;
}

/* Nobody runs or waits for a real drive; *ran is what all have run for so far. */
static bool all_asleep(unsigned long long *ran)
{
    char text[1024];
    bool asleep = true;
    DIR *tasks = opendir("/proc/self/task");
    *ran = 0;
    if (!tasks) return false;
    for (const struct dirent *task; asleep && (task = readdir(tasks)) != NULL;) {
        if (task->d_name[0] == '.' || atol(task->d_name) == keeper_tid) continue;
        const char *state = first_line(task->d_name, "stat", text, sizeof text) ? strrchr(text, ')') : NULL;
        asleep = state && state[1] == ' ' && state[2] == 'S' &&
                 first_line(task->d_name, "schedstat", text, sizeof text);
        if (asleep) *ran += strtoull(text, NULL, 10);
    }
    closedir(tasks);
    return asleep;
}

/* One that was woken by another that was seen asleep later is seen the second time. */
static bool idle(void)
{
    unsigned long long before, after;
    return all_asleep(&before) && all_asleep(&after) && before == after;
}

static void *keep_time(void *unused)
{
    (void)unused;
    keeper_tid = syscall(SYS_gettid);
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!readings) pthread_cond_wait(&begun, &lock);
        pthread_mutex_unlock(&lock);
        const struct timespec pause = {0, 20000};
        nanosleep(&pause, NULL);
        const bool leap = idle();
        pthread_mutex_lock(&lock);
        double first = 0;
        for (const struct reading *r = readings; r; r = r->next)
            if (first == 0 || r->end < first) first = r->end;
        const double t = now();
        if (leap && t < first) leapt += first - t;
        if (leap || t >= first) pthread_cond_broadcast(&moved);
    }
    return NULL;
}

__attribute__((constructor)) static void begin(void)
{
    const char *text = getenv("THROTTLE");
    sigset_t all, before;
    if (!text) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&keeper, NULL, keep_time, NULL) != 0) abort();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    rate = atof(text);
}

static ssize_t throttled(const char *name, int fd, void *buffer, size_t n, off_t at)
{
    const pread_type real = (pread_type)dlsym(RTLD_NEXT, name);
    const ssize_t got = real(fd, buffer, n, at);
    if (got < 4096 || rate == 0) return got;
    pthread_mutex_lock(&lock);
    const double start = now();
    if (next_free < start) next_free = start;
    next_free += (double)got / rate;
    struct reading mine = {readings, next_free};
    readings = &mine;
    pthread_cond_signal(&begun);
    while (now() < mine.end) pthread_cond_wait(&moved, &lock);
    struct reading **link = &readings;
    while (*link != &mine) link = &(*link)->next;
    *link = mine.next;
    pthread_mutex_unlock(&lock);
    return got;
}

ssize_t pread(int fd, void *buffer, size_t n, off_t at)
{
    return throttled("pread", fd, buffer, n, at);
}

ssize_t pread64(int fd, void *buffer, size_t n, off_t at)
{
    return throttled("pread64", fd, buffer, n, at);
}

int clock_gettime(clockid_t id, struct timespec *out)
{
    if (rate == 0 || id != CLOCK_MONOTONIC) return (int)syscall(SYS_clock_gettime, id, out);
    pthread_mutex_lock(&lock);
    const double t = now();
    pthread_mutex_unlock(&lock);
    out->tv_sec = (time_t)t;
    out->tv_nsec = (long)((t - (double)out->tv_sec) * 1e9);
    return 0;
}
