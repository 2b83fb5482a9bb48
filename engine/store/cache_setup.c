/* Sizes, layout, creation and end of an expert cache: the plan and the allocation are one code. */
#include "base/carve.h"
#include "store/cache_state.h"

#define BUFFERS_MAX ((uint64_t)1 << 30)
/* From here on mem_alloc aligns to a page, which direct reads need. */
#define ARENA_MIN ((size_t)64 << 10)

static uint64_t record_count(const struct container *c)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < c->bank_count; i++) n += c->banks[i].experts;
    return n;
}

static uint32_t batch_max(const struct container *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->bank_count; i++)
        if (c->banks[i].experts > n) n = c->banks[i].experts;
    return n;
}

uint64_t expert_cache_slot_bytes(const struct container *c)
{
    size_t n = 0;
    for (uint32_t i = 0; i < c->bank_count; i++)
        if (c->banks[i].record.bytes > n) n = c->banks[i].record.bytes;
    return round_up(n, IO_ALIGN);
}

/* More slots than records would never be filled. */
static uint32_t useful_slots(const struct container *c, const struct cache_options *o)
{
    const uint64_t records = record_count(c);
    return o->slots < records ? o->slots : (uint32_t)records;
}

static bool arena_size(const struct container *c, const struct cache_options *o, uint32_t *buffers,
                       size_t *bytes)
{
    const uint64_t n = useful_slots(c, o) + (uint64_t)o->lanes * (o->transient + o->ahead);
    if (n > BUFFERS_MAX || record_count(c) >= UINT32_MAX ||
        !size_mul((size_t)n, (size_t)expert_cache_slot_bytes(c), bytes))
        return false;
    *buffers = (uint32_t)n;
    if (*bytes < ARENA_MIN) *bytes = ARENA_MIN;
    return true;
}

static struct expert_cache *lay_out(struct carve *carve, const struct container *c,
                                    const struct cache_options *o, uint32_t buffers)
{
    const uint32_t records = (uint32_t)record_count(c), batch = batch_max(c);
    struct expert_cache *x = carve_take(carve, sizeof *x);
    uint32_t *first = carve_take(carve, (c->bank_count + 1) * sizeof *first);
    uint32_t *buffer_of = carve_take(carve, records * sizeof *buffer_of);
    struct cache_drive *drive = carve_take(carve, c->drive_count * sizeof *drive);
    uint8_t *verified = carve_take(carve, c->drive_count * (records / 8 + 1));
    struct direct_file *files =
        carve_take(carve, (size_t)c->drive_count * c->bank_count * sizeof *files);
    struct cache_buffer *buffer = carve_take(carve, buffers * sizeof *buffer);
    struct cache_lane *lane = carve_take(carve, o->lanes * sizeof *lane);
    struct cache_wanted *pending = carve_take(carve, (size_t)o->lanes * batch * sizeof *pending);
    struct cache_waiting *waiting = carve_take(carve, (size_t)o->lanes * batch * sizeof *waiting);
    uint32_t *ahead = carve_take(carve, (size_t)o->lanes * o->ahead * sizeof *ahead);
    struct cache_usage usage = {.tokens = carve_take(carve, c->bank_count * sizeof *usage.tokens)};
    usage.count = carve_take(carve, records * sizeof *usage.count);
    struct cache_policy policy;
    cache_policy_init(&policy, carve, first, c->bank_count, records, buffers, o->working_set,
                      o->policy);
    if (carve->base == NULL) return NULL;

    x->first = first;
    x->buffer_of = buffer_of;
    x->drive = drive;
    x->buffer = buffer;
    x->lane = lane;
    x->policy = policy;
    x->usage = usage;
    x->slots = x->open = x->capacity = useful_slots(c, o);
    x->buffers = buffers;
    x->lanes = o->lanes;
    x->transient = o->transient;
    x->ahead = o->ahead;
    cache_policy_resize(&x->policy, x->capacity);
    for (uint32_t i = 0; i < BUFFER_KINDS; i++) x->free[i] = NO_BUFFER;
    for (uint32_t i = 0; i < c->bank_count; i++) first[i + 1] = first[i] + c->banks[i].experts;
    for (uint32_t i = 0; i < c->drive_count; i++) {
        drive[i].files = files + (size_t)i * c->bank_count;
        drive[i].verified = verified + (size_t)i * (records / 8 + 1);
        for (uint32_t k = 0; k < c->bank_count; k++) drive[i].files[k].fd = -1;
    }
    for (uint32_t i = 0; i < records; i++) buffer_of[i] = NO_BUFFER;
    for (uint32_t i = buffers; i-- > 0;) {
        buffer[i].kind = i < x->slots                                   ? BUFFER_SLOT
                         : i < x->slots + o->lanes * o->transient ? BUFFER_TRANSIENT
                                                                  : BUFFER_AHEAD;
        buffer[i].next_free = x->free[buffer[i].kind];
        x->free[buffer[i].kind] = i;
    }
    for (uint32_t i = 0; i < o->lanes; i++) {
        lane[i].pending = pending + (size_t)i * batch;
        lane[i].waiting = waiting + (size_t)i * batch;
        lane[i].ahead = ahead + (size_t)i * o->ahead;
    }
    return x;
}

