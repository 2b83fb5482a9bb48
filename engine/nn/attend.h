/* Softmax attention of one query head over a range of cached keys, in blocks at fixed positions,
 * so that neither chunk size nor threads can change a bit. Shared by all attention mixers. */
#ifndef NN_ATTEND_H
#define NN_ATTEND_H

#include "kernels/kernels.h"

struct attend_keys { /* row j of k, v belongs to position j */
    const float *k, *v;
    size_t ldk, ldv;
    uint32_t k_dim, v_dim;
    float scale;
};

/* Running result of one head; acc and acc2 are [v_dim], scores is [ATTN_BLOCK]. */
struct attend_head {
    float m, l;
    bool begun;
    float *acc, *acc2, *scores;
};

/* Adds keys first .. end-1, cut at multiples of ATTN_BLOCK. */
void attend_range(const struct kernels *kern, const struct attend_keys *keys, const float *q,
                  uint32_t first, uint32_t end, struct attend_head *h);
/* A logit that takes part in the denominator only. */
void attend_sink(const struct kernels *kern, float logit, uint32_t v_dim, struct attend_head *h);
/* out[v_dim] = acc / l */
void attend_finish(const struct attend_head *h, uint32_t v_dim, float *out);

#endif
