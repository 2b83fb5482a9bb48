/* y = W x for a chunk of tokens, by the product that the weight's codec calls for. */
#ifndef NN_LINEAR_H
#define NN_LINEAR_H

#include "base/carve.h"
#include "base/pool.h"
#include "kernels/kernels.h"
#include "quant/codec.h"

struct nn { /* what every part needs to compute */
    const struct kernels *k;
    struct pool *pool;
};

/* Activations of n tokens, float rows and, made on demand once, their quantised forms. */
struct linear_input {
    const float *x;
    size_t ldx;
    uint32_t n, k;
    bool quantized, quantized22;
    struct qbatch q;     /* storage carved for at least n rows of k */
    struct qbatch22 q22; /* the same where `fine` */
};

/* fine: matrices that take 22-bit activations may read it. */
void linear_input_carve(struct carve *c, uint32_t n, uint32_t k, bool fine,
                        struct linear_input *in);
/* Points at new rows; forgets the quantised forms. */
void linear_input_set(struct linear_input *in, const float *x, size_t ldx, uint32_t n, uint32_t k);
/* The storage of row `first` and the following. */
void linear_input_skip(struct linear_input *in, uint32_t first);
/* Makes the quantised form that `w` reads, if any. Parallel over tokens. */
void linear_input_prepare(const struct nn *nn, struct linear_input *in, const struct matrix *w);
/* Makes row t of that form, for callers that schedule their own tasks. */
void linear_input_quantize(const struct nn *nn, struct linear_input *in, const struct matrix *w,
                           uint32_t t);

struct linear_job {
    const struct matrix *w;
    float *y;
    size_t ldy;
};

/* All jobs read the same input; one parallel region for all of them. */
void linear_run(const struct nn *nn, struct linear_input *in, const struct linear_job *jobs,
                uint32_t count);

/* Units of work of a matrix, the rows r0 to r1 - 1 of units first to end - 1, and their work itself: tokens
 * index[0..n) (or 0..n-1 when NULL). The input must be prepared. For callers that schedule their own
 * tasks. */
uint32_t linear_units(const struct matrix *w);
void linear_span_rows(const struct matrix *w, uint32_t first, uint32_t end, uint32_t *r0,
                      uint32_t *r1);
void linear_span(const struct nn *nn, const struct matrix *w, uint32_t first, uint32_t end,
                 const struct linear_input *in, const uint32_t *index, uint32_t n, float *y,
                 size_t ldy);

/* The output matrix: int8 weights meet 15-bit activations. */
struct head_scratch {
    struct qbatch15 q;
};
void head_carve(struct carve *c, uint32_t n, uint32_t k, struct head_scratch *s);
void head_run(const struct nn *nn, struct head_scratch *s, const struct matrix *w, const float *x,
              size_t ldx, uint32_t n, float *y, size_t ldy);

#endif
