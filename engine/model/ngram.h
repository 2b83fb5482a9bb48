/* Hashed n-gram embeddings (rows read from a table on disk) added to a hyper residual. */
#ifndef MODEL_NGRAM_H
#define MODEL_NGRAM_H

#include <stdatomic.h>

#include "model/architecture.h"
#include "nn/linear.h"
#include "store/row_table.h"

struct ngram_scratch {
    float *e;      /* [n][tables * dim] */
    float *key;    /* [n][width] */
    float *value;  /* [n][hidden] */
    float *gated;  /* [n][width] */
    float *normed; /* [n][width] */
    float *query;  /* [n][hidden]: one branch at a time */
    struct linear_input in;
};

void ngram_carve(struct carve *c, const struct architecture *a, uint32_t n,
                 struct ngram_scratch *s);

struct ngram_call {
    const struct nn *nn;
    const struct architecture *arch;
    const struct ngram_site *site;
    const struct ngram_weights *weights;
    struct row_table *rows;
    struct ngram_state *state;
    float *stream; /* [n][width] */
    const _Atomic int *cancel; /* looked at before each row when not NULL */
};

/* Adds the rows of n tokens to the stream; moves the state on. */
hr_status ngram_forward(const struct ngram_call *call, struct ngram_scratch *s, const int32_t *ids,
                        uint32_t n, hr_error *err);

#endif
