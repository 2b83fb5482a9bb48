/* Codebooks from samples: residual k-means, then rounds of joint least squares over all stages. */
#ifndef ENCODE_RVQ_FIT_H
#define ENCODE_RVQ_FIT_H

#include "base/pool.h"
#include "kernels/kernels.h"
#include "quant/rvq.h"

struct rvq_fit {
    const struct kernels *k;
    struct pool *pool;
    struct mem_budget *mem;
    const struct rvq_shape *shape;
    uint32_t beam;   /* 1..RVQ_MAX_BEAM, the one that will encode */
    uint32_t rounds; /* of least squares; 0: greedy residual k-means alone */
    uint64_t seed;
};

/* x [n][8], rows scaled to a root mean square of 1, finite; n >= 1. entries [stages][entries][8]
 * in units of 1 / *unit. The same result for every thread count and ISA. */
hr_status rvq_fit(const struct rvq_fit *f, const float *x, size_t n, int8_t *entries, float *unit,
                  hr_error *err);

#endif
