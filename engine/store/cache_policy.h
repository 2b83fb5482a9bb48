/* Which record leaves the cache: recency, or use frequency that decays with time. */
#ifndef STORE_CACHE_POLICY_H
#define STORE_CACHE_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/carve.h"

#define NO_SLOT UINT32_MAX

struct cache_policy {
    bool by_frequency;
    double half_life; /* tokens */
    double now;       /* recency: requests so far; frequency: tokens / half_life */
    double *heat;     /* [records] higher is worth more */
    uint32_t slots, count;
    uint32_t *heap;  /* [slots] evictable slots, the coldest first */
    uint32_t *place; /* [slots] index in heap, NO_SLOT when not evictable */
    double *key;     /* [slots] heat of what lies there */
};

/* Takes its arrays from `carve`; with base == NULL it only measures. policy is HR_CACHE_*. */
void cache_policy_init(struct cache_policy *p, struct carve *carve, uint32_t records,
                       uint32_t slots, uint32_t working_set, int32_t policy);
void cache_policy_tick(struct cache_policy *p, uint32_t tokens);
/* A request for the record. Its slot must not be evictable at that moment. */
void cache_policy_touch(struct cache_policy *p, uint32_t record);
/* Slot, holding record, may be evicted from now on / no longer. */
void cache_policy_offer(struct cache_policy *p, uint32_t slot, uint32_t record);
void cache_policy_withdraw(struct cache_policy *p, uint32_t slot);
/* The slot to evict first; NO_SLOT when there is none. */
uint32_t cache_policy_coldest(const struct cache_policy *p);
/* Whether the record deserves the coldest slot. */
bool cache_policy_admits(const struct cache_policy *p, uint32_t record);

#endif
