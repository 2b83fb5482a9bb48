#include "store/replay.h"

#include <string.h>

#include "base/carve.h"
#include "store/expert_cache.h"
#include "store/replay_time.h"

/* As in the model: leases of a wave; tokens of a chunk for which the next layer is guessed. */
enum { HELD = 32, GUESS_TOKENS = 2, IO_THREADS = 4 };

struct replay {
    const struct replay_setup *s;
    struct container container;
    struct bank_entry *banks; /* [layers] */
    struct expert_cache *cache;
    /* One layer of one chunk, as the model groups it. */
    uint32_t *first;  /* [experts + 2] */
    uint32_t *token;  /* [chunk * top_k] */
    uint32_t *wanted; /* [experts] */
    /* What was read ahead for the next layer, and which of it the layer asks for. */
    uint32_t *guess;  /* [2 * ahead] */
    bool *used;       /* the same */
    uint32_t guesses;
    struct replay_time time;
};

static void lay_out(struct carve *c, struct replay *r)
{
    const struct replay_setup *s = r->s;
    r->banks = carve_take(c, s->layers * sizeof *r->banks);
    r->first = carve_take(c, ((size_t)s->experts + 2) * sizeof *r->first);
    r->token = carve_take(c, (size_t)s->chunk * s->top_k * sizeof *r->token);
    r->wanted = carve_take(c, s->experts * sizeof *r->wanted);
    r->guess = carve_take(c, (size_t)GUESS_TOKENS * s->ahead * sizeof *r->guess);
    r->used = carve_take(c, (size_t)GUESS_TOKENS * s->ahead * sizeof *r->used);
}

static const int32_t *routes_of(const struct replay *r, const int32_t *ids, size_t token,
                                uint32_t layer)
{
    return ids + (token * r->s->layers + layer) * r->s->top_k;
}

/* Experts that n tokens want in a layer, ascending, and which of the tokens want each. */
static uint32_t group(struct replay *r, const int32_t *ids, size_t at, uint32_t n, uint32_t layer)
{
    const struct replay_setup *s = r->s;
    uint32_t wanted = 0, *first = r->first;
    memset(first, 0, ((size_t)s->experts + 2) * sizeof *first);
    for (uint32_t t = 0; t < n; t++) {
        const int32_t *e = routes_of(r, ids, at + t, layer);
        for (uint32_t k = 0; k < s->top_k && e[k] >= 0; k++) first[e[k] + 2]++;
    }
    for (uint32_t e = 0; e < s->experts; e++) {
        if (first[e + 2] > 0) r->wanted[wanted++] = e;
        first[e + 2] += first[e + 1];
    }
    /* first[e + 1] is where expert e starts, and moves to where e + 1 does. */
    for (uint32_t t = 0; t < n; t++) {
        const int32_t *e = routes_of(r, ids, at + t, layer);
        for (uint32_t k = 0; k < s->top_k && e[k] >= 0; k++) r->token[first[e[k] + 1]++] = t;
    }
    return wanted;
}

static hr_status serve(struct replay *r, hr_error *err)
{
    struct cache_lease lease[HELD];
    for (;;) {
        uint32_t held = 0;
        bool got = true;
        while (got && held < HELD) {
            TRY(cache_next(r->cache, 0, held == 0, &lease[held], &got, NULL, err));
            held += got;
        }
        if (held == 0) return HR_OK;
        for (uint32_t i = 0; i < held; i++) cache_release(r->cache, 0, &lease[i]);
    }
}

/* Asks for the guesses one at a time, so that it shows which of them are read. */
static void read_guesses(struct replay *r, size_t at, uint32_t n, uint32_t layer)
{
    const struct replay_setup *s = r->s;
    struct cache_stats before, after;
    r->guesses = 0;
    if (s->ahead == 0 || n > GUESS_TOKENS || layer == s->layers || expert_cache_whole(r->cache))
        return;
    for (uint32_t rank = 0; rank < s->ahead; rank++)
        for (uint32_t t = 0; t < n; t++) {
            const int32_t e = s->guesses[((at + t) * s->layers + layer) * s->ranks + rank];
            if (e < 0) continue;
            const uint32_t expert = (uint32_t)e;
            expert_cache_stats(r->cache, &before);
            cache_read_ahead(r->cache, 0, layer, &expert, 1);
            expert_cache_stats(r->cache, &after);
            if (after.ahead_issued > before.ahead_issued) r->guess[r->guesses++] = expert;
        }
}

static hr_status run_chunk(struct replay *r, const int32_t *ids, size_t at, uint32_t n,
                           uint64_t *misses, hr_error *err)
{
    struct cache_stats before, after;
    if (n > 1) replay_time_rest(&r->time);
    r->guesses = 0;
    for (uint32_t layer = 0; layer < r->s->layers; layer++) {
        const uint32_t wanted = group(r, ids, at, n, layer);
        const struct cache_uses uses = {n, r->first, r->token};
        for (uint32_t i = 0; i < r->guesses; i++)
            r->used[i] = r->first[r->guess[i] + 1] > r->first[r->guess[i]];
        expert_cache_stats(r->cache, &before);
        cache_begin(r->cache, 0, layer, r->wanted, wanted, &uses);
        read_guesses(r, at, n, layer + 1);
        TRY(serve(r, err));
        expert_cache_stats(r->cache, &after);
        const uint32_t missed = (uint32_t)(after.misses - before.misses);
        if (misses != NULL) misses[missed]++;
        if (n > 1) continue;
        replay_time_layer(&r->time, wanted, missed, r->used);
        replay_time_ahead(&r->time, r->guesses);
    }
    return HR_OK;
}

