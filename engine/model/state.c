#include "model/state.h"

#include <string.h>

static size_t delta_S_floats(const struct delta_part *p)
{
    return (size_t)p->value_heads * p->key_dim * p->value_dim;
}

static size_t delta_conv_floats(const struct delta_part *p)
{
    return (size_t)(p->conv_taps - 1) * delta_channels(p);
}

void state_carve(struct carve *c, const struct architecture *a, uint32_t ctx,
                 struct layer_state *layers)
{
    for (uint32_t i = 0; i < a->layers; i++) {
        const struct mixer_part *m = layer_mixer(a, i);
        struct layer_state s;
        if (m->kind == MIXER_ATTENTION) {
            const size_t floats = (size_t)m->attention.kv_heads * ctx * m->attention.head_dim;
            s.attention.k = carve_take(c, floats * sizeof(float));
            s.attention.v = carve_take(c, floats * sizeof(float));
            s.attention.ctx = ctx;
        } else {
            s.delta.S = carve_take(c, delta_S_floats(&m->delta) * sizeof(float));
            s.delta.conv = carve_take(c, delta_conv_floats(&m->delta) * sizeof(float));
        }
        if (layers) layers[i] = s;
    }
}

void state_clear(const struct architecture *a, struct layer_state *layers)
{
    for (uint32_t i = 0; i < a->layers; i++) {
        const struct mixer_part *m = layer_mixer(a, i);
        if (m->kind != MIXER_DELTA) continue;
        memset(layers[i].delta.S, 0, delta_S_floats(&m->delta) * sizeof(float));
        memset(layers[i].delta.conv, 0, delta_conv_floats(&m->delta) * sizeof(float));
    }
}

void state_copy(const struct architecture *a, struct layer_state *to,
                const struct layer_state *from, uint32_t position)
{
    for (uint32_t i = 0; i < a->layers; i++) {
        const struct mixer_part *m = layer_mixer(a, i);
        if (m->kind == MIXER_DELTA) {
            memcpy(to[i].delta.S, from[i].delta.S, delta_S_floats(&m->delta) * sizeof(float));
            memcpy(to[i].delta.conv, from[i].delta.conv,
                   delta_conv_floats(&m->delta) * sizeof(float));
            continue;
        }
        const size_t stride = (size_t)from[i].attention.ctx * m->attention.head_dim;
        const size_t bytes = (size_t)position * m->attention.head_dim * sizeof(float);
        for (uint32_t h = 0; h < m->attention.kv_heads; h++) {
            memcpy(to[i].attention.k + h * stride, from[i].attention.k + h * stride, bytes);
            memcpy(to[i].attention.v + h * stride, from[i].attention.v + h * stride, bytes);
        }
    }
}

hr_status state_pieces(const struct architecture *a, uint32_t layer, struct layer_state *state,
                       uint32_t position, state_piece_fn fn, void *user, hr_error *err)
{
    const struct mixer_part *m = layer_mixer(a, layer);
    if (m->kind == MIXER_DELTA) {
        TRY(fn(user, state->delta.S, delta_S_floats(&m->delta), err));
        return fn(user, state->delta.conv, delta_conv_floats(&m->delta), err);
    }
    const struct attention_part *p = &m->attention;
    const size_t stride = (size_t)state->attention.ctx * p->head_dim;
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        TRY(fn(user, state->attention.k + h * stride, (size_t)position * p->head_dim, err));
        TRY(fn(user, state->attention.v + h * stride, (size_t)position * p->head_dim, err));
    }
    return HR_OK;
}
