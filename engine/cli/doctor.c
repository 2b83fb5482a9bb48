#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/doctor.h"
#include "cli/trace_file.h"

enum { OWN_OPTIONS = 3, RECORD_HEADER = 64, PAGE = 4096, TOP_K_MOST = 64 };

struct doctor_options {
    struct model_options model;
    float seconds; /* of reading */
    uint32_t position;
    const char *trace;
};

/* Shares of layers that miss 0, 1, ... experts of a recorded text; the first quarter fills the cache. */
struct miss_shares {
    double share[TOP_K_MOST + 1];
    uint32_t count; /* 0: no trace */
};

/* Bytes of an expert in another codec; 0 when it is not smaller than now. */
static uint64_t smaller_record(const char *codec, const hr_plan_result *plan)
{
    const uint32_t width = plan->expert_width, inner = plan->expert_inner;
    hr_quant_params q;
    uint64_t up, down, books;
    hr_quant_params_init(&q);
    snprintf(q.codec, sizeof q.codec, "%s", codec);
    if (width == 0 || inner == 0 || hr_quant_bytes(&q, inner, width, &up, &books, NULL) != HR_OK ||
        hr_quant_bytes(&q, width, inner, &down, &books, NULL) != HR_OK)
        return 0;
    const uint64_t record = (RECORD_HEADER + 2 * up + down + PAGE - 1) / PAGE * PAGE;
    return record < plan->record_bytes ? record : 0;
}

static int simulate_trace(const struct doctor_options *o, const hr_plan_result *plan,
                          struct miss_shares *out)
{
    const bool json = o->model.json;
    hr_simulate_params p;
    hr_simulate_result r = {.size = sizeof r};
    uint64_t misses[TOP_K_MOST + 1], layers = 0;
    int32_t *ids;
    size_t tokens;
    hr_error err = {0};
    if (plan->top_k > TOP_K_MOST || plan->moe_layers == 0)
        return report_failure(HR_ERR_USAGE, json, "doctor: --trace is for models that use 1 to %d "
                              "experts of a layer", TOP_K_MOST);
    const int code = trace_file_read(o->trace, plan->moe_layers, plan->top_k, json, &ids, &tokens);
    if (code != EXIT_OK) return code;
    hr_simulate_params_init(&p);
    p.layers = plan->moe_layers;
    p.experts = plan->experts;
    p.top_k = plan->top_k;
    p.slots = plan->cache_slots;
    p.policy = o->model.params.cache_policy;
    p.warm_up = (uint32_t)(tokens / 4);
    const hr_status status = hr_simulate(&p, ids, tokens, misses, &r, &err);
    free(ids);
    if (status == HR_ERR_USAGE) err.code = HR_ERR_FORMAT; /* the numbers come from the file */
    if (status != HR_OK) return report_error((hr_status)err.code, &err, json);
    for (uint32_t i = 0; i <= plan->top_k; i++) layers += misses[i];
    for (uint32_t i = 0; i <= plan->top_k; i++)
        out->share[i] = (double)misses[i] / (double)(layers ? layers : 1);
    out->count = plan->top_k + 1;
    return EXIT_OK;
}

/* Bank files of a further drive, one of them in path[1024]; 0 when there are none. */
static uint32_t count_banks(const char *directory, char path[1024])
{
    uint32_t n = 0;
    DIR *dir = opendir(directory);
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        const size_t length = strlen(e->d_name);
        if (strncmp(e->d_name, "experts-", 8) != 0 || length < 12 ||
            strcmp(e->d_name + length - 4, ".bin") != 0 ||
            snprintf(path, 1024, "%s/%s", directory, e->d_name) >= 1024)
            continue;
        n++;
    }
    if (dir != NULL) closedir(dir);
    return n;
}

