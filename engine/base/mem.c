#include "base/mem.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/sanitizer.h"

#if !defined(MAP_ANONYMOUS) && defined(MAP_ANON)
#define MAP_ANONYMOUS MAP_ANON
#endif

#define SMALL_ALIGNMENT ((size_t)64)
#define SMALL_OVERHEAD ((size_t)64) /* the allocator's header and what aligning wastes */
#define LARGE_ALIGNMENT ((size_t)4096)
#define LARGE_BYTES ((size_t)64 << 10)

static size_t page_bytes(void)
{
    const long page = sysconf(_SC_PAGESIZE);
    return page > (long)LARGE_ALIGNMENT ? (size_t)page : LARGE_ALIGNMENT;
}

/* The bytes asked of the system and the bytes charged; false when they do not fit a size_t. */
static bool block_size(size_t bytes, size_t *block, size_t *cost)
{
    if (bytes > SIZE_MAX / 2) return false;
    if (bytes >= LARGE_BYTES) {
        *block = round_up(bytes, page_bytes());
        *cost = *block;
    } else {
        *block = round_up(bytes ? bytes : 1, SMALL_ALIGNMENT);
        *cost = *block + SMALL_OVERHEAD;
    }
    return true;
}

void mem_budget_init(struct mem_budget *b, uint64_t limit)
{
    atomic_init(&b->used, 0);
    atomic_init(&b->peak, 0);
    atomic_init(&b->limit, limit);
}

static bool charge(struct mem_budget *b, uint64_t cost)
{
    if (!b) return true;
    const uint64_t set = atomic_load_explicit(&b->limit, memory_order_relaxed);
    const uint64_t limit = set ? set : UINT64_MAX;
    uint64_t used = atomic_load_explicit(&b->used, memory_order_relaxed);
    do {
        if (used > limit || cost > limit - used) return false;
    } while (!atomic_compare_exchange_weak(&b->used, &used, used + cost));

    uint64_t peak = atomic_load_explicit(&b->peak, memory_order_relaxed);
    while (peak < used + cost && !atomic_compare_exchange_weak(&b->peak, &peak, used + cost)) {
    }
    return true;
}

static void uncharge(struct mem_budget *b, uint64_t cost)
{
    if (b) atomic_fetch_sub(&b->used, cost);
}

/* Under AddressSanitizer every block comes from its allocator, which guards both ends. */
static bool is_mapped(size_t bytes)
{
    return !HAVE_ADDRESS_SANITIZER && bytes >= LARGE_BYTES;
}

static void *map(size_t block)
{
    void *p = mmap(NULL, block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

#if defined(MADV_HUGEPAGE)
/* Begins with a huge page: what lies before the first one would stay in small ones. */
static void *map_huge(size_t block)
{
    enum { PAGE = 2 << 20 };
    uint8_t *p = block <= SIZE_MAX - PAGE ? map(block + PAGE) : NULL;
    if (!p) return map(block);
    const size_t before = (PAGE - (uintptr_t)p % PAGE) % PAGE;
    if (before > 0) (void)munmap(p, before);
    (void)munmap(p + before + block, PAGE - before);
    (void)madvise(p + before, block, MADV_HUGEPAGE);
    return p + before;
}
#endif

static void *take(size_t bytes, size_t block)
{
    if (!is_mapped(bytes)) {
        void *p = NULL;
        const size_t alignment = bytes >= LARGE_BYTES ? page_bytes() : SMALL_ALIGNMENT;
        if (posix_memalign(&p, alignment, block) != 0) return NULL;
        memset(p, 0, block);
        return p;
    }
#if defined(MADV_HUGEPAGE)
    if (block >= MEM_HUGE_PAGES) return map_huge(block);
#endif
    return map(block);
}

void *mem_alloc(struct mem_budget *b, size_t bytes)
{
    size_t block, cost;
    if (!block_size(bytes, &block, &cost) || !charge(b, cost)) return NULL;
    void *p = take(bytes, block);
    if (!p) uncharge(b, cost);
    return p;
}

static void give_back(void *p)
{
#if defined(_WIN32)
    posix_aligned_free(p); /* what posix_memalign gave is not for free() there */
#else
    free(p);
#endif
}

void mem_free_returned(struct mem_budget *b, void *p, size_t bytes, size_t returned)
{
    size_t block, cost;
    if (!p || !block_size(bytes, &block, &cost)) return;
    if (is_mapped(bytes))
        (void)munmap(p, block);
    else
        give_back(p);
    uncharge(b, cost - returned);
}

void mem_free(struct mem_budget *b, void *p, size_t bytes)
{
    mem_free_returned(b, p, bytes, 0);
}

static size_t whole_pages(void *part, size_t bytes, uint8_t **first)
{
    const size_t page = page_bytes(), before = (size_t)(-(uintptr_t)part & (page - 1));
    *first = (uint8_t *)part + before;
    return bytes > before ? (bytes - before) & ~(page - 1) : 0;
}

void mem_return(struct mem_budget *b, void *part, size_t bytes, size_t *returned)
{
    uint8_t *first;
    const size_t n = whole_pages(part, bytes, &first);
    if (n == 0) return;
#if defined(__linux__)
    (void)madvise(first, n, MADV_DONTNEED);
#else
    /* Elsewhere MADV_DONTNEED may keep the pages; a new mapping in their place does not. */
    if (!HAVE_ADDRESS_SANITIZER)
        (void)mmap(first, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#endif
    *returned += n;
    uncharge(b, n);
}

bool mem_retake(struct mem_budget *b, void *part, size_t bytes, size_t *returned)
{
    uint8_t *first;
    const size_t n = whole_pages(part, bytes, &first);
    if (!charge(b, n)) return false;
    *returned -= n;
    return true;
}

int mem_lock(void *p, size_t bytes)
{
    if (mlock(p, bytes) == 0) return 0;
    const int code = errno;
    (void)munlock(p, bytes); /* of pages locked before one could not be brought in */
    return code;
}

void mem_unlock(void *p, size_t bytes)
{
    (void)munlock(p, bytes);
}

uint64_t mem_cost(size_t bytes)
{
    size_t block, cost;
    return block_size(bytes, &block, &cost) ? (uint64_t)cost : UINT64_MAX;
}

bool size_mul(size_t a, size_t b, size_t *out)
{
    if (b != 0 && a > SIZE_MAX / b) return false;
    *out = a * b;
    return true;
}

bool size_add(size_t a, size_t b, size_t *out)
{
    if (a > SIZE_MAX - b) return false;
    *out = a + b;
    return true;
}

size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) & ~(unit - 1);
}
