#include "model/plan.h"

#include <string.h>

#include "base/cpu.h"
#include "base/pool.h"
#include "model/read_ahead.h"
#include "model/scratch.h"
#include "model/state.h"
#include "model/weights.h"
#include "store/row_table.h"
#include "text/tokenizer.h"

/* Room for what calls allocate and free again (encoding a text, recording routes), for the fixed
 * structures of a model and its sessions, and for vocabularies with tokens longer than any known. */
enum { CALL_SLACK = 4 << 20, LONG_TOKEN = 1024, MAX_CHUNK = 4096, AUTO_CHUNK = 512, MAX_READ_AHEAD = 64 };

/* More than any machine has; the sums of the plan stay far from overflow. */
#define STATE_MAX ((uint64_t)1 << 56)

uint64_t plan_session_state(const struct architecture *a, uint32_t ctx)
{
    struct carve c = {NULL, 0};
    struct state s = {0};
    state_carve(&c, a, ctx, &s);
    const uint64_t cost = mem_cost(c.used);
    return cost < STATE_MAX ? cost : STATE_MAX;
}

size_t plan_workspace(uint32_t vocab, size_t longest)
{
    return 3 * sizeof(float) * (size_t)vocab + vocab / 8 + 3 * longest + 1024;
}

uint64_t plan_session_scratch(const struct architecture *a, uint32_t ctx, uint32_t chunk,
                              uint32_t workers, size_t longest)
{
    struct carve c = {NULL, 0};
    struct forward_scratch s;
    forward_carve(&c, a, ctx, chunk, workers, &s);
    return mem_cost(c.used) + mem_cost((size_t)a->vocab_size * sizeof(float)) +
           mem_cost(plan_workspace(a->vocab_size, longest)) +
           mem_cost(a->layers * sizeof(struct layer_state));
}

static hr_status in_range(const char *what, uint32_t v, uint32_t max, hr_error *err)
{
    if (v <= max) return HR_OK;
    return fail(err, HR_ERR_USAGE, "%s is %u; at most %u is allowed", what, v, max);
}

static uint64_t overhead_bytes(const struct container *c, const struct architecture *a,
                               uint32_t threads)
{
    uint64_t n = c->mem_bytes + container_drives_cost(c) + mem_cost(json_bytes(c->manifest)) + pool_cost(threads) + CALL_SLACK;
    n += mem_cost(a->layers * sizeof(struct layer_weights));
    n += mem_cost(architecture_stacks(a) * sizeof(struct matrix));
    if (a->ngram.order) n += row_table_cost();
    if (c->has_tokenizer)
        n += mem_cost(c->tokenizer_bytes) + tokenizer_cost(c->tokenizer_bytes);
    return n;
}

/* The most slots whose cost stays within `room`. */
static uint32_t slots_within(const struct container *c, struct cache_options o, uint64_t room,
                             uint32_t most)
{
    uint32_t lo = 0, hi = most; /* cost(lo) fits */
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo + 1) / 2;
        o.slots = mid;
        if (expert_cache_cost(c, &o) <= room)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

/* Threads of each drive. When the number is left to the engine and there is enough on a drive to
 * measure it, creation finds out how many of them are used: small records need more reads in flight. */
enum { FEW_READS = 4, MANY_READS = 8, LARGE_RECORD = 4 << 20, WORTH_MEASURING = 256 << 20 };

static void choose_reads(const struct container *c, const struct architecture *a,
                         const hr_model_params *params, struct plan *p)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < c->bank_count; i++)
        bytes += (uint64_t)c->banks[i].experts * c->banks[i].record.bytes;
    p->cache_options.calibrate =
        params->io_threads == 0 && params->direct != 0 && bytes >= WORTH_MEASURING;
    const bool many = p->cache_options.calibrate && p->record_bytes < LARGE_RECORD;
    p->io_threads = params->io_threads ? params->io_threads : many ? MANY_READS : FEW_READS;
    p->cache_options.io_threads = p->io_threads;
    p->read_ahead_adaptive = params->read_ahead < 0 && bytes >= WORTH_MEASURING;
    const uint32_t ranks = params->read_ahead > 0        ? (uint32_t)params->read_ahead
                           : p->read_ahead_adaptive ? AHEAD_RANKS
                                                         : 0;
    p->read_ahead = ranks < a->max_top_k ? ranks : a->max_top_k;
    if (!p->read_ahead_adaptive) p->cache_options.ahead = 2 * p->read_ahead;
}

/* Reading ahead by itself takes its buffers from the cache, but not from a small one, and not where the
 * cache holds everything. Recomputes what the buffers change. */
