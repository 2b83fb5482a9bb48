#include "nn/delta_rule.h"

#include <math.h>
#include <string.h>

enum { MAX_TAPS = 8 };

static size_t worker_floats(const struct delta_part *p)
{
    return ((size_t)p->value_dim + 15) & ~(size_t)15;
}

void delta_carve(struct carve *c, const struct delta_part *p, uint32_t n, uint32_t workers,
                 struct delta_scratch *s)
{
    const size_t channels = delta_channels(p), vd = (size_t)p->value_heads * p->value_dim;
    s->u = carve_take(c, n * channels * sizeof(float));
    s->c = carve_take(c, n * channels * sizeof(float));
    s->z = carve_take(c, n * vd * sizeof(float));
    s->o = carve_take(c, n * vd * sizeof(float));
    s->a = carve_take(c, (size_t)n * p->value_heads * sizeof(float));
    s->b = carve_take(c, (size_t)n * p->value_heads * sizeof(float));
    s->work = carve_take(c, workers * worker_floats(p) * sizeof(float));
    s->rate = carve_take(c, p->value_heads * sizeof(float));
    linear_input_carve(c, n, (uint32_t)vd, &s->out_in);
}

struct delta_ctx {
    const struct nn *nn;
    const struct delta_part *p;
    const struct delta_weights *w;
    struct delta_state *state;
    struct delta_scratch *s;
    uint32_t n;
};

/* Per token: causal convolution, q and k normalised, decay and beta from their projections. */
static void token_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct delta_ctx *c = ctx;
    const struct delta_part *p = c->p;
    const struct kernels *kern = c->nn->k;
    const size_t channels = delta_channels(p);
    const uint32_t back = p->conv_taps - 1, hv = p->value_heads;
    const float *rows[MAX_TAPS];
    (void)worker;
    for (uint32_t j = 0; j <= back; j++)
        rows[j] = t + j < back ? c->state->conv + (size_t)(t + j) * channels
                               : c->s->u + (size_t)(t + j - back) * channels;
    float *y = c->s->c + (size_t)t * channels;
    kern->conv_silu(c->w->conv, rows, p->conv_taps, channels, y);

    const float q_scale = 1.0f / sqrtf((float)p->key_dim);
    float *k = y + (size_t)p->key_heads * p->key_dim;
    for (uint32_t h = 0; h < p->key_heads; h++) {
        float *qh = y + (size_t)h * p->key_dim, *kh = k + (size_t)h * p->key_dim;
        kern->l2_norm(qh, p->key_dim, p->qk_norm_eps, q_scale, qh);
        kern->l2_norm(kh, p->key_dim, p->qk_norm_eps, 1.0f, kh);
    }

    float *a = c->s->a + (size_t)t * hv, *b = c->s->b + (size_t)t * hv;
    for (uint32_t h = 0; h < hv; h++) a[h] = a[h] + c->w->dt_bias[h];
    kern->softplus(a, a, hv);
    for (uint32_t h = 0; h < hv; h++) a[h] = a[h] * c->s->rate[h];
    kern->exp(a, a, hv);
    kern->sigmoid(b, b, hv);
}

/* Per value head: the recurrence over the chunk's tokens, then the gated norm. */
static void head_task(void *ctx, uint32_t h, uint32_t worker)
{
    const struct delta_ctx *c = ctx;
    const struct delta_part *p = c->p;
    const struct kernels *kern = c->nn->k;
    const size_t channels = delta_channels(p), kd = (size_t)p->key_heads * p->key_dim;
    const size_t vd = (size_t)p->value_heads * p->value_dim;
    const uint32_t kh = h / (p->value_heads / p->key_heads);
    float *S = c->state->S + (size_t)h * p->key_dim * p->value_dim;
    float *work = c->s->work + worker * worker_floats(p);
    for (uint32_t t = 0; t < c->n; t++) {
        const float *row = c->s->c + t * channels;
        const float *z = c->s->z + t * vd + (size_t)h * p->value_dim;
        float *o = c->s->o + t * vd + (size_t)h * p->value_dim;
        kern->delta_step(S, p->key_dim, p->value_dim, c->s->a + (size_t)t * p->value_heads + h, 0,
                         row + kd + (size_t)kh * p->key_dim, row + (size_t)kh * p->key_dim,
                         row + 2 * kd + (size_t)h * p->value_dim,
                         c->s->b[(size_t)t * p->value_heads + h], work, o);
        kern->rms_norm(o, c->w->norm, p->value_dim, p->norm_eps, o);
        kern->silu_mul(o, z, o, p->value_dim);
    }
}

/* The last taps - 1 raw rows, whether they came in this chunk or before. */
static void keep_conv_rows(const struct delta_ctx *c)
{
    const size_t channels = delta_channels(c->p);
    const uint32_t back = c->p->conv_taps - 1;
    if (back == 0) return;
    if (c->n < back)
        memmove(c->state->conv, c->state->conv + c->n * channels,
                (back - c->n) * channels * sizeof(float));
    const uint32_t fresh = c->n < back ? c->n : back;
    memcpy(c->state->conv + (back - fresh) * channels, c->s->u + (c->n - fresh) * channels,
           fresh * channels * sizeof(float));
}

void delta_forward(const struct nn *nn, const struct delta_part *p, const struct delta_weights *w,
                   struct delta_state *state, struct delta_scratch *s, struct linear_input *in,
                   float *y, size_t ldy)
{
    const size_t channels = delta_channels(p), vd = (size_t)p->value_heads * p->value_dim;
    const struct linear_job jobs[] = {{&w->qkv, s->u, channels},
                                      {&w->z, s->z, vd},
                                      {&w->a, s->a, p->value_heads},
                                      {&w->b, s->b, p->value_heads}};
    linear_run(nn, in, jobs, 4);
    nn->k->exp(s->rate, w->a_log, p->value_heads);
    for (uint32_t h = 0; h < p->value_heads; h++) s->rate[h] = -s->rate[h];
    struct delta_ctx c = {nn, p, w, state, s, in->n};
    pool_run(nn->pool, in->n, token_task, &c);
    pool_run(nn->pool, p->value_heads, head_task, &c);
    keep_conv_rows(&c);
    linear_input_set(&s->out_in, s->o, vd, in->n, (uint32_t)vd);
    const struct linear_job out = {&w->out, y, ldy};
    linear_run(nn, &s->out_in, &out, 1);
}
