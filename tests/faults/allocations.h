/* What the program holds now: blocks of the C library's heap, bytes that it mapped itself. */
#ifndef TESTS_FAULTS_ALLOCATIONS_H
#define TESTS_FAULTS_ALLOCATIONS_H

#include <stdint.h>

struct alive {
    int64_t blocks, mapped;
};

struct alive allocations_alive(void);

#endif
