#include "model/forward.h"

#include <string.h>

struct embed_ctx {
    const struct forward_call *call;
    const int32_t *ids;
};

static void embed_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct embed_ctx *c = ctx;
    const struct model *m = c->call->model;
    float *x = c->call->scratch->x + (size_t)t * m->arch.hidden;
    (void)worker;
    matrix_row(&m->embed, (uint32_t)c->ids[t], x);
    if (m->arch.embed_scale != 1.0f) m->nn.k->scale(x, m->arch.embed_scale, m->arch.hidden);
}

static struct residual_call stream(const struct forward_call *call, uint32_t n)
{
    return (struct residual_call){&call->model->nn, &call->model->arch.residual,
                                  &call->scratch->residual, call->model->arch.hidden, n};
}

/* What the next part reads, as rows of scratch->x. */
static void read_stream(const struct forward_call *call, const struct residual_site *site,
                        bool seal, uint32_t n)
{
    struct forward_scratch *s = call->scratch;
    const uint32_t hidden = call->model->arch.hidden;
    const struct residual_call r = stream(call, n);
    residual_read(&r, site, seal, 0, n, s->x);
    linear_input_set(&s->in, s->x, hidden, n, hidden);
}

static hr_status write_stream(const struct forward_call *call, uint32_t layer, const char *part,
                              uint32_t n, hr_error *err)
{
    const struct residual_call r = stream(call, n);
    if (residual_write(&r, call->scratch->y)) return HR_OK;
    return fail(err, HR_ERR_NUMERIC,
                "%s: layer %u: the output of the %s is not finite (NaN or infinity) near position %u; "
                "run headrace verify, or the checkpoint itself is damaged",
                call->model->c->path, layer, part, call->position);
}

static void run_mixer(const struct forward_call *call, uint32_t i, uint32_t n)
{
    const struct model *m = call->model;
    struct forward_scratch *s = call->scratch;
    const struct mixer_part *part = layer_mixer(&m->arch, i);
    const struct layer_weights *w = &m->layers[i];
    struct layer_state *state = &call->state->layers[i];
    struct carve c = {s->part, 0};
    struct mixer_scratch mixer;
    scratch_carve_mixer(&c, part, m->plan.ctx, n, pool_threads(m->pool), &mixer);
    switch (part->kind) {
    case MIXER_ATTENTION:
        attention_forward(&m->nn, &part->attention, &w->attention, &state->attention,
                          &mixer.attention, &s->in, call->position, s->y, m->arch.hidden);
        break;
    case MIXER_MLA:
        mla_forward(&m->nn, &part->mla, &w->mla, &state->mla, &mixer.mla, &s->in, call->position,
                    s->y, m->arch.hidden);
        break;
    case MIXER_DELTA:
        delta_forward(&m->nn, &part->delta, &w->delta, &state->delta, &mixer.delta, &s->in, s->y,
                      m->arch.hidden);
        break;
    }
}

static void keep_routes(const struct forward_call *call, const struct moe_scratch *s,
                        const struct moe_part *p, uint32_t moe_layer, uint32_t n)
{
    if (!call->route_ids) return;
    const uint32_t width = call->model->arch.max_top_k;
    for (uint32_t t = 0; t < n; t++) {
        const size_t to = moe_layer * call->route_stride + (size_t)t * width;
        for (uint32_t r = 0; r < width; r++) {
            const size_t from = (size_t)t * p->top_k + r;
            call->route_ids[to + r] = r < p->top_k ? s->ids[from] : -1;
            call->route_weights[to + r] = r < p->top_k ? s->weights[from] : 0.0f;
        }
    }
}

/* The MoE layer behind layer i; arch.layers when there is none. */
static uint32_t next_moe(const struct model *m, uint32_t i)
{
    uint32_t next = i + 1;
    while (next < m->arch.layers && layer_ffn(&m->arch, next)->kind != FFN_MOE) next++;
    return next;
}

static bool guess_layer(struct forward_call *call, uint32_t i, struct moe_guess *g)
{
    struct model *m = call->model;
    struct guess_scratch *s = &call->scratch->guess;
    const uint32_t next = next_moe(m, i);
    if (next == m->arch.layers) return false;
    *g = (struct moe_guess){.part = &layer_ffn(&m->arch, next)->moe, .weights = &m->layers[next].moe,
                            .bank_index = m->layers[next].bank, .width = call->ahead,
                            .router = &s->router, .ids = s->ids, .mixing = s->weights};
    call->guesses++;
    return true;
}

/* What would be read ahead of the next MoE layer, were it asked for. */
static void tell_guess(struct forward_call *call, uint32_t i, uint32_t n)
{
    struct model *m = call->model;
    struct guess_scratch *s = call->told;
    const uint32_t next = next_moe(m, i);
    if (next == m->arch.layers) return;
    const struct moe_part *p = &layer_ffn(&m->arch, next)->moe;
    router_forward(&m->nn, p, &m->layers[next].moe, &call->scratch->in, &s->router, s->ids,
                   s->weights);
    call->tap_guess(call->guess_user, next, n, p->top_k, s->ids);
}

