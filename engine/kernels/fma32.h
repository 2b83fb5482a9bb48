/* a * b + c, rounded once. Where the CPU has no such instruction the C library would be asked, and
 * some libraries go through a wider type and round twice. */
#ifndef KERNELS_FMA32_H
#define KERNELS_FMA32_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float fma32(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return fmaf(a, b, c);
#else
    /* The product is exact in double. The sum is rounded to odd there: of the two doubles around the
     * exact value the one with an odd last bit, or the value itself. With 29 bits to spare, rounding
     * that to float is rounding the exact value. */
    const double product = (double)a * (double)b, addend = (double)c, sum = product + addend;
    const double back = sum - product, lost = (product - (sum - back)) + (addend - back);
    uint64_t bits;
    double odd;
    memcpy(&bits, &sum, sizeof bits);
    const uint64_t inexact = (lost > 0.0) | (lost < 0.0); /* neither with infinities and NaN */
    const uint64_t outward = (uint64_t)((lost > 0.0) == (sum > 0.0));
    bits += (inexact & ~bits & 1) * (2 * outward - 1);
    memcpy(&odd, &bits, sizeof odd);
    return (float)odd;
#endif
}

#endif
