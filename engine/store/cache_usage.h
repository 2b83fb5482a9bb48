/* How many tokens used each record, kept from one run to the next in a file (formats/usage.md). The
 * cache begins with what the counts say of each record's warmth; from then on that decays as uses do. */
#ifndef STORE_CACHE_USAGE_H
#define STORE_CACHE_USAGE_H

#include "store/expert_cache.h"

/* Whether the file is whole and of this container; reads all of it and keeps nothing. */
hr_status cache_usage_check(const struct container *c, const char *path, hr_error *err);
/* Takes over the file's counts; before the first request. After an error the cache must be freed. */
hr_status cache_usage_load(struct expert_cache *x, const char *path, hr_error *err);
/* Writes the counts, those taken over included. Others may use the cache meanwhile. */
hr_status cache_usage_save(struct expert_cache *x, const char *path, hr_error *err);

#endif
