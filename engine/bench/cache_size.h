/* How large a working set must be to come from memory. */
#ifndef BENCH_CACHE_SIZE_H
#define BENCH_CACHE_SIZE_H

#include <stdint.h>

enum { CACHE_SIZE_UNKNOWN = 64 << 20 }; /* what is assumed where the system does not say */

/* Bytes of the largest cache of the first CPU. `root` is prefixed to /sys paths, for tests. */
uint64_t cache_size_largest(const char *root);

#endif
