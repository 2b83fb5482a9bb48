/* Preloaded into a program: its reads of a page or more share THROTTLE bytes per second, as those of
 * a slower drive would. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef ssize_t (*pread_type)(int, void *, size_t, off_t);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double next_free; /* when the drive will have done what it was asked for */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static ssize_t throttled(const char *name, int fd, void *buffer, size_t n, off_t at)
{
    const pread_type real = (pread_type)dlsym(RTLD_NEXT, name);
    const char *rate = getenv("THROTTLE");
    const ssize_t got = real(fd, buffer, n, at);
    if (got < 4096 || rate == NULL) return got;
    pthread_mutex_lock(&lock);
    const double start = now();
    if (next_free < start) next_free = start;
    next_free += (double)got / atof(rate);
    const double wait = next_free - start;
    pthread_mutex_unlock(&lock);
    const struct timespec pause = {(time_t)wait, (long)((wait - (double)(time_t)wait) * 1e9)};
    nanosleep(&pause, NULL);
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
