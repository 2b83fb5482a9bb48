#include "nn/attention.h"

#include <string.h>

#include "nn/attend.h"
#include "nn/rope.h"

/* Floats of one worker: scores and two accumulators for each query head that shares a key head;
 * with selection also one block's worth of gathered keys and values. */
static size_t worker_floats(const struct attention_part *p)
{
    size_t n = ATTN_BLOCK + 2 * (size_t)p->head_dim;
    if (p->sparse.heads)
        n = ATTN_BLOCK + (size_t)(p->heads / p->kv_heads + 1) * p->head_dim +
            2 * (size_t)ATTN_BLOCK * p->head_dim;
    return (n + 15) & ~(size_t)15;
}

void attention_carve(struct carve *c, const struct attention_part *p, uint32_t ctx, uint32_t n,
                     uint32_t workers, struct attention_scratch *s)
{
    const size_t q_dim = (size_t)p->heads * p->head_dim, kv_dim = (size_t)p->kv_heads * p->head_dim;
    s->q = carve_take(c, n * q_dim * sizeof(float));
    s->gate = p->output_gate ? carve_take(c, n * q_dim * sizeof(float)) : NULL;
    s->k = carve_take(c, n * kv_dim * sizeof(float));
    s->v = carve_take(c, n * kv_dim * sizeof(float));
    s->cosine = carve_take(c, (size_t)n * p->rope.half * sizeof(float));
    s->sine = carve_take(c, (size_t)n * p->rope.half * sizeof(float));
    s->work = carve_take(c, workers * worker_floats(p) * sizeof(float));
    if (p->sparse.heads) sparse_carve(c, &p->sparse, ctx, n, workers, &s->sparse);
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
    float *y;
    size_t ldy, hidden;
};

/* Bias, norm and rotation of the `heads` heads of one token's q or k. */
static void finish_heads(const struct attn_ctx *c, float *x, uint32_t heads, const float *bias,
                         const float *norm, const float *cosine, const float *sine)
{
    const struct attention_part *p = c->p;
    const uint32_t hd = p->head_dim;
    if (p->bias) c->nn->k->add(x, bias, (size_t)heads * hd);
    if (p->qk_norm && p->qk_norm_vector)
        c->nn->k->rms_norm(x, norm, (size_t)heads * hd, p->norm_eps, x);
    for (uint32_t h = 0; h < heads; h++) {
        float *head = x + (size_t)h * hd;
        if (p->qk_norm && !p->qk_norm_vector) c->nn->k->rms_norm(head, norm, hd, p->norm_eps, head);
        rope_apply(head, p->rope.half, cosine, sine);
    }
}

/* Per token: q and k finished, k and v appended to the cache. */
static void prepare_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct attn_ctx *c = ctx;
    const struct attention_part *p = c->p;
    const struct attention_weights *w = c->w;
    const uint32_t half = p->rope.half, hd = p->head_dim;
    const size_t kv_dim = (size_t)p->kv_heads * hd;
    float *cosine = c->s->cosine + (size_t)t * half, *sine = c->s->sine + (size_t)t * half;
    float *k = c->s->k + t * kv_dim, *v = c->s->v + t * kv_dim;
    (void)worker;
    rope_table(w->frequency, half, p->rope.scale, c->position + t, cosine, sine);
    finish_heads(c, c->s->q + (size_t)t * p->heads * hd, p->heads, w->q_bias, w->q_norm, cosine,
                 sine);
    finish_heads(c, k, p->kv_heads, w->k_bias, w->k_norm, cosine, sine);
    if (p->bias) c->nn->k->add(v, w->v_bias, kv_dim);
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        const size_t to = ((size_t)h * c->state->ctx + c->position + t) * hd;
        memcpy(c->state->k + to, k + (size_t)h * hd, hd * sizeof(float));
        memcpy(c->state->v + to, v + (size_t)h * hd, hd * sizeof(float));
    }
}

static struct attend_keys head_keys(const struct attn_ctx *c, uint32_t kv)
{
    const uint32_t hd = c->p->head_dim;
    const size_t at = (size_t)kv * c->state->ctx * hd;
    return (struct attend_keys){c->state->k + at, c->state->v + at, hd, hd, hd, hd, c->scale};
}

/* One query head of one token, all keys in its window. The result replaces q. */
static void dense_head(const struct attn_ctx *c, uint32_t t, uint32_t h, float *work)
{
    const struct attention_part *p = c->p;
    const uint32_t hd = p->head_dim, keys = c->position + t + 1;
    const uint32_t first = p->window && keys > p->window ? keys - p->window : 0;
    const struct attend_keys range = head_keys(c, h / (p->heads / p->kv_heads));
    float *q = c->s->q + ((size_t)t * p->heads + h) * hd;
    struct attend_head head = {.scores = work, .acc = work + ATTN_BLOCK,
                               .acc2 = work + ATTN_BLOCK + hd};
    attend_range(c->nn->k, &range, q, first, keys, &head);
    if (p->sinks) attend_sink(c->nn->k, c->w->sinks[h], hd, &head);
    attend_finish(&head, hd, q);
}

