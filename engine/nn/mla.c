#include "nn/mla.h"

#include <string.h>

#include "nn/attend.h"
#include "nn/rope.h"

static uint32_t latent_width(const struct mla_part *p)
{
    return p->kv_lora_rank + p->rope_dim;
}

void mla_carve(struct carve *c, const struct mla_part *p, uint32_t n, uint32_t workers,
               struct mla_scratch *s)
{
    const size_t f = sizeof(float), rows = (size_t)n * p->heads;
    const uint32_t widest = p->nope_dim > p->kv_lora_rank ? p->nope_dim : p->kv_lora_rank;
    s->q_a = carve_take(c, (size_t)n * p->q_lora_rank * f);
    s->q = carve_take(c, rows * (p->nope_dim + p->rope_dim) * f);
    s->kv = carve_take(c, (size_t)n * latent_width(p) * f);
    s->query = carve_take(c, rows * latent_width(p) * f);
    s->out = carve_take(c, rows * p->v_dim * f);
    s->gate = p->output_gate ? carve_take(c, rows * p->v_dim * f) : NULL;
    s->cosine = carve_take(c, (size_t)n * p->rope.half * f);
    s->sine = carve_take(c, (size_t)n * p->rope.half * f);
    s->work = carve_take(c, workers * attend_floats(p->kv_lora_rank) * f);
    linear_input_carve(c, n, p->q_lora_rank ? p->q_lora_rank : 1, false, &s->in);
    linear_input_carve(c, (uint32_t)rows, widest, false, &s->per_head);
    linear_input_carve(c, n, p->heads * p->v_dim, false, &s->out_in);
}

struct mla_ctx {
    const struct nn *nn;
    const struct mla_part *p;
    const struct mla_weights *w;
    struct mla_state *state;
    struct mla_scratch *s;
    uint32_t position, n, tile; /* tile: query heads of one attention task */
};

static void q_a_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct mla_ctx *c = ctx;
    float *q = c->s->q_a + (size_t)t * c->p->q_lora_rank;
    (void)worker;
    c->nn->k->rms_norm(q, c->w->q_a_norm, c->p->q_lora_rank, c->p->inner_eps, q);
}

/* Per token: the latent normed, the rotary parts rotated, both appended to the cache; the rotated
 * part of every query goes behind its place in the absorbed query. */
static void token_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct mla_ctx *c = ctx;
    const struct mla_part *p = c->p;
    const uint32_t half = p->rope.half, r = p->kv_lora_rank, width = latent_width(p);
    float *cosine = c->s->cosine + (size_t)t * half, *sine = c->s->sine + (size_t)t * half;
    float *kv = c->s->kv + (size_t)t * width;
    (void)worker;
    rope_table(c->w->frequency, half, p->rope.scale, c->position + t, cosine, sine);
    c->nn->k->rms_norm(kv, c->w->kv_a_norm, r, p->inner_eps, kv);
    rope_apply(kv + r, half, cosine, sine);
    memcpy(c->state->latent + (size_t)(c->position + t) * width, kv, width * sizeof(float));
    for (uint32_t h = 0; h < p->heads; h++) {
        const size_t row = (size_t)t * p->heads + h;
        float *pe = c->s->query + row * width + r;
        memcpy(pe, c->s->q + row * (p->nope_dim + p->rope_dim) + p->nope_dim,
               p->rope_dim * sizeof(float));
        rope_apply(pe, half, cosine, sine);
    }
}

enum { HEAD_TOKENS = 64 };

/* A head's own matrix times that head's rows: x row (t, h) at x[(t * heads + h) * ldx]. */
struct head_linear {
    const struct mla_ctx *c;
    const struct matrix *w; /* [heads] */
    struct linear_input *in;
    float *y;
    size_t ldy;
    uint32_t units;
};

static void head_linear_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct head_linear *l = ctx;
    const uint32_t heads = l->c->p->heads, h = task / l->units, unit = task % l->units;
    (void)worker;
    /* Rows of one head lie `heads` apart. */
    for (uint32_t t = 0; t < l->c->n; t += HEAD_TOKENS) {
        const uint32_t left = l->c->n - t, count = left < HEAD_TOKENS ? left : HEAD_TOKENS;
        uint32_t row[HEAD_TOKENS];
        for (uint32_t i = 0; i < count; i++) row[i] = (t + i) * heads + h;
        linear_span(l->c->nn, &l->w[h], unit, unit + 1, l->in, row, count, l->y + row[0] * l->ldy,
                    heads * l->ldy);
    }
}

