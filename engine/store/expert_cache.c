#include "store/expert_cache.h"

#include <string.h>

#include "base/clock.h"
#include "store/cache_state.h"

/* Everything but the public functions runs with the lock held. */

static uint32_t random_below(struct expert_cache *x, uint32_t n)
{
    x->random ^= x->random << 13;
    x->random ^= x->random >> 17;
    x->random ^= x->random << 5;
    return x->random % n;
}

static void wait_for(struct cache_lane *l, struct cache_wanted w, uint32_t b)
{
    l->waiting[l->waiting_count++] = (struct cache_waiting){w.expert, w.tag, b};
}

static void forget_waiting(struct cache_lane *l, uint32_t i)
{
    l->waiting_count--;
    memmove(&l->waiting[i], &l->waiting[i + 1], (l->waiting_count - i) * sizeof l->waiting[i]);
}

/* Gives as many pending items a buffer as there are, in disk order; with `insist` at least one while
 * nothing is on its way. */
static void submit(struct expert_cache *x, struct cache_lane *l, bool insist)
{
    uint32_t i = 0, kept = 0;
    if (l->failed) return;
    for (; i < l->pending_count; i++) {
        const struct cache_wanted w = l->pending[i];
        const uint32_t record = x->first[l->bank] + w.expert;
        uint32_t b = x->buffer_of[record];
        const bool ahead = b != NO_BUFFER && x->buffer[b].kind == BUFFER_AHEAD;
        if (b != NO_BUFFER && !ahead && !cache_may_lease(x, l, b)) {
            l->pending[kept++] = w;
            continue;
        }
        if (b != NO_BUFFER && !ahead) { /* another lane had it read meanwhile */
            cache_lease_buffer(x, l, b);
            x->stats.hits++;
            wait_for(l, w, b);
            continue;
        }
        const uint32_t home =
            cache_take_buffer(x, l, l->bank, record, insist && l->waiting_count == 0);
        if (home == NO_BUFFER) break;
        if (ahead)
            cache_claim(x, b, home);
        else
            cache_start_read(x, b = home, l->bank, w.expert, false);
        x->stats.misses++;
        if (x->buffer[b].kind == BUFFER_TRANSIENT) x->stats.transient_reads++;
        cache_lease_buffer(x, l, b);
        wait_for(l, w, b);
    }
    memmove(&l->pending[kept], &l->pending[i], (l->pending_count - i) * sizeof *l->pending);
    l->pending_count -= i - kept;
}

static void wake(struct expert_cache *x, uint32_t bank)
{
    for (uint32_t i = 0; i < x->lanes; i++)
        if (x->lane[i].asleep && x->lane[i].bank == bank)
            pthread_cond_signal(&x->lane[i].progress);
}

/* The failure reaches every lane that waits for the buffer, and the buffer becomes free. */
static void fail_waiters(struct expert_cache *x, uint32_t b, const hr_error *error)
{
    for (uint32_t i = 0; i < x->lanes; i++) {
        struct cache_lane *l = &x->lane[i];
        for (uint32_t j = l->waiting_count; j-- > 0;) {
            if (l->waiting[j].buffer != b) continue;
            forget_waiting(l, j);
            if (!l->failed) l->error = *error;
            l->failed = true;
            cache_unlease_buffer(x, l, b);
        }
    }
}

static void read_done(struct expert_cache *x, uint32_t b, hr_status s, const hr_error *error)
{
    const uint32_t bank = x->buffer[b].bank;
    if (x->buffer[b].kind == BUFFER_AHEAD)
        cache_ahead_done(x, b, s);
    else if (s == HR_OK)
        x->buffer[b].state = BUFFER_READY;
    else
        fail_waiters(x, b, error);
    wake(x, bank);
}

