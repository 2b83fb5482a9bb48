#include "base/machine.h"

#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#if defined(__linux__)
#include <sys/sysmacros.h>
#endif

enum { PATH_BYTES = 4096, NESTING = 4 /* volumes made of volumes */ };

static bool join(char out[PATH_BYTES], const char *a, const char *b)
{
    const int n = snprintf(out, PATH_BYTES, "%s%s", a, b);
    return n > 0 && n < PATH_BYTES;
}

static bool read_line(const char *directory, const char *name, char *line, size_t capacity)
{
    char path[PATH_BYTES];
    FILE *file = join(path, directory, name) ? fopen(path, "re") : NULL;
    if (!file) return false;
    const bool ok = fgets(line, (int)capacity, file) != NULL;
    (void)fclose(file);
    if (ok) line[strcspn(line, "\n")] = '\0';
    return ok;
}

#if defined(__linux__)

static bool one_of(const char *name, const char *const *names)
{
    for (; *names; names++)
        if (strcmp(name, *names) == 0) return true;
    return false;
}

/* The mount of a device number, as in /proc/self/mountinfo: file system and what it was made of. */
static bool find_mount(const char *root, unsigned major_number, unsigned minor_number,
                       char type[24], char source[256])
{
    char path[PATH_BYTES], line[PATH_BYTES];
    bool found = false;
    FILE *file = join(path, root, "/proc/self/mountinfo") ? fopen(path, "re") : NULL;
    if (!file) return false;
    while (!found && fgets(line, sizeof line, file)) {
        unsigned a, b;
        const char *tail = strstr(line, " - ");
        found = sscanf(line, "%*d %*d %9u:%9u", &a, &b) == 2 && a == major_number &&
                b == minor_number && tail && sscanf(tail, " - %23s %255s", type, source) == 2;
    }
    (void)fclose(file);
    return found;
}

static bool is_directory(const char *directory, const char *name)
{
    char path[PATH_BYTES];
    struct stat st;
    return join(path, directory, name) && stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* A block device's directory below /sys/devices; a partition's is inside its drive's. */
static void look_at_device(char *directory, struct drive_facts *out, int depth)
{
    char line[16], part[PATH_BYTES];
    if (read_line(directory, "/partition", line, sizeof line)) {
        char *slash = strrchr(directory, '/');
        if (slash) *slash = '\0';
    }
    const char *name = strrchr(directory, '/');
    if (depth == 0 && name) snprintf(out->device, sizeof out->device, "%.39s", name + 1);
    if (strstr(directory, "/usb")) out->usb = true;
    /* The drives of virtual machines say so too, whatever is behind them. */
    const bool virtual_drive = strstr(directory, "/virtio") || strstr(directory, "/vbd-");
    if (!virtual_drive && read_line(directory, "/queue/rotational", line, sizeof line) &&
        line[0] == '1')
        out->rotational = true;
    if (depth == NESTING || !is_directory(directory, "/slaves") || !join(part, directory, "/slaves"))
        return;
    DIR *slaves = opendir(part);
    for (struct dirent *d; slaves && (d = readdir(slaves));) {
        char below[PATH_BYTES], real[PATH_MAX];
        if (d->d_name[0] == '.') continue;
        const int n = snprintf(below, sizeof below, "%.3700s/%.300s", part, d->d_name);
        if (n > 0 && realpath(below, real)) look_at_device(real, out, depth + 1);
    }
    if (slaves) (void)closedir(slaves);
}

void drive_facts_of(const char *root, unsigned major_number, unsigned minor_number,
                    struct drive_facts *out)
{
    static const char *const remote[] = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs",
                                         "lustre", "afs", "9p", "virtiofs", "fuse.sshfs", NULL};
    static const char *const memory[] = {"tmpfs", "ramfs", NULL};
    char source[256] = "", path[PATH_BYTES], number[64], real[PATH_MAX];
    memset(out, 0, sizeof *out);
    (void)find_mount(root, major_number, minor_number, out->filesystem, source);
    out->network = one_of(out->filesystem, remote);
    out->memory = one_of(out->filesystem, memory);
    /* File systems over several devices have a number of their own, and name one of those. */
    struct stat st;
    if (major_number == 0 && strncmp(source, "/dev/", 5) == 0 && stat(source, &st) == 0 &&
        S_ISBLK(st.st_mode)) {
        major_number = major(st.st_rdev);
        minor_number = minor(st.st_rdev);
    }
    snprintf(number, sizeof number, "/sys/dev/block/%u:%u", major_number, minor_number);
    if (major_number != 0 && join(path, root, number) && realpath(path, real))
        look_at_device(real, out, 0);
}

bool drive_facts_read(const char *path, struct drive_facts *out)
{
    struct stat st;
    memset(out, 0, sizeof *out);
    if (stat(path, &st) != 0) return false;
    drive_facts_of("", major(st.st_dev), minor(st.st_dev), out);
    return true;
}

#else

void drive_facts_of(const char *root, unsigned major_number, unsigned minor_number,
                    struct drive_facts *out)
{
    (void)root, (void)major_number, (void)minor_number;
    memset(out, 0, sizeof *out);
}

bool drive_facts_read(const char *path, struct drive_facts *out)
{
    struct stat st;
    memset(out, 0, sizeof *out);
    return stat(path, &st) == 0;
}

#endif

static uint64_t swap_used(const char *root)
{
    char path[PATH_BYTES], line[256];
    uint64_t total = 0, unused = 0, kib;
    FILE *file = join(path, root, "/proc/meminfo") ? fopen(path, "re") : NULL;
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "SwapTotal: %15" SCNu64, &kib) == 1) total = kib << 10;
        if (sscanf(line, "SwapFree: %15" SCNu64, &kib) == 1) unused = kib << 10;
    }
    (void)fclose(file);
    return total > unused ? total - unused : 0;
}

void machine_limits_read(const char *root, struct machine_limits *out)
{
    char line[128];
    struct rlimit limit;
    memset(out, 0, sizeof *out);
    out->memlock = UINT64_MAX;
#if defined(RLIMIT_MEMLOCK)
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        out->memlock = (uint64_t)limit.rlim_cur;
#endif
    out->swap_used = swap_used(root);
    if (!read_line(root, "/sys/kernel/mm/transparent_hugepage/enabled", line, sizeof line)) return;
    const char *open = strchr(line, '['), *close = open ? strchr(open, ']') : NULL;
    if (close && close - open - 1 < (ptrdiff_t)sizeof out->huge_pages)
        snprintf(out->huge_pages, sizeof out->huge_pages, "%.*s", (int)(close - open - 1), open + 1);
}
