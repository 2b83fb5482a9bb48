#include "advise/forecast.h"

#include <math.h>
#include <string.h>

#include "advise/hit_rate.h"

enum {
    REGIONS = 16, /* parallel regions of a layer */
    POSITION_DEFAULT = 512,
    DEPTHS = 4,
    EXPERTS_MOST = 64
};

/* What a table of other models and a short measurement leave open. */
#define HIT_SLACK_TABLE 0.07
#define HIT_SLACK_GIVEN 0.02
#define COMPUTE_SLACK 0.10
#define GAIN_WORTH 1.05
/* Two drives that share the experts give this much of one: they are seldom asked evenly. */
#define SECOND_DRIVE 1.7

/* With `m` records asked for at once. Between measured depths by the logarithm. */
static double bandwidth_at(const struct estimate_input *in, double m)
{
    const double depth = fmax(1, fmin(m, in->in_flight));
    double best = 0;
    for (uint32_t i = 0, d = 1; i < DEPTHS; i++, d *= 2) {
        const double here = in->bandwidth[i];
        if (here <= 0) continue;
        if (d <= depth || best == 0) {
            best = here;
            continue;
        }
        if (d / 2 < depth)
            best += (here - best) * log2(2 * depth / d);
        break;
    }
    return best;
}

/* Of a layer with experts. */
static double shared_seconds(const struct estimate_input *in)
{
    return in->shared / in->trunk_rate / in->moe_layers;
}

/* Seconds of one layer's experts when m of them are missing: reads fly together, what is cached or
 * shared computes meanwhile, the last to land computes alone. */
static double layer_seconds(const struct estimate_input *in, double m, double *disk)
{
    const double one = in->record / in->expert_rate, all = in->top_k * one + shared_seconds(in);
    if (m <= 0) return all;
    const double read = m * in->record / bandwidth_at(in, m);
    *disk += read;
    return fmax(read + one, all);
}

/* Share of layers that miss m of k experts when each is missing with chance q. */
static double binomial(uint32_t k, uint32_t m, double q)
{
    if (q <= 0 || q >= 1) return (q <= 0 ? m == 0 : m == k) ? 1 : 0;
    return exp(lgamma(k + 1.0) - lgamma(m + 1.0) - lgamma(k - m + 1.0) + m * log(q) +
               (k - m) * log1p(-q));
}

void estimate(const struct estimate_input *in, struct estimate *out)
{
    const double trunk = in->trunk / in->trunk_rate + in->state / in->memory_rate +
                         in->layers * REGIONS * in->dispatch;
    double experts = 0, disk = 0, missing = 0;
    const uint32_t k = in->top_k < EXPERTS_MOST ? in->top_k : EXPERTS_MOST;
    for (uint32_t m = 0; m <= k && in->moe_layers > 0; m++) {
        const double share = in->misses ? (m < in->miss_count ? in->misses[m] : 0)
                                        : binomial(k, m, 1 - in->hit_rate);
        const double n = in->misses ? fmin(m * in->miss_scale, k) : m;
        double read = 0;
        if (share <= 0) continue;
        experts += share * layer_seconds(in, n, &read);
        disk += share * read;
        missing += share * n;
    }
    out->disk = in->moe_layers * disk;
    out->seconds = trunk + in->moe_layers * experts;
    out->compute = trunk + in->shared / in->trunk_rate;
    if (in->moe_layers > 0)
        out->compute += in->moe_layers * in->top_k * in->record / in->expert_rate;
    out->bytes = in->moe_layers * missing * in->record;
}