static void afford_read_ahead(const struct container *c, struct plan *p)
{
    struct cache_options o = p->cache_options;
    if (!p->read_ahead_adaptive) return;
    o.ahead = 2 * p->read_ahead;
    o.slots = 0;
    const uint64_t io = expert_cache_cost(c, &o), room = p->io + p->cache;
    const uint32_t slots = room > io ? slots_within(c, o, room, p->total_experts) : 0;
    if (p->slots == p->total_experts || slots < 8 * o.ahead * o.lanes) {
        p->read_ahead = 0;
        p->read_ahead_adaptive = false;
        return;
    }
    p->total -= room;
    p->slots = o.slots = slots;
    p->io = io;
    p->cache = expert_cache_cost(c, &o) - io;
    p->total += p->io + p->cache;
    p->cache_options = o;
}

hr_status plan_make(const struct container *c, const struct architecture *a,
                    const hr_model_params *params, const struct memory_probe *memory,
                    struct plan *p, hr_error *err)
{
    memset(p, 0, sizeof *p);
    TRY(in_range("threads", params->threads, 1024, err));
    TRY(in_range("io_threads", params->io_threads, 64, err));
    TRY(in_range("max_sessions", params->max_sessions, 64, err));
    TRY(in_range("chunk", params->chunk, MAX_CHUNK, err));
    if (params->read_ahead < -1 || params->read_ahead > MAX_READ_AHEAD)
        return fail(err, HR_ERR_USAGE, "read_ahead is %d; -1 to %d are allowed", params->read_ahead,
                    MAX_READ_AHEAD);
    p->ctx = params->ctx ? params->ctx : a->max_position < 4096 ? a->max_position : 4096;
    if (p->ctx > a->max_position)
        return fail(err, HR_ERR_USAGE, "ctx is %u; this model knows positions up to %u", p->ctx,
                    a->max_position);
    p->threads = params->threads ? params->threads : cpu_physical_cores();
    p->sessions = params->max_sessions ? params->max_sessions : 1;
    p->available = memory->usable;
    p->ram = params->ram ? params->ram : memory_default_budget(memory);
    p->record_bytes = expert_cache_slot_bytes(c);
    const size_t longest = c->has_tokenizer ? LONG_TOKEN : 0;
    for (uint32_t i = 0; i < c->bank_count; i++) p->total_experts += c->banks[i].experts;
    for (uint32_t i = 0; i < a->layers; i++)
        if (layer_ffn(a, i)->kind == FFN_MOE) p->working_set_records += layer_ffn(a, i)->moe.top_k;

    struct cache_options *o = &p->cache_options;
    *o = (struct cache_options){.lanes = p->sessions,
                                .working_set = (uint32_t)p->working_set_records,
                                .policy = params->cache_policy, .verify = params->verify,
                                .direct = params->direct != 0,
                                .shuffle_seed = params->shuffle_reads};
    choose_reads(c, a, params, p);
    o->transient = cache_transient_buffers(a->max_top_k, p->io_threads);
    p->trunk = mem_cost(c->trunk_bytes);
    p->overhead = overhead_bytes(c, a, p->threads);
    p->state = p->sessions * plan_session_state(a, p->ctx);
    p->io = expert_cache_cost(c, o);
    const uint64_t fixed = p->trunk + p->overhead + p->state + p->io;
    const uint32_t most = p->ctx < AUTO_CHUNK ? p->ctx : AUTO_CHUNK;
    const uint32_t least = params->chunk ? params->chunk : 1;

    /* A larger chunk reads each expert for more tokens; it may take an eighth of what is free. */
    p->chunk = params->chunk ? params->chunk : most;
    p->floor = fixed + p->sessions * plan_session_scratch(a, p->ctx, least, p->threads, longest);
    const uint64_t spare = p->ram > fixed ? p->ram - fixed : 0;
    while (p->chunk > least &&
           p->sessions * plan_session_scratch(a, p->ctx, p->chunk, p->threads, longest) > spare / 8)
        p->chunk = p->chunk / 2 > least ? p->chunk / 2 : least;
    p->scratch = p->sessions * plan_session_scratch(a, p->ctx, p->chunk, p->threads, longest);

    const uint64_t used = fixed + p->scratch;
    if (p->ram >= used) p->slots = slots_within(c, *o, p->ram - used + p->io, p->total_experts);
    o->slots = p->slots;
    p->cache = expert_cache_cost(c, o) - p->io;
    p->total = used + p->cache;

    struct cache_options whole = *o;
    const uint64_t rest = fixed - p->io;
    afford_read_ahead(c, p);
    whole.slots = p->total_experts;
    p->recommended = rest + expert_cache_cost(c, &whole) +
                     p->sessions * plan_session_scratch(a, p->ctx, params->chunk ? params->chunk : most,
                                                        p->threads, longest);
    const uint64_t safe = memory_default_budget(memory);
    if (p->recommended > safe) p->recommended = safe > p->floor ? safe : p->floor;
    return HR_OK;
}