void cache_read_record(void *cache, uint32_t b, uint32_t drive)
{
    struct expert_cache *x = cache;
    hr_error error = {0};
    const hr_status s = cache_fill(x, b, drive, &error);
    pthread_mutex_lock(&x->lock);
    read_done(x, b, s, &error);
    pthread_mutex_unlock(&x->lock);
}

/* Shell sort: batches are short and often sorted already, and nothing may be allocated. */
static void sort_by_expert(struct cache_wanted *w, uint32_t n)
{
    uint32_t gap = 1;
    while (gap < n / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3) {
        for (uint32_t i = gap; i < n; i++) {
            const struct cache_wanted v = w[i];
            uint32_t j = i;
            for (; j >= gap && w[j - gap].expert > v.expert; j -= gap) w[j] = w[j - gap];
            w[j] = v;
        }
    }
}

static hr_status check_batch(const struct expert_cache *x, const struct cache_lane *l,
                             uint32_t bank, const uint32_t *experts, uint32_t n, hr_error *err)
{
    const struct container *c = x->container;
    if (l->failed || l->pending_count > 0 || l->waiting_count > 0)
        return fail(err, HR_ERR_USAGE, "the lane's batch before this one is not finished");
    if (bank >= c->bank_count || n > c->banks[bank].experts)
        return fail(err, HR_ERR_USAGE, "no such bank, or more experts than it has");
    for (uint32_t i = 0; i < n; i++)
        if (experts[i] >= c->banks[bank].experts)
            return fail(err, HR_ERR_USAGE, "layer %u has no expert %u", c->banks[bank].layer,
                        experts[i]);
    return HR_OK;
}

void cache_begin(struct expert_cache *x, uint32_t lane, uint32_t bank, const uint32_t *experts,
                 uint32_t n, const struct cache_uses *uses)
{
    static const uint32_t zero = 0;
    if (lane >= x->lanes) return; /* cache_next says so */
    struct cache_lane *l = &x->lane[lane];
    pthread_mutex_lock(&x->lock);
    if (check_batch(x, l, bank, experts, n, l->failed ? NULL : &l->error) != HR_OK) {
        l->failed = true;
        pthread_mutex_unlock(&x->lock);
        return;
    }
    l->bank = bank;
    cache_policy_turn(&x->policy, bank, uses ? uses->chunk : 1);
    cache_usage_turn(x, bank, uses ? uses->chunk : 1);
    for (uint32_t i = 0; i < n; i++) {
        const struct cache_wanted w = {experts[i], i};
        const uint32_t record = x->first[bank] + w.expert, b = x->buffer_of[record];
        struct cache_request request = {bank, record, &zero, 1, 1};
        if (uses) {
            const uint32_t first = uses->first[w.expert];
            request.token = uses->token + first;
            request.tokens = uses->first[w.expert + 1] - first;
            request.chunk = uses->chunk;
        }
        if (b != NO_BUFFER && x->buffer[b].kind != BUFFER_AHEAD && cache_may_lease(x, l, b)) {
            cache_lease_buffer(x, l, b);
            x->stats.hits++;
            wait_for(l, w, b);
        } else {
            l->pending[l->pending_count++] = w;
        }
        cache_policy_touch(&x->policy, &request);
        x->usage.count[record] += request.tokens;
    }
    sort_by_expert(l->pending, l->pending_count);
    submit(x, l, false);
    cache_settle_ahead(x, lane);
    pthread_mutex_unlock(&x->lock);
}

/* An item whose record is there, in order or (testing) any; NO_BUFFER when all are being read. */
static uint32_t pick_ready(struct expert_cache *x, const struct cache_lane *l)
{
    uint32_t ready = 0;
    for (uint32_t i = 0; i < l->waiting_count; i++) {
        if (x->buffer[l->waiting[i].buffer].state != BUFFER_READY) continue;
        if (x->random == 0) return i;
        ready++;
    }
    if (ready == 0) return NO_BUFFER;
    uint32_t skip = random_below(x, ready);
    for (uint32_t i = 0;; i++) {
        if (x->buffer[l->waiting[i].buffer].state != BUFFER_READY) continue;
        if (skip-- == 0) return i;
    }
}

