/* Working memory of a forward pass. */
#ifndef MODEL_SCRATCH_H
#define MODEL_SCRATCH_H

#include "base/carve.h"
#include "model/architecture.h"
#include "model/moe_stream.h"
#include "model/ngram.h"
#include "nn/attention.h"
#include "nn/delta_rule.h"
#include "nn/mla.h"
#include "nn/residual.h"

/* For asking the next MoE layer's router. */
struct guess_scratch {
    struct router_scratch router;
    int32_t *ids;
    float *weights;
};

struct forward_scratch {
    struct residual_scratch residual;
    float *x;                /* [n][hidden] input of a part */
    float *y;                /* [n][hidden] output of a part */
    struct linear_input in;  /* x, quantised when needed */
    struct head_scratch head;
    struct guess_scratch guess;
    void *part;              /* the part at work: mixer, ffn or n-gram rows, carved anew each time */
    size_t part_bytes;
};

/* Lays out scratch for n tokens; the same lines measure (base NULL) for the plan. */
void forward_carve(struct carve *c, const struct architecture *a, uint32_t ctx, uint32_t n,
                   uint32_t workers, struct forward_scratch *s);

void guess_carve(struct carve *c, const struct architecture *a, uint32_t n, struct guess_scratch *s);

/* One part's piece, for whichever kind it is; the others are left alone. */
struct mixer_scratch {
    struct attention_scratch attention;
    struct mla_scratch mla;
    struct delta_scratch delta;
};
void scratch_carve_mixer(struct carve *c, const struct mixer_part *m, uint32_t ctx, uint32_t n,
                         uint32_t workers, struct mixer_scratch *s);
void scratch_carve_ffn(struct carve *c, const struct architecture *a, const struct ffn_part *f,
                       uint32_t n, struct moe_scratch *moe, struct glu_scratch *dense);

#endif
