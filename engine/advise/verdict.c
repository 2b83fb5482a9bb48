/* Why a model will run well, badly, or not at all; the gravest first. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "advise/forecast.h"

enum { SLOTS = sizeof((hr_forecast_result *)0)->reason / sizeof((hr_forecast_result *)0)->reason[0] };

static void say(hr_forecast_result *r, int32_t verdict, const char *fmt, ...) PRINTF_LIKE(3, 4);

static void say(hr_forecast_result *r, int32_t verdict, const char *fmt, ...)
{
    va_list args;
    if (verdict > r->verdict) r->verdict = verdict;
    if (r->reasons == SLOTS) return;
    va_start(args, fmt);
    vsnprintf(r->reason[r->reasons], sizeof r->reason[0], fmt, args);
    va_end(args);
    r->grade[r->reasons++] = verdict;
}

static double gib(uint64_t bytes)
{
    return (double)bytes / (1 << 30);
}

static void look_at_memory(const hr_forecast_params *p, hr_forecast_result *r)
{
    const hr_plan_result *plan = p->plan;
    const hr_probe_result *probe = p->probe;
    const uint64_t set = (uint64_t)plan->moe_layers * plan->top_k;
    if (!plan->fits)
        say(r, HR_NO, "it needs at least %.2f GiB of memory, the floor, and has %.2f GiB: %s",
            gib(plan->floor), gib(plan->ram),
            plan->floor <= plan->available ? "raise ram"
                                           : "shorten the context, quantise the trunk, or add memory");
    else if (plan->ram > plan->available)
        say(r, HR_NO, "ram is %.2f GiB and %.2f GiB are available: the machine would swap or kill it",
            gib(plan->ram), gib(plan->available));
    else if (plan->ram > plan->available - plan->available / 8)
        say(r, HR_WARN, "ram takes %.2f of %.2f GiB available: what is left over may be too little for the "
            "rest of the machine, and swapping is ten times slower than a smaller cache",
            gib(plan->ram), gib(plan->available));
    if (plan->fits && plan->moe_layers > 0 && plan->cache_slots < set)
        say(r, HR_WARN, "the cache holds %u experts and one token needs %llu: most are read again for "
            "every token", plan->cache_slots, (unsigned long long)set);
    if (probe->cgroup_room < probe->physical_memory && probe->cgroup_room <= probe->available)
        say(r, HR_READY, "a control group leaves %.2f GiB of memory", gib(probe->cgroup_room));
    if (probe->swap_used > probe->physical_memory / 16)
        say(r, HR_WARN, "%.2f GiB are swapped out already: close what needs the memory",
            gib(probe->swap_used));
}

static void look_at_drive(const hr_forecast_params *p, hr_forecast_result *r)
{
    const hr_probe_result *probe = p->probe;
    const bool matters = r->bytes_read > 0;
    const int32_t grade = matters ? HR_WARN : HR_READY;
    if (probe->disk_rates == 0) return;
    const char *name = probe->device[0] ? probe->device : probe->filesystem[0] ? probe->filesystem : "drive";
    if (probe->memory)
        say(r, HR_WARN, "the files lie in memory (%s): they take it twice", probe->filesystem);
    if (probe->rotational)
        say(r, grade, "%s is a spinning disk: experts are read from all over it", name);
    if (probe->usb) say(r, grade, "%s is attached by USB, whose bridge is often the limit", name);
    if (probe->network)
        say(r, grade, "the files come over a network (%s): a local copy is faster", probe->filesystem);
    if (!probe->cold && !probe->memory && probe->accounted)
        say(r, grade, "the drive's figures are not proven: %.0f %% of the bytes came from it, the rest "
            "from the page cache",
            probe->asked ? 100.0 * (double)probe->physical / (double)probe->asked : 0.0);
    else if (!probe->cold && !probe->memory)
        say(r, grade, "the drive's figures are not proven: this system does not say what came from "
            "devices");
    if (!probe->direct)
        say(r, grade, "reads cannot bypass the page cache on %s, which then takes memory and time",
            probe->filesystem[0] ? probe->filesystem : "this file system");
    if (probe->fresh)
        say(r, HR_READY, "the drive was measured with a file just written: real data may be slower");
    if (matters && probe->best_depth > p->plan->io_threads)
        say(r, HR_READY, "the drive is faster with %u reads in flight: --io-threads %u",
            probe->best_depth, probe->best_depth);
}

static void look_at_rest(const hr_forecast_params *p, hr_forecast_result *r)
{
    const hr_plan_result *plan = p->plan;
    if (r->tokens_per_second < 1)
        say(r, HR_WARN, "slower than a token per second");
    if (!plan->has_tokenizer)
        say(r, HR_WARN, "there is no tokenizer: it takes and gives token ids only");
    if (p->probe->memlock < plan->trunk)
        say(r, HR_READY, "%.1f MiB may be locked in memory, the trunk has %.1f: without a privilege it is not "
            "locked, and may be paged out under pressure (ulimit -l)", (double)p->probe->memlock / (1 << 20),
            (double)plan->trunk / (1 << 20));
    if (strcmp(p->probe->huge_pages, "never") == 0)
        say(r, HR_READY, "transparent huge pages are off: madvise or always is a little faster");
}

void verdict_give(const hr_forecast_params *p, hr_forecast_result *r)
{
    r->verdict = HR_READY;
    r->reasons = 0;
    look_at_memory(p, r);
    look_at_drive(p, r);
    look_at_rest(p, r);
    /* The gravest first; of equal ones the order above. */
    for (uint32_t i = 1; i < r->reasons; i++)
        for (uint32_t j = i; j > 0 && r->grade[j] > r->grade[j - 1]; j--) {
            char text[sizeof r->reason[0]];
            const int32_t grade = r->grade[j];
            memcpy(text, r->reason[j], sizeof text);
            memcpy(r->reason[j], r->reason[j - 1], sizeof text);
            memcpy(r->reason[j - 1], text, sizeof text);
            r->grade[j] = r->grade[j - 1];
            r->grade[j - 1] = grade;
        }
}
