#include "nn/sparse_select.h"

#include <math.h>
#include <string.h>

#include "nn/rope.h"
#include "nn/router.h"

void sparse_carve(struct carve *c, const struct sparse_part *p, uint32_t ctx, uint32_t n,
                  uint32_t workers, struct sparse_scratch *s)
{
    s->q = carve_take(c, (size_t)n * p->heads * p->dim * sizeof(float));
    s->k = carve_take(c, (size_t)n * p->dim * sizeof(float));
    s->score = carve_take(c, (size_t)workers * (ctx / p->block + 1) * sizeof(float));
    s->chosen = carve_take(c, (size_t)n * (p->budget / p->block) * sizeof(int32_t));
}

struct select_ctx {
    const struct nn *nn;
    const struct attention_part *p;
    const struct attention_weights *w;
    struct attention_state *state;
    struct sparse_scratch *s;
    uint32_t position, n;
    const float *cosine, *sine;
};

static void query_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct select_ctx *c = ctx;
    const struct sparse_part *p = &c->p->sparse;
    const uint32_t half = c->p->rope.half;
    (void)worker;
    for (uint32_t h = 0; h < p->heads; h++) {
        float *q = c->s->q + ((size_t)t * p->heads + h) * p->dim;
        c->nn->k->rms_norm(q, c->w->index_q_norm, p->dim, c->p->norm_eps, q);
        rope_apply(q, half, c->cosine + (size_t)t * half, c->sine + (size_t)t * half);
    }
    memcpy(c->state->index_raw + (size_t)(c->position + t) * p->dim, c->s->k + (size_t)t * p->dim,
           p->dim * sizeof(float));
}

/* Every block that became complete with this chunk: mean of its raw keys, normed, rotated at its
 * first token. Sums in ascending position, so the chunk's cut does not matter. */
static void pool_blocks(const struct select_ctx *c)
{
    const struct sparse_part *p = &c->p->sparse;
    const uint32_t half = c->p->rope.half, end = (c->position + c->n) / p->block;
    float cosine[MAX_ROTARY_HALF], sine[MAX_ROTARY_HALF];
    for (uint32_t b = c->position / p->block; b < end; b++) {
        float *key = c->state->index_block + (size_t)b * p->dim;
        const float *raw = c->state->index_raw + (size_t)b * p->block * p->dim;
        memcpy(key, raw, p->dim * sizeof(float));
        for (uint32_t j = 1; j < p->block; j++)
            c->nn->k->add(key, raw + (size_t)j * p->dim, p->dim);
        c->nn->k->scale(key, 1.0f / (float)p->block, p->dim);
        c->nn->k->rms_norm(key, c->w->index_k_norm, p->dim, c->p->norm_eps, key);
        rope_table(c->w->frequency, half, c->p->rope.scale, b * p->block, cosine, sine);
        rope_apply(key, half, cosine, sine);
    }
}

static void sort_ascending(int32_t *ids, uint32_t n)
{
    for (uint32_t gap = n / 2; gap > 0; gap /= 2)
        for (uint32_t i = gap; i < n; i++) {
            const int32_t x = ids[i];
            uint32_t j = i;
            for (; j >= gap && ids[j - gap] > x; j -= gap) ids[j] = ids[j - gap];
            ids[j] = x;
        }
}

static void choose_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct select_ctx *c = ctx;
    const struct sparse_part *p = &c->p->sparse;
    const uint32_t keys = c->position + t + 1, blocks = sparse_blocks(p, keys);
    const uint32_t kept = sparse_kept(p, keys);
    if (kept == blocks) return; /* dense */
    float *score = c->s->score + (size_t)worker * (c->state->ctx / p->block + 1);
    const float *q = c->s->q + (size_t)t * p->heads * p->dim;
    const float scale = 1.0f / sqrtf((float)p->dim);
    for (uint32_t b = 0; b < blocks; b++) {
        const float *key = c->state->index_block + (size_t)b * p->dim;
        float sum = 0;
        for (uint32_t h = 0; h < p->heads; h++) {
            const float dot = c->nn->k->dot(q + (size_t)h * p->dim, key, p->dim);
            if (dot > 0) sum += dot;
        }
        score[b] = sum * scale;
    }
    int32_t *chosen = c->s->chosen + (size_t)t * (p->budget / p->block);
    router_top_k(score, blocks, kept, chosen);
    sort_ascending(chosen, kept);
}

void sparse_select(const struct nn *nn, const struct attention_part *p,
                   const struct attention_weights *w, struct attention_state *state,
                   struct sparse_scratch *s, struct linear_input *in, uint32_t position,
                   const float *cosine, const float *sine)
{
    const size_t q_width = (size_t)p->sparse.heads * p->sparse.dim;
    const struct linear_job jobs[] = {{&w->index_q, s->q, q_width}, {&w->index_k, s->k, p->sparse.dim}};
    struct select_ctx c = {nn, p, w, state, s, position, in->n, cosine, sine};
    linear_run(nn, in, jobs, 2);
    pool_run(nn->pool, in->n, query_task, &c);
    pool_blocks(&c);
    pool_run(nn->pool, in->n, choose_task, &c);
}
