/* Reader threads: each drive has a queue and a few reads in flight. Jobs begin in the order they were
 * queued, those of low priority when no other of their drive waits. */
#ifndef STORE_READER_H
#define STORE_READER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

struct reader;
typedef void (*reader_fn)(void *ctx, uint32_t job, uint32_t drive); /* runs on a reader thread */

struct reader_options {
    uint32_t drives, threads; /* threads: of each drive, as many reads can be in flight */
    uint32_t jobs;            /* job numbers are below this; a job waits once at most */
    uint32_t shuffle;         /* not 0: waiting jobs begin in pseudo-random order */
};

hr_status reader_create(const struct reader_options *o, reader_fn fn, void *ctx,
                        struct mem_budget *b, struct reader **out, hr_error *err);
/* Finishes the jobs that have begun, forgets the others. */
void reader_free(struct reader *r);
uint64_t reader_cost(const struct reader_options *o);
/* Reads in flight on a drive from now on: 1 to `threads`, which is the value at first. */
void reader_set_depth(struct reader *r, uint32_t drive, uint32_t depth);
void reader_submit(struct reader *r, uint32_t drive, uint32_t job, bool low);
/* Takes a job back that no thread has begun; false when it is too late. */
bool reader_cancel(struct reader *r, uint32_t drive, uint32_t job);
/* A job of low priority that somebody waits for now. */
void reader_promote(struct reader *r, uint32_t drive, uint32_t job);

#endif
