/* What a session remembers: keys and values, recurrent states, per layer. */
#ifndef MODEL_STATE_H
#define MODEL_STATE_H

#include "base/carve.h"
#include "model/architecture.h"

struct layer_state {
    union {
        struct attention_state attention;
        struct delta_state delta;
    };
};

/* Lays all layers' state for ctx tokens; `layers` (may be NULL when measuring) gets the pointers. */
void state_carve(struct carve *c, const struct architecture *a, uint32_t ctx,
                 struct layer_state *layers);
/* Position 0: recurrent states to zero (keys and values need none). */
void state_clear(const struct architecture *a, struct layer_state *layers);

/* to = from, as far as `position` tokens matter; both laid out for the same ctx. */
void state_copy(const struct architecture *a, struct layer_state *to,
                const struct layer_state *from, uint32_t position);

/* Calls fn for every piece of one layer's state that matters at `position`, in file order. */
typedef hr_status (*state_piece_fn)(void *user, float *data, size_t floats, hr_error *err);
hr_status state_pieces(const struct architecture *a, uint32_t layer, struct layer_state *state,
                       uint32_t position, state_piece_fn fn, void *user, hr_error *err);

#endif
