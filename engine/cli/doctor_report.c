#include <stdio.h>

#include "cli/doctor.h"

static const char *const LIMITS[] = {"disk", "memory", "compute"};
static const char *const VERDICTS[] = {"ready", "warn", "no"};
static const char *const LEVERS[] = {"ram", "faster_drive", "second_drive", "codec", "threads"};

static const char *grade_name(int32_t grade)
{
    return grade == HR_READY ? "note" : VERDICTS[grade];
}

static void print_drive(const hr_probe_result *p)
{
    if (p->disk_rates == 0) return;
    printf("drive         %s%s%s%s, %s, %s:", p->device[0] ? p->device : "unknown device",
           p->filesystem[0] ? " (" : "", p->filesystem, p->filesystem[0] ? ")" : "",
           p->direct ? "direct" : "through the page cache", p->cold ? "cold" : "not proven cold");
    for (uint32_t i = 0; i < p->disk_rates; i++)
        if (p->disk[i].reads)
            printf("%s %.2f GB/s at %u", i ? "," : "", p->disk[i].bytes_per_second / 1e9,
                   p->disk[i].depth);
    printf(" in flight\n");
}

static void print_lever(const struct doctor *d, int lever, bool first)
{
    static const char *const texts[] = {"more ram", "a drive twice as fast", "a second drive",
                                        "experts in rvq3", "twice the cores"};
    const double rate = d->forecast.lever[lever];
    printf("%-13s %s: %.2f tokens/s%s\n", first ? "with" : "", texts[lever], rate,
           lever == d->forecast.best_lever ? " (helps most)" : "");
}

void doctor_print(const struct doctor *d)
{
    const hr_plan_result *p = &d->plan;
    const hr_probe_result *m = &d->probe;
    const hr_forecast_result *f = &d->forecast;
    const double set = (double)p->moe_layers * p->top_k;
    char a[32], b[32], c[32], e[32], codec[64];
    printf("verdict       %s\n", VERDICTS[f->verdict]);
    for (uint32_t i = 0; i < f->reasons; i++)
        printf("  %-11s %s\n", grade_name(f->grade[i]), f->reason[i]);
    printf("memory        ram %s, floor %s, recommended %s, available %s\n", format_bytes(p->ram, a),
           format_bytes(p->floor, b), format_bytes(p->recommended, c), format_bytes(p->available, e));
    if (p->moe_layers > 0)
        printf("cache         %u of %u experts (%s), %.2f times what a token uses\n", p->cache_slots,
               p->total_experts, format_bytes(p->cache, a), set > 0 ? p->cache_slots / set : 0);
    printf("a token       reads %s of trunk (%s) and %s of experts (%s) from memory\n",
           format_bytes(p->trunk_per_token, a), p->trunk_codec,
           format_bytes(p->experts_per_token, b),
           format_codec(p->expert_codec, p->expert_activations, codec));
    print_drive(m);
    if (m->memory_rate > 0)
        printf("processor     memory %.1f GB/s, experts %.1f, trunk %.1f, with %u thread%s\n",
               m->memory_rate / 1e9, m->expert_rate / 1e9, m->trunk_rate / 1e9, m->threads,
               m->threads == 1 ? "" : "s");
    printf("hits          %.0f %% of experts (%.0f to %.0f, %s), %s read from disk for a token\n",
           100 * f->hit_rate, 100 * f->hit_low, 100 * f->hit_high,
           d->traced ? "from the trace" : "as other models", format_bytes((uint64_t)f->bytes_read, a));
    printf("forecast      %.2f tokens/s, between %.2f and %.2f; the limit is %s\n",
           f->tokens_per_second, f->low, f->high, LIMITS[f->limit]);
    bool first = true;
    for (int i = 0; i < HR_LEVERS; i++) {
        if (f->lever[i] <= 0) continue;
        print_lever(d, i, first);
        first = false;
    }
}

