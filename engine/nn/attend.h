/* Softmax attention of a few query heads over a range of cached keys, in blocks at fixed positions,
 * so that neither chunk size nor threads can change a bit. Shared by all attention mixers. */
#ifndef NN_ATTEND_H
#define NN_ATTEND_H

#include "base/carve.h"
#include "kernels/kernels.h"

struct attend_keys { /* row j of k, v belongs to position j */
    const float *k, *v;
    size_t ldk, ldv;
    uint32_t k_dim, v_dim;
    float scale;
};

/* Query heads that read the same keys, and their running results. */
struct attend_group {
    uint32_t count; /* 1..ATTN_QUERIES */
    bool begun;
    const float *q[ATTN_QUERIES];
    uint32_t end[ATTN_QUERIES]; /* each looks at the keys before its own end */
    float m[ATTN_QUERIES], l[ATTN_QUERIES];
    float *acc[ATTN_QUERIES], *next[ATTN_QUERIES]; /* [v_dim]; next: of one block */
    float *scores;                                 /* [ATTN_QUERIES][ATTN_BLOCK] */
};

/* Queries of one task when `queries` are shared between threads: as many as fit, but some for all. */
uint32_t attend_tile(uint32_t queries, uint32_t at_most, uint32_t threads);
/* Floats of storage for a group with values of v_dim. */
size_t attend_floats(uint32_t v_dim);
/* An empty group in that storage. */
void attend_begin(struct attend_group *g, float *storage, uint32_t v_dim);
/* Another query: returns its place. */
uint32_t attend_add(struct attend_group *g, const float *q, uint32_t end);
/* Adds keys `first` up to each query's end, cut at multiples of ATTN_BLOCK; first is below every
 * end. */
void attend_range(const struct kernels *kern, const struct attend_keys *keys,
                  struct attend_group *g, uint32_t first);
/* A logit that takes part in the denominator only. */
void attend_sink(const struct kernels *kern, float logit, uint32_t v_dim, struct attend_group *g,
                 uint32_t i);
/* out[v_dim] = acc / l */
void attend_finish(const struct attend_group *g, uint32_t i, uint32_t v_dim, float *out);

#endif
