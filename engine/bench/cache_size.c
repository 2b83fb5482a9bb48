#include "bench/cache_size.h"

#include <stdio.h>

#include "base/text_file.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>

uint64_t cache_size_largest(const char *root)
{
    static const char *const names[] = {"hw.l3cachesize", "hw.perflevel0.l2cachesize",
                                        "hw.l2cachesize"};
    uint64_t largest = 0;
    (void)root;
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        uint64_t bytes = 0;
        size_t n = sizeof bytes;
        if (sysctlbyname(names[i], &bytes, &n, NULL, 0) == 0 && n == sizeof bytes && bytes > largest)
            largest = bytes;
    }
    return largest ? largest : CACHE_SIZE_UNKNOWN;
}

#elif defined(_WIN32)
#include "windows/processors.h"

uint64_t cache_size_largest(const char *root)
{
    const uint64_t largest = processors_largest_cache();
    (void)root;
    return largest ? largest : CACHE_SIZE_UNKNOWN;
}

#else

enum { CACHES_MOST = 16 };

/* The content is "1024K"; 0 when there is no such cache. */
static uint64_t read_size(const char *root, unsigned index)
{
    char path[80], line[32], unit = 0;
    struct text_file f;
    unsigned long kib = 0;
    (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%u/size", index);
    if (!text_file_open(&f, root, path)) return 0;
    const bool got = text_file_line(&f, line, sizeof line) && sscanf(line, "%9lu%c", &kib, &unit) >= 1;
    text_file_close(&f);
    if (!got) return 0;
    return (uint64_t)kib << (unit == 'M' ? 20 : unit == 'K' ? 10 : 0);
}

uint64_t cache_size_largest(const char *root)
{
    uint64_t largest = 0;
    for (unsigned i = 0; i < CACHES_MOST; i++) {
        const uint64_t bytes = read_size(root, i);
        if (bytes > largest) largest = bytes;
    }
    return largest ? largest : CACHE_SIZE_UNKNOWN;
}

#endif