static hr_status run_ffn(struct forward_call *call, uint32_t i, uint32_t n, hr_error *err)
{
    struct model *m = call->model;
    struct forward_scratch *s = call->scratch;
    const struct ffn_part *part = layer_ffn(&m->arch, i);
    const struct layer_weights *w = &m->layers[i];
    const uint32_t hidden = m->arch.hidden;
    struct carve c = {s->part, 0};
    struct moe_scratch moe;
    struct glu_scratch dense;
    scratch_carve_ffn(&c, &m->arch, part, n, &moe, &dense);
    if (part->kind == FFN_DENSE) {
        struct glu_job job = {.gate = &w->dense.gate, .up = &w->dense.up, .down = &w->dense.down,
                              .act = part->dense.act, .in = &s->in, .n = n, .y = s->y, .ldy = hidden};
        glu_slice(&dense, 0, &job);
        glu_run(&m->nn, &job, 1);
        return HR_OK;
    }
    struct moe_call mc = {.nn = &m->nn, .cache = m->cache, .bank = &m->c->banks[w->bank],
                          .bank_index = w->bank, .lane = call->lane, .part = &part->moe,
                          .weights = &w->moe, .scratch = &moe, .hidden = hidden, .cancel = call->cancel};
    struct moe_guess guess;
    if (call->ahead > 0 && guess_layer(call, i, &guess)) mc.guess = &guess;
    const hr_status st = moe_forward(&mc, &s->in, s->y, hidden, err);
    call->waited += mc.waited;
    call->stored += mc.stored;
    if (st != HR_OK) return fail_prefix(err, st, "layer %u", i);
    keep_routes(call, &moe, &part->moe, w->bank, n);
    if (call->tap_guess) tell_guess(call, i, n);
    if (call->tap)
        call->tap(call->tap_user, i, n, moe_width(&part->moe, hidden), part->moe.top_k,
                  part->moe.latent ? moe.latent : s->x, moe.ids, moe.weights);
    return HR_OK;
}

static hr_status run_head(const struct forward_call *call, uint32_t n, uint32_t rows, float *logits,
                          hr_error *err)
{
    const struct model *m = call->model;
    struct forward_scratch *s = call->scratch;
    const struct residual_call r = stream(call, n);
    residual_read(&r, &m->final_site, false, n - rows, rows, s->x);
    head_run(&m->nn, &s->head, &m->head, s->x, m->arch.hidden, rows, logits, m->arch.vocab_size);
    if (m->arch.logit_scale != 1.0f)
        m->nn.k->scale(logits, m->arch.logit_scale, (size_t)rows * m->arch.vocab_size);
    if (m->nn.k->all_finite(logits, (size_t)rows * m->arch.vocab_size)) return HR_OK;
    return fail(err, HR_ERR_NUMERIC,
                "%s: the logits are not finite (NaN or infinity) near position %u although every layer's "
                "output is: final norm or head; run headrace verify, or the checkpoint itself is damaged",
                m->c->path, call->position);
}

static hr_status run_ngram(const struct forward_call *call, uint32_t i, const int32_t *ids,
                           uint32_t n, hr_error *err)
{
    const struct model *m = call->model;
    uint32_t at = 0;
    while (at < m->arch.ngram.site_count && m->arch.ngram.sites[at].layer != i) at++;
    if (at == m->arch.ngram.site_count) return HR_OK;
    const struct ngram_call g = {.nn = &m->nn, .arch = &m->arch, .site = &m->arch.ngram.sites[at],
                                 .weights = &m->ngram[at], .rows = m->ngram_rows,
                                 .state = &call->state->ngram[at],
                                 .stream = call->scratch->residual.h, .cancel = call->cancel};
    struct carve c = {call->scratch->part, 0};
    struct ngram_scratch s;
    ngram_carve(&c, &m->arch, n, &s);
    return ngram_forward(&g, &s, ids, n, err);
}

hr_status forward(struct forward_call *call, const int32_t *ids, uint32_t n, uint32_t rows,
                  float *logits, hr_error *err)
{
    struct model *m = call->model;
    struct forward_scratch *s = call->scratch;
    const struct residual_call r = stream(call, n);
    struct embed_ctx embed = {call, ids};
    pool_run(m->pool, n, embed_task, &embed);
    residual_begin(&r, s->x);
    for (uint32_t i = 0; i < m->arch.layers; i++) {
        const uint32_t block = m->arch.residual.block;
        if (call->cancel && atomic_load(call->cancel))
            return fail(err, HR_ERR_CANCELLED, "cancelled before layer %u of the chunk at position %u",
                        i, call->position);
        TRY(run_ngram(call, i, ids, n, err));
        read_stream(call, &m->layers[i].mixer_site, block && i % block == 0, n);
        run_mixer(call, i, n);
        TRY(write_stream(call, i, "mixer", n, err));
        read_stream(call, &m->layers[i].ffn_site, false, n);
        TRY(run_ffn(call, i, n, err));
        TRY(write_stream(call, i, "ffn", n, err));
    }
    return rows > 0 ? run_head(call, n, rows, logits, err) : HR_OK;
}
