/* How much room the volume of an open file has. */
#ifndef WINDOWS_SYS_STATVFS_H
#define WINDOWS_SYS_STATVFS_H

#include <stdint.h>

struct statvfs {
    uint64_t f_bavail, f_frsize;
};

int fstatvfs(int fd, struct statvfs *out);

#endif
