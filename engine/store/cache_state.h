/* What the cache is made of; shared by expert_cache.c and cache_setup.c only. */
#ifndef STORE_CACHE_STATE_H
#define STORE_CACHE_STATE_H

#include <pthread.h>

#include "store/cache_policy.h"
#include "store/direct_io.h"
#include "store/expert_cache.h"
#include "store/reader.h"

#define NO_BUFFER UINT32_MAX

enum cache_buffer_state { BUFFER_EMPTY, BUFFER_READING, BUFFER_READY };

/* Buffers 0..slots-1 are the cache; the others are transient: they hold a record only while
 * somebody leases it. A lane may lease at most `transient` of these, whoever had them filled, so
 * one is always free for a lane below its share. */
struct cache_buffer {
    uint32_t bank, expert;
    uint32_t leases;
    uint32_t next_free;
    uint8_t state;
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
    uint32_t slots, buffers, lanes, transient;
    int32_t verify;
    uint32_t random; /* 0 = records are delivered in order */
    uint32_t *first;     /* [banks] number of the bank's expert 0 */
    uint32_t *buffer_of; /* [records] */
    uint8_t *verified;   /* [records] bits */
    struct direct_file *files; /* [banks] */
    struct cache_buffer *buffer;
    struct cache_lane *lane;
    uint32_t free_slot, free_transient; /* list heads */
    struct cache_policy policy;
    struct cache_stats stats;
};

/* The job of a reader thread: fills buffer b and tells who waits for it. */
void cache_read_record(void *cache, uint32_t b);

#endif