/* A drive with copies of every bank adds its bandwidth, one with some of them that share of it. */
static hr_status add_drives(const struct doctor_options *o, struct doctor *d, hr_error *err)
{
    for (uint32_t i = 0; i < o->model.params.drive_count; i++) {
        char path[1024];
        hr_probe_params p;
        hr_probe_result r = {.size = sizeof r};
        const uint32_t banks = count_banks(o->model.params.drives[i], path);
        if (banks == 0) continue;
        const double share = banks < d->plan.moe_layers ? (double)banks / d->plan.moe_layers : 1;
        hr_probe_params_init(&p, &d->plan);
        p.disk_seconds = (double)o->seconds;
        p.compute_seconds = -1;
        p.direct = o->model.params.direct;
        const hr_status status = hr_probe(path, &p, &r, err);
        if (status != HR_OK) return status;
        for (uint32_t k = 0; k < r.disk_rates && k < d->probe.disk_rates; k++) {
            d->probe.disk[k].bytes_per_second += share * r.disk[k].bytes_per_second;
            d->probe.disk[k].lowest += share * r.disk[k].lowest;
            d->probe.disk[k].highest += share * r.disk[k].highest;
        }
        d->probe.cold = d->probe.cold && r.cold;
        d->probe.direct = d->probe.direct && r.direct;
    }
    return HR_OK;
}

static hr_status examine(const char *path, const struct doctor_options *o,
                         const struct miss_shares *misses, struct doctor *d, hr_error *err)
{
    static const char other[] = "rvq4x64"; /* the converter's rvq3 */
    hr_probe_params probe;
    hr_forecast_params forecast;
    const uint64_t record = smaller_record(other, &d->plan);
    hr_probe_params_init(&probe, &d->plan);
    probe.disk_seconds = (double)o->seconds;
    probe.direct = o->model.params.direct;
    memcpy(probe.isa, o->model.params.isa, sizeof probe.isa);
    if (d->plan.moe_layers == 0) probe.disk_seconds = -1;
    if (record > 0) memcpy(probe.other_codec, other, sizeof other);
    hr_status status = hr_probe(path, &probe, &d->probe, err);
    if (status == HR_OK) status = add_drives(o, d, err);
    if (status != HR_OK) return status;
    hr_forecast_params_init(&forecast);
    forecast.plan = &d->plan;
    forecast.probe = &d->probe;
    forecast.position = o->position;
    forecast.other_record_bytes = record;
    if (misses->count > 0) {
        forecast.misses = misses->share;
        forecast.miss_count = misses->count;
    }
    return hr_forecast(&forecast, &d->forecast, err);
}

int command_doctor(int argc, char **argv)
{
    struct doctor_options o = {.seconds = 2};
    struct doctor d = {{.size = sizeof d.plan}, {.size = sizeof d.probe},
                       {.size = sizeof d.forecast}, false};
    model_options_init(&o.model);
    struct cli_option options[MODEL_OPTION_COUNT + OWN_OPTIONS] = {
        {"--seconds", OPTION_REAL, &o.seconds, NULL, NULL},
        {"--position", OPTION_U32, &o.position, NULL, NULL},
        {"--trace", OPTION_PATH, &o.trace, NULL, NULL},
    };
    model_options_describe(&o.model, options + OWN_OPTIONS);
    const char *path;
    size_t count;
    char message[256];
    const bool parsed =
        args_parse(argc, argv, options, MODEL_OPTION_COUNT + OWN_OPTIONS, &path, 1, &count, message);
    const bool json = o.model.json;
    if (!parsed) return report_failure(HR_ERR_USAGE, json, "doctor: %s (see headrace help)", message);
    model_options_finish(&o.model);
    if (count != 1) return report_failure(HR_ERR_USAGE, json, "doctor: give one MODEL");
    if (!(o.seconds > 0 && o.seconds <= 60))
        return report_failure(HR_ERR_USAGE, json, "doctor: --seconds must be above 0 and at most 60");
    hr_error err = {0};
    struct miss_shares misses = {.count = 0};
    hr_status status = hr_plan(path, &o.model.params, &d.plan, &err);
    if (status != HR_OK) return finish_output(report_error(status, &err, json));
    if (o.trace) {
        const int code = simulate_trace(&o, &d.plan, &misses);
        if (code != EXIT_OK) return finish_output(code);
    }
    d.traced = o.trace != NULL;
    status = examine(path, &o, &misses, &d, &err);
    if (status != HR_OK) return finish_output(report_error(status, &err, json));
    if (json) doctor_print_json(&d);
    else doctor_print(&d);
    return finish_output(d.plan.fits ? EXIT_OK : EXIT_MEMORY);
}
