/* The one place where reading and arithmetic meet: route, ask the cache, compute what is there
 * while the rest is being read, combine in rank order. */
#ifndef MODEL_MOE_STREAM_H
#define MODEL_MOE_STREAM_H

#include <stdatomic.h>

#include "nn/glu.h"
#include "nn/parts.h"
#include "nn/router.h"
#include "store/expert_cache.h"

struct moe_scratch {
    struct router_scratch router;
    int32_t *ids;       /* [n][top_k] in rank order */
    float *weights;     /* [n][top_k] */
    uint32_t *pair;     /* [n][top_k]: where the result of (token, rank) lies */
    uint32_t *token;    /* [n * top_k]: token of a pair; pairs are grouped by expert */
    uint32_t *first;    /* [experts + 1]: first pair of each expert */
    uint32_t *wanted;   /* [experts]: the distinct experts, ascending */
    float *result;      /* [n * top_k][width], width = latent or hidden */
    float *latent;      /* [n][latent]: input of the routed experts */
    float *mixed;       /* [n][latent]: their weighted sum */
    struct linear_input latent_in, mixed_in;
    float *shared;      /* [n][hidden] */
    float *shared_gate; /* [n] */
    struct glu_scratch glu;
};

/* fine: some bank's products take 22-bit activations. */
void moe_carve(struct carve *c, const struct moe_part *p, uint32_t hidden, bool fine, uint32_t n,
               struct moe_scratch *s);

/* The next MoE layer's experts are guessed for chunks of so many tokens at most. */
enum { GUESS_TOKENS = 2 };
struct moe_guess {
    const struct moe_part *part;
    const struct moe_weights *weights;
    uint32_t bank_index, width; /* width: the best ranks of each token */
    struct router_scratch *router;
    int32_t *ids;          /* [GUESS_TOKENS][top_k] */
    float *mixing;         /* the same; not used */
};

struct moe_call {
    const struct nn *nn;
    struct expert_cache *cache;
    const struct bank_entry *bank;
    uint32_t bank_index, lane;
    const struct moe_part *part;
    const struct moe_weights *weights;
    struct moe_scratch *scratch;
    const struct moe_guess *guess; /* or NULL */
    uint32_t hidden;
    const _Atomic int *cancel; /* looked at after each read when not NULL */
    double waited; /* seconds blocked on reads, added to */
    double stored; /* seconds in calls of the cache, those blocked included, added to */
};

/* y[n][hidden] = routed experts + shared expert. After it s->ids and s->weights hold the routes. No
 * lease survives the call, whatever it returns. */
hr_status moe_forward(struct moe_call *call, struct linear_input *in, float *y, size_t ldy,
                      hr_error *err);

#endif
