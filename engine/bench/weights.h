/* Pseudo-random weights of any codec, as many matrices as a pool holds. */
#ifndef BENCH_WEIGHTS_H
#define BENCH_WEIGHTS_H

#include "quant/codec.h"
#include "quant/rvq.h"

struct bench_weights {
    enum codec codec;
    bool fine; /* products take 22-bit activations; the caller sets it */
    uint32_t rows, cols;
    size_t stride; /* from one matrix to the next: the blob, rounded up to 64 */
    size_t count;
    const uint8_t *pool;
    struct rvq_books books;
};

/* Bytes of one blob with what aligns the next; 0 when there is none. */
size_t bench_weights_stride(enum codec c, uint32_t rows, uint32_t cols);
/* Fills the pool with copies of one matrix, encoded from pseudo-random floats that `source`
 * [rows * cols] receives. rvq: pseudo-random codes and codebooks. The pool holds at least one. */
void bench_weights_fill(struct bench_weights *w, enum codec c, uint32_t rows, uint32_t cols,
                        float *source, uint8_t *pool, size_t bytes);
void bench_weights_matrix(const struct bench_weights *w, size_t i, struct matrix *m);

struct bench_random {
    uint64_t state;
};
uint32_t bench_random_next(struct bench_random *r);
/* Roughly normal, variance 1. */
void bench_random_floats(struct bench_random *r, float *out, size_t n);

#endif
