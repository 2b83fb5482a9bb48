#include "windows/processors.h"

#include <stdlib.h>

#include "windows/winapi.h"

/* Every record of one kind, in a block to be freed; NULL when there is none. */
static uint8_t *records(LOGICAL_PROCESSOR_RELATIONSHIP kind, DWORD *bytes)
{
    *bytes = 0;
    (void)GetLogicalProcessorInformationEx(kind, NULL, bytes);
    uint8_t *block = *bytes > 0 ? malloc(*bytes) : NULL;
    if (block != NULL &&
        !GetLogicalProcessorInformationEx(
            kind, (SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX *)(void *)block, bytes)) {
        free(block);
        block = NULL;
    }
    return block;
}

/* The affinity mask speaks of one group of 64 processors; without limits a process runs in all. */
static uint32_t usable_cores(void)
{
    DWORD_PTR own = 0, whole = 0;
    DWORD bytes;
    uint32_t all = 0, mine = 0;
    const bool limited =
        GetProcessAffinityMask(GetCurrentProcess(), &own, &whole) && own != 0 && own != whole;
    uint8_t *block = records(RelationProcessorCore, &bytes);
    for (DWORD at = 0; block != NULL && at < bytes;) {
        const SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX *one = (const void *)(block + at);
        all++;
        mine += one->Processor.GroupMask[0].Group == 0 && (one->Processor.GroupMask[0].Mask & own);
        at += one->Size;
    }
    free(block);
    return limited ? mine : all;
}

/* A job's hard limit, in hundredths of a percent of all processors. */
static uint32_t under_job_limit(uint32_t cores)
{
    JOBOBJECT_CPU_RATE_CONTROL_INFORMATION rate = {0};
    const DWORD hard = JOB_OBJECT_CPU_RATE_CONTROL_ENABLE | JOB_OBJECT_CPU_RATE_CONTROL_HARD_CAP;
    if (!QueryInformationJobObject(NULL, JobObjectCpuRateControlInformation, &rate, sizeof rate,
                                   NULL) ||
        (rate.ControlFlags & hard) != hard)
        return cores;
    const uint64_t allowed =
        ((uint64_t)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS) * rate.CpuRate + 9999) / 10000;
    return allowed < cores ? (uint32_t)allowed : cores;
}

uint32_t processors_cores(void)
{
    const uint32_t cores = under_job_limit(usable_cores());
    return cores > 0 ? cores : 1;
}

uint64_t processors_largest_cache(void)
{
    DWORD bytes;
    uint64_t largest = 0;
    uint8_t *block = records(RelationCache, &bytes);
    for (DWORD at = 0; block != NULL && at < bytes;) {
        const SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX *one = (const void *)(block + at);
        if (one->Cache.CacheSize > largest) largest = one->Cache.CacheSize;
        at += one->Size;
    }
    free(block);
    return largest;
}
