/* Byte-capped cache of expert records as they lie on disk, filled by reader threads, with leases.
 *
 * The one place where files become expert records in memory. A caller asks for a layer's experts,
 * gets leases, waits for them to be ready in whatever order they land, computes, releases.
 *   - A leased record is never evicted or overwritten.
 *   - Hits of a request are leased before any victim is chosen (batch-aware).
 *   - A miss that is colder than every slot, or that finds all leased or in flight, takes a transient
 *     buffer of the caller's lane; when those are busy too, the rest waits for a later call.
 *   - Never holds more than the bytes given at creation.
 */
#ifndef STORE_EXPERT_CACHE_H
#define STORE_EXPERT_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"
#include "store/container.h"

struct expert_cache;

struct cache_options {
    uint32_t slots;        /* records the cache keeps (0 allowed) */
    uint32_t lanes;        /* independent users (sessions), each with its own transient buffers */
    uint32_t transient;    /* buffers per lane, at least 1 */
    uint32_t io_threads;   /* of each drive: most reads in flight */
    uint32_t ahead;        /* buffers per lane for records that may be wanted next */
    uint32_t working_set;  /* layers x top_k records: AUTO policy compares slots with it */
    int32_t policy;        /* HR_CACHE_* */
    int32_t verify;        /* HR_VERIFY_* */
    bool direct;
    bool calibrate;        /* measure at creation how many reads in flight each drive needs */
    uint32_t shuffle_seed; /* 0 = off */
    bool dry;              /* nothing is read, every record is there at once: for simulations */
};

/* Transient buffers that suit: a token's choices in one layer, or as many as are being read and as
 * many being computed. */
static inline uint32_t cache_transient_buffers(uint32_t top_k, uint32_t io_threads)
{
    const uint32_t token = top_k < 8 ? top_k : 8, stream = io_threads < 8 ? 2 * io_threads : 16;
    return token > stream ? token : stream;
}

struct cache_lease {
    uint32_t bank, expert;
    const uint8_t *record; /* the whole record; valid once delivered, until released */
    uint32_t buffer;       /* private */
    uint32_t tag;          /* the caller's: index into its own request list */
};

/* Which tokens of a chunk use each expert: token[first[e]] .. token[first[e + 1] - 1], at least one,
 * ascending. What the last tokens use is the warmest. */
struct cache_uses {
    uint32_t chunk;
    const uint32_t *first, *token;
};

hr_status expert_cache_create(struct container *c, const struct cache_options *o,
                              struct mem_budget *b, struct expert_cache **out, hr_error *err);
void expert_cache_free(struct expert_cache *x);
/* Bytes that expert_cache_create allocates for these options: plans use it. */
uint64_t expert_cache_cost(const struct container *c, const struct cache_options *o);
/* Slots in use from now on, at most as many as created. The others' memory goes back to the system,
 * the coldest first; what is leased follows when it is released, and `wait` waits for that. */
void expert_cache_resize(struct expert_cache *x, uint32_t capacity, bool wait);
/* Bytes of one slot. */
uint64_t expert_cache_slot_bytes(const struct container *c);

/* Begins a layer: `experts` are n distinct ids of `bank` (any order). Leases all hits, then
 * submits reads for as many misses as there are buffers, in disk order. Everything leased here
 * or later must be delivered by cache_next and released. One open batch per lane. A wrong call
 * (unknown bank or expert, a batch still open) is reported by the lane's next cache_next. `uses`
 * NULL: one token wants them all. */
void cache_begin(struct expert_cache *x, uint32_t lane, uint32_t bank, const uint32_t *experts,
                 uint32_t n, const struct cache_uses *uses);
/* The next ready record of the batch, blocking when none is ready and reads are in flight.
 * `block` = false returns *got = false instead of waiting. *got = false with block = true means
 * the batch is finished. A failed read returns its error; cache_abort must follow. Submits
 * further reads as buffers become free. When no read is in flight and the rest of the batch has
 * no buffer because the caller holds its leases, block = true is HR_ERR_USAGE: release first, then
 * go on. *waited adds seconds blocked. */
hr_status cache_next(struct expert_cache *x, uint32_t lane, bool block, struct cache_lease *out,
                     bool *got, double *waited, hr_error *err);
void cache_release(struct expert_cache *x, uint32_t lane, const struct cache_lease *lease);
/* Ends a batch early: waits for its reads in flight, drops all its undelivered leases. Leases
 * delivered but not released must be released by the caller. */
void cache_abort(struct expert_cache *x, uint32_t lane);
/* Begins reads of records that the lane's next batch, of `bank`, may want: they start when no other
 * waits and never take a place in the cache before somebody asks. What is in memory or has no buffer
 * is left out. What the next batch does not ask for is cancelled, or dropped when it is there. */
void cache_read_ahead(struct expert_cache *x, uint32_t lane, uint32_t bank, const uint32_t *experts,
                      uint32_t n);
/* Of the lane's reads ahead so far: how many were asked for later, how many were read in vain. */
void cache_ahead_counts(struct expert_cache *x, uint32_t lane, uint64_t *used, uint64_t *wasted);
/* Whether every record has a slot, so that nothing is read twice. */
bool expert_cache_whole(struct expert_cache *x);

/* hits + misses: requests given a buffer; a request that joins a read in flight is a hit, one for
 * which a record was read ahead is a miss all the same. reads and bytes_read count everything. */
struct cache_stats {
    uint64_t hits, misses, reads, bytes_read, retries, verified, evictions, transient_reads;
    uint64_t leases, slots, used;
    uint64_t ahead_issued, ahead_used, ahead_wasted, ahead_cancelled, ahead_bytes;
    uint64_t fallbacks; /* records that another drive gave after one had failed */
};
void expert_cache_stats(const struct expert_cache *x, struct cache_stats *out);
/* "direct", "buffered" or "mixed". */
const char *expert_cache_io_mode(const struct expert_cache *x);

#endif