static hr_status prepare(const hr_forecast_params *p, struct estimate_input *in, hr_error *err)
{
    const hr_plan_result *plan = p->plan;
    const hr_probe_result *probe = p->probe;
    const uint32_t position = p->position ? p->position : POSITION_DEFAULT;
    const bool experts = plan->moe_layers > 0 && plan->experts_per_token > 0;
    memset(in, 0, sizeof *in);
    if (probe->memory_rate <= 0 || probe->trunk_rate <= 0 || (experts && probe->expert_rate <= 0))
        return fail(err, HR_ERR_USAGE, "the probe has no rates of this model's codecs: run it with "
                    "parameters from the plan");
    in->layers = plan->layers;
    in->moe_layers = experts ? plan->moe_layers : 0;
    in->experts = plan->experts;
    in->top_k = plan->top_k;
    in->in_flight = plan->io_threads ? plan->io_threads : 1;
    /* The engine finds out how many it needs, two at least. */
    if (probe->best_depth > 0 && in->in_flight > probe->best_depth)
        in->in_flight = probe->best_depth > 2 ? probe->best_depth : 2;
    in->slots = plan->cache_slots;
    if (experts) in->record = (double)plan->experts_per_token / plan->moe_layers / plan->top_k;
    in->shared = experts ? fmin((double)plan->shared_per_token, (double)plan->trunk_per_token) : 0;
    in->trunk = (double)plan->trunk_per_token - in->shared;
    in->state = (double)plan->state_per_token + (double)plan->state_per_position * position;
    in->expert_rate = probe->expert_rate;
    in->trunk_rate = probe->trunk_rate;
    in->memory_rate = probe->memory_rate;
    in->dispatch = probe->dispatch_seconds;
    for (uint32_t i = 0; i < probe->disk_rates && i < DEPTHS; i++)
        in->bandwidth[i] = probe->disk[i].reads ? probe->disk[i].bytes_per_second : 0;
    in->misses = p->misses;
    in->miss_count = p->miss_count;
    in->miss_scale = 1;
    return HR_OK;
}

static double table_of(const struct estimate_input *in, uint64_t slots)
{
    return hit_rate_expected(slots, in->moe_layers, in->experts, in->top_k);
}

static double hits_of(const struct estimate_input *in)
{
    double missing = 0;
    for (uint32_t m = 0; m < in->miss_count && m <= in->top_k; m++) missing += m * in->misses[m];
    return in->top_k ? 1 - missing / in->top_k : 1;
}

static double clamped(double x)
{
    return x < 0 ? 0 : x > 1 ? 1 : x;
}

/* With another hit rate, and misses spread over the layers as before. */
static void estimate_at(struct estimate_input in, double hit_rate, struct estimate *out)
{
    if (in.hit_rate < 1)
        in.miss_scale = (1 - hit_rate) / (1 - in.hit_rate);
    else if (hit_rate < 1)
        in.misses = NULL;
    in.hit_rate = hit_rate;
    estimate(&in, out);
}

/* With a cache of another size, when the misses of the present one are known. */
static double hits_with(const struct estimate_input *in, uint64_t slots)
{
    const double now = 1 - table_of(in, in->slots), then = 1 - table_of(in, slots);
    return now > 0 ? clamped(1 - (1 - in->hit_rate) * then / now) : 1;
}

static double with_more_ram(const struct estimate_input *in, const hr_plan_result *plan)
{
    struct estimate e;
    if (plan->record_bytes == 0 || plan->cache_slots >= plan->total_experts) return 0;
    const uint64_t more = plan->cache_slots + plan->ram / plan->record_bytes;
    estimate_at(*in, hits_with(in, more < plan->total_experts ? more : plan->total_experts), &e);
    return 1 / e.seconds;
}

static double with_drive(struct estimate_input in, double factor)
{
    struct estimate e;
    for (uint32_t i = 0; i < DEPTHS; i++) in.bandwidth[i] *= factor;
    estimate(&in, &e);
    return 1 / e.seconds;
}

static double with_codec(struct estimate_input in, const hr_forecast_params *p)
{
    struct estimate e;
    const double record = (double)p->other_record_bytes;
    if (record <= 0 || record > 0.95 * in.record || p->probe->other_rate <= 0) return 0;
    const double hits = hits_with(&in, (uint64_t)((double)in.slots * in.record / record));
    in.record = record;
    in.expert_rate = p->probe->other_rate;
    estimate_at(in, hits, &e);
    return 1 / e.seconds;
}

