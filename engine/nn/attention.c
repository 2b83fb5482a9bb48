#include "nn/attention.h"

#include <string.h>

#include "nn/attend.h"
#include "nn/rope.h"

/* Floats of one worker: a group of query heads; with selection also one block's worth of gathered
 * keys and values. */
static size_t worker_floats(const struct attention_part *p)
{
    const size_t gathered = p->sparse.heads ? 2 * (size_t)ATTN_BLOCK * p->head_dim : 0;
    return attend_floats(p->head_dim) + gathered;
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
    linear_input_carve(c, n, (uint32_t)q_dim, false, &s->out_in);
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
    /* Queries of one key head are numbered token by token; those of a span may share a task, `tile`
     * at a time. */
    uint32_t n, span, tile;
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

static float *query_of(const struct attn_ctx *c, uint32_t t, uint32_t h)
{
    return c->s->q + ((size_t)t * c->p->heads + h) * c->p->head_dim;
}

/* The results replace the queries, number `first` of key head kv and the following. */
static void finish_group(const struct attn_ctx *c, struct attend_group *g, uint32_t kv,
                         uint32_t first)
{
    const struct attention_part *p = c->p;
    const uint32_t hd = p->head_dim, group = p->heads / p->kv_heads;
    for (uint32_t i = 0; i < g->count; i++) {
        const uint32_t t = (first + i) / group, h = kv * group + (first + i) % group;
        float *q = query_of(c, t, h);
        if (p->sinks) attend_sink(c->nn->k, c->w->sinks[h], hd, g, i);
        attend_finish(g, i, hd, q);
        if (p->output_gate)
            c->nn->k->sigmoid_mul(q, c->s->gate + ((size_t)t * p->heads + h) * hd, hd);
    }
}

/* Queries first .. first + count - 1 of key head kv, numbered token by token; with a window they
 * must be one token's. */
static void dense_group(const struct attn_ctx *c, uint32_t kv, uint32_t first, uint32_t count,
                        float *work)
{
    const struct attention_part *p = c->p;
    const uint32_t group = p->heads / p->kv_heads, least = c->position + first / group + 1;
    const struct attend_keys range = head_keys(c, kv);
    struct attend_group g;
    attend_begin(&g, work, p->head_dim);
    for (uint32_t r = first; r < first + count; r++)
        attend_add(&g, query_of(c, r / group, kv * group + r % group), c->position + r / group + 1);
    attend_range(c->nn->k, &range, &g, p->window && least > p->window ? least - p->window : 0);
    finish_group(c, &g, kv, first);
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

/* `count` query heads of one token, from its query number `first` of key head kv on. */
static void sparse_group(const struct attn_ctx *c, uint32_t kv, uint32_t first, uint32_t count,
                         float *work)
{
    const struct attention_part *p = c->p;
    const uint32_t hd = p->head_dim, group = p->heads / p->kv_heads, t = first / group;
    const uint32_t keys = c->position + t + 1, block = p->sparse.block;
    const struct attend_keys all = head_keys(c, kv);
    float *k = work + attend_floats(hd), *v = k + (size_t)ATTN_BLOCK * hd;
    struct attend_keys part = all;
    struct gather from = {.chosen = c->s->sparse.chosen + (size_t)t * (p->sparse.budget / block),
                          .kept = sparse_kept(&p->sparse, keys), .block = block,
                          .tail_first = sparse_blocks(&p->sparse, keys) * block, .keys = keys};
    struct attend_group g;
    part.k = k;
    part.v = v;
    attend_begin(&g, work, hd);
    for (uint32_t r = first; r < first + count; r++)
        attend_add(&g, query_of(c, t, kv * group + r % group), 0);
    for (uint32_t n; (n = gather_keys(&from, &all, k, v)) > 0;) {
        for (uint32_t i = 0; i < count; i++) g.end[i] = n;
        attend_range(c->nn->k, &part, &g, 0);
    }
    finish_group(c, &g, kv, first);
}

/* Tasks go over key heads, and for each over tiles of its queries. A window or a selection belongs
 * to one token. */
static void attend_task(void *ctx, uint32_t task, uint32_t worker)
{
    const struct attn_ctx *c = ctx;
    const struct attention_part *p = c->p;
    const uint32_t group = p->heads / p->kv_heads;
    const uint32_t tiles = (c->span + c->tile - 1) / c->tile, spans = group * c->n / c->span;
    const uint32_t kv = task / (tiles * spans), rest = task % (tiles * spans);
    const uint32_t at = rest % tiles * c->tile, first = rest / tiles * c->span + at;
    const uint32_t count = c->span - at < c->tile ? c->span - at : c->tile;
    const uint32_t keys = c->position + first / group + 1;
    float *work = c->s->work + worker * worker_floats(p);
    if (p->sparse.heads && sparse_kept(&p->sparse, keys) < sparse_blocks(&p->sparse, keys))
        sparse_group(c, kv, first, count, work);
    else
        dense_group(c, kv, first, count, work);
}

static void attend_all(struct attn_ctx *c)
{
    const struct attention_part *p = c->p;
    const uint32_t queries = p->heads / p->kv_heads * c->n;
    c->span = p->window || p->sparse.heads ? p->heads / p->kv_heads : queries;
    c->tile = attend_tile(queries * p->kv_heads, c->span, pool_threads(c->nn->pool));
    const uint32_t tiles = (c->span + c->tile - 1) / c->tile;
    pool_run(c->nn->pool, p->kv_heads * (queries / c->span) * tiles, attend_task, c);
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
    struct attn_ctx c = {.nn = nn, .p = p, .w = w, .state = state, .s = s, .position = position,
                         .scale = p->scale, .y = y, .ldy = ldy, .hidden = w->o.rows, .n = in->n};
    pool_run(nn->pool, in->n, prepare_task, &c);
    if (p->sparse.heads)
        sparse_select(nn, p, w, state, &s->sparse, in, position, s->cosine, s->sine);
    attend_all(&c);
    linear_input_set(&s->out_in, s->q, q_dim, in->n, (uint32_t)q_dim);
    const struct linear_job out = {&w->o, y, ldy};
    linear_run(nn, &s->out_in, &out, 1);
    if (p->output_bias) pool_run(nn->pool, in->n, bias_task, &c);
}
