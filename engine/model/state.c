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

static size_t ngram_conv_floats(const struct architecture *a)
{
    return (size_t)(a->ngram.conv_taps - 1) * a->ngram.dilation * stream_width(a);
}

static void carve_attention(struct carve *c, const struct attention_part *p, uint32_t ctx,
                            struct attention_state *s)
{
    const size_t floats = (size_t)p->kv_heads * ctx * p->head_dim;
    memset(s, 0, sizeof *s);
    s->k = carve_take(c, floats * sizeof(float));
    s->v = carve_take(c, floats * sizeof(float));
    s->ctx = ctx;
    if (p->sparse.heads == 0) return;
    s->index_raw = carve_take(c, (size_t)ctx * p->sparse.dim * sizeof(float));
    s->index_block = carve_take(c, (size_t)(ctx / p->sparse.block) * p->sparse.dim * sizeof(float));
}

static void carve_layer(struct carve *c, const struct mixer_part *m, uint32_t ctx,
                        struct layer_state *s)
{
    switch (m->kind) {
    case MIXER_ATTENTION: carve_attention(c, &m->attention, ctx, &s->attention); break;
    case MIXER_MLA:
        s->mla.ctx = ctx;
        s->mla.latent = carve_take(c, (size_t)ctx * (m->mla.kv_lora_rank + m->mla.rope_dim) *
                                          sizeof(float));
        break;
    case MIXER_DELTA:
        s->delta.S = carve_take(c, delta_S_floats(&m->delta) * sizeof(float));
        s->delta.conv = carve_take(c, delta_conv_floats(&m->delta) * sizeof(float));
        break;
    }
}

void state_carve(struct carve *c, const struct architecture *a, uint32_t ctx, struct state *state)
{
    for (uint32_t i = 0; i < a->layers; i++) {
        struct layer_state s;
        carve_layer(c, layer_mixer(a, i), ctx, &s);
        if (state->layers) state->layers[i] = s;
    }
    for (uint32_t i = 0; i < a->ngram.site_count; i++) {
        state->ngram[i].history = carve_take(c, (a->ngram.order - 1) * sizeof(float));
        state->ngram[i].conv = carve_take(c, ngram_conv_floats(a) * sizeof(float));
    }
}

void state_clear(const struct architecture *a, struct state *state)
{
    for (uint32_t i = 0; i < a->layers; i++) {
        const struct mixer_part *m = layer_mixer(a, i);
        if (m->kind != MIXER_DELTA) continue;
        memset(state->layers[i].delta.S, 0, delta_S_floats(&m->delta) * sizeof(float));
        memset(state->layers[i].delta.conv, 0, delta_conv_floats(&m->delta) * sizeof(float));
    }
    for (uint32_t s = 0; s < a->ngram.site_count; s++) {
        for (uint32_t i = 0; i + 1 < a->ngram.order; i++) state->ngram[s].history[i] = -1.0f;
        memset(state->ngram[s].conv, 0, ngram_conv_floats(a) * sizeof(float));
    }
}

static hr_status attention_pieces(const struct attention_part *p, struct attention_state *s,
                                  uint32_t position, state_piece_fn fn, void *user, hr_error *err)
{
    const size_t stride = (size_t)s->ctx * p->head_dim;
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        TRY(fn(user, s->k + h * stride, (size_t)position * p->head_dim, err));
        TRY(fn(user, s->v + h * stride, (size_t)position * p->head_dim, err));
    }
    if (p->sparse.heads == 0) return HR_OK;
    TRY(fn(user, s->index_raw, (size_t)position * p->sparse.dim, err));
    return fn(user, s->index_block, (size_t)(position / p->sparse.block) * p->sparse.dim, err);
}

static hr_status layer_pieces(const struct mixer_part *m, struct layer_state *s, uint32_t position,
                              state_piece_fn fn, void *user, hr_error *err)
{
    switch (m->kind) {
    case MIXER_ATTENTION:
        return attention_pieces(&m->attention, &s->attention, position, fn, user, err);
    case MIXER_MLA:
        return fn(user, s->mla.latent,
                  (size_t)position * (m->mla.kv_lora_rank + m->mla.rope_dim), err);
    case MIXER_DELTA:
        TRY(fn(user, s->delta.S, delta_S_floats(&m->delta), err));
        return fn(user, s->delta.conv, delta_conv_floats(&m->delta), err);
    }
    return HR_OK;
}

hr_status state_pieces(const struct architecture *a, struct state *state, uint32_t position,
                       state_piece_fn fn, void *user, hr_error *err)
{
    for (uint32_t i = 0; i < a->layers; i++)
        TRY(layer_pieces(layer_mixer(a, i), &state->layers[i], position, fn, user, err));
    for (uint32_t i = 0; i < a->ngram.site_count; i++) {
        TRY(fn(user, state->ngram[i].history, a->ngram.order - 1, err));
        TRY(fn(user, state->ngram[i].conv, ngram_conv_floats(a), err));
    }
    return HR_OK;
}

struct copy_walk {
    uint8_t *to;
    const uint8_t *from;
};

static hr_status copy_piece(void *user, float *data, size_t floats, hr_error *err)
{
    const struct copy_walk *w = user;
    (void)err;
    memcpy(w->to + ((const uint8_t *)data - w->from), data, floats * sizeof(float));
    return HR_OK;
}

void state_copy(const struct architecture *a, void *to_block, struct state *from,
                const void *from_block, uint32_t position)
{
    struct copy_walk w = {to_block, from_block};
    state_pieces(a, from, position, copy_piece, &w, NULL);
}
