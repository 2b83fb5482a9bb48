/* Divides one block of memory into 64-byte aligned pieces. With base == NULL it only measures,
 * so that a plan and the real layout come from the same lines. */
#ifndef BASE_CARVE_H
#define BASE_CARVE_H

#include <stddef.h>
#include <stdint.h>

struct carve {
    uint8_t *base;
    size_t used;
};

/* What no size_t can hold measures SIZE_MAX, which no allocator gives. */
static inline void *carve_take(struct carve *c, size_t bytes)
{
    void *p = c->base ? c->base + c->used : NULL;
    const size_t n = (bytes + 63) & ~(size_t)63;
    c->used = n < bytes || n > SIZE_MAX - c->used ? SIZE_MAX : c->used + n;
    return p;
}

#endif
