/* Which record leaves the cache: recency, or use frequency that decays with time.
 *
 * Time is counted in tokens, by a clock for each bank that moves when the bank is asked. A record is
 * as old as the tokens that its own bank has seen since, so that banks whose turn comes later in the
 * same token are not taken for older than those that had theirs. */
#ifndef STORE_CACHE_POLICY_H
#define STORE_CACHE_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/carve.h"

#define NO_SLOT UINT32_MAX

struct cache_policy {
    int32_t kind;          /* HR_CACHE_* */
    bool by_frequency;
    double half_life;      /* tokens */
    double requests;       /* recency: so far */
    double *clock;         /* [banks] frequency: tokens in half-lives */
    double *heat;          /* [records] higher is worth more; on the scale of the bank's clock */
    const uint32_t *first; /* [banks] number of the bank's first record */
    uint32_t banks, turn;  /* turn: the bank that was asked last */
    uint32_t working_set;
    uint32_t *count;       /* [banks] evictable slots */
    uint32_t *heap;        /* [records] of each bank its evictable slots, the coldest first */
    uint32_t *place;       /* [slots] index in the bank's heap, NO_SLOT when not evictable */
    uint32_t *bank, *record; /* [slots] of what lies there */
};

/* A request: the tokens of a chunk of `chunk` that use the record, ascending. */
struct cache_request {
    uint32_t bank, record;
    const uint32_t *token;
    uint32_t tokens, chunk;
};

/* Takes its arrays from `carve`; with base == NULL it only measures. first[banks] stays the caller's.
 * policy is HR_CACHE_*; slots are all that can ever hold a record. */
void cache_policy_init(struct cache_policy *p, struct carve *carve, const uint32_t *first,
                       uint32_t banks, uint32_t records, uint32_t slots, uint32_t working_set,
                       int32_t policy);
/* The half-life that suits a cache of this capacity. */
void cache_policy_resize(struct cache_policy *p, uint32_t capacity);
/* The bank's turn: a chunk of `tokens`. Its requests follow. */
void cache_policy_turn(struct cache_policy *p, uint32_t bank, uint32_t tokens);
/* The record's slot must not be evictable at that moment. */
void cache_policy_touch(struct cache_policy *p, const struct cache_request *r);
/* Before the first request: the record's warmth when that share of all tokens used it before. */
void cache_policy_seed(struct cache_policy *p, uint32_t record, double share);
/* Slot, holding record of bank, may be evicted from now on / no longer. */
void cache_policy_offer(struct cache_policy *p, uint32_t slot, uint32_t bank, uint32_t record);
void cache_policy_withdraw(struct cache_policy *p, uint32_t slot);
/* The slot to evict first; NO_SLOT when there is none. */
uint32_t cache_policy_coldest(const struct cache_policy *p);
/* Whether the record of bank deserves the place of what `slot` holds. */
bool cache_policy_admits(const struct cache_policy *p, uint32_t bank, uint32_t record,
                         uint32_t slot);

#endif
