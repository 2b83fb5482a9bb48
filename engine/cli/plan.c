#include <stdio.h>

#include "cli/cli.h"

static void line(const char *label, uint64_t bytes, const char *note)
{
    char text[32];
    printf("%-15s %14s %20llu  %s\n", label, format_bytes(bytes, text), (unsigned long long)bytes,
           note);
}

static void print_plan(const hr_plan_result *p)
{
    char note[96];
    line("trunk", p->trunk, "resident weights");
    snprintf(note, sizeof note, "sessions of %u tokens", p->ctx);
    line("state", p->state, note);
    snprintf(note, sizeof note, "up to %u tokens together", p->chunk);
    line("scratch", p->scratch, note);
    line("i/o", p->io, "read buffers");
    line("overhead", p->overhead, "tokenizer, tables, threads");
    snprintf(note, sizeof note, "%u of %u experts", p->cache_slots, p->total_experts);
    line("expert cache", p->cache, note);
    line("total", p->total, "");
    line("ram", p->ram, p->fits ? "fits" : "does not fit");
    line("floor", p->floor, "the least that opens");
    line("recommended", p->recommended, "");
    line("available", p->available, "on this machine now");
    line("working set", p->working_set, "experts of one token");
    line("cold token", p->bytes_per_token_cold, "read when nothing is cached");
}

void out_plan(struct json_out *j, const char *key, const hr_plan_result *p)
{
    out_open(j, key, '{');
    out_bool(j, "fits", p->fits != 0);
    out_u64(j, "trunk", p->trunk);
    out_u64(j, "state", p->state);
    out_u64(j, "scratch", p->scratch);
    out_u64(j, "io", p->io);
    out_u64(j, "overhead", p->overhead);
    out_u64(j, "cache", p->cache);
    out_u64(j, "total", p->total);
    out_u64(j, "floor", p->floor);
    out_u64(j, "recommended", p->recommended);
    out_u64(j, "ram", p->ram);
    out_u64(j, "available", p->available);
    out_u64(j, "record_bytes", p->record_bytes);
    out_u64(j, "working_set", p->working_set);
    out_u64(j, "bytes_per_token_cold", p->bytes_per_token_cold);
    out_u64(j, "cache_slots", p->cache_slots);
    out_u64(j, "total_experts", p->total_experts);
    out_u64(j, "ctx", p->ctx);
    out_u64(j, "chunk", p->chunk);
    out_close(j, '}');
}

int command_plan(int argc, char **argv)
{
    struct model_options o;
    const char *path;
    const int parsed = model_command_parse(argc, argv, "plan", false, &o, &path);
    if (parsed != EXIT_OK) return parsed;
    hr_error err = {0};
    hr_plan_result plan = {.size = sizeof plan};
    const hr_status status = hr_plan(path, &o.params, &plan, &err);
    if (status != HR_OK) return finish_output(report_error(status, &err, o.json));
    if (o.json) {
        struct json_out j;
        json_out_init(&j, stdout);
        out_plan(&j, NULL, &plan);
        json_out_end(&j);
    } else {
        print_plan(&plan);
    }
    return finish_output(plan.fits ? EXIT_OK : EXIT_MEMORY);
}
