#include "store/cache_policy.h"

#include <math.h>

#include "headrace.h"

/* Uses further back than this add less than a millionth. */
enum { HALF_LIVES_SEEN = 20 };
/* Heats that differ by rounding alone are equal. */
#define SAME 1e-9

void cache_policy_init(struct cache_policy *p, struct carve *carve, const uint32_t *first,
                       uint32_t banks, uint32_t records, uint32_t slots, uint32_t working_set,
                       int32_t policy)
{
    *p = (struct cache_policy){.kind = policy, .first = first, .banks = banks,
                               .working_set = working_set};
    p->by_frequency = policy != HR_CACHE_LRU;
    p->clock = carve_take(carve, banks * sizeof *p->clock);
    p->heat = carve_take(carve, records * sizeof *p->heat);
    p->count = carve_take(carve, banks * sizeof *p->count);
    p->heap = carve_take(carve, records * sizeof *p->heap);
    p->place = carve_take(carve, slots * sizeof *p->place);
    p->bank = carve_take(carve, slots * sizeof *p->bank);
    p->record = carve_take(carve, slots * sizeof *p->record);
    if (carve->base == NULL) return;
    for (uint32_t i = 0; i < records; i++) p->heat[i] = -INFINITY;
    for (uint32_t i = 0; i < slots; i++) p->place[i] = NO_SLOT;
    cache_policy_resize(p, slots);
}

/* A cache of s working sets holds the choices of about s tokens, and older ones say the less the
 * fewer it holds. Below one only what is used again and again is worth keeping. Replayed traces of
 * three models gave the exponent (docs/findings.md). */
void cache_policy_resize(struct cache_policy *p, uint32_t capacity)
{
    const double sets = p->working_set ? capacity / (double)p->working_set : 2;
    const double suits = sets < 1 ? fmin(8, 1 / fmax(sets, 0.125)) : fmin(16, pow(sets, 4.0 / 3));
    p->half_life = p->kind == HR_CACHE_LFU ? 16 : suits;
}

void cache_policy_turn(struct cache_policy *p, uint32_t bank, uint32_t tokens)
{
    p->turn = bank;
    if (p->by_frequency) p->clock[bank] += tokens / p->half_life;
}

/* Frequency: heat is log2 of the sum of 2^(time of each use), time in half-lives, so that all
 * records of a bank decay together without being visited. */
void cache_policy_touch(struct cache_policy *p, const struct cache_request *r)
{
    double *h = &p->heat[r->record], sum = 0;
    if (!p->by_frequency) {
        *h = ++p->requests;
        return;
    }
    for (uint32_t i = r->tokens; i-- > 0;) {
        const double age = (r->chunk - 1 - r->token[i]) / p->half_life;
        if (age > HALF_LIVES_SEEN && sum > 0) break;
        sum += exp2(-fmin(age, 1000));
    }
    const double now = p->clock[r->bank] + log2(sum);
    *h = fmax(*h, now) + log2(1 + exp2(-fabs(*h - now)));
}

/* What its uses would add up to, four times: without a past of its own a cache errs less that way.
 * By recency: older than any request. */
void cache_policy_seed(struct cache_policy *p, uint32_t record, double share)
{
    p->heat[record] = p->by_frequency ? 2 + log2(share / (1 - exp2(-1 / p->half_life))) : share - 1;
}

static double warmth(const struct cache_policy *p, uint32_t bank, uint32_t record)
{
    return p->heat[record] - p->clock[bank];
}

/* Ties are broken by slot, so that a sequence of requests evicts the same way however its reads
 * were timed. */
static bool colder(const struct cache_policy *p, uint32_t a, uint32_t b)
{
    const double x = p->heat[p->record[a]], y = p->heat[p->record[b]];
    return x < y || (x == y && a < b);
}

static void put(struct cache_policy *p, uint32_t *heap, uint32_t at, uint32_t slot)
{
    heap[at] = slot;
    p->place[slot] = at;
}

static void sift_up(struct cache_policy *p, uint32_t *heap, uint32_t at, uint32_t slot)
{
    while (at > 0) {
        const uint32_t parent = (at - 1) / 2;
        if (colder(p, heap[parent], slot)) break;
        put(p, heap, at, heap[parent]);
        at = parent;
    }
    put(p, heap, at, slot);
}

static void sift_down(struct cache_policy *p, uint32_t *heap, uint32_t count, uint32_t at,
                      uint32_t slot)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && colder(p, heap[child + 1], heap[child])) child++;
        if (colder(p, slot, heap[child])) break;
        put(p, heap, at, heap[child]);
        at = child;
    }
    put(p, heap, at, slot);
}

void cache_policy_offer(struct cache_policy *p, uint32_t slot, uint32_t bank, uint32_t record)
{
    p->bank[slot] = bank;
    p->record[slot] = record;
    sift_up(p, p->heap + p->first[bank], p->count[bank]++, slot);
}

void cache_policy_withdraw(struct cache_policy *p, uint32_t slot)
{
    const uint32_t at = p->place[slot], bank = p->bank[slot];
    uint32_t *heap = p->heap + p->first[bank];
    if (at == NO_SLOT) return;
    p->place[slot] = NO_SLOT;
    const uint32_t count = --p->count[bank], last = heap[count];
    if (last == slot) return;
    if (at > 0 && colder(p, last, heap[(at - 1) / 2]))
        sift_up(p, heap, at, last);
    else
        sift_down(p, heap, count, at, last);
}

/* Among equals the bank whose turn was last: it is asked again after all others. */
uint32_t cache_policy_coldest(const struct cache_policy *p)
{
    uint32_t best = NO_SLOT, bank = p->turn;
    double least = INFINITY;
    for (uint32_t i = 0; i < p->banks; i++, bank = (bank ? bank : p->banks) - 1) {
        if (p->count[bank] == 0) continue;
        const uint32_t slot = p->heap[p->first[bank]];
        const double w = warmth(p, bank, p->record[slot]);
        if (best != NO_SLOT && w >= least - SAME) continue;
        best = slot;
        least = w;
    }
    return best;
}

/* Equal heat keeps what is there: within one token everything new is equally warm, and replacing
 * would sweep the cache once per token. */
bool cache_policy_admits(const struct cache_policy *p, uint32_t bank, uint32_t record,
                         uint32_t slot)
{
    return !p->by_frequency ||
           warmth(p, bank, record) > warmth(p, p->bank[slot], p->record[slot]) + SAME;
}
