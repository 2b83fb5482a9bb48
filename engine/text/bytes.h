/* Tables inside tokenizer.bin are used in place: little-endian, at any address. */
#ifndef TEXT_BYTES_H
#define TEXT_BYTES_H

#include <stddef.h>
#include <stdint.h>

struct section {
    const uint8_t *data;
    size_t bytes;
};

static inline uint32_t get_u16(const uint8_t *table, size_t index)
{
    const uint8_t *p = table + 2 * index;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static inline uint32_t get_u32(const uint8_t *table, size_t index)
{
    const uint8_t *p = table + 4 * index;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t get_u64(const uint8_t *p)
{
    return (uint64_t)get_u32(p, 0) | (uint64_t)get_u32(p, 1) << 32;
}

#endif
