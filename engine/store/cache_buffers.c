/* The buffers of the expert cache: which is free, which is leased, which is given up, how many there
 * are. Everything here but expert_cache_resize runs with the lock held. */
#include "store/cache_state.h"

static void push_free(struct expert_cache *x, uint32_t b)
{
    uint32_t *head = &x->free[x->buffer[b].kind];
    x->buffer[b].next_free = *head;
    *head = b;
}

uint32_t cache_pop_free(struct expert_cache *x, enum cache_buffer_kind kind)
{
    const uint32_t b = x->free[kind];
    if (b != NO_BUFFER) x->free[kind] = x->buffer[b].next_free;
    return b;
}

void cache_empty_buffer(struct expert_cache *x, uint32_t b)
{
    struct cache_buffer *f = &x->buffer[b];
    x->buffer_of[cache_record_of(x, f)] = NO_BUFFER;
    if (f->kind == BUFFER_SLOT) x->stats.used--;
    f->state = BUFFER_EMPTY;
    f->guess = f->dropped = false;
    push_free(x, b);
}

void cache_change_roles(struct expert_cache *x, uint32_t b, uint32_t home)
{
    x->buffer[b].kind = x->buffer[home].kind;
    if (x->buffer[b].kind == BUFFER_SLOT) x->stats.used++;
    x->buffer[home].kind = BUFFER_AHEAD;
    push_free(x, home);
}

/* The coldest slot joins the free ones; false when there is none to give up. */
static bool evict(struct expert_cache *x)
{
    const uint32_t coldest = cache_policy_coldest(&x->policy);
    if (coldest == NO_SLOT) return false;
    cache_policy_withdraw(&x->policy, coldest);
    cache_empty_buffer(x, coldest);
    x->stats.evictions++;
    return true;
}

/* Closes slots while there are more than wanted and one is not in use. */
static void close_surplus(struct expert_cache *x)
{
    if (x->open <= x->capacity) return;
    while (x->open > x->capacity) {
        if (x->free[BUFFER_SLOT] == NO_BUFFER && !evict(x)) return;
        const uint32_t b = cache_pop_free(x, BUFFER_SLOT);
        x->buffer[b].kind = BUFFER_CLOSED;
        mem_return(x->budget, cache_bytes_of(x, b), x->slot_bytes, &x->returned);
        push_free(x, b);
        x->open--;
    }
    pthread_cond_broadcast(&x->closed);
}

static void reopen(struct expert_cache *x)
{
    while (x->open < x->capacity) {
        const uint32_t b = x->free[BUFFER_CLOSED];
        if (!mem_retake(x->budget, cache_bytes_of(x, b), x->slot_bytes, &x->returned)) return;
        (void)cache_pop_free(x, BUFFER_CLOSED);
        x->buffer[b].kind = BUFFER_SLOT;
        push_free(x, b);
        x->open++;
    }
}

bool cache_may_lease(const struct expert_cache *x, const struct cache_lane *l, uint32_t b)
{
    return x->buffer[b].kind == BUFFER_SLOT || l->transient_held < x->transient;
}

void cache_lease_buffer(struct expert_cache *x, struct cache_lane *l, uint32_t b)
{
    struct cache_buffer *f = &x->buffer[b];
    if (f->kind == BUFFER_TRANSIENT)
        l->transient_held++;
    else if (f->leases == 0)
        cache_policy_withdraw(&x->policy, b);
    f->leases++;
    x->stats.leases++;
}

void cache_unlease_buffer(struct expert_cache *x, struct cache_lane *l, uint32_t b)
{
    struct cache_buffer *f = &x->buffer[b];
    if (f->kind == BUFFER_TRANSIENT) l->transient_held--;
    x->stats.leases--;
    if (--f->leases > 0) return;
    if (f->state != BUFFER_READY || f->kind == BUFFER_TRANSIENT)
        cache_empty_buffer(x, b);
    else
        cache_policy_offer(&x->policy, b, f->bank, cache_record_of(x, f));
    close_surplus(x);
}

uint32_t cache_take_buffer(struct expert_cache *x, struct cache_lane *l, uint32_t bank,
                           uint32_t record, bool insist)
{
    const uint32_t b = cache_pop_free(x, BUFFER_SLOT);
    if (b != NO_BUFFER) return b;
    const uint32_t coldest = cache_policy_coldest(&x->policy);
    const bool worth = coldest != NO_SLOT && cache_policy_admits(&x->policy, bank, record, coldest);
    if (!worth && l->transient_held < x->transient) {
        const uint32_t passing = cache_pop_free(x, BUFFER_TRANSIENT);
        if (passing != NO_BUFFER) return passing;
    }
    if (!worth && !insist) return NO_BUFFER;
    return evict(x) ? cache_pop_free(x, BUFFER_SLOT) : NO_BUFFER;
}

void expert_cache_resize(struct expert_cache *x, uint32_t capacity, bool wait)
{
    pthread_mutex_lock(&x->lock);
    x->capacity = capacity < x->slots ? capacity : x->slots;
    cache_policy_resize(&x->policy, x->capacity);
    close_surplus(x);
    reopen(x);
    while (wait && x->open > x->capacity) pthread_cond_wait(&x->closed, &x->lock);
    pthread_mutex_unlock(&x->lock);
}
