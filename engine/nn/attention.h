/* Grouped-query attention; every option of the part is here: q/k norm, partial rotary, biases,
 * sinks, window, output gate, block-sparse selection. */
#ifndef NN_ATTENTION_H
#define NN_ATTENTION_H

#include "nn/linear.h"
#include "nn/parts.h"
#include "nn/sparse_select.h"

struct attention_scratch {
    float *q, *k, *v, *gate; /* [n][...] */
    float *cosine, *sine;    /* [n][rope.half] */
    float *work;             /* per worker */
    struct sparse_scratch sparse;
    struct linear_input out_in;
};

void attention_carve(struct carve *c, const struct attention_part *p, uint32_t ctx, uint32_t n,
                     uint32_t workers, struct attention_scratch *s);
/* in: normed hidden rows of n tokens at positions position.. ; y: [n][hidden]. Appends n keys. */
void attention_forward(const struct nn *nn, const struct attention_part *p,
                       const struct attention_weights *w, struct attention_state *state,
                       struct attention_scratch *s, struct linear_input *in, uint32_t position,
                       float *y, size_t ldy);

#endif
