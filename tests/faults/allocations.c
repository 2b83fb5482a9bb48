/* Allocations that fail on demand, and what is alive: linked into the program that is tested. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "allocations.h"
#include "plan.h"

/* glibc's own, under the names that it keeps for this. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic int64_t blocks, mapped;

struct alive allocations_alive(void)
{
    return (struct alive){atomic_load(&blocks), atomic_load(&mapped)};
}

static bool refused(enum fault_call call, int code)
{
    if (!fault_wanted(call) || fault_next(call).action == ACT_NONE) return false;
    errno = code;
    return true;
}

static void *counted(void *p)
{
    if (p) atomic_fetch_add(&blocks, 1);
    return p;
}

void *malloc(size_t n)
{
    return refused(CALL_MALLOC, ENOMEM) ? NULL : counted(__libc_malloc(n));
}

void *calloc(size_t n, size_t each)
{
    return refused(CALL_MALLOC, ENOMEM) ? NULL : counted(__libc_calloc(n, each));
}

void *realloc(void *p, size_t n)
{
    if (refused(CALL_MALLOC, ENOMEM)) return NULL;
    void *moved = __libc_realloc(p, n);
    if (!p) return counted(moved);
    if (!moved && n == 0) atomic_fetch_sub(&blocks, 1);
    return moved;
}

void *memalign(size_t alignment, size_t n)
{
    return refused(CALL_MALLOC, ENOMEM) ? NULL : counted(__libc_memalign(alignment, n));
}

void *aligned_alloc(size_t alignment, size_t n)
{
    return memalign(alignment, n);
}

int posix_memalign(void **out, size_t alignment, size_t n)
{
    void *p = memalign(alignment, n);
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

void free(void *p)
{
    if (p) atomic_fetch_sub(&blocks, 1);
    __libc_free(p);
}

void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset)
{
    if (refused(CALL_MMAP, ENOMEM)) return MAP_FAILED;
    void *p = (void *)syscall(SYS_mmap, at, n, protection, flags, fd, offset);
    if (p != MAP_FAILED) atomic_fetch_add(&mapped, (int64_t)n);
    return p;
}

void *mmap64(void *at, size_t n, int protection, int flags, int fd, off64_t offset)
{
    return mmap(at, n, protection, flags, fd, offset);
}

int munmap(void *at, size_t n)
{
    const int done = (int)syscall(SYS_munmap, at, n);
    if (done == 0) atomic_fetch_sub(&mapped, (int64_t)n);
    return done;
}

/* Cutting a piece out of a mapping takes memory, giving it back does not. */
int mprotect(void *at, size_t n, int protection)
{
    if (protection == PROT_NONE && refused(CALL_MPROTECT, ENOMEM)) return -1;
    return (int)syscall(SYS_mprotect, at, n, protection);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
    static __typeof__(&pthread_create) real;
    if (!real) real = (__typeof__(&pthread_create))dlsym(RTLD_NEXT, "pthread_create");
    return refused(CALL_THREAD, EAGAIN) ? EAGAIN : real(thread, attr, run, arg);
}
