/* qsort of the C library may allocate as much as it sorts, and takes quadratic time for some input. */
#ifndef BASE_SORT_H
#define BASE_SORT_H

#include <stddef.h>

/* Heap sort: in place, at most n log n comparisons, not stable. compare as for qsort. */
void sort_in_place(void *base, size_t n, size_t size, int (*compare)(const void *, const void *));

#endif
