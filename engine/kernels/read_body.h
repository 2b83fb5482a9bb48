/* The plain read that products from memory are compared with. */
#ifndef KERNELS_READ_BODY_H
#define KERNELS_READ_BODY_H

#include <stdint.h>

#include "kernels/unroll.h"

typedef uint64_t touch_line __attribute__((vector_size(64), aligned(8), may_alias));

/* Four streams: one alone does not keep the memory busy. */
static uint64_t read_lines(const void *p, size_t bytes)
{
    enum { STREAMS = 4 };
    const char *from = p;
    const size_t part = bytes / STREAMS / sizeof(touch_line) * sizeof(touch_line);
    touch_line lanes = { 0 };
    for (size_t i = 0; i < part; i += sizeof(touch_line))
        UNROLL(4)
        for (size_t s = 0; s < STREAMS; s++)
            lanes += *(const touch_line *)(const void *)(from + s * part + i);
    uint64_t sum = 0;
    for (size_t j = 0; j < 8; j++)
        sum += lanes[j];
    return sum;
}

#endif
