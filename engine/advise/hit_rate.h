/* How often a cache of experts answers, from measured models: no trace of the own text is at hand. */
#ifndef ADVISE_HIT_RATE_H
#define ADVISE_HIT_RATE_H

#include <stdint.h>

/* Share of requests that a cache of `slots` records answers when decoding, with `layers` layers of
 * `experts` experts each of which a token uses `top_k`. */
double hit_rate_expected(uint64_t slots, uint32_t layers, uint32_t experts, uint32_t top_k);

#endif
