/* Gated linear units, down(act(gate x, up x)), several at once: routed experts, shared experts
 * and dense layers are all jobs of this one routine. */
#ifndef NN_GLU_H
#define NN_GLU_H

#include "nn/linear.h"
#include "nn/parts.h"

struct glu_job {
    const struct matrix *gate, *up, *down;
    const float *gate_bias, *up_bias, *down_bias; /* all or none */
    struct activation act;
    struct linear_input *in; /* jobs may share it */
    const uint32_t *index;   /* rows of `in` this job reads; NULL = 0..n-1 */
    uint32_t n;
    float *y;                /* [n][down->rows], row i belongs to index[i] */
    size_t ldy;
    /* carved by glu_carve, or pieces of one carve: */
    float *h;                /* [n][inner] gate, then the product */
    float *u;                /* [n][inner] */
    struct linear_input mid; /* storage for n rows of inner */
};

/* Room for `n` rows in all of jobs with at most `inner` inner units; glu_slice hands out parts.
 * fine: a `down` may take 22-bit activations. */
struct glu_scratch {
    float *h, *u;
    struct linear_input mid;
    uint32_t n, inner;
};
void glu_carve(struct carve *c, uint32_t n, uint32_t inner, bool fine, struct glu_scratch *s);
/* Points job->h, u, mid at rows [first, first + job->n) of the scratch. */
void glu_slice(const struct glu_scratch *s, uint32_t first, struct glu_job *job);

enum { GLU_MAX_JOBS = 64 };
/* count <= GLU_MAX_JOBS. One parallel region for all jobs together. */
void glu_run(const struct nn *nn, struct glu_job *jobs, uint32_t count);

#endif
