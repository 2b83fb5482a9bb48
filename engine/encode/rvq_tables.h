/* What the encoder's search reads, made from codebooks of floats or integers. */
#ifndef ENCODE_RVQ_TABLES_H
#define ENCODE_RVQ_TABLES_H

#include "kernels/kernels.h"
#include "quant/rvq.h"

/* Floats of the three tables of a shape, one behind the other. */
size_t rvq_tables_floats(uint32_t stages, uint32_t entries);
/* books [stages][entries][8]; weight [8], finite and >= 0, or NULL for 1. The search's pointers go to
 * `memory`, of rvq_tables_floats; the beam is not touched. */
void rvq_tables_make(struct rvq_search *s, uint32_t stages, uint32_t entries, const float *books,
                     const float *weight, float *memory);

#endif
