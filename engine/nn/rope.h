/* Rotary positions: half-split pairs, angle = position * frequency, in double until the end. */
#ifndef NN_ROPE_H
#define NN_ROPE_H

#include <stdint.h>

/* cos, sin: [half] for one position, times scale. */
void rope_table(const double *frequency, uint32_t half, float scale, uint32_t position,
                float *cosine, float *sine);
/* Rotates the first 2 * half values of x in place. */
void rope_apply(float *x, uint32_t half, const float *cosine, const float *sine);

#endif
