/* The gated delta rule (Gated DeltaNet, arXiv:2412.06464; Kimi Delta Attention, arXiv:2510.26692),
 * recurrent in prefill too: one order of operations whatever the chunk. */
#ifndef NN_DELTA_RULE_H
#define NN_DELTA_RULE_H

#include "nn/linear.h"
#include "nn/parts.h"

struct delta_scratch {
    float *u;       /* [n][channels] raw projections */
    float *c;       /* [n][channels] after convolution, q and k normed */
    float *z, *o;   /* [n][value_heads * value_dim] */
    float *a, *b;   /* [n][delta_decays], [n][value_heads]: decay and beta */
    float *low;     /* [n][decay_rank + gate_rank] */
    float *work;    /* per worker: value_dim */
    float *rate;    /* [value_heads]: exp(a_log) */
    struct linear_input a_in, z_in, out_in;
};

void delta_carve(struct carve *c, const struct delta_part *p, uint32_t n, uint32_t workers,
                 struct delta_scratch *s);
void delta_forward(const struct nn *nn, const struct delta_part *p, const struct delta_weights *w,
                   struct delta_state *state, struct delta_scratch *s, struct linear_input *in,
                   float *y, size_t ldy);

#endif
