#include "nn/router.h"

#include <math.h>
#include <string.h>

enum { MAX_GROUPS = 256 };

static bool better(const float *scores, int32_t a, int32_t b)
{
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
}

/* A heap of the k best so far, worst on top; then popped from worst to best. */
static void sift_down(const float *scores, int32_t *heap, uint32_t n, uint32_t i)
{
    for (;;) {
        uint32_t worst = i;
        for (uint32_t c = 2 * i + 1; c <= 2 * i + 2 && c < n; c++)
            if (better(scores, heap[worst], heap[c])) worst = c;
        if (worst == i) return;
        const int32_t x = heap[i];
        heap[i] = heap[worst];
        heap[worst] = x;
        i = worst;
    }
}

void router_top_k(const float *scores, uint32_t n, uint32_t k, int32_t *ids)
{
    for (uint32_t i = 0; i < k; i++) ids[i] = (int32_t)i;
    for (uint32_t i = k / 2; i-- > 0;) sift_down(scores, ids, k, i);
    for (uint32_t i = k; i < n; i++) {
        if (!better(scores, (int32_t)i, ids[0])) continue;
        ids[0] = (int32_t)i;
        sift_down(scores, ids, k, 0);
    }
    for (uint32_t m = k; m > 1; m--) {
        const int32_t worst = ids[0];
        ids[0] = ids[m - 1];
        ids[m - 1] = worst;
        sift_down(scores, ids, m - 1, 0);
    }
}

void router_carve(struct carve *c, const struct moe_part *p, uint32_t n, struct router_scratch *s)
{
    const size_t bytes = (size_t)n * p->experts * sizeof(float);
    s->scores = carve_take(c, bytes);
    s->keys = p->router == ROUTER_SIGMOID || p->groups > 1 ? carve_take(c, bytes) : NULL;
}

struct route_ctx {
    const struct nn *nn;
    const struct moe_part *p;
    const struct moe_weights *w;
    struct router_scratch *s;
    int32_t *ids;
    float *weights;
};

static float group_score(const struct moe_part *p, const float *keys, uint32_t n)
{
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        if (keys[i] > first) {
            second = first;
            first = keys[i];
        } else if (keys[i] > second) {
            second = keys[i];
        }
    }
    return p->group_max || n < 2 ? first : first + second;
}

/* Groups outside the best top_groups cannot be chosen. */
static void limit_groups(const struct moe_part *p, float *keys)
{
    const uint32_t size = p->experts / p->groups;
    float score[MAX_GROUPS] = {0};
    int32_t best[MAX_GROUPS];
    bool kept[MAX_GROUPS] = {false};
    for (uint32_t g = 0; g < p->groups; g++) score[g] = group_score(p, keys + g * size, size);
    router_top_k(score, p->groups, p->top_groups, best);
    for (uint32_t i = 0; i < p->top_groups; i++) kept[best[i]] = true;
    for (uint32_t g = 0; g < p->groups; g++)
        for (uint32_t i = 0; !kept[g] && i < size; i++) keys[g * size + i] = -INFINITY;
}

static void route_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct route_ctx *c = ctx;
    const struct moe_part *p = c->p;
    const struct kernels *kern = c->nn->k;
    const uint32_t k = p->top_k, experts = p->experts;
    float *scores = c->s->scores + (size_t)t * experts;
    float *keys = c->s->keys ? c->s->keys + (size_t)t * experts : scores;
    int32_t *ids = c->ids + (size_t)t * k;
    float *weights = c->weights + (size_t)t * k;
    (void)worker;
    if (p->router_bias) kern->add(scores, c->w->router_bias, experts);
    if (p->router == ROUTER_SIGMOID) kern->sigmoid(scores, scores, experts);
    if (keys != scores) memcpy(keys, scores, experts * sizeof(float));
    if (p->select_bias) kern->add(keys, c->w->select_bias, experts);
    if (p->groups > 1) limit_groups(p, keys);
    /* Softmax routers choose by logit: softmax is monotonic, but its rounding can make ties. */
    router_top_k(keys, experts, k, ids);
    if (p->router == ROUTER_SOFTMAX) kern->softmax(scores, experts);
    float total = 0;
    for (uint32_t r = 0; r < k; r++) {
        weights[r] = scores[ids[r]];
        total += weights[r];
    }
    if (p->router == ROUTER_SOFTMAX_CHOSEN) kern->softmax(weights, k);
    for (uint32_t r = 0; r < k; r++) {
        if (p->renormalize) weights[r] = weights[r] / (total + 1e-20f);
        weights[r] = weights[r] * p->scaling;
    }
}

void router_forward(const struct nn *nn, const struct moe_part *p, const struct moe_weights *w,
                    struct linear_input *in, struct router_scratch *s, int32_t *ids,
                    float *weights)
{
    const struct linear_job job = {&w->router, s->scores, p->experts};
    linear_run(nn, in, &job, 1);
    struct route_ctx c = {nn, p, w, s, ids, weights};
    pool_run(nn->pool, in->n, route_task, &c);
}
