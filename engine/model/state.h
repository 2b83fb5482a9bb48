/* What a session remembers: keys and values, recurrent states, per layer. */
#ifndef MODEL_STATE_H
#define MODEL_STATE_H

#include "base/carve.h"
#include "model/architecture.h"

struct layer_state {
    union {
        struct attention_state attention;
        struct mla_state mla;
        struct delta_state delta;
    };
};

struct state {
    struct layer_state *layers;
    struct ngram_state ngram[MAX_NGRAM_SITES];
};

/* Lays all state for ctx tokens; state->layers may be NULL when measuring. */
void state_carve(struct carve *c, const struct architecture *a, uint32_t ctx, struct state *state);
/* Position 0: recurrent states to zero (keys and values need none). */
void state_clear(const struct architecture *a, struct state *state);

/* Calls fn for every piece of the state that matters at `position`, in file order. */
typedef hr_status (*state_piece_fn)(void *user, float *data, size_t floats, hr_error *err);
hr_status state_pieces(const struct architecture *a, struct state *state, uint32_t position,
                       state_piece_fn fn, void *user, hr_error *err);
/* Copies what matters at `position` into another block that was laid out by the same carve. */
void state_copy(const struct architecture *a, void *to_block, struct state *from,
                const void *from_block, uint32_t position);

#endif
