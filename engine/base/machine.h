/* What the system says about the drive under a path and about limits that decide speed. */
#ifndef BASE_MACHINE_H
#define BASE_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

struct drive_facts {
    char filesystem[24]; /* "ext4", "nfs4"; "" when unknown */
    char device[40];     /* "nvme0n1"; "" when it is none, or unknown */
    bool rotational;     /* a spinning disk, or one below a volume */
    bool usb;
    bool network;        /* another machine, or the host of this one, serves the files */
    bool memory;         /* the files live in RAM */
};

struct machine_limits {
    uint64_t memlock;   /* bytes that may be locked in memory; UINT64_MAX: any number */
    uint64_t swap_used; /* bytes of the whole machine */
    char huge_pages[16]; /* of transparent huge pages: "always", "madvise", "never"; "" when unknown */
};

/* `root` is prefixed to /proc and /sys paths, for tests; major and minor are those of the file
 * system's device. Where the system says nothing, everything is empty and false. */
void drive_facts_of(const char *root, unsigned major, unsigned minor, struct drive_facts *out);
/* False when there is no such path. */
bool drive_facts_read(const char *path, struct drive_facts *out);
void machine_limits_read(const char *root, struct machine_limits *out);

#endif
