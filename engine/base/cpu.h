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
    bool sha;                             /* SHA-256 instructions (x86 SHA, ARMv8 SHA2) */
};
/* Probed once (thread-safe), cpuid + xgetbv or the OS's word. */
const struct cpu_features *cpu_features(void);
/* Physical cores this process may run on (affinity and cgroup cpu.max honoured), at least 1. */
uint32_t cpu_physical_cores(void);
/* The same with `root` prefixed to /proc and /sys paths, for tests. */
uint32_t cpu_physical_cores_under(const char *root);

/* Round-to-nearest, no flush-to-zero, no denormals-are-zero, no traps; returns the mode before. */
uint64_t float_mode_enter(void);
void float_mode_leave(uint64_t saved);

#endif
