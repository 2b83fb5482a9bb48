/* Second moments of a matrix's inputs, factored for an encoder that lets later weights of a row make
 * up for the errors of earlier ones. With H = A A', A upper triangular, the error e of a row costs
 * |e A|^2, and its part of sub-vector j is (e_j + sum over i < 8 j of e_i N_ji) D_j. */
#ifndef ENCODE_MOMENTS_H
#define ENCODE_MOMENTS_H

#include "base/pool.h"
#include "quant/rvq.h"

/* Floats of what moments_factor writes: for every sub-vector j N_j [8][8 j], then D_j transposed,
 * [8][8] lower triangular. Dimensions beyond the last input are zero. */
size_t moments_floats(uint32_t cols);
/* Offsets of N_j and of D_j. */
static inline size_t moments_feedback(size_t j)
{
    return RVQ_DIM * RVQ_DIM / 2 * j * (j + 1);
}
static inline size_t moments_metric(size_t j)
{
    return moments_feedback(j) + RVQ_DIM * RVQ_DIM * j;
}

/* H = x'x over x [n, cols], finite, scaled to a mean square of 1, plus damping > 0 on the diagonal;
 * without any input other than zero the identity. The same result for every thread count. */
hr_status moments_factor(struct pool *pool, struct mem_budget *mem, const float *x, size_t n,
                         uint32_t cols, double damping, float *moments, hr_error *err);

#endif
