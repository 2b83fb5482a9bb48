/* Persistent compute threads. Tasks are claimed dynamically; results may never depend on who
 * runs which task. */
#ifndef BASE_POOL_H
#define BASE_POOL_H

#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

struct pool;
typedef void (*pool_fn)(void *ctx, uint32_t task, uint32_t worker); /* worker in [0, pool_threads) */

/* `threads` counts the caller. Workers run in the engine's float mode. */
hr_status pool_create(uint32_t threads, struct mem_budget *b, struct pool **out, hr_error *err);
void pool_free(struct pool *p);
uint32_t pool_threads(const struct pool *p);
uint64_t pool_cost(uint32_t threads); /* bytes for the plan, stacks that will be touched included */
/* Runs fn(ctx, 0..tasks-1) and returns when all are done. Several threads may call at once: calls
 * take turns. Spins briefly, then parks. tasks == 0 returns at once; one task runs on the caller. */
void pool_run(struct pool *p, uint32_t tasks, pool_fn fn, void *ctx);

/* The same for tasks that cost less together: fn does [first, end). */
typedef void (*pool_span_fn)(void *ctx, uint32_t first, uint32_t end, uint32_t worker);
void pool_run_spans(struct pool *p, uint32_t tasks, pool_span_fn fn, void *ctx);
/* Stages of tasks: stage i ends before task end[i], the last one is the end of all. Spans lie within
 * one stage. A later stage begins when the one before is claimed, not when it is done. */
void pool_run_stages(struct pool *p, const uint32_t *end, uint32_t stages, pool_span_fn fn,
                     void *ctx);
/* For a task that needs what tasks of earlier stages leave: returns when they have brought `left`
 * down to 0. Those are being run, since tasks are claimed in order. */
void pool_await(const struct pool *p, const _Atomic uint32_t *left);

#endif
