/* What this machine and this process may use (base/memory.h), as Windows tells it. */
#include "base/memory.h"

#include <string.h>

#include "windows/winapi.h"
#include <psapi.h>

#define LEAST_USABLE ((uint64_t)1 << 20)

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t minus(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static bool counters(PROCESS_MEMORY_COUNTERS_EX *out)
{
    memset(out, 0, sizeof *out);
    out->cb = sizeof *out;
    return GetProcessMemoryInfo(GetCurrentProcess(), (PROCESS_MEMORY_COUNTERS *)out, sizeof *out) != 0;
}

uint64_t memory_rss(void)
{
    PROCESS_MEMORY_COUNTERS_EX used;
    return counters(&used) ? used.WorkingSetSize : 0;
}

/* What the job object of this process, the counterpart of a control group, leaves: limits of the
 * job as a whole and of each process are on committed memory. */
static uint64_t job_room(void)
{
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION job;
    PROCESS_MEMORY_COUNTERS_EX used;
    uint64_t least = UINT64_MAX;
    memset(&job, 0, sizeof job);
    if (!QueryInformationJobObject(NULL, JobObjectExtendedLimitInformation, &job, sizeof job, NULL))
        return least;
    const DWORD flags = job.BasicLimitInformation.LimitFlags;
    const uint64_t own = counters(&used) ? used.PrivateUsage : 0;
    if (flags & JOB_OBJECT_LIMIT_PROCESS_MEMORY)
        least = smaller(least, minus(job.ProcessMemoryLimit, own));
    if (flags & JOB_OBJECT_LIMIT_JOB_MEMORY) least = smaller(least, minus(job.JobMemoryLimit, own));
    return least;
}

void memory_probe_read(const char *root, struct memory_probe *out)
{
    MEMORYSTATUSEX status;
    (void)root;
    memset(&status, 0, sizeof status);
    status.dwLength = sizeof status;
    *out = (struct memory_probe){.cgroup = job_room(), .rlimit = UINT64_MAX};
    if (GlobalMemoryStatusEx(&status)) {
        out->physical = status.ullTotalPhys;
        out->available = status.ullAvailPhys;
        /* Memory is promised against RAM and page file together: beyond that it is refused. */
        out->rlimit = status.ullAvailPageFile;
    }
    out->usable = smaller(smaller(out->available, out->cgroup), out->rlimit);
    if (out->physical > 0) out->usable = smaller(out->usable, out->physical);
    if (out->usable < LEAST_USABLE) out->usable = LEAST_USABLE;
}

uint64_t memory_default_budget(const struct memory_probe *p)
{
    return p->usable - p->usable / 4;
}
