#include "nn/attention.h"

#include <math.h>
#include <string.h>

#include "nn/rope.h"

static size_t worker_floats(const struct attention_part *p)
{
    return ((size_t)ATTN_BLOCK + 2 * (size_t)p->head_dim + 15) & ~(size_t)15;
}

void attention_carve(struct carve *c, const struct attention_part *p, uint32_t n, uint32_t workers,
                     struct attention_scratch *s)
{
    const size_t q_dim = (size_t)p->heads * p->head_dim, kv_dim = (size_t)p->kv_heads * p->head_dim;
    s->q = carve_take(c, n * q_dim * sizeof(float));
    s->gate = p->output_gate ? carve_take(c, n * q_dim * sizeof(float)) : NULL;
    s->k = carve_take(c, n * kv_dim * sizeof(float));
    s->v = carve_take(c, n * kv_dim * sizeof(float));
    s->cosine = carve_take(c, (size_t)n * (p->rotary_dim / 2) * sizeof(float));
    s->sine = carve_take(c, (size_t)n * (p->rotary_dim / 2) * sizeof(float));
    s->work = carve_take(c, workers * worker_floats(p) * sizeof(float));
    linear_input_carve(c, n, (uint32_t)q_dim, &s->out_in);
}

struct attn_ctx {
    const struct nn *nn;
    const struct attention_part *p;
    const struct attention_weights *w;
    struct attention_state *state;
    struct attention_scratch *s;
    uint32_t position;
    float scale;
};

/* Per token: norm and rotate q and k, append k and v to the cache. */
static void prepare_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct attn_ctx *c = ctx;
    const struct attention_part *p = c->p;
    const uint32_t half = p->rotary_dim / 2, hd = p->head_dim;
    float *cosine = c->s->cosine + (size_t)t * half, *sine = c->s->sine + (size_t)t * half;
    (void)worker;
    rope_table(c->w->frequency, half, c->position + t, cosine, sine);
    for (uint32_t h = 0; h < p->heads; h++) {
        float *q = c->s->q + ((size_t)t * p->heads + h) * hd;
        if (p->qk_norm) c->nn->k->rms_norm(q, c->w->q_norm, hd, p->norm_eps, q);
        rope_apply(q, half, cosine, sine);
    }
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        const size_t from = ((size_t)t * p->kv_heads + h) * hd;
        const size_t to = ((size_t)h * c->state->ctx + c->position + t) * hd;
        float *k = c->s->k + from;
        if (p->qk_norm) c->nn->k->rms_norm(k, c->w->k_norm, hd, p->norm_eps, k);
        rope_apply(k, half, cosine, sine);
        memcpy(c->state->k + to, k, hd * sizeof(float));
        memcpy(c->state->v + to, c->s->v + from, hd * sizeof(float));
    }
}

/* One query head of one token: key blocks at fixed absolute positions, merged in ascending order,
 * so neither chunk size nor threads can change a bit. The result replaces q. */
static void head_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct attn_ctx *c = ctx;
    const struct attention_part *p = c->p;
    const struct kernels *kern = c->nn->k;
    const uint32_t hd = p->head_dim, t = task / p->heads, h = task % p->heads;
    const uint32_t kv = h / (p->heads / p->kv_heads), keys = c->position + t + 1;
    float *scores = c->s->work + worker * worker_floats(p);
    float *acc = scores + ATTN_BLOCK, *acc2 = acc + hd;
    float *q = c->s->q + (size_t)task * hd;
    const float *k = c->state->k + (size_t)kv * c->state->ctx * hd;
    const float *v = c->state->v + (size_t)kv * c->state->ctx * hd;
    float m = 0, l = 0, m2, l2;
    for (uint32_t j = 0; j < keys; j += ATTN_BLOCK) {
        const uint32_t n = keys - j < ATTN_BLOCK ? keys - j : ATTN_BLOCK;
        const float *kj = k + (size_t)j * hd, *vj = v + (size_t)j * hd;
        if (j == 0) {
            kern->attn_block(q, kj, hd, vj, hd, n, hd, hd, c->scale, scores, &m, &l, acc);
        } else {
            kern->attn_block(q, kj, hd, vj, hd, n, hd, hd, c->scale, scores, &m2, &l2, acc2);
            kern->attn_merge(&m, &l, acc, m2, l2, acc2, hd);
        }
    }
    for (uint32_t i = 0; i < hd; i++) q[i] = acc[i] / l;
    if (p->output_gate) kern->sigmoid_mul(q, c->s->gate + (size_t)task * hd, hd);
}

void attention_forward(const struct nn *nn, const struct attention_part *p,
                       const struct attention_weights *w, struct attention_state *state,
                       struct attention_scratch *s, struct linear_input *in, uint32_t position,
                       float *y, size_t ldy)
{
    const size_t q_dim = (size_t)p->heads * p->head_dim, kv_dim = (size_t)p->kv_heads * p->head_dim;
    const struct linear_job jobs[] = {{&w->q, s->q, q_dim},
                                      {&w->k, s->k, kv_dim},
                                      {&w->v, s->v, kv_dim},
                                      {&w->gate, s->gate, q_dim}};
    linear_run(nn, in, jobs, p->output_gate ? 4 : 3);
    struct attn_ctx c = {nn, p, w, state, s, position, 1.0f / sqrtf((float)p->head_dim)};
    pool_run(nn->pool, in->n, prepare_task, &c);
    pool_run(nn->pool, in->n * p->heads, head_task, &c);
    linear_input_set(&s->out_in, s->q, q_dim, in->n, (uint32_t)q_dim);
    const struct linear_job out = {&w->o, y, ldy};
    linear_run(nn, &s->out_in, &out, 1);
}
