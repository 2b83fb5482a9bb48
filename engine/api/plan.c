/* The public functions that plan memory. */
#include "headrace.h"

#include <stdio.h>

#include "api/exchange.h"
#include "model/model.h"
#include "model/token_cost.h"
#include "store/manifest.h"

static void fill_budget(const struct plan *p, hr_plan_result *r)
{
    r->trunk = p->trunk;
    r->state = p->state;
    r->scratch = p->scratch;
    r->io = p->io;
    r->overhead = p->overhead;
    r->cache = p->cache;
    r->total = p->total;
    r->floor = p->floor;
    r->recommended = p->recommended;
    r->ram = p->ram;
    r->available = p->available;
    r->record_bytes = p->record_bytes;
    r->working_set = p->working_set_records * p->record_bytes;
    r->bytes_per_token_cold = r->working_set;
    r->cache_slots = p->slots;
    r->total_experts = p->total_experts;
    r->ctx = p->ctx;
    r->chunk = p->chunk;
    r->fits = p->floor <= p->ram;
    r->threads = p->threads;
    r->io_threads = p->io_threads;
}

static void fill_token(const struct container *c, const struct architecture *a, hr_plan_result *r)
{
    struct token_cost cost;
    token_cost_of(c, a, &cost);
    r->trunk_per_token = cost.trunk;
    r->shared_per_token = cost.shared;
    r->experts_per_token = cost.experts;
    r->state_per_token = cost.state;
    r->state_per_position = cost.state_per_position;
    r->layers = a->layers;
    r->moe_layers = a->moe_layers;
    r->experts = a->max_experts;
    r->top_k = a->max_top_k;
    r->trunk_rows = cost.rows;
    r->trunk_cols = cost.cols;
    r->expert_width = cost.width;
    r->expert_inner = cost.inner;
    r->has_tokenizer = c->has_tokenizer;
    snprintf(r->trunk_codec, sizeof r->trunk_codec, "%s", codec_name(cost.trunk_codec));
    snprintf(r->expert_codec, sizeof r->expert_codec, "%s", codec_name(cost.expert_codec));
    r->expert_activations = codec_activations(cost.expert_codec, cost.fine);
}

static hr_status plan_container(const struct container *c, const hr_model_params *params,
                                hr_plan_result *result, hr_error *err)
{
    struct architecture arch;
    struct memory_probe memory;
    struct plan plan;
    TRY(model_check(c, &arch, err));
    memory_probe_read("", &memory);
    TRY(plan_make(c, &arch, params, &memory, &plan, err));
    fill_budget(&plan, result);
    fill_token(c, &arch, result);
    return HR_OK;
}

hr_status hr_plan(const char *path, const hr_model_params *params, hr_plan_result *plan,
                  hr_error *err)
{
    hr_model_params p;
    hr_plan_result r = {.size = sizeof r};
    struct container *c = NULL;
    if (!path || !plan) return fail(err, HR_ERR_USAGE, "path or plan is NULL");
    TRY(take_params(params, &p, err));
    TRY(container_open_drives(path, p.drives, p.drive_count, NULL, &c, err));
    const hr_status st = plan_container(c, &p, &r, err);
    container_close(c);
    if (st != HR_OK) return st;
    return give(plan, plan->size, &r, sizeof r, err);
}

hr_status hr_plan_manifest(const char *manifest, size_t n, const hr_model_params *params,
                           hr_plan_result *plan, hr_error *err)
{
    hr_model_params p;
    hr_plan_result r = {.size = sizeof r};
    struct container *c = NULL;
    if (!manifest || !plan) return fail(err, HR_ERR_USAGE, "manifest or plan is NULL");
    if (n > MANIFEST_MAX)
        return fail(err, HR_ERR_FORMAT, "a manifest of %zu bytes; at most %d are allowed", n,
                    MANIFEST_MAX);
    TRY(take_params(params, &p, err));
    if (p.drive_count >= DRIVES_MOST)
        return fail(err, HR_ERR_USAGE, "%u further drives are too many; at most %d are allowed",
                    p.drive_count, DRIVES_MOST - 1);
    TRY(manifest_parse(manifest, n, "a container to be", NULL, &c, err));
    for (uint32_t i = 0; i < p.drive_count; i++)
        c->drives[c->drive_count++] = (struct drive_dir){p.drives && p.drives[i] ? p.drives[i] : "", -1};
    const hr_status st = plan_container(c, &p, &r, err);
    c->drive_count = 1; /* the paths are the caller's */
    container_close(c);
    if (st != HR_OK) return st;
    return give(plan, plan->size, &r, sizeof r, err);
}
