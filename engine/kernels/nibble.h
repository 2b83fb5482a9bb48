/* Sizes that the 4-bit kernels and codecs share (formats/codecs.md). */
#ifndef KERNELS_NIBBLE_H
#define KERNELS_NIBBLE_H

#include <stddef.h>

/* A group is 32 inputs of 64 rows: 1024 bytes of nibbles, 2048 decoded. Weights are at most 32 in
 * magnitude. Exponents of one MXFP4 row count down to MXFP4_SPREAD below its largest: with 2^20 inputs the sum
 * 2^15 * 48,768 * 2^(7 + 25) is below 2^63. */
enum {
    NIBBLE_GROUP = 32,
    NIBBLE_VECTORS = 4, /* of 16 rows */
    NIBBLE_BYTES = 1024,
    NIBBLE_TILE = 2048,
    NIBBLE_LARGEST = 32,
    MXFP4_SPREAD = 25,
    FINE_PLANES = 3, /* of 22-bit activations */
};

/* The same with 22-bit activations, where a group's dot is below 2^29.6 and 2^L groups have their sum
 * below 2^(29.6 + L + (33 - L)). */
static inline unsigned mxfp4_fine_spread(size_t groups)
{
    unsigned spread = 33;
    while (spread > 0 && groups > (size_t)1 << (33 - spread))
        spread--;
    return spread < MXFP4_SPREAD ? spread : MXFP4_SPREAD;
}

#endif
