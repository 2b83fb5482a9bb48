/* Records read before anybody asks, in buffers of their own. */
#include "store/cache_state.h"

void cache_read_ahead(struct expert_cache *x, uint32_t lane, uint32_t bank, const uint32_t *experts,
                      uint32_t n)
{
    if (lane >= x->lanes || bank >= x->container->bank_count) return;
    struct cache_lane *l = &x->lane[lane];
    pthread_mutex_lock(&x->lock);
    for (uint32_t i = 0; i < n && l->ahead_count < x->ahead; i++) {
        if (experts[i] >= x->container->banks[bank].experts) continue;
        if (x->buffer_of[x->first[bank] + experts[i]] != NO_BUFFER) continue;
        const uint32_t b = cache_pop_free(x, BUFFER_AHEAD);
        if (b == NO_BUFFER) break;
        l->ahead[l->ahead_count++] = b;
        x->buffer[b].guess = true;
        x->buffer[b].lane = lane;
        x->stats.ahead_issued++;
        cache_start_read(x, b, bank, experts[i], true);
    }
    pthread_mutex_unlock(&x->lock);
}

/* The lane that had it read no longer follows it. */
static void forget(struct expert_cache *x, uint32_t b)
{
    struct cache_lane *l = &x->lane[x->buffer[b].lane];
    uint32_t i = 0;
    while (l->ahead[i] != b) i++;
    l->ahead[i] = l->ahead[--l->ahead_count];
}

void cache_claim(struct expert_cache *x, uint32_t b, uint32_t home)
{
    struct cache_buffer *f = &x->buffer[b];
    forget(x, b);
    f->dropped = false;
    x->stats.ahead_used++;
    x->lane[f->lane].ahead_used++;
    if (f->state == BUFFER_READING) reader_promote(x->reader, f->drive, b);
    cache_change_roles(x, b, home);
}

static void waste(struct expert_cache *x, uint32_t b)
{
    forget(x, b);
    x->stats.ahead_wasted++;
    x->lane[x->buffer[b].lane].ahead_wasted++;
    cache_empty_buffer(x, b);
}

static bool is_pending(const struct cache_lane *l, const struct cache_buffer *f)
{
    if (f->bank != l->bank) return false;
    for (uint32_t i = 0; i < l->pending_count; i++)
        if (l->pending[i].expert == f->expert) return true;
    return false;
}

void cache_settle_ahead(struct expert_cache *x, uint32_t lane)
{
    struct cache_lane *l = &x->lane[lane];
    for (uint32_t i = l->ahead_count; i-- > 0;) {
        const uint32_t b = l->ahead[i];
        struct cache_buffer *f = &x->buffer[b];
        if (is_pending(l, f)) continue;
        if (f->state == BUFFER_READY) {
            waste(x, b);
        } else if (cache_cancel_read(x, b)) {
            forget(x, b);
            x->stats.ahead_cancelled++;
            cache_empty_buffer(x, b);
        } else {
            f->dropped = true;
        }
    }
}

void cache_ahead_done(struct expert_cache *x, uint32_t b, hr_status s)
{
    if (s != HR_OK || x->buffer[b].dropped)
        waste(x, b);
    else
        x->buffer[b].state = BUFFER_READY;
}

void cache_ahead_counts(struct expert_cache *x, uint32_t lane, uint64_t *used, uint64_t *wasted)
{
    pthread_mutex_lock(&x->lock);
    *used = x->lane[lane].ahead_used;
    *wasted = x->lane[lane].ahead_wasted;
    pthread_mutex_unlock(&x->lock);
}

bool expert_cache_whole(struct expert_cache *x)
{
    pthread_mutex_lock(&x->lock);
    const bool whole = x->capacity >= x->first[x->container->bank_count];
    pthread_mutex_unlock(&x->lock);
    return whole;
}
