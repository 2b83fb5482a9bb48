/* What Windows knows about cores and caches. */
#ifndef WINDOWS_PROCESSORS_H
#define WINDOWS_PROCESSORS_H

#include <stdint.h>

/* Cores with a logical processor that this process may use, and that its job's CPU limit leaves. */
uint32_t processors_cores(void);
/* Bytes of the largest cache; 0 when unknown. */
uint64_t processors_largest_cache(void);

#endif