static void run_heads(const struct mla_ctx *c, const struct matrix *w, const float *x, size_t ldx,
                      uint32_t k, float *y, size_t ldy)
{
    struct linear_input *in = &c->s->per_head;
    linear_input_set(in, x, ldx, c->n * c->p->heads, k);
    linear_input_prepare(c->nn, in, &w[0]);
    struct head_linear l = {c, w, in, y, ldy, linear_units(&w[0])};
    pool_run(c->nn->pool, c->p->heads * l.units, head_linear_task, &l);
}

/* A few query heads, numbered token by token: attention with the latent as key and value. The mean
 * latents replace the absorbed queries. */
static void attend_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct mla_ctx *c = ctx;
    const struct mla_part *p = c->p;
    const uint32_t r = p->kv_lora_rank, width = latent_width(p), first = task * c->tile;
    const uint32_t left = c->n * p->heads - first, count = left < c->tile ? left : c->tile;
    const struct attend_keys keys = {c->state->latent, c->state->latent, width, width,
                                     width, r, p->scale};
    float *q = c->s->query + (size_t)first * width;
    struct attend_group g;
    attend_begin(&g, c->s->work + worker * attend_floats(r), r);
    for (uint32_t i = 0; i < count; i++)
        attend_add(&g, q + i * width, c->position + (first + i) / p->heads + 1);
    attend_range(c->nn->k, &keys, &g, 0);
    for (uint32_t i = 0; i < count; i++) attend_finish(&g, i, r, q + i * width);
}

static void gate_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct mla_ctx *c = ctx;
    const size_t width = (size_t)c->p->heads * c->p->v_dim;
    (void)worker;
    c->nn->k->sigmoid_mul(c->s->out + t * width, c->s->gate + t * width, width);
}

static void project_queries(struct mla_ctx *c, struct linear_input *in)
{
    const struct mla_part *p = c->p;
    const size_t q_width = (size_t)p->heads * (p->nope_dim + p->rope_dim);
    struct linear_job jobs[3];
    uint32_t count = 0;
    jobs[count++] = (struct linear_job){&c->w->kv_a, c->s->kv, latent_width(p)};
    if (p->output_gate)
        jobs[count++] = (struct linear_job){&c->w->gate, c->s->gate, (size_t)p->heads * p->v_dim};
    if (p->q_lora_rank == 0) {
        jobs[count++] = (struct linear_job){&c->w->q, c->s->q, q_width};
        linear_run(c->nn, in, jobs, count);
        return;
    }
    jobs[count++] = (struct linear_job){&c->w->q_a, c->s->q_a, p->q_lora_rank};
    linear_run(c->nn, in, jobs, count);
    pool_run(c->nn->pool, c->n, q_a_task, c);
    linear_input_set(&c->s->in, c->s->q_a, p->q_lora_rank, c->n, p->q_lora_rank);
    const struct linear_job q_b = {&c->w->q, c->s->q, q_width};
    linear_run(c->nn, &c->s->in, &q_b, 1);
}

void mla_forward(const struct nn *nn, const struct mla_part *p, const struct mla_weights *w,
                 struct mla_state *state, struct mla_scratch *s, struct linear_input *in,
                 uint32_t position, float *y, size_t ldy)
{
    struct mla_ctx c = {nn, p, w, state, s, position, in->n, 0};
    const size_t width = latent_width(p), out_width = (size_t)p->heads * p->v_dim;
    project_queries(&c, in);
    pool_run(nn->pool, c.n, token_task, &c);
    run_heads(&c, w->k_b, s->q, p->nope_dim + p->rope_dim, p->nope_dim, s->query, width);
    c.tile = attend_tile(c.n * p->heads, c.n * p->heads, pool_threads(nn->pool));
    pool_run(nn->pool, (c.n * p->heads + c.tile - 1) / c.tile, attend_task, &c);
    run_heads(&c, w->v_b, s->query, width, p->kv_lora_rank, s->out, p->v_dim);
    if (p->output_gate) pool_run(nn->pool, c.n, gate_task, &c);
    linear_input_set(&s->out_in, s->out, out_width, c.n, (uint32_t)out_width);
    const struct linear_job o = {&w->o, y, ldy};
    linear_run(nn, &s->out_in, &o, 1);
}
