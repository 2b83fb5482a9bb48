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

static inline void *carve_take(struct carve *c, size_t bytes)
{
    void *p = c->base ? c->base + c->used : NULL;
    c->used += (bytes + 63) & ~(size_t)63;
    return p;
}

#endif
