#include "base/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/text_file.h"

#if defined(__APPLE__)
#include <mach/mach.h>
#include <sys/sysctl.h>
#endif

#define LEAST_USABLE ((uint64_t)1 << 20)
/* The kernel writes "no limit" in v1 as the largest signed number, rounded down to a page. */
#define NO_LIMIT_V1 ((uint64_t)1 << 62)

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t minus(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* Room under a limit: what is used, less the file pages the kernel would drop first. */
static uint64_t room(uint64_t limit, uint64_t used, uint64_t reclaimable)
{
    return minus(limit, minus(used, reclaimable));
}

static uint64_t unified_room(const char *root)
{
    struct cgroup_dir dir;
    uint64_t least = UINT64_MAX;
    if (!cgroup_find(root, NULL, &dir)) return least;
    do {
        uint64_t max = UINT64_MAX, high = UINT64_MAX, used = 0, cached = 0;
        (void)cgroup_number(&dir, "memory.max", &max);
        (void)cgroup_number(&dir, "memory.high", &high);
        const uint64_t limit = smaller(max, high);
        if (limit == UINT64_MAX) continue;
        (void)cgroup_number(&dir, "memory.current", &used);
        (void)cgroup_keyed(&dir, "memory.stat", "inactive_file", &cached);
        least = smaller(least, room(limit, used, cached));
    } while (cgroup_up(&dir));
    return least;
}

static uint64_t legacy_room(const char *root)
{
    struct cgroup_dir dir;
    uint64_t least = UINT64_MAX;
    if (!cgroup_find(root, "memory", &dir)) return least;
    do {
        uint64_t own = UINT64_MAX, above = UINT64_MAX, used = 0, cached = 0;
        (void)cgroup_number(&dir, "memory.limit_in_bytes", &own);
        /* Also tells of limits on ancestors that a container's mount does not show. */
        (void)cgroup_keyed(&dir, "memory.stat", "hierarchical_memory_limit", &above);
        const uint64_t limit = smaller(own, above);
        if (limit >= NO_LIMIT_V1) continue;
        (void)cgroup_number(&dir, "memory.usage_in_bytes", &used);
        (void)cgroup_keyed(&dir, "memory.stat", "total_inactive_file", &cached);
        least = smaller(least, room(limit, used, cached));
    } while (cgroup_up(&dir));
    return least;
}

#if defined(__APPLE__)

static void system_memory(const char *root, uint64_t *physical, uint64_t *available)
{
    (void)root;
    uint64_t total = 0;
    size_t n = sizeof total;
    if (sysctlbyname("hw.memsize", &total, &n, NULL, 0) == 0) *physical = total;

    vm_statistics64_data_t vm;
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&vm, &count) ==
        KERN_SUCCESS)
        *available = ((uint64_t)vm.free_count + vm.inactive_count + vm.purgeable_count) *
                     (uint64_t)vm_kernel_page_size;
}

uint64_t memory_rss(void)
{
    mach_task_basic_info_data_t info;
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    if (task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t)&info, &count) !=
        KERN_SUCCESS)
        return 0;
    return info.resident_size;
}

static void process_memory(const char *root, uint64_t *mapped, uint64_t *data)
{
    (void)root;
    *mapped = 0; /* reserved address space is far more than what is used */
    *data = memory_rss();
}

#else

static uint64_t page_bytes(void)
{
    const long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (uint64_t)page : 4096;
}

static void system_memory(const char *root, uint64_t *physical, uint64_t *available)
{
    struct text_file file;
    if (text_file_open(&file, root, "/proc/meminfo")) {
        char line[256], name[64];
        uint64_t kib, free_kib = 0, file_kib = 0;
        while (text_file_line(&file, line, sizeof line)) {
            if (sscanf(line, "%63[^:]: %15" SCNu64, name, &kib) != 2) continue;
            if (strcmp(name, "MemTotal") == 0) *physical = kib << 10;
            if (strcmp(name, "MemAvailable") == 0) *available = kib << 10;
            if (strcmp(name, "MemFree") == 0) free_kib = kib;
            if (strcmp(name, "Inactive(file)") == 0) file_kib = kib;
        }
        text_file_close(&file);
        /* Kernels before 3.14 do not say. */
        if (*available == 0) *available = (free_kib + file_kib) << 10;
    }
#if defined(_SC_PHYS_PAGES)
    if (*physical == 0) {
        const long pages = sysconf(_SC_PHYS_PAGES);
        if (pages > 0) *physical = (uint64_t)pages * page_bytes();
    }
#endif
}

/* /proc/self/statm in pages: size resident shared text lib data. */
static bool read_statm(const char *root, uint64_t fields[6])
{
    struct text_file file;
    char line[256];
    if (!text_file_open(&file, root, "/proc/self/statm")) return false;
    const bool read = text_file_line(&file, line, sizeof line);
    text_file_close(&file);
    return read && sscanf(line, "%15" SCNu64 " %15" SCNu64 " %15" SCNu64 " %15" SCNu64 " %15" SCNu64
                          " %15" SCNu64, &fields[0], &fields[1], &fields[2], &fields[3], &fields[4],
                          &fields[5]) == 6;
}

uint64_t memory_rss(void)
{
    uint64_t fields[6];
    return read_statm("", fields) ? fields[1] * page_bytes() : 0;
}

static void process_memory(const char *root, uint64_t *mapped, uint64_t *data)
{
    uint64_t fields[6] = {0};
    if (!read_statm(root, fields)) memset(fields, 0, sizeof fields);
    *mapped = fields[0] * page_bytes();
    *data = fields[5] * page_bytes();
}

#endif

static uint64_t room_under(const struct rlimit *limit, uint64_t used)
{
    return limit->rlim_cur == RLIM_INFINITY ? UINT64_MAX : minus((uint64_t)limit->rlim_cur, used);
}

static uint64_t process_room(const char *root)
{
    uint64_t mapped, data, least = UINT64_MAX;
    struct rlimit limit;
    process_memory(root, &mapped, &data);
    if (getrlimit(RLIMIT_AS, &limit) == 0) least = smaller(least, room_under(&limit, mapped));
    if (getrlimit(RLIMIT_DATA, &limit) == 0) least = smaller(least, room_under(&limit, data));
    return least;
}

void memory_probe_read(const char *root, struct memory_probe *out)
{
    memset(out, 0, sizeof *out);
    system_memory(root, &out->physical, &out->available);
    /* Where the system does not say, half of the machine is a guess that seldom hurts. */
    if (out->available == 0) out->available = out->physical / 2;
    out->cgroup = smaller(unified_room(root), legacy_room(root));
    out->rlimit = process_room(root);

    out->usable = smaller(smaller(out->available, out->cgroup), out->rlimit);
    if (out->physical > 0) out->usable = smaller(out->usable, out->physical);
    if (out->usable < LEAST_USABLE) out->usable = LEAST_USABLE;
}

uint64_t memory_default_budget(const struct memory_probe *p)
{
    return p->usable - p->usable / 4;
}
