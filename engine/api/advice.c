/* The public functions that measure the machine and forecast: argument checks. */
#include "headrace.h"

#include <stdio.h>
#include <string.h>

#include "advise/forecast.h"
#include "advise/probe.h"
#include "api/exchange.h"
#include "base/cpu.h"
#include "quant/codec.h"
#include "store/direct_io.h"
#include "store/replay.h"

enum { RECORD_DEFAULT = 1 << 20, RECORD_MOST = 1 << 30, SECONDS_MOST = 60, THREADS_MOST = 1024 };
enum { DIM_MOST = 1 << 20, LAYERS_MOST = 1024, EXPERTS_MOST = 1 << 16 };
enum { CHUNK_DEFAULT = 512, CHUNK_MOST = 4096 };
enum { AHEAD_MOST = 64, IN_FLIGHT_DEFAULT = 4, IN_FLIGHT_MOST = 64 };

void hr_probe_params_init(hr_probe_params *params, const hr_plan_result *plan)
{
    memset(params, 0, sizeof *params);
    params->size = sizeof *params;
    params->direct = 1;
    snprintf(params->isa, sizeof params->isa, "auto");
    if (plan == NULL || plan->size < sizeof *plan) return;
    params->record_bytes = plan->record_bytes;
    params->pool = plan->trunk_per_token +
                   (plan->cache > plan->experts_per_token ? plan->cache : plan->experts_per_token);
    params->threads = plan->threads;
    params->expert_width = plan->expert_width;
    params->expert_inner = plan->expert_inner;
    params->top_k = plan->top_k;
    params->trunk_rows = plan->trunk_rows;
    params->trunk_cols = plan->trunk_cols;
    params->expert_activations = plan->expert_activations;
    memcpy(params->expert_codec, plan->expert_codec, sizeof params->expert_codec);
    memcpy(params->trunk_codec, plan->trunk_codec, sizeof params->trunk_codec);
}

static hr_status known_codec(char name[16], const char *what, hr_error *err)
{
    name[15] = '\0';
    if (strcmp(name, codec_name(CODEC_NONE)) == 0) name[0] = '\0';
    if (name[0] == '\0' || codec_from_name(name) != CODEC_NONE) return HR_OK;
    return fail(err, HR_ERR_USAGE, "%s \"%s\" is unknown", what, name);
}

static hr_status seconds_in_range(double *seconds, double otherwise, const char *what, hr_error *err)
{
    if (*seconds == 0) *seconds = otherwise;
    if (*seconds <= SECONDS_MOST) return HR_OK; /* not a NaN */
    return fail(err, HR_ERR_USAGE, "%s is %g; at most %d", what, *seconds, SECONDS_MOST);
}

static hr_status check_shapes(hr_probe_params *p, hr_error *err)
{
    TRY(known_codec(p->expert_codec, "expert_codec", err));
    TRY(known_codec(p->trunk_codec, "trunk_codec", err));
    TRY(known_codec(p->other_codec, "other_codec", err));
    if (p->expert_codec[0] && (p->expert_width == 0 || p->expert_inner == 0 || p->top_k == 0 ||
                               p->expert_width > DIM_MOST || p->expert_inner > DIM_MOST))
        return fail(err, HR_ERR_USAGE, "%u experts of [%u, %u] are out of range", p->top_k,
                    p->expert_width, p->expert_inner);
    const uint32_t bits = p->expert_activations;
    if (bits != 0 && bits != 8 && (bits != 22 || codec_from_name(p->expert_codec) != CODEC_MXFP4))
        return fail(err, HR_ERR_USAGE, "expert_activations is %u; 0 and 8 are allowed, with mxfp4 also 22",
                    bits);
    if (p->trunk_codec[0] && (p->trunk_rows == 0 || p->trunk_cols == 0 || p->trunk_rows > DIM_MOST ||
                              p->trunk_cols > DIM_MOST))
        return fail(err, HR_ERR_USAGE, "trunk matrices of [%u, %u] are out of range", p->trunk_rows,
                    p->trunk_cols);
    return HR_OK;
}

hr_status hr_probe(const char *path, const hr_probe_params *params, hr_probe_result *result,
                   hr_error *err)
{
    hr_probe_params p;
    hr_probe_result r = {.size = sizeof r};
    if (!result) return fail(err, HR_ERR_USAGE, "result is NULL");
    hr_probe_params_init(&p, NULL);
    if (params) TRY(take_struct("hr_probe_params", params, params->size, &p, sizeof p, err));
    p.isa[sizeof p.isa - 1] = '\0';
    TRY(seconds_in_range(&p.disk_seconds, 2, "disk_seconds", err));
    TRY(seconds_in_range(&p.compute_seconds, 1, "compute_seconds", err));
    if (p.threads == 0) p.threads = cpu_physical_cores();
    if (p.threads > THREADS_MOST)
        return fail(err, HR_ERR_USAGE, "threads is %u; at most %d", p.threads, THREADS_MOST);
    if (p.record_bytes == 0) p.record_bytes = RECORD_DEFAULT;
    if (p.record_bytes > RECORD_MOST || p.record_bytes % IO_ALIGN != 0)
        return fail(err, HR_ERR_USAGE, "record_bytes is %llu; a multiple of %d, at most %d",
                    (unsigned long long)p.record_bytes, IO_ALIGN, RECORD_MOST);
    if (p.disk_seconds > 0 && !path) return fail(err, HR_ERR_USAGE, "path is NULL");
    TRY(check_shapes(&p, err));
    TRY(probe_run(path, &p, &r, err));
    return give(result, result->size, &r, sizeof r, err);
}

