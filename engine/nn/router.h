/* Which experts a token uses, and with what weight. */
#ifndef NN_ROUTER_H
#define NN_ROUTER_H

#include "nn/linear.h"
#include "nn/parts.h"

struct router_scratch {
    float *scores;  /* [n][experts] */
    float *keys;    /* [n][experts]: what experts are chosen by, where that is not the score */
};
void router_carve(struct carve *c, const struct moe_part *p, uint32_t n, struct router_scratch *s);

/* Routes n tokens. ids, weights: [n][top_k] in rank order: score descending, id ascending. */
void router_forward(const struct nn *nn, const struct moe_part *p, const struct moe_weights *w,
                    struct linear_input *in, struct router_scratch *s, int32_t *ids,
                    float *weights);

/* The k best of n scores under that order; k <= n. */
void router_top_k(const float *scores, uint32_t n, uint32_t k, int32_t *ids);

#endif
