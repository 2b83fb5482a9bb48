#include "cli/cold.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/args.h"

void cold_drop(const char *directory)
{
    DIR *d = opendir(directory);
    if (d == NULL) return;
    for (const struct dirent *entry; (entry = readdir(d)) != NULL;) {
        struct stat status;
        const int fd = openat(dirfd(d), entry->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0) continue;
#if defined(POSIX_FADV_DONTNEED)
        /* Pages that are not written back yet cannot be dropped. */
        if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && fsync(fd) == 0)
            (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
#else
        (void)status;
#endif
        close(fd);
    }
    closedir(d);
}

bool cold_physical_bytes(uint64_t *bytes)
{
    char line[128];
    bool found = false;
    FILE *f = fopen("/proc/self/io", "re");
    if (f == NULL) return false;
    while (!found && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, "read_bytes: ", 12) != 0) continue;
        line[strcspn(line, "\n")] = '\0';
        found = parse_u64(line + 12, UINT64_MAX, bytes);
    }
    fclose(f);
    return found;
}
