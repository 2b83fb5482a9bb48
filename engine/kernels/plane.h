/* One vector of int8 activations as the panel kernels take it. */
#ifndef KERNELS_PLANE_H
#define KERNELS_PLANE_H

#include <stddef.h>
#include <stdint.h>

struct plane {
    const int8_t *q;
    const uint8_t *shift; /* per block of 64; NULL: all zero */
    unsigned low;         /* the smallest shift, taken off every block */
    size_t flush;         /* blocks an int32 lane can take before it must go to int64 */
};

#endif
