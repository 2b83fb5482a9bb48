/* Reader threads: jobs are taken in the order they were queued, a few at a time. */
#ifndef STORE_READER_H
#define STORE_READER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

struct reader;
typedef void (*reader_fn)(void *ctx, uint32_t job); /* runs on a reader thread */

/* `jobs` is the most that can wait at once. shuffle != 0: waiting jobs are taken in pseudo-random
 * order. */
hr_status reader_create(uint32_t threads, uint32_t jobs, uint32_t shuffle, reader_fn fn, void *ctx,
                        struct mem_budget *b, struct reader **out, hr_error *err);
/* Finishes the jobs that have begun, forgets the others. */
void reader_free(struct reader *r);
uint64_t reader_cost(uint32_t threads, uint32_t jobs);
void reader_submit(struct reader *r, uint32_t job);
/* Takes a job back that no thread has begun; false when it is too late. */
bool reader_cancel(struct reader *r, uint32_t job);

#endif
