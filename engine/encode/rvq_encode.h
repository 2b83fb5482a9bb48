/* A matrix into an rvq blob: initial row scales, beam search, refitted scales. */
#ifndef ENCODE_RVQ_ENCODE_H
#define ENCODE_RVQ_ENCODE_H

#include "base/pool.h"
#include "kernels/kernels.h"
#include "quant/codec.h"
#include "quant/rvq.h"

struct rvq_encode {
    const struct kernels *k;
    struct pool *pool;
    struct mem_budget *mem;
    enum codec codec;
    const struct rvq_books *books;
    float unit;    /* as rvq_fit gave it */
    uint32_t beam; /* 1..RVQ_MAX_BEAM */
};

/* w [rows, cols], finite; importance [cols], finite and >= 0, weighs the squared error of each
 * input, NULL for 1. blob has codec_matrix_bytes. The same bytes for every thread count and ISA. */
hr_status rvq_encode(const struct rvq_encode *e, const float *w, uint32_t rows, uint32_t cols,
                     const float *importance, void *blob, hr_error *err);

/* A row scale as it is stored; 0 for one so small that bfloat16 would not hold it as a normal number. */
uint16_t rvq_stored_scale(double scale);
/* The scales that encoding starts from: root mean squares of the rows, in the books' unit. */
void rvq_row_scales(const struct rvq_encode *e, const float *w, uint32_t rows, uint32_t cols,
                    uint16_t *scale);
/* [stages][entries][8] */
void rvq_entries(const struct rvq_encode *e, float *entries);

#endif
