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
    s->a = carve_take(c, (size_t)n * delta_decays(p) * sizeof(float));
    s->b = carve_take(c, (size_t)n * p->value_heads * sizeof(float));
    s->work = carve_take(c, workers * worker_floats(p) * sizeof(float));
    s->rate = carve_take(c, p->value_heads * sizeof(float));
    s->low = carve_take(c, (size_t)n * (p->decay_rank + p->gate_rank) * sizeof(float));
    linear_input_carve(c, n, p->decay_rank ? p->decay_rank : 1, false, &s->a_in);
    linear_input_carve(c, n, p->gate_rank ? p->gate_rank : 1, false, &s->z_in);
    linear_input_carve(c, n, (uint32_t)vd, false, &s->out_in);
}

struct delta_ctx {
    const struct nn *nn;
    const struct delta_part *p;
    const struct delta_weights *w;
    struct delta_state *state;
    struct delta_scratch *s;
    uint32_t n;
};

/* Projection of one token to decay factors: exp(-exp(a_log) * softplus(a + dt_bias)), or
 * exp(bound * sigmoid(exp(a_log) * (a + dt_bias))); a_log belongs to the head. */
static void decay_row(const struct delta_ctx *c, float *a)
{
    const struct delta_part *p = c->p;
    const struct kernels *kern = c->nn->k;
    const size_t n = delta_decays(p), width = n / p->value_heads;
    kern->add(a, c->w->dt_bias, n);
    if (!p->decay_bounded) kern->softplus(a, a, n);
    for (uint32_t h = 0; h < p->value_heads; h++)
        kern->scale(a + h * width, p->decay_bounded ? c->s->rate[h] : -c->s->rate[h], width);
    if (p->decay_bounded) {
        kern->sigmoid(a, a, n);
        kern->scale(a, p->decay_bound, n);
    }
    kern->exp(a, a, n);
}

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

    decay_row(c, c->s->a + (size_t)t * delta_decays(p));
    float *b = c->s->b + (size_t)t * hv;
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
    const size_t decays = delta_decays(p), width = decays / p->value_heads;
    float *work = c->s->work + worker * worker_floats(p);
    for (uint32_t t = 0; t < c->n; t++) {
        const float *row = c->s->c + t * channels;
        const float *z = c->s->z + t * vd + (size_t)h * p->value_dim;
        float *o = c->s->o + t * vd + (size_t)h * p->value_dim;
        kern->delta_step(S, p->key_dim, p->value_dim, c->s->a + t * decays + h * width,
                         p->decay_channel ? 1 : 0,
                         row + kd + (size_t)kh * p->key_dim, row + (size_t)kh * p->key_dim,
                         row + 2 * kd + (size_t)h * p->value_dim,
                         c->s->b[(size_t)t * p->value_heads + h], work, o);
        kern->rms_norm(o, c->w->norm, p->value_dim, p->norm_eps, o);
        if (p->gate_sigmoid)
            kern->sigmoid_mul(o, z, p->value_dim);
        else
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

/* Every projection of the input; low-rank ones in two steps. */
static void project(const struct delta_ctx *c, struct linear_input *in)
{
    const struct delta_part *p = c->p;
    const struct delta_weights *w = c->w;
    struct delta_scratch *s = c->s;
    const size_t vd = (size_t)p->value_heads * p->value_dim;
    float *a_low = s->low, *z_low = s->low + (size_t)c->n * p->decay_rank;
    const struct linear_job jobs[] = {
        {&w->qkv, s->u, delta_channels(p)},
        {&w->b, s->b, p->value_heads},
        p->decay_rank ? (struct linear_job){&w->a_down, a_low, p->decay_rank}
                      : (struct linear_job){&w->a, s->a, delta_decays(p)},
        p->gate_rank ? (struct linear_job){&w->z_down, z_low, p->gate_rank}
                     : (struct linear_job){&w->z, s->z, vd}};
    linear_run(c->nn, in, jobs, 4);
    if (p->decay_rank) {
        const struct linear_job up = {&w->a, s->a, delta_decays(p)};
        linear_input_set(&s->a_in, a_low, p->decay_rank, c->n, p->decay_rank);
        linear_run(c->nn, &s->a_in, &up, 1);
    }
    if (p->gate_rank) {
        const struct linear_job up = {&w->z, s->z, vd};
        linear_input_set(&s->z_in, z_low, p->gate_rank, c->n, p->gate_rank);
        linear_run(c->nn, &s->z_in, &up, 1);
    }
}

void delta_forward(const struct nn *nn, const struct delta_part *p, const struct delta_weights *w,
                   struct delta_state *state, struct delta_scratch *s, struct linear_input *in,
                   float *y, size_t ldy)
{
    const size_t vd = (size_t)p->value_heads * p->value_dim;
    struct delta_ctx c = {nn, p, w, state, s, in->n};
    project(&c, in);
    nn->k->exp(s->rate, w->a_log, p->value_heads);
    pool_run(nn->pool, in->n, token_task, &c);
    pool_run(nn->pool, p->value_heads, head_task, &c);
    keep_conv_rows(&c);
    linear_input_set(&s->out_in, s->o, vd, in->n, (uint32_t)vd);
    const struct linear_job out = {&w->out, y, ldy};
    linear_run(nn, &s->out_in, &out, 1);
}