static void sleep_until_progress(struct expert_cache *x, struct cache_lane *l)
{
    l->asleep = true;
    pthread_cond_wait(&l->progress, &x->lock);
    l->asleep = false;
}

static hr_status next(struct expert_cache *x, struct cache_lane *l, bool block,
                      struct cache_lease *out, bool *got, double *waited, hr_error *err)
{
    for (;;) {
        submit(x, l, block);
        if (l->failed) {
            if (err != NULL) *err = l->error;
            return (hr_status)l->error.code;
        }
        const uint32_t i = pick_ready(x, l);
        if (i != NO_BUFFER) {
            const struct cache_waiting w = l->waiting[i];
            *out = (struct cache_lease){
                .bank = l->bank,
                .expert = w.expert,
                .record = cache_bytes_of(x, w.buffer),
                .buffer = w.buffer,
                .tag = w.tag,
            };
            forget_waiting(l, i);
            *got = true;
            return HR_OK;
        }
        if (!block || (l->waiting_count == 0 && l->pending_count == 0)) return HR_OK;
        if (l->waiting_count == 0)
            return fail(err, HR_ERR_USAGE, "%u experts of layer %u wait for a buffer and all are "
                        "leased: release some first", l->pending_count,
                        x->container->banks[l->bank].layer);
        const double start = clock_seconds();
        sleep_until_progress(x, l);
        if (waited != NULL) *waited += clock_seconds() - start;
    }
}

hr_status cache_next(struct expert_cache *x, uint32_t lane, bool block, struct cache_lease *out,
                     bool *got, double *waited, hr_error *err)
{
    *got = false;
    if (lane >= x->lanes) return fail(err, HR_ERR_USAGE, "there is no lane %u", lane);
    pthread_mutex_lock(&x->lock);
    const hr_status s = next(x, &x->lane[lane], block, out, got, waited, err);
    pthread_mutex_unlock(&x->lock);
    return s;
}

void cache_release(struct expert_cache *x, uint32_t lane, const struct cache_lease *given)
{
    if (lane >= x->lanes || given->buffer >= x->buffers) return;
    struct cache_lane *l = &x->lane[lane];
    pthread_mutex_lock(&x->lock);
    if (x->buffer[given->buffer].leases > 0) {
        cache_unlease_buffer(x, l, given->buffer);
        submit(x, l, false);
    }
    pthread_mutex_unlock(&x->lock);
}

/* Reads that nobody else wants and no thread has begun are taken back. */
static void cancel_queued(struct expert_cache *x, struct cache_lane *l)
{
    for (uint32_t i = l->waiting_count; i-- > 0;) {
        const uint32_t b = l->waiting[i].buffer;
        if (x->buffer[b].state != BUFFER_READING || x->buffer[b].leases > 1) continue;
        if (!cache_cancel_read(x, b)) continue;
        forget_waiting(l, i);
        cache_unlease_buffer(x, l, b);
    }
}

static bool is_reading(const struct expert_cache *x, const struct cache_lane *l)
{
    for (uint32_t i = 0; i < l->waiting_count; i++)
        if (x->buffer[l->waiting[i].buffer].state == BUFFER_READING) return true;
    return false;
}

void cache_abort(struct expert_cache *x, uint32_t lane)
{
    if (lane >= x->lanes) return;
    struct cache_lane *l = &x->lane[lane];
    pthread_mutex_lock(&x->lock);
    l->pending_count = 0;
    cancel_queued(x, l);
    while (is_reading(x, l)) sleep_until_progress(x, l);
    while (l->waiting_count > 0) cache_unlease_buffer(x, l, l->waiting[--l->waiting_count].buffer);
    l->failed = false;
    pthread_mutex_unlock(&x->lock);
}
