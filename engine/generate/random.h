/* The sampler's random numbers: a counter-based generator, so a token's number depends on the seed
 * and the token's index alone (docs/sampling.md). */
#ifndef GENERATE_RANDOM_H
#define GENERATE_RANDOM_H

#include <stdint.h>

/* Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). */
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* The uniform number in [0, 1) of token `index` under `seed`: a multiple of 2^-53. */
double random_uniform(uint64_t seed, uint64_t index);

#endif