/* The chosen blocks and the incomplete last one, gathered ATTN_BLOCK keys at a time. */
struct gather {
    const int32_t *chosen;
    uint32_t kept, next, block, tail_first, keys;
};

static uint32_t gather_keys(struct gather *g, const struct attend_keys *from, float *k, float *v)
{
    uint32_t n = 0;
    while (n + g->block <= ATTN_BLOCK && g->next <= g->kept) {
        const bool tail = g->next == g->kept;
        const uint32_t first = tail ? g->tail_first : (uint32_t)g->chosen[g->next] * g->block;
        const uint32_t count = tail ? g->keys - g->tail_first : g->block;
        memcpy(k + (size_t)n * from->ldk, from->k + (size_t)first * from->ldk,
               count * from->ldk * sizeof(float));
        memcpy(v + (size_t)n * from->ldv, from->v + (size_t)first * from->ldv,
               count * from->ldv * sizeof(float));
        n += count;
        g->next++;
    }
    return n;
}

static void sparse_group(const struct attn_ctx *c, uint32_t t, uint32_t kv, float *work)
{
    const struct attention_part *p = c->p;
    const uint32_t hd = p->head_dim, group = p->heads / p->kv_heads, keys = c->position + t + 1;
    const uint32_t block = p->sparse.block, blocks = sparse_blocks(&p->sparse, keys);
    const struct attend_keys all = head_keys(c, kv);
    float *acc = work + ATTN_BLOCK, *acc2 = acc + (size_t)group * hd;
    float *k = acc2 + hd, *v = k + (size_t)ATTN_BLOCK * hd;
    float m[MAX_GROUP], l[MAX_GROUP];
    struct attend_keys part = all;
    struct gather g = {.chosen = c->s->sparse.chosen + (size_t)t * (p->sparse.budget / block),
                       .kept = sparse_kept(&p->sparse, keys), .block = block,
                       .tail_first = blocks * block, .keys = keys};
    part.k = k;
    part.v = v;
    float *q = c->s->q + ((size_t)t * p->heads + (size_t)kv * group) * hd;
    bool begun = false;
    for (uint32_t n; (n = gather_keys(&g, &all, k, v)) > 0; begun = true)
        for (uint32_t h = 0; h < group; h++) {
            struct attend_head head = {m[h], l[h], begun, acc + (size_t)h * hd, acc2, work};
            attend_range(c->nn->k, &part, q + (size_t)h * hd, 0, n, &head);
            m[h] = head.m;
            l[h] = head.l;
        }
    for (uint32_t h = 0; h < group; h++) {
        struct attend_head head = {m[h], l[h], true, acc + (size_t)h * hd, acc2, work};
        if (p->sinks) attend_sink(c->nn->k, c->w->sinks[kv * group + h], hd, &head);
        attend_finish(&head, hd, q + (size_t)h * hd);
    }
}

static void open_gate(const struct attn_ctx *c, uint32_t t, uint32_t first_head, uint32_t heads)
{
    const size_t hd = c->p->head_dim, at = ((size_t)t * c->p->heads + first_head) * hd;
    if (c->p->output_gate) c->nn->k->sigmoid_mul(c->s->q + at, c->s->gate + at, heads * hd);
}

static void head_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct attn_ctx *c = ctx;
    const uint32_t t = task / c->p->heads, h = task % c->p->heads;
    dense_head(c, t, h, c->s->work + worker * worker_floats(c->p));
    open_gate(c, t, h, 1);
}

/* With selection: the query heads that share one key head, so that keys are gathered once. */
static void group_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct attn_ctx *c = ctx;
    const struct attention_part *p = c->p;
    const uint32_t group = p->heads / p->kv_heads, t = task / p->kv_heads, kv = task % p->kv_heads;
    const uint32_t keys = c->position + t + 1;
    float *work = c->s->work + worker * worker_floats(p);
    if (sparse_kept(&p->sparse, keys) < sparse_blocks(&p->sparse, keys))
        sparse_group(c, t, kv, work);
    else
        for (uint32_t h = 0; h < group; h++) dense_head(c, t, kv * group + h, work);
    open_gate(c, t, kv * group, group);
}

static void bias_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct attn_ctx *c = ctx;
    (void)worker;
    c->nn->k->add(c->y + (size_t)t * c->ldy, c->w->o_bias, c->hidden);
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
    struct attn_ctx c = {nn, p, w, state, s, position, p->scale, y, ldy, w->o.rows};
    pool_run(nn->pool, in->n, prepare_task, &c);
    if (p->sparse.heads) {
        sparse_select(nn, p, w, state, &s->sparse, in, position, s->cosine, s->sine);
        pool_run(nn->pool, in->n * p->kv_heads, group_task, &c);
    } else {
        pool_run(nn->pool, in->n * p->heads, head_task, &c);
    }
    linear_input_set(&s->out_in, s->q, q_dim, in->n, (uint32_t)q_dim);
    const struct linear_job out = {&w->o, y, ldy};
    linear_run(nn, &s->out_in, &out, 1);
    if (p->output_bias) pool_run(nn->pool, in->n, bias_task, &c);
}
