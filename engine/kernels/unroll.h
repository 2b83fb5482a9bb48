/* Full unrolling of short loops, so that arrays of vectors live in registers. */
#ifndef KERNELS_UNROLL_H
#define KERNELS_UNROLL_H

#define UNROLL_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define UNROLL(n) UNROLL_PRAGMA(clang loop unroll(full))
#else
#define UNROLL(n) UNROLL_PRAGMA(GCC unroll n)
#endif

#endif
