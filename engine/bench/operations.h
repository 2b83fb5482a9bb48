/* The kernels as pieces of work for the meter. */
#ifndef BENCH_OPERATIONS_H
#define BENCH_OPERATIONS_H

#include "base/carve.h"
#include "bench/measure.h"
#include "bench/weights.h"
#include "nn/linear.h"

enum { BENCH_TOKENS_MOST = 64, BENCH_HEAD_DIM = 128 };

/* Activations and results, none of them in the pool. */
struct bench_operands {
    struct nn nn; /* without a thread pool: everything runs on the caller */
    float *x;     /* [BENCH_TOKENS_MOST][cols] */
    struct linear_input in;
    struct head_scratch head;
    float *y; /* [BENCH_TOKENS_MOST][rows] */
    float *vectors; /* [VECTORS][BENCH_HEAD_DIM] */
    float *scores;  /* [ATTN_BLOCK] */
    uint32_t rows, cols, tokens;
    uint8_t *pool;
    size_t pool_bytes;
    const struct bench_weights *weights;
    struct matrix matrix;
    size_t matrix_index;
    uint32_t units;
};

void bench_operands_carve(struct carve *c, uint32_t rows, uint32_t cols, struct bench_operands *o);
void bench_operands_init(struct bench_operands *o, const struct kernels *k, uint32_t rows,
                         uint32_t cols, uint8_t *pool, size_t pool_bytes);

/* Each describes its work; the operands stay its context until the next call. The pool must be
 * filled: with the weights of `w`, or with float32. */
void bench_product(struct bench_operands *o, const struct bench_weights *w, uint32_t tokens,
                   struct bench_work *out);
void bench_head(struct bench_operands *o, const struct bench_weights *w, uint32_t tokens,
                struct bench_work *out);                             /* int8 weights */
void bench_attention(struct bench_operands *o, struct bench_work *out); /* a block of keys */
void bench_delta(struct bench_operands *o, struct bench_work *out);     /* writes to the pool */
void bench_quantize(struct bench_operands *o, struct bench_work *out);
void bench_quantize15(struct bench_operands *o, struct bench_work *out);
void bench_quantize22(struct bench_operands *o, struct bench_work *out);

#endif
