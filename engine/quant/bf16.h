/* bfloat16: the upper half of a float32. */
#ifndef QUANT_BF16_H
#define QUANT_BF16_H

#include <stdint.h>
#include <string.h>

static inline float bf16_decode(uint16_t v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Nearest, ties to even. */
static inline uint16_t bf16_encode(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) /* rounding must not turn a NaN into infinity */
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
