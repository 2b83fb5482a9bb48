#include "base/cpu.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/text_file.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif
#if defined(__linux__)
#include <sched.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
#include "windows/processors.h"
#endif

static struct cpu_features features;

#if defined(__x86_64__)

static bool bit(uint32_t word, unsigned n)
{
    return (word >> n) & 1u;
}

static uint64_t saved_state_mask(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static void probe(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    features.sse42 = bit(c, 20);
    const bool fma = bit(c, 12), avx = bit(c, 28), f16c = bit(c, 29), ssse3 = bit(c, 9);
    const uint64_t mask = bit(c, 27) ? saved_state_mask() : 0;
    const bool ymm = (mask & 0x06) == 0x06, zmm = (mask & 0xE6) == 0xE6;

    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    features.avx2 = ymm && avx && fma && f16c && bit(b, 5);
    features.avx512 = features.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) &&
                      bit(b, 31) && bit(c, 11) && bit(c, 1);
    features.sha = ssse3 && features.sse42 && bit(b, 29);
}

#elif defined(__aarch64__) && defined(__linux__)

static void probe(void)
{
    const unsigned long caps = getauxval(AT_HWCAP);
    features.neon = (caps >> 1) & 1;
    features.sha = (caps >> 6) & 1;
    features.arm_crc32 = (caps >> 7) & 1;
    features.dotprod = (caps >> 20) & 1;
}

#elif defined(__aarch64__) && defined(__APPLE__)

static bool os_says(const char *name)
{
    int value = 0;
    size_t n = sizeof value;
    return sysctlbyname(name, &value, &n, NULL, 0) == 0 && value != 0;
}

static void probe(void)
{
    features.neon = true;
    features.sha = os_says("hw.optional.arm.FEAT_SHA256");
    features.arm_crc32 = os_says("hw.optional.armv8_crc32");
    features.dotprod = os_says("hw.optional.arm.FEAT_DotProd");
}

#else

static void probe(void)
{
#if defined(__aarch64__)
    features.neon = true;
#endif
}

#endif

const struct cpu_features *cpu_features(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, probe);
    return &features;
}

#if defined(__linux__)

/* The lowest CPU of the core that `cpu` belongs to; the CPU itself where the system is silent. */
static uint32_t core_of(const char *root, uint32_t cpu)
{
    char path[80], line[256];
    struct text_file file;
    unsigned first = cpu;
    (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%u/topology/thread_siblings_list",
                   (unsigned)cpu);
    if (text_file_open(&file, root, path)) {
        if (!text_file_line(&file, line, sizeof line) || sscanf(line, "%9u", &first) != 1) first = cpu;
        text_file_close(&file);
    }
    return (uint32_t)first;
}

static uint32_t cores_by_affinity(const char *root)
{
    /* The kernel refuses a set smaller than its own: these hold 65,536 CPUs. */
    cpu_set_t set[64], seen[64];
    const uint32_t cpus = 8 * sizeof set;
    memset(set, 0, sizeof set);
    memset(seen, 0, sizeof seen);
    if (sched_getaffinity(0, sizeof set, set) != 0) {
        const long online = sysconf(_SC_NPROCESSORS_ONLN);
        return online > 0 ? (uint32_t)online : 1;
    }

    /* A core counts once, by the first of its CPUs that we may use. */
    uint32_t cores = 0;
    for (uint32_t cpu = 0; cpu < cpus; cpu++) {
        if (!CPU_ISSET_S(cpu, sizeof set, set)) continue;
        const uint32_t core = core_of(root, cpu);
        if (core < cpus && CPU_ISSET_S(core, sizeof seen, seen)) continue;
        if (core < cpus) CPU_SET_S(core, sizeof seen, seen);
        cores++;
    }
    return cores > 0 ? cores : 1;
}

/* CPUs' worth of time, rounded up: one and a half keep two threads busy. */
static uint32_t limit_by_quota(uint32_t cores, uint64_t quota, uint64_t period)
{
    if (quota == UINT64_MAX || period == 0) return cores;
    const uint64_t whole = quota / period + (quota % period != 0);
    return whole < 1 ? 1 : whole < cores ? (uint32_t)whole : cores;
}

static uint32_t cores_by_quota(const char *root, uint32_t cores)
{
    struct cgroup_dir dir;
    if (cgroup_find(root, NULL, &dir)) {
        do {
            char line[64];
            unsigned long long quota, period;
            if (cgroup_line(&dir, "cpu.max", line, sizeof line) &&
                sscanf(line, "%19llu %19llu", &quota, &period) == 2)
                cores = limit_by_quota(cores, quota, period);
        } while (cgroup_up(&dir));
    }
    if (cgroup_find(root, "cpu", &dir)) {
        do {
            uint64_t quota, period;
            if (cgroup_number(&dir, "cpu.cfs_quota_us", &quota) &&
                cgroup_number(&dir, "cpu.cfs_period_us", &period))
                cores = limit_by_quota(cores, quota, period);
        } while (cgroup_up(&dir));
    }
    return cores;
}

uint32_t cpu_physical_cores_under(const char *root)
{
    return cores_by_quota(root, cores_by_affinity(root));
}

#elif defined(__APPLE__)

uint32_t cpu_physical_cores_under(const char *root)
{
    (void)root;
    int cores = 0;
    size_t n = sizeof cores;
    if (sysctlbyname("hw.physicalcpu", &cores, &n, NULL, 0) != 0 || cores < 1) return 1;
    return (uint32_t)cores;
}

#elif defined(_WIN32)

uint32_t cpu_physical_cores_under(const char *root)
{
    (void)root;
    return processors_cores();
}

#else

uint32_t cpu_physical_cores_under(const char *root)
{
    (void)root;
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (uint32_t)online : 1;
}

#endif

uint32_t cpu_physical_cores(void)
{
    return cpu_physical_cores_under("");
}

#if defined(__x86_64__)

/* The x87 unit has a mode of its own, but 64-bit code computes float and double in SSE only. */
uint64_t float_mode_enter(void)
{
    const uint32_t before = _mm_getcsr();
    _mm_setcsr(0x1F80); /* every exception masked, round to nearest, no FTZ, no DAZ */
    return before;
}

void float_mode_leave(uint64_t saved)
{
    _mm_setcsr((uint32_t)saved);
}

#elif defined(__aarch64__)

uint64_t float_mode_enter(void)
{
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before)::"memory");
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0) : "memory");
    return before;
}

void float_mode_leave(uint64_t saved)
{
    __asm__ volatile("msr fpcr, %0" ::"r"(saved) : "memory");
}

#else

uint64_t float_mode_enter(void)
{
    const int before = fegetround();
    (void)fesetround(FE_TONEAREST);
    return before < 0 ? (uint64_t)FE_TONEAREST : (uint64_t)before;
}

void float_mode_leave(uint64_t saved)
{
    (void)fesetround((int)saved);
}

#endif
