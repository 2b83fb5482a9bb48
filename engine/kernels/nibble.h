/* Sizes that the 4-bit kernels and codecs share (formats/codecs.md). */
#ifndef KERNELS_NIBBLE_H
#define KERNELS_NIBBLE_H

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
};

#endif
