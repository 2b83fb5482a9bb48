/* The drives that an expert cache reads from, as statistics show them. */
#ifndef STORE_CACHE_DRIVES_H
#define STORE_CACHE_DRIVES_H

#include <stdbool.h>
#include <stdint.h>

struct expert_cache;

struct cache_drive_stats {
    const char *path, *mode; /* mode: "direct", "buffered", "mixed", or "absent" without a bank */
    uint32_t banks, depth;   /* bank files it holds; reads in flight */
    uint64_t reads, bytes, failures; /* failures: reads that gave no good record */
    double seconds;          /* with a read in flight */
    double probed;           /* bytes per second, measured at creation; 0 = not measured */
    bool left_out;           /* after errors in a row, read only where no other drive has the bank */
};
void expert_cache_drive(const struct expert_cache *x, uint32_t drive, struct cache_drive_stats *out);

#endif