static void out_probe(struct json_out *j, const hr_probe_result *p)
{
    out_open(j, "drive", '{');
    out_string(j, "device", p->device);
    out_string(j, "filesystem", p->filesystem);
    out_bool(j, "direct", p->direct);
    out_bool(j, "cold", p->cold);
    out_bool(j, "fresh", p->fresh);
    out_bool(j, "rotational", p->rotational);
    out_bool(j, "usb", p->usb);
    out_bool(j, "network", p->network);
    out_bool(j, "memory", p->memory);
    out_u64(j, "asked", p->asked);
    if (p->accounted) out_u64(j, "physical", p->physical);
    else out_null(j, "physical");
    out_u64(j, "best_depth", p->best_depth);
    out_open(j, "rates", '[');
    for (uint32_t i = 0; i < p->disk_rates; i++) {
        out_open(j, NULL, '{');
        out_u64(j, "depth", p->disk[i].depth);
        out_u64(j, "reads", p->disk[i].reads);
        out_f64(j, "bytes_per_second", p->disk[i].bytes_per_second);
        out_f64(j, "lowest", p->disk[i].lowest);
        out_f64(j, "highest", p->disk[i].highest);
        out_f64(j, "seconds_per_read", p->disk[i].seconds_per_read);
        out_close(j, '}');
    }
    out_close(j, ']');
    out_close(j, '}');
    out_open(j, "compute", '{');
    out_u64(j, "threads", p->threads);
    out_f64(j, "memory_rate", p->memory_rate);
    out_f64(j, "expert_rate", p->expert_rate);
    out_u64(j, "expert_activations", p->expert_activations);
    out_f64(j, "trunk_rate", p->trunk_rate);
    out_f64(j, "other_rate", p->other_rate);
    out_f64(j, "dispatch_seconds", p->dispatch_seconds);
    out_close(j, '}');
    out_open(j, "machine", '{');
    out_u64(j, "physical_memory", p->physical_memory);
    out_u64(j, "available", p->available);
    if (p->cgroup_room == UINT64_MAX) out_null(j, "cgroup_room");
    else out_u64(j, "cgroup_room", p->cgroup_room);
    if (p->memlock == UINT64_MAX) out_null(j, "memlock");
    else out_u64(j, "memlock", p->memlock);
    out_u64(j, "swap_used", p->swap_used);
    out_string(j, "huge_pages", p->huge_pages);
    out_close(j, '}');
}

static void out_forecast(struct json_out *j, const hr_forecast_result *f, bool traced)
{
    out_open(j, "forecast", '{');
    out_f64(j, "tokens_per_second", f->tokens_per_second);
    out_f64(j, "low", f->low);
    out_f64(j, "high", f->high);
    out_string(j, "limit", LIMITS[f->limit]);
    out_f64(j, "hit_rate", f->hit_rate);
    out_string(j, "hits_from", traced ? "trace" : "table");
    out_f64(j, "hit_low", f->hit_low);
    out_f64(j, "hit_high", f->hit_high);
    out_f64(j, "bytes_read", f->bytes_read);
    out_f64(j, "seconds_disk", f->seconds_disk);
    out_f64(j, "seconds_compute", f->seconds_compute);
    out_open(j, "levers", '{');
    for (int i = 0; i < HR_LEVERS; i++)
        if (f->lever[i] > 0) out_f64(j, LEVERS[i], f->lever[i]);
    out_close(j, '}');
    if (f->best_lever >= 0) out_string(j, "best_lever", LEVERS[f->best_lever]);
    else out_null(j, "best_lever");
    out_close(j, '}');
}

void doctor_print_json(const struct doctor *d)
{
    struct json_out j;
    json_out_init(&j, stdout);
    out_open(&j, NULL, '{');
    out_string(&j, "verdict", VERDICTS[d->forecast.verdict]);
    out_open(&j, "reasons", '[');
    for (uint32_t i = 0; i < d->forecast.reasons; i++) {
        out_open(&j, NULL, '{');
        out_string(&j, "grade", grade_name(d->forecast.grade[i]));
        out_string(&j, "text", d->forecast.reason[i]);
        out_close(&j, '}');
    }
    out_close(&j, ']');
    out_plan(&j, "plan", &d->plan);
    out_probe(&j, &d->probe);
    out_forecast(&j, &d->forecast, d->traced);
    out_close(&j, '}');
    json_out_end(&j);
}
