/* How fast a drive gives records that nobody has read, at several numbers of reads in flight.
 *
 * A figure counts as cold only when the system's own account says that the bytes came from the
 * device: reads that the page cache answered do not appear there. What a drive keeps in its own
 * memory no account shows, so no record is read twice. */
#ifndef STORE_DISK_PROBE_H
#define STORE_DISK_PROBE_H

#include "store/container.h"
#include "store/direct_io.h"

enum { DISK_DEPTHS = 4, DISK_DEPTH_MOST = 8 };

/* Records that may be read: `records` of record_bytes each, from offset `first` on. The offset and
 * record_bytes are multiples of IO_ALIGN. */
struct disk_region {
    struct direct_file *file;
    uint64_t first, records;
    size_t record_bytes;
};

struct disk_probe_options {
    double seconds;      /* of reading, in all */
    uint64_t seed;       /* which records are read; 0: another choice at each call */
    uint8_t *arena;      /* DISK_DEPTH_MOST times the largest record, aligned to IO_ALIGN; NULL: allocated */
    uint32_t depth_most; /* deeper queues are not tried; 0 = DISK_DEPTH_MOST */
};

struct disk_rate {
    uint32_t depth; /* reads in flight */
    uint32_t reads; /* 0: the records did not suffice to measure it */
    uint64_t bytes; /* asked for */
    double bytes_per_second;
    double lowest, highest;   /* of the slices it was measured in */
    double seconds_per_read;  /* from asking for a record to having it, mean */
};

struct disk_probe {
    struct disk_rate rate[DISK_DEPTHS]; /* ascending depth */
    uint32_t rates;
    uint32_t best; /* the smallest depth within 5 % of the highest rate; 0: nothing was measured */
    uint64_t asked, physical; /* bytes; physical: read from devices, as the system accounts for it */
    bool accounted; /* the system keeps such an account */
    bool cold;      /* proven: at least 98 % of what was asked for came from devices */
    bool direct;    /* every file bypasses the page cache */
    bool fresh;     /* of a file written just now: the drive may still hold it in faster memory */
};

/* Reads whole records from pseudo-random places, none twice; ends early when all were read. */
hr_status disk_probe_run(const struct disk_region *regions, uint32_t count,
                         const struct disk_probe_options *o, struct mem_budget *b,
                         struct disk_probe *out, hr_error *err);
/* Of a container's banks. */
hr_status disk_probe_container(const struct container *c, bool direct,
                               const struct disk_probe_options *o, struct mem_budget *b,
                               struct disk_probe *out, hr_error *err);
/* Of a file that exists, cut into records (its last part is left out). */
hr_status disk_probe_file(int dir_fd, const char *name, size_t record_bytes, bool direct,
                          const struct disk_probe_options *o, struct mem_budget *b,
                          struct disk_probe *out, hr_error *err);
/* Where no data is yet: of a scratch file in the directory, which has no name while it is used. Takes
 * at most 256 MiB, an eighth of the free space and as long to write as o->seconds says. */
hr_status disk_probe_scratch(int dir_fd, size_t record_bytes, bool direct,
                             const struct disk_probe_options *o, struct mem_budget *b,
                             struct disk_probe *out, hr_error *err);

#endif
