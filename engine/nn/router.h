/* Which experts a token uses, and with what weight. */
#ifndef NN_ROUTER_H
#define NN_ROUTER_H

#include "nn/linear.h"
#include "nn/parts.h"

/* Softmax routing of n tokens. scores: [n][experts], overwritten. ids, weights: [n][top_k] in rank
 * order: score descending, id ascending. */
void router_forward(const struct nn *nn, const struct moe_part *p, const struct matrix *router,
                    struct linear_input *in, float *scores, int32_t *ids, float *weights);

/* The k best of n scores under that order; k <= n. */
void router_top_k(const float *scores, uint32_t n, uint32_t k, int32_t *ids);

#endif