void hr_forecast_params_init(hr_forecast_params *params)
{
    memset(params, 0, sizeof *params);
    params->size = sizeof *params;
    params->hit_rate = -1;
}

hr_status hr_forecast(const hr_forecast_params *params, hr_forecast_result *result, hr_error *err)
{
    hr_forecast_params p;
    hr_plan_result plan = {0};
    hr_probe_result probe = {0};
    hr_forecast_result r = {.size = sizeof r};
    if (!params || !result) return fail(err, HR_ERR_USAGE, "params or result is NULL");
    hr_forecast_params_init(&p);
    TRY(take_struct("hr_forecast_params", params, params->size, &p, sizeof p, err));
    if (!p.plan || !p.probe) return fail(err, HR_ERR_USAGE, "plan or probe is NULL");
    if (p.plan->size < sizeof plan || p.probe->size < sizeof probe)
        return fail(err, HR_ERR_USAGE, "plan or probe has a size field below that of this library");
    memcpy(&plan, p.plan, sizeof plan);
    memcpy(&probe, p.probe, sizeof probe);
    p.plan = &plan;
    p.probe = &probe;
    if (!(p.hit_rate <= 1)) return fail(err, HR_ERR_USAGE, "hit_rate is %g; at most 1", p.hit_rate);
    TRY(forecast_run(&p, &r, err));
    verdict_give(&p, &r);
    return give(result, result->size, &r, sizeof r, err);
}

void hr_simulate_params_init(hr_simulate_params *params)
{
    memset(params, 0, sizeof *params);
    params->size = sizeof *params;
}

static bool is_time(double seconds)
{
    return seconds >= 0 && seconds <= 3600;
}

static hr_status check_ahead(const hr_simulate_params *p, hr_error *err)
{
    if (p->read_ahead > AHEAD_MOST || p->in_flight > IN_FLIGHT_MOST || p->guess_ranks > p->experts)
        return fail(err, HR_ERR_USAGE, "read_ahead %u, guess_ranks %u, in_flight %u: out of range",
                    p->read_ahead, p->guess_ranks, p->in_flight);
    if (p->read_ahead > 0 && (!p->guesses || p->guess_ranks < p->read_ahead))
        return fail(err, HR_ERR_USAGE, "to read %u ranks ahead as many guesses are needed, and there are "
                    "%u", p->read_ahead, p->guesses ? p->guess_ranks : 0);
    if (!is_time(p->read_seconds) || !is_time(p->layer_seconds) || !is_time(p->expert_seconds))
        return fail(err, HR_ERR_USAGE, "read_seconds, layer_seconds or expert_seconds is out of range");
    return HR_OK;
}

hr_status hr_simulate(const hr_simulate_params *params, const int32_t *ids, size_t tokens,
                      uint64_t *misses, hr_simulate_result *result, hr_error *err)
{
    hr_simulate_params p;
    hr_simulate_result r = {.size = sizeof r};
    struct replay_result found;
    if (!params || !result || (!ids && tokens))
        return fail(err, HR_ERR_USAGE, "params, ids or result is NULL");
    hr_simulate_params_init(&p);
    TRY(take_struct("hr_simulate_params", params, params->size, &p, sizeof p, err));
    if (p.chunk == 0) p.chunk = CHUNK_DEFAULT;
    if (p.layers == 0 || p.layers > LAYERS_MOST || p.experts == 0 || p.experts > EXPERTS_MOST ||
        p.top_k == 0 || p.top_k > p.experts || p.chunk > CHUNK_MOST)
        return fail(err, HR_ERR_USAGE, "%u layers of %u experts, %u of a token, in chunks of %u: out "
                    "of range", p.layers, p.experts, p.top_k, p.chunk);
    if (p.policy < HR_CACHE_AUTO || p.policy > HR_CACHE_LFU)
        return fail(err, HR_ERR_USAGE, "policy is %d", p.policy);
    if (misses) memset(misses, 0, ((size_t)p.top_k + 1) * sizeof *misses);
    if (p.in_flight == 0) p.in_flight = IN_FLIGHT_DEFAULT;
    TRY(check_ahead(&p, err));
    const struct replay_setup setup = {
        p.layers,        p.experts,       p.top_k,         p.slots,          p.policy,
        p.prefill,       p.chunk,         p.warm_up,       p.read_ahead,     p.guess_ranks,
        p.guesses,       p.read_seconds,  p.layer_seconds, p.expert_seconds, p.in_flight};
    TRY(replay_run(&setup, ids, tokens, misses, NULL, &found, err));
    r.tokens = found.tokens;
    r.hits = found.hits;
    r.misses = found.misses;
    r.evictions = found.evictions;
    r.transient_reads = found.transient_reads;
    r.read_ahead_issued = found.issued;
    r.read_ahead_used = found.used;
    r.read_ahead_wasted = found.wasted;
    r.read_ahead_cancelled = found.cancelled;
    r.alone = found.alone;
    r.seconds = found.seconds;
    r.seconds_blocked = found.blocked;
    r.seconds_wanted = found.wanted;
    return give(result, result->size, &r, sizeof r, err);
}
