#include "model/forward.h"

#include <string.h>

struct token_ctx {
    const struct forward_call *call;
    const int32_t *ids;
    const float *norm; /* NULL: no norm */
    uint32_t first;
    _Atomic int broken; /* a value is not finite */
};

static void embed_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct token_ctx *c = ctx;
    const struct architecture *a = &c->call->model->arch;
    float *h = c->call->scratch->h + (size_t)t * a->hidden;
    (void)worker;
    matrix_row(&c->call->model->embed, (uint32_t)c->ids[t], h);
}

static void add_task(void *ctx, uint32_t t, uint32_t worker)
{
    struct token_ctx *c = ctx;
    const struct forward_scratch *s = c->call->scratch;
    const struct kernels *k = c->call->model->nn.k;
    const uint32_t hidden = c->call->model->arch.hidden;
    float *h = s->h + (size_t)t * hidden;
    (void)worker;
    k->add(h, s->y + (size_t)t * hidden, hidden);
    if (!k->all_finite(h, hidden)) atomic_store(&c->broken, 1);
}

static void norm_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct token_ctx *c = ctx;
    const struct forward_scratch *s = c->call->scratch;
    const struct architecture *a = &c->call->model->arch;
    const size_t at = (size_t)(c->first + t) * a->hidden;
    (void)worker;
    c->call->model->nn.k->rms_norm(s->h + at, c->norm, a->hidden, a->norm_eps, s->x + at);
}

/* Plain residual, read side: x = norm(h). */
static void residual_read(const struct forward_call *call, const float *norm, uint32_t n)
{
    struct forward_scratch *s = call->scratch;
    const uint32_t hidden = call->model->arch.hidden;
    struct token_ctx c = {.call = call, .norm = norm};
    pool_run(call->model->pool, n, norm_task, &c);
    linear_input_set(&s->in, s->x, hidden, n, hidden);
}

/* Write side: h += y. */
static hr_status residual_write(const struct forward_call *call, uint32_t layer, const char *part,
                                uint32_t n, hr_error *err)
{
    struct token_ctx c = {.call = call};
    pool_run(call->model->pool, n, add_task, &c);
    if (!atomic_load(&c.broken)) return HR_OK;
    return fail(err, HR_ERR_NUMERIC,
                "%s: layer %u: the output of the %s is not finite (NaN or infinity) near position %u; "
                "run headrace verify, or the checkpoint itself is damaged",
                call->model->c->path, layer, part, call->position);
}

static void run_mixer(const struct forward_call *call, uint32_t i, struct carve *c, uint32_t n)
{
    const struct model *m = call->model;
    struct forward_scratch *s = call->scratch;
    const struct mixer_part *part = layer_mixer(&m->arch, i);
    struct attention_scratch attention;
    struct delta_scratch delta;
    scratch_carve_mixer(c, part, n, pool_threads(m->pool), &attention, &delta);
    if (part->kind == MIXER_ATTENTION)
        attention_forward(&m->nn, &part->attention, &m->layers[i].attention,
                          &call->state[i].attention, &attention, &s->in, call->position, s->y,
                          m->arch.hidden);
    else
        delta_forward(&m->nn, &part->delta, &m->layers[i].delta, &call->state[i].delta, &delta,
                      &s->in, s->y, m->arch.hidden);
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

static hr_status run_ffn(struct forward_call *call, uint32_t i, struct carve *c, uint32_t n,
                         hr_error *err)
{
    struct model *m = call->model;
    struct forward_scratch *s = call->scratch;
    const struct ffn_part *part = layer_ffn(&m->arch, i);
    const struct layer_weights *w = &m->layers[i];
    const uint32_t hidden = m->arch.hidden;
    struct moe_scratch moe;
    struct glu_scratch dense;
    scratch_carve_ffn(c, part, hidden, n, &moe, &dense);
    if (part->kind == FFN_DENSE) {
        struct glu_job job = {.gate = &w->dense.gate, .up = &w->dense.up, .down = &w->dense.down,
                              .in = &s->in, .n = n, .y = s->y, .ldy = hidden};
        glu_slice(&dense, 0, &job);
        glu_run(&m->nn, &job, 1);
        return HR_OK;
    }
    struct moe_call mc = {.nn = &m->nn, .cache = m->cache, .bank = &m->c->banks[w->bank],
                          .bank_index = w->bank, .lane = call->lane, .part = &part->moe,
                          .weights = &w->moe, .scratch = &moe, .hidden = hidden};
    const hr_status st = moe_forward(&mc, &s->in, s->y, hidden, err);
    call->waited += mc.waited;
    if (st != HR_OK) return fail_prefix(err, st, "layer %u", i);
    keep_routes(call, &moe, &part->moe, w->bank, n);
    return HR_OK;
}

static void run_head(const struct forward_call *call, uint32_t n, uint32_t rows, float *logits)
{
    const struct model *m = call->model;
    struct forward_scratch *s = call->scratch;
    const uint32_t hidden = m->arch.hidden, first = n - rows;
    struct token_ctx c = {.call = call, .norm = m->final_norm, .first = first};
    pool_run(m->pool, rows, norm_task, &c);
    head_run(&m->nn, &s->head, &m->head, s->x + (size_t)first * hidden, hidden, rows, logits,
             m->arch.vocab_size);
}

hr_status forward(struct forward_call *call, const int32_t *ids, uint32_t n, uint32_t rows,
                  float *logits, hr_error *err)
{
    struct model *m = call->model;
    struct forward_scratch *s = call->scratch;
    struct token_ctx embed = {.call = call, .ids = ids};
    pool_run(m->pool, n, embed_task, &embed);
    for (uint32_t i = 0; i < m->arch.layers; i++) {
        if (call->cancel && atomic_load(call->cancel))
            return fail(err, HR_ERR_CANCELLED, "cancelled before layer %u of the chunk at position %u",
                        i, call->position);
        struct carve mixer = {s->part, 0}, ffn = {s->part, 0};
        residual_read(call, m->layers[i].mixer_norm, n);
        run_mixer(call, i, &mixer, n);
        TRY(residual_write(call, i, "mixer", n, err));
        residual_read(call, m->layers[i].ffn_norm, n);
        TRY(run_ffn(call, i, &ffn, n, err));
        TRY(residual_write(call, i, "ffn", n, err));
    }
    cache_tick(m->cache, n);
    if (rows > 0) run_head(call, n, rows, logits);
    return HR_OK;
}
