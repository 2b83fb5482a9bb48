#include "nn/router.h"

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

struct route_ctx {
    const struct nn *nn;
    const struct moe_part *p;
    float *scores;
    int32_t *ids;
    float *weights;
};

static void route_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct route_ctx *c = ctx;
    const uint32_t k = c->p->top_k;
    float *scores = c->scores + (size_t)t * c->p->experts;
    int32_t *ids = c->ids + (size_t)t * k;
    float *weights = c->weights + (size_t)t * k;
    (void)worker;
    /* Chosen by logit: softmax is monotonic, but its rounding can make ties. */
    router_top_k(scores, c->p->experts, k, ids);
    c->nn->k->softmax(scores, c->p->experts);
    float total = 0;
    for (uint32_t r = 0; r < k; r++) {
        weights[r] = scores[ids[r]];
        total += weights[r];
    }
    for (uint32_t r = 0; r < k; r++) {
        if (c->p->renormalize) weights[r] = weights[r] / total;
        weights[r] = weights[r] * c->p->scaling;
    }
}

void router_forward(const struct nn *nn, const struct moe_part *p, const struct matrix *router,
                    struct linear_input *in, float *scores, int32_t *ids, float *weights)
{
    const struct linear_job job = {router, scores, p->experts};
    linear_run(nn, in, &job, 1);
    struct route_ctx c = {nn, p, scores, ids, weights};
    pool_run(nn->pool, in->n, route_task, &c);
}
