/* What the cache is made of; shared by expert_cache.c, cache_buffers.c and cache_setup.c only. */
#ifndef STORE_CACHE_STATE_H
#define STORE_CACHE_STATE_H

#include <pthread.h>

#include "store/cache_policy.h"
#include "store/direct_io.h"
#include "store/expert_cache.h"
#include "store/reader.h"

#define NO_BUFFER UINT32_MAX

enum cache_buffer_state { BUFFER_EMPTY, BUFFER_READING, BUFFER_READY };

/* Slots are the cache. Transient buffers hold a record only while somebody leases it: a lane may
 * lease at most `transient` of these, whoever had them filled, so one is always free for a lane
 * below its share. Closed ones are slots whose memory went back to the system. */
enum cache_buffer_kind { BUFFER_SLOT, BUFFER_TRANSIENT, BUFFER_CLOSED };

struct cache_buffer {
    uint32_t bank, expert;
    uint32_t leases;
    uint32_t next_free;
    uint8_t kind, state;
    bool check; /* the checksum, not only the identity */
};

struct cache_wanted {
    uint32_t expert, tag;
};

struct cache_waiting {
    uint32_t expert, tag, buffer;
};

struct cache_lane {
    pthread_cond_t progress;
    bool asleep, failed;
    uint32_t bank;
    uint32_t transient_held;
    struct cache_wanted *pending; /* without a buffer yet, in disk order */
    uint32_t pending_count;
    struct cache_waiting *waiting; /* leased, not delivered */
    uint32_t waiting_count;
    hr_error error;
};

struct expert_cache {
    pthread_mutex_t lock; /* guards everything below that changes */
    struct container *container;
    struct mem_budget *budget;
    struct reader *reader;
    uint8_t *arena;
    size_t arena_bytes, slot_bytes, bytes;
    uint32_t slots, buffers, lanes, transient; /* slots: as created */
    uint32_t open, capacity; /* slots that are not closed; how many there shall be */
    size_t returned;         /* bytes of the closed ones */
    pthread_cond_t closed;   /* open came down to capacity */
    int32_t verify;
    uint32_t random; /* 0 = records are delivered in order */
    uint32_t *first;     /* [banks + 1] number of the bank's expert 0 */
    uint32_t *buffer_of; /* [records] */
    uint8_t *verified;   /* [records] bits */
    struct direct_file *files; /* [banks] */
    struct cache_buffer *buffer;
    struct cache_lane *lane;
    uint32_t free[3]; /* list heads, by kind */
    struct cache_policy policy;
    struct cache_stats stats;
};

/* cache_buffers.c; all with the lock held. */
static inline uint32_t cache_record_of(const struct expert_cache *x, const struct cache_buffer *f)
{
    return x->first[f->bank] + f->expert;
}
static inline uint8_t *cache_bytes_of(const struct expert_cache *x, uint32_t b)
{
    return x->arena + (size_t)b * x->slot_bytes;
}
/* Whether the lane's share of transient buffers allows it. */
bool cache_may_lease(const struct expert_cache *x, const struct cache_lane *l, uint32_t b);
void cache_lease_buffer(struct expert_cache *x, struct cache_lane *l, uint32_t b);
void cache_unlease_buffer(struct expert_cache *x, struct cache_lane *l, uint32_t b);
/* A buffer for a record that is nowhere: a free slot, the coldest slot if the record is worth it, a
 * transient buffer of the lane's share, or NO_BUFFER. `insist`: the coldest slot rather than none. */
uint32_t cache_take_buffer(struct expert_cache *x, struct cache_lane *l, uint32_t bank,
                           uint32_t record, bool insist);

/* The job of a reader thread: fills buffer b and tells who waits for it. */
void cache_read_record(void *cache, uint32_t b);

#endif
