/* What the cache is made of; shared by the files of the cache only. */
#ifndef STORE_CACHE_STATE_H
#define STORE_CACHE_STATE_H

#include <pthread.h>

#include "store/cache_drives.h"
#include "store/cache_policy.h"
#include "store/direct_io.h"
#include "store/expert_cache.h"
#include "store/reader.h"

#define NO_BUFFER UINT32_MAX

enum cache_buffer_state { BUFFER_EMPTY, BUFFER_READING, BUFFER_READY };

/* Slots are the cache. Transient buffers hold a record only while somebody leases it: a lane may
 * lease at most `transient` of these, whoever had them filled, so one is always free for a lane
 * below its share. Ahead: a record nobody has asked for yet; when somebody does, the buffer changes
 * roles with a free one. Closed ones are slots whose memory went back to the system. */
enum cache_buffer_kind { BUFFER_SLOT, BUFFER_TRANSIENT, BUFFER_AHEAD, BUFFER_CLOSED, BUFFER_KINDS };

struct cache_buffer {
    uint32_t bank, expert;
    uint32_t leases;
    uint32_t next_free;
    uint8_t kind, state;
    uint8_t drive;
    bool check;    /* the checksum, not only the identity */
    bool guess;    /* read ahead, for `lane` */
    bool dropped;  /* ... which no longer wants it */
    uint32_t lane;
};

struct cache_drive {
    struct direct_file *files; /* [banks]; fd -1 where the drive lacks the bank */
    uint8_t *verified;         /* [records] bits */
    uint64_t queued;           /* bytes asked for and not there yet */
    uint32_t pending;          /* reads they belong to */
    uint32_t errors;           /* I/O errors in a row */
    uint32_t passed_over;      /* requests for its banks that others got since it was chosen */
    double since;              /* when pending rose from 0 */
    double rate_bytes, rate_seconds; /* lately, with a read in flight */
    struct cache_drive_stats stats;
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
    uint32_t *ahead; /* buffers read ahead for it that nobody has asked for */
    uint32_t ahead_count;
    uint64_t ahead_used, ahead_wasted;
    hr_error error;
};

struct cache_usage {
    uint32_t *tokens; /* [banks] that were counted */
    uint32_t *count;  /* [records] how many of them used each */
};

struct expert_cache {
    pthread_mutex_t lock; /* guards everything below that changes */
    struct container *container;
    struct mem_budget *budget;
    struct reader *reader;
    uint8_t *arena;
    size_t arena_bytes, slot_bytes, bytes;
    uint32_t slots, buffers, lanes, transient, ahead; /* slots: as created; the last two per lane */
    uint32_t open, capacity; /* slots that are not closed; how many there shall be */
    size_t returned;         /* bytes of the closed ones */
    pthread_cond_t closed;   /* open came down to capacity */
    int32_t verify;
    uint32_t random; /* 0 = records are delivered in order */
    uint32_t *first;     /* [banks + 1] number of the bank's expert 0 */
    uint32_t *buffer_of; /* [records] */
    struct cache_drive *drive; /* [container->drive_count] */
    struct cache_buffer *buffer;
    struct cache_lane *lane;
    uint32_t free[BUFFER_KINDS]; /* list heads */
    struct cache_policy policy;
    struct cache_usage usage;
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

/* The buffer forgets its record and is free; the free buffer `home` takes over the role of b, which
 * was read ahead, and b that of home. */
void cache_empty_buffer(struct expert_cache *x, uint32_t b);
void cache_change_roles(struct expert_cache *x, uint32_t b, uint32_t home);
uint32_t cache_pop_free(struct expert_cache *x, enum cache_buffer_kind kind);

/* cache_drives.c: sends buffer b to be filled from the drive that should have it first; takes that
 * back unless a thread has begun. With the lock held. */
void cache_start_read(struct expert_cache *x, uint32_t b, uint32_t bank, uint32_t expert, bool low);
bool cache_cancel_read(struct expert_cache *x, uint32_t b);
/* Fills buffer b from `drive`, or from another that has the record; without the lock. */
hr_status cache_fill(struct expert_cache *x, uint32_t b, uint32_t drive, hr_error *err);
/* Opens the bank files of all drives; depths by measuring where asked for. */
hr_status cache_open_drives(struct expert_cache *x, bool direct, hr_error *err);
void cache_calibrate(struct expert_cache *x, uint32_t io_threads);
void cache_close_drives(struct expert_cache *x);

/* expert_cache.c: the job of a reader thread; without the lock. */
void cache_read_record(void *cache, uint32_t b, uint32_t drive);

/* cache_ahead.c, with the lock held: a lane asks for what was read ahead; what it has not asked for
 * is given up; a read ahead that nobody has claimed is done. */
void cache_claim(struct expert_cache *x, uint32_t b, uint32_t home);
void cache_settle_ahead(struct expert_cache *x, uint32_t lane);
void cache_ahead_done(struct expert_cache *x, uint32_t b, hr_status s);

/* cache_usage.c, with the lock held: tokens ask a bank; their uses are added to `usage.count`. */
void cache_usage_turn(struct expert_cache *x, uint32_t bank, uint32_t tokens);

#endif
