#include "nn/attend.h"

#include <string.h>

static void attend_block(const struct kernels *kern, const struct attend_keys *keys,
                         const float *q, uint32_t first, uint32_t n, struct attend_head *h)
{
    const float *k = keys->k + (size_t)first * keys->ldk;
    const float *v = keys->v + (size_t)first * keys->ldv;
    if (!h->begun) {
        kern->attn_block(q, k, keys->ldk, v, keys->ldv, n, keys->k_dim, keys->v_dim, keys->scale,
                         h->scores, &h->m, &h->l, h->acc);
        h->begun = true;
        return;
    }
    float m2, l2;
    kern->attn_block(q, k, keys->ldk, v, keys->ldv, n, keys->k_dim, keys->v_dim, keys->scale,
                     h->scores, &m2, &l2, h->acc2);
    kern->attn_merge(&h->m, &h->l, h->acc, m2, l2, h->acc2, keys->v_dim);
}

void attend_range(const struct kernels *kern, const struct attend_keys *keys, const float *q,
                  uint32_t first, uint32_t end, struct attend_head *h)
{
    while (first < end) {
        const uint32_t cut = (first / ATTN_BLOCK + 1) * ATTN_BLOCK;
        const uint32_t stop = cut < end ? cut : end;
        attend_block(kern, keys, q, first, stop - first, h);
        first = stop;
    }
}

void attend_sink(const struct kernels *kern, float logit, uint32_t v_dim, struct attend_head *h)
{
    memset(h->acc2, 0, v_dim * sizeof(float));
    kern->attn_merge(&h->m, &h->l, h->acc, logit, 1.0f, h->acc2, v_dim);
}

void attend_finish(const struct attend_head *h, uint32_t v_dim, float *out)
{
    for (uint32_t i = 0; i < v_dim; i++) out[i] = h->acc[i] / h->l;
}
