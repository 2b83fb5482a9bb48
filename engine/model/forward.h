/* One pass over the layers for a chunk of tokens: the reading order of the engine. */
#ifndef MODEL_FORWARD_H
#define MODEL_FORWARD_H

#include <stdatomic.h>

#include "model/model.h"
#include "model/scratch.h"
#include "model/state.h"

struct forward_call {
    struct model *model;
    uint32_t lane, position;
    struct state *state;
    struct forward_scratch *scratch;
    const _Atomic int *cancel; /* looked at between layers and reads when not NULL */
    int32_t *route_ids;        /* [moe_layers][route_stride] for this chunk's first token, or NULL */
    float *route_weights;
    size_t route_stride;       /* values per MoE layer */
    hr_moe_fn tap;             /* or NULL */
    void *tap_user;
    hr_guess_fn tap_guess;     /* or NULL */
    void *guess_user;
    struct guess_scratch *told; /* for tap_guess: as many tokens as a chunk */
    uint32_t ahead;            /* ranks of the next MoE layer to read ahead; 0 = none */
    uint32_t guesses;          /* layers for which that was done, added to */
    double waited, stored;     /* as in moe_call */
};

/* Evaluates n ids at call->position. Logits of the last `rows` tokens (0..n) go to
 * logits[rows][vocab]. HR_ERR_NUMERIC names the layer whose output is not finite. */
hr_status forward(struct forward_call *call, const int32_t *ids, uint32_t n, uint32_t rows,
                  float *logits, hr_error *err);

#endif