static struct reader_options reader_of(const struct container *c, const struct cache_options *o,
                                       uint32_t buffers)
{
    return (struct reader_options){c->drive_count, o->io_threads, buffers, o->shuffle_seed};
}

uint64_t expert_cache_cost(const struct container *c, const struct cache_options *o)
{
    struct carve carve = {0};
    uint32_t buffers;
    size_t arena;
    if (!arena_size(c, o, &buffers, &arena)) return UINT64_MAX;
    (void)lay_out(&carve, c, o, buffers);
    const struct reader_options r = reader_of(c, o, buffers);
    return mem_cost(carve.used) + mem_cost(arena) + reader_cost(&r);
}

hr_status expert_cache_create(struct container *c, const struct cache_options *o,
                              struct mem_budget *b, struct expert_cache **out, hr_error *err)
{
    uint32_t buffers;
    size_t arena;
    struct carve carve = {0};

    *out = NULL;
    if (o->lanes == 0 || o->transient == 0)
        return fail(err, HR_ERR_USAGE, "the expert cache needs a lane and a transient buffer");
    if (!arena_size(c, o, &buffers, &arena))
        return fail(err, HR_ERR_MEMORY, "expert cache: %u slots of %llu bytes are too many",
                    o->slots, (unsigned long long)expert_cache_slot_bytes(c));
    (void)lay_out(&carve, c, o, buffers);
    const size_t bytes = carve.used;
    carve = (struct carve){.base = mem_alloc(b, bytes)};
    if (carve.base == NULL)
        return fail(err, HR_ERR_MEMORY, "expert cache: no memory for its index (%zu bytes)", bytes);
    struct expert_cache *x = lay_out(&carve, c, o, buffers);
    x->container = c;
    x->budget = b;
    x->bytes = bytes;
    x->verify = o->verify;
    x->random = o->shuffle_seed;
    x->slot_bytes = (size_t)expert_cache_slot_bytes(c);
    pthread_mutex_init(&x->lock, NULL);
    pthread_cond_init(&x->closed, NULL);
    for (uint32_t i = 0; i < x->lanes; i++) pthread_cond_init(&x->lane[i].progress, NULL);

    hr_status s = o->dry ? HR_OK : cache_open_drives(x, o->direct, err);
    if (s == HR_OK) {
        x->arena = mem_alloc(b, arena);
        x->arena_bytes = arena;
        if (x->arena == NULL)
            s = fail(err, HR_ERR_MEMORY, "expert cache: no memory for %u buffers (%zu bytes)",
                     buffers, arena);
    }
    const struct reader_options r = reader_of(c, o, buffers);
    if (s == HR_OK && !o->dry) s = reader_create(&r, cache_read_record, x, b, &x->reader, err);
    if (s != HR_OK) {
        expert_cache_free(x);
        return s;
    }
    for (uint32_t i = 0; i < c->drive_count; i++) x->drive[i].stats.depth = o->io_threads;
    if (o->calibrate && !o->dry) cache_calibrate(x, o->io_threads);
    *out = x;
    return HR_OK;
}

void expert_cache_free(struct expert_cache *x)
{
    if (x == NULL) return;
    reader_free(x->reader);
    cache_close_drives(x);
    for (uint32_t i = 0; i < x->lanes; i++) pthread_cond_destroy(&x->lane[i].progress);
    pthread_cond_destroy(&x->closed);
    pthread_mutex_destroy(&x->lock);
    mem_free_returned(x->budget, x->arena, x->arena_bytes, x->returned);
    mem_free(x->budget, x, x->bytes);
}

void expert_cache_stats(const struct expert_cache *x, struct cache_stats *out)
{
    pthread_mutex_t *lock = &((struct expert_cache *)x)->lock;
    pthread_mutex_lock(lock);
    *out = x->stats;
    out->slots = x->open;
    pthread_mutex_unlock(lock);
}
