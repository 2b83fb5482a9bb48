/* What the CPU can do, and the floating-point mode the engine needs. */
#ifndef BASE_CPU_H
#define BASE_CPU_H

#include <stdbool.h>
#include <stdint.h>

struct cpu_features {
    bool sse42;                           /* crc32 */
    bool avx2;                            /* avx2 + fma + f16c, and the OS saves ymm */
    bool avx512;                          /* f, bw, dq, vl, vnni, vbmi, and the OS saves zmm */
    bool neon, dotprod, arm_crc32;
};
/* Probed once (thread-safe), cpuid + xgetbv or the OS's word. */
const struct cpu_features *cpu_features(void);
/* Physical cores this process may run on (affinity and cgroup cpu.max honoured), at least 1. */
uint32_t cpu_physical_cores(void);

/* Round-to-nearest, no flush-to-zero, no denormals-are-zero, no traps; returns the mode before. */
uint64_t float_mode_enter(void);
void float_mode_leave(uint64_t saved);

#endif
