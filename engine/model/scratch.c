#include "model/scratch.h"

void scratch_carve_mixer(struct carve *c, const struct mixer_part *m, uint32_t ctx, uint32_t n,
                         uint32_t workers, struct mixer_scratch *s)
{
    switch (m->kind) {
    case MIXER_ATTENTION: attention_carve(c, &m->attention, ctx, n, workers, &s->attention); break;
    case MIXER_MLA: mla_carve(c, &m->mla, n, workers, &s->mla); break;
    case MIXER_DELTA: delta_carve(c, &m->delta, n, workers, &s->delta); break;
    }
}

void scratch_carve_ffn(struct carve *c, const struct architecture *a, const struct ffn_part *f,
                       uint32_t n, struct moe_scratch *moe, struct glu_scratch *dense)
{
    if (f->kind == FFN_MOE)
        moe_carve(c, &f->moe, a->hidden, a->fine, n, moe);
    else
        glu_carve(c, n, f->dense.inner, false, dense);
}

static size_t largest_part(const struct architecture *a, uint32_t ctx, uint32_t n, uint32_t workers)
{
    size_t most = 0;
    for (uint32_t i = 0; i < a->mixer_count; i++) {
        struct carve c = {NULL, 0};
        struct mixer_scratch s;
        scratch_carve_mixer(&c, &a->mixers[i], ctx, n, workers, &s);
        if (c.used > most) most = c.used;
    }
    for (uint32_t i = 0; i < a->ffn_count; i++) {
        struct carve c = {NULL, 0};
        struct moe_scratch moe;
        struct glu_scratch dense;
        scratch_carve_ffn(&c, a, &a->ffns[i], n, &moe, &dense);
        if (c.used > most) most = c.used;
    }
    if (a->ngram.order) {
        struct carve c = {NULL, 0};
        struct ngram_scratch s;
        ngram_carve(&c, a, n, &s);
        if (c.used > most) most = c.used;
    }
    return most;
}

void guess_carve(struct carve *c, const struct architecture *a, uint32_t n, struct guess_scratch *s)
{
    const size_t scores = (size_t)n * a->max_experts * sizeof(float);
    const size_t ranks = (size_t)n * a->max_top_k;
    s->router.scores = carve_take(c, scores);
    s->router.keys = carve_take(c, scores);
    s->ids = carve_take(c, ranks * sizeof(int32_t));
    s->weights = carve_take(c, ranks * sizeof(float));
}

void forward_carve(struct carve *c, const struct architecture *a, uint32_t ctx, uint32_t n,
                   uint32_t workers, struct forward_scratch *s)
{
    const size_t rows = (size_t)n * a->hidden * sizeof(float);
    residual_carve(c, &a->residual, a->hidden, a->layers, n, &s->residual);
    s->x = carve_take(c, rows);
    s->y = carve_take(c, rows);
    linear_input_carve(c, n, a->hidden, a->fine, &s->in);
    head_carve(c, n, a->hidden, &s->head);
    guess_carve(c, a, GUESS_TOKENS, &s->guess);
    s->part_bytes = largest_part(a, ctx, n, workers);
    s->part = carve_take(c, s->part_bytes);
}