static hr_status run_all(struct replay *r, const int32_t *ids, size_t tokens, uint64_t *misses,
                         struct replay_result *out, hr_error *err)
{
    const struct replay_setup *s = r->s;
    struct cache_stats start = {0}, end;
    struct replay_time warm = r->time;
    const size_t warm_up = s->warm_up < tokens ? s->warm_up : tokens;
    for (size_t at = 0; at < tokens;) {
        const size_t left = at < s->prefill ? s->prefill - at : 1;
        size_t n = at < s->prefill ? (left < s->chunk ? left : s->chunk) : 1;
        if (n > tokens - at) n = tokens - at;
        const bool counts = at >= warm_up;
        if (!counts && at + n >= warm_up) { /* the count begins behind this chunk */
            TRY(run_chunk(r, ids, at, (uint32_t)n, NULL, err));
            expert_cache_stats(r->cache, &start);
            warm = r->time;
        } else {
            TRY(run_chunk(r, ids, at, (uint32_t)n, counts && n == 1 ? misses : NULL, err));
        }
        if (counts) out->tokens += n;
        if (counts && n == 1) out->alone++;
        at += n;
    }
    expert_cache_stats(r->cache, &end);
    out->hits = end.hits - start.hits;
    out->misses = end.misses - start.misses;
    out->evictions = end.evictions - start.evictions;
    out->transient_reads = end.transient_reads - start.transient_reads;
    out->issued = end.ahead_issued - start.ahead_issued;
    out->used = end.ahead_used - start.ahead_used;
    /* The cache was given every record at once; the clock knows what it could have taken back. */
    out->cancelled = r->time.cancelled - warm.cancelled;
    out->wasted = end.ahead_wasted - start.ahead_wasted - out->cancelled;
    out->seconds = r->time.now - warm.now;
    out->blocked = r->time.blocked - warm.blocked;
    out->wanted = r->time.wanted - warm.wanted;
    return HR_OK;
}

static hr_status check_ids(const struct replay_setup *s, const int32_t *ids, size_t tokens,
                           hr_error *err)
{
    const size_t row = s->top_k;
    for (size_t i = 0; i < tokens * s->layers; i++)
        for (size_t k = 0; k < row; k++) {
            const int32_t e = ids[i * row + k];
            bool twice = false;
            for (size_t j = 0; j < k && e >= 0; j++) twice = twice || ids[i * row + j] == e;
            if (e < -1 || e >= (int64_t)s->experts || twice)
                return fail(err, HR_ERR_USAGE, "token %zu, layer %zu: expert %d is %s", i / s->layers,
                            i % s->layers, e, twice ? "there twice" : "out of range");
        }
    return HR_OK;
}

static hr_status check_guesses(const struct replay_setup *s, size_t tokens, hr_error *err)
{
    const size_t row = (size_t)s->layers * s->ranks;
    for (size_t i = 0; s->ahead > 0 && i < tokens * row; i++)
        if (s->guesses[i] < -1 || s->guesses[i] >= (int64_t)s->experts)
            return fail(err, HR_ERR_USAGE, "token %zu, layer %zu: guess %d is out of range", i / row,
                        i % row / s->ranks, s->guesses[i]);
    return HR_OK;
}

hr_status replay_run(const struct replay_setup *s, const int32_t *ids, size_t tokens,
                     uint64_t *misses, struct mem_budget *b, struct replay_result *out,
                     hr_error *err)
{
    struct replay r = {.s = s, .time = {.read = s->read_seconds, .layer = s->layer_seconds,
                                        .expert = s->expert_seconds, .in_flight = s->in_flight}};
    struct carve carve = {0};
    *out = (struct replay_result){0};
    TRY(check_ids(s, ids, tokens, err));
    TRY(check_guesses(s, tokens, err));
    lay_out(&carve, &r);
    const size_t bytes = carve.used;
    carve = (struct carve){.base = mem_alloc(b, bytes)};
    if (carve.base == NULL)
        return fail(err, HR_ERR_MEMORY, "no memory for a replay (%zu bytes)", bytes);
    uint8_t *block = carve.base;
    lay_out(&carve, &r);
    r.container = (struct container){.bank_count = s->layers, .banks = r.banks, .dir_fd = -1,
                                     .drive_count = 1};
    for (uint32_t i = 0; i < s->layers; i++)
        r.banks[i] = (struct bank_entry){.layer = i, .experts = s->experts, .file = ""};
    const struct cache_options o = {.slots = s->slots, .lanes = 1,
                                    .transient = cache_transient_buffers(s->top_k, IO_THREADS),
                                    .io_threads = IO_THREADS, .ahead = GUESS_TOKENS * s->ahead,
                                    .working_set = s->layers * s->top_k, .policy = s->policy,
                                    .verify = HR_VERIFY_OFF, .dry = true};
    hr_status status = expert_cache_create(&r.container, &o, b, &r.cache, err);
    if (status == HR_OK) status = run_all(&r, ids, tokens, misses, out, err);
    expert_cache_free(r.cache);
    mem_free(b, block, bytes);
    return status;
}
