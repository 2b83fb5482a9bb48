/* Where the memory goes, decided before anything is loaded. */
#ifndef MODEL_PLAN_H
#define MODEL_PLAN_H

#include "base/memory.h"
#include "model/architecture.h"
#include "store/container.h"
#include "store/expert_cache.h"

struct plan {
    uint32_t ctx, threads, io_threads, chunk, sessions;
    uint32_t slots, total_experts;
    uint64_t working_set_records, record_bytes; /* record_bytes: one slot */
    uint64_t trunk, state, scratch, io, overhead, cache; /* bytes; cache = slots, io = the rest of it */
    uint64_t ram, floor, total, recommended, available;
    uint32_t read_ahead;     /* ranks of a token to guess; 0 = none */
    bool read_ahead_adaptive;
    struct cache_options cache_options;
};

/* Resolves defaults and sizes; succeeds when the container cannot fit (floor > ram): the caller
 * decides. HR_ERR_USAGE for parameters out of range. */
hr_status plan_make(const struct container *c, const struct architecture *a,
                    const hr_model_params *params, const struct memory_probe *memory,
                    struct plan *out, hr_error *err);

/* Bytes of one session: its state, and its scratch with everything else it allocates. */
uint64_t plan_session_state(const struct architecture *a, uint32_t ctx);
uint64_t plan_session_scratch(const struct architecture *a, uint32_t ctx, uint32_t chunk,
                              uint32_t workers, size_t longest);
/* Of that, what generating works in: three numbers and a bit for each id, text that is held back,
 * a token of at most `longest` bytes. generate/generate.c divides it. */
size_t plan_workspace(uint32_t vocab, size_t longest);

#endif