static double with_threads(struct estimate_input in)
{
    struct estimate e;
    in.expert_rate = fmin(2 * in.expert_rate, fmax(in.expert_rate, in.memory_rate));
    in.trunk_rate = fmin(2 * in.trunk_rate, fmax(in.trunk_rate, in.memory_rate));
    estimate(&in, &e);
    return 1 / e.seconds;
}

static void pull_levers(const struct estimate_input *in, const hr_forecast_params *p,
                        hr_forecast_result *r)
{
    const bool streams = r->bytes_read > 0;
    memset(r->lever, 0, sizeof r->lever);
    if (streams) {
        r->lever[HR_LEVER_RAM] = with_more_ram(in, p->plan);
        r->lever[HR_LEVER_FASTER_DRIVE] = with_drive(*in, 2);
        r->lever[HR_LEVER_SECOND_DRIVE] = with_drive(*in, SECOND_DRIVE);
    }
    if (in->moe_layers > 0) r->lever[HR_LEVER_CODEC] = with_codec(*in, p);
    r->lever[HR_LEVER_THREADS] = with_threads(*in);
    r->best_lever = -1;
    double best = GAIN_WORTH * r->tokens_per_second;
    for (int32_t i = 0; i < HR_LEVERS; i++) {
        if (r->lever[i] <= best) continue;
        best = r->lever[i];
        r->best_lever = i;
    }
}

static double slow_edge(const hr_disk_rate *d)
{
    return (d->bytes_per_second + d->lowest) / 2;
}

static double fast_edge(const hr_disk_rate *d)
{
    return (d->bytes_per_second + d->highest) / 2;
}

static void find_band(const struct estimate_input *in, const hr_forecast_params *p,
                      hr_forecast_result *r)
{
    struct estimate_input edge = *in;
    struct estimate e;
    const bool known = p->misses || p->hit_rate >= 0;
    const double slack = known ? HIT_SLACK_GIVEN : HIT_SLACK_TABLE;
    r->hit_low = in->hit_rate < 1 ? clamped(in->hit_rate - slack) : 1;
    r->hit_high = clamped(in->hit_rate + slack);
    for (int side = 0; side < 2; side++) {
        const double factor = side ? 1 + COMPUTE_SLACK : 1 / (1 + COMPUTE_SLACK);
        for (uint32_t i = 0; i < DEPTHS; i++)
            if (in->bandwidth[i] > 0)
                edge.bandwidth[i] = side ? fast_edge(&p->probe->disk[i]) : slow_edge(&p->probe->disk[i]);
        edge.expert_rate = in->expert_rate * factor;
        edge.trunk_rate = in->trunk_rate * factor;
        estimate_at(edge, side ? r->hit_high : r->hit_low, &e);
        *(side ? &r->high : &r->low) = 1 / e.seconds;
    }
}

static int32_t limit_of(const struct estimate_input *in, const struct estimate *e)
{
    if (e->disk > e->compute) return HR_LIMIT_DISK;
    const double bytes = in->trunk + in->shared + in->moe_layers * in->top_k * in->record;
    /* What a plain read of the same bytes would take. */
    return bytes / in->memory_rate > 0.75 * e->compute ? HR_LIMIT_MEMORY : HR_LIMIT_COMPUTE;
}

hr_status forecast_run(const hr_forecast_params *p, hr_forecast_result *r, hr_error *err)
{
    struct estimate_input in;
    struct estimate e;
    TRY(prepare(p, &in, err));
    in.hit_rate = p->misses ? hits_of(&in) : p->hit_rate >= 0 ? p->hit_rate : table_of(&in, in.slots);
    if (in.moe_layers == 0) in.hit_rate = 1;
    if (in.hit_rate < 1 && bandwidth_at(&in, 1) <= 0)
        return fail(err, HR_ERR_USAGE, "the probe did not measure the drive, and not everything "
                    "fits in the cache");
    estimate(&in, &e);
    r->tokens_per_second = 1 / e.seconds;
    r->hit_rate = in.hit_rate;
    r->bytes_read = e.bytes;
    r->seconds_disk = e.disk;
    r->seconds_compute = e.compute;
    r->limit = limit_of(&in, &e);
    find_band(&in, p, r);
    pull_levers(&in, p, r);
    return HR_OK;
}
