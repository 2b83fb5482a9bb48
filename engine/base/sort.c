#include "base/sort.h"

#include <stdint.h>

static void swap(uint8_t *a, uint8_t *b, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        const uint8_t byte = a[i];
        a[i] = b[i];
        b[i] = byte;
    }
}

/* Lets the element at `root` sink until no child is larger. */
static void sink(uint8_t *base, size_t root, size_t n, size_t size,
                 int (*compare)(const void *, const void *))
{
    for (size_t child = 2 * root + 1; child < n; child = 2 * root + 1) {
        if (child + 1 < n && compare(base + child * size, base + (child + 1) * size) < 0) child++;
        if (compare(base + root * size, base + child * size) >= 0) return;
        swap(base + root * size, base + child * size, size);
        root = child;
    }
}

void sort_in_place(void *base, size_t n, size_t size, int (*compare)(const void *, const void *))
{
    uint8_t *const p = base;
    for (size_t i = n / 2; i-- > 0;) sink(p, i, n, size, compare);
    for (size_t end = n; end-- > 1;) {
        swap(p, p + end * size, size);
        sink(p, 0, end, size, compare);
    }
}
