/* The expert cache driven by recorded routes instead of a model: the same code decides what stays,
 * nothing is read. */
#ifndef STORE_REPLAY_H
#define STORE_REPLAY_H

#include "base/mem.h"
#include "base/status.h"

struct replay_setup {
    uint32_t layers, experts, top_k; /* MoE layers, experts of each, most of a token */
    uint32_t slots;
    int32_t policy;   /* HR_CACHE_* */
    uint32_t prefill; /* tokens at the start that are evaluated in chunks */
    uint32_t chunk;   /* tokens of such a chunk, at least 1 */
    uint32_t warm_up; /* tokens at the start whose requests are not counted */
    uint32_t ahead;   /* ranks of a token that are read ahead; 0 = none */
    uint32_t ranks;   /* of guesses, at least `ahead` */
    const int32_t *guesses; /* [tokens][layers][ranks], -1 behind a shorter list */
    double read_seconds, layer_seconds, expert_seconds; /* as in replay_time; all 0: no time passes */
    uint32_t in_flight;
};

struct replay_result {
    uint64_t tokens, hits, misses, evictions, transient_reads; /* after the warm-up */
    uint64_t issued, used, wasted, cancelled;                  /* reads ahead */
    uint64_t alone;                  /* tokens evaluated one by one, and seconds of these */
    double seconds, blocked, wanted; /* in all, waiting, of reading what was missed */
};

/* ids [tokens][layers][top_k], -1 behind a shorter list. misses [top_k + 1] (may be NULL) receives how
 * many counted layers of single tokens missed 0, 1, ... experts. */
hr_status replay_run(const struct replay_setup *s, const int32_t *ids, size_t tokens,
                     uint64_t *misses, struct mem_budget *b, struct replay_result *out,
                     hr_error *err);

#endif
