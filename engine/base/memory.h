/* What this machine and this process may use, and do use. */
#ifndef BASE_MEMORY_H
#define BASE_MEMORY_H

#include <stdint.h>

struct memory_probe {
    uint64_t physical;  /* RAM of the machine */
    uint64_t available; /* MemAvailable (Linux), free + inactive + purgeable (macOS) */
    uint64_t cgroup;    /* smallest room left (limit - what is used and not reclaimable) under memory.max,
                           memory.high (v2) or memory.limit_in_bytes (v1) on the path to the root;
                           UINT64_MAX when none */
    uint64_t rlimit;    /* what RLIMIT_AS and RLIMIT_DATA leave, UINT64_MAX when none */
    uint64_t usable;    /* the smallest of all; never 0 */
};

/* `root` is prefixed to /proc and /sys paths so that tests can lay their own tree; "" normally. */
void memory_probe_read(const char *root, struct memory_probe *out);
/* The default budget: three quarters of usable. */
uint64_t memory_default_budget(const struct memory_probe *p);
/* Resident bytes of this process now; 0 when unknown. */
uint64_t memory_rss(void);

#endif
