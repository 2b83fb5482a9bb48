/* What decoding one token touches, from descriptions alone. */
#ifndef MODEL_TOKEN_COST_H
#define MODEL_TOKEN_COST_H

#include "model/architecture.h"
#include "store/container.h"

struct token_cost {
    uint64_t trunk;        /* bytes of resident weights: all but the embedding, of which it takes a row */
    uint64_t shared;       /* of these, the experts that every token uses */
    uint64_t experts;      /* bytes of expert records: the working set */
    uint64_t state;        /* bytes of recurrent state, read and written */
    uint64_t state_per_position; /* bytes of attention state, for every token before */
    enum codec trunk_codec, expert_codec; /* that hold most bytes; CODEC_NONE without experts */
    bool fine;             /* most bytes of expert_codec meet 22-bit activations */
    uint32_t rows, cols;   /* the layers' matrix of trunk_codec that has most bytes */
    uint32_t width, inner; /* of the experts: down [width, inner] */
};

void token_cost_of(const struct container *c, const struct architecture *a, struct token_cost *out);
/* The codec that holds most bytes of the layers' tensors; embedding and head may have another. */
enum codec trunk_codec_of(const struct container *c);

#endif
