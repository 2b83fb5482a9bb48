/* headrace bench: what was measured, and its two reports. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "cli/cli.h"

enum { BENCH_REPEATS_MAX = 100, BENCH_DRIVES_MAX = 8 };

/* One phase of one repeat: prefill, or decode token by token. Seconds are the caller's clock but for
 * the last three, which are the library's. */
struct bench_phase {
    double seconds, compute, waiting, other;
    uint64_t hits, misses, bytes_read;
    double read_rate; /* bytes per second of all drives together, while they had reads in flight */
};

struct bench_run {
    hr_model_info info;
    hr_stats stats; /* after the last repeat */
    uint32_t prefill, decode, repeats; /* tokens, tokens, measured repeats */
    const char *ids;                   /* file, or NULL: pseudo-random */
    struct bench_phase prefilled[BENCH_REPEATS_MAX], decoded[BENCH_REPEATS_MAX];
    bool cold, physical_known;
    uint64_t physical_bytes, library_bytes; /* of all cold repeats, opening included */
};

/* The physical bytes show that at least 98 % of what the library read came from storage. */
bool bench_proven(const struct bench_run *run);
void bench_print(const struct bench_run *run);
void bench_json(const struct bench_run *run);

/* headrace bench --kernels; engine/cli/bench_kernels.c. Returns the exit code. */
int bench_kernels(int argc, char **argv);

#endif
