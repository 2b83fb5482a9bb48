/* Block-sparse attention: an indexer scores blocks of consecutive keys, the best are attended.
 * Below its budget every block is chosen and attention is exactly dense. */
#ifndef NN_SPARSE_SELECT_H
#define NN_SPARSE_SELECT_H

#include "nn/linear.h"
#include "nn/parts.h"

struct sparse_scratch {
    float *q;        /* [n][heads][dim] */
    float *k;        /* [n][dim] */
    float *score;    /* per worker: [blocks of ctx] */
    int32_t *chosen; /* [n][budget / block], ascending; unused when dense */
};

void sparse_carve(struct carve *c, const struct sparse_part *p, uint32_t ctx, uint32_t n,
                  uint32_t workers, struct sparse_scratch *s);

/* Projects, stores the keys of n tokens, and chooses blocks for each. cosine, sine:
 * [n][rope.half] of these tokens. */
void sparse_select(const struct nn *nn, const struct attention_part *p,
                   const struct attention_weights *w, struct attention_state *state,
                   struct sparse_scratch *s, struct linear_input *in, uint32_t position,
                   const float *cosine, const float *sine);

/* Blocks that a token with `keys` visible keys may choose from, and how many it chooses. */
static inline uint32_t sparse_blocks(const struct sparse_part *p, uint32_t keys)
{
    return keys / p->block;
}

static inline uint32_t sparse_kept(const struct sparse_part *p, uint32_t keys)
{
    const uint32_t most = p->budget / p->block, blocks = sparse_blocks(p, keys);
    return blocks < most ? blocks : most;
}

#endif
