#include "store/cache_policy.h"

#include <math.h>

#include "headrace.h"

void cache_policy_init(struct cache_policy *p, struct carve *carve, uint32_t records,
                       uint32_t slots, uint32_t working_set, int32_t policy)
{
    /* Below one working set recency alone keeps nothing from one token to the next; around it the
     * last token's records are exactly what fits; above, slow frequency is slightly ahead. */
    const double sets = working_set ? (double)slots / (double)working_set : 2;
    *p = (struct cache_policy){.slots = slots, .half_life = 16};
    p->by_frequency = policy == HR_CACHE_LFU;
    if (policy == HR_CACHE_AUTO) {
        p->by_frequency = sets < 1 || sets > 1.5;
        if (sets > 1.5) p->half_life = 8;
    }
    p->heat = carve_take(carve, records * sizeof *p->heat);
    p->heap = carve_take(carve, slots * sizeof *p->heap);
    p->place = carve_take(carve, slots * sizeof *p->place);
    p->key = carve_take(carve, slots * sizeof *p->key);
    if (carve->base == NULL) return;
    for (uint32_t i = 0; i < records; i++) p->heat[i] = -INFINITY;
    for (uint32_t i = 0; i < slots; i++) p->place[i] = NO_SLOT;
}

void cache_policy_tick(struct cache_policy *p, uint32_t tokens)
{
    if (p->by_frequency) p->now += tokens / p->half_life;
}

/* Frequency: heat is log2 of the sum of 2^(time of each use), time in half-lives, so that all
 * records decay together without being visited. */
void cache_policy_touch(struct cache_policy *p, uint32_t record)
{
    double *h = &p->heat[record];
    if (!p->by_frequency)
        *h = ++p->now;
    else
        *h = fmax(*h, p->now) + log2(1 + exp2(-fabs(*h - p->now)));
}

/* Ties are broken by slot, so that a sequence of requests evicts the same way however its reads
 * were timed. */
static bool colder(const struct cache_policy *p, uint32_t a, uint32_t b)
{
    return p->key[a] < p->key[b] || (p->key[a] == p->key[b] && a < b);
}

static void put(struct cache_policy *p, uint32_t at, uint32_t slot)
{
    p->heap[at] = slot;
    p->place[slot] = at;
}

static void sift_up(struct cache_policy *p, uint32_t at, uint32_t slot)
{
    while (at > 0) {
        const uint32_t parent = (at - 1) / 2;
        if (colder(p, p->heap[parent], slot)) break;
        put(p, at, p->heap[parent]);
        at = parent;
    }
    put(p, at, slot);
}

static void sift_down(struct cache_policy *p, uint32_t at, uint32_t slot)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= p->count) break;
        if (child + 1 < p->count && colder(p, p->heap[child + 1], p->heap[child])) child++;
        if (colder(p, slot, p->heap[child])) break;
        put(p, at, p->heap[child]);
        at = child;
    }
    put(p, at, slot);
}

void cache_policy_offer(struct cache_policy *p, uint32_t slot, uint32_t record)
{
    p->key[slot] = p->heat[record];
    sift_up(p, p->count++, slot);
}

void cache_policy_withdraw(struct cache_policy *p, uint32_t slot)
{
    const uint32_t at = p->place[slot];
    if (at == NO_SLOT) return;
    p->place[slot] = NO_SLOT;
    const uint32_t last = p->heap[--p->count];
    if (last == slot) return;
    if (at > 0 && colder(p, last, p->heap[(at - 1) / 2]))
        sift_up(p, at, last);
    else
        sift_down(p, at, last);
}

uint32_t cache_policy_coldest(const struct cache_policy *p)
{
    return p->count > 0 ? p->heap[0] : NO_SLOT;
}

/* Equal heat keeps what is there: within one token everything new is equally warm, and replacing
 * would sweep the cache once per token. */
bool cache_policy_admits(const struct cache_policy *p, uint32_t record)
{
    return !p->by_frequency || p->count == 0 || p->heat[record] > p->key[p->heap[0]];
}
