#include "model/model.h"

#include <stdio.h>
#include <string.h>

#include "base/cpu.h"
#include "base/crc32c.h"
#include "base/machine.h"
#include "store/cache_usage.h"
#include "store/direct_io.h"
#include "store/regular_file.h"

enum { LOAD_PIECE = 4 * TRUNK_CHUNK };

struct load_ctx {
    struct model *m;
    struct direct_file file;
    pthread_mutex_t lock;
    uint32_t failed_piece; /* lowest that failed, so that the error does not depend on timing */
    hr_error error;
    _Atomic uint64_t retries;
};

static const char *tensor_at(const struct container *c, uint64_t offset)
{
    const char *name = "padding";
    uint64_t best = 0;
    for (uint32_t i = 0; i < c->tensor_count; i++) {
        const struct tensor_entry *t = &c->tensors[i];
        if (t->offset <= offset + TRUNK_CHUNK && t->offset + t->bytes > offset && t->offset >= best) {
            best = t->offset;
            name = t->name;
        }
    }
    return name;
}

static hr_status load_piece(struct load_ctx *l, uint64_t at, hr_error *err)
{
    const struct container *c = l->m->c;
    const uint64_t end = at + LOAD_PIECE < c->trunk_bytes ? at + LOAD_PIECE : c->trunk_bytes;
    uint64_t retries = 0;
    TRY(direct_read(&l->file, at, l->m->trunk + at, (size_t)(end - at), &retries, err));
    atomic_fetch_add(&l->retries, retries);
    for (uint64_t o = at; o < end; o += TRUNK_CHUNK) {
        const uint64_t n = end - o < TRUNK_CHUNK ? end - o : TRUNK_CHUNK;
        if (crc32c(0, l->m->trunk + o, (size_t)n) == c->trunk_crc[o / TRUNK_CHUNK]) continue;
        return fail(err, HR_ERR_FORMAT,
                    "%s/trunk.bin: checksum mismatch in the %llu bytes at offset %llu (tensor \"%s\"); "
                    "copy or convert the container again",
                    c->path, (unsigned long long)n, (unsigned long long)o, tensor_at(c, o));
    }
    return HR_OK;
}

static void load_task(void *ctx, uint32_t task, uint32_t worker)
{
    struct load_ctx *l = ctx;
    hr_error err;
    (void)worker;
    if (load_piece(l, (uint64_t)task * LOAD_PIECE, &err) == HR_OK) return;
    pthread_mutex_lock(&l->lock);
    if (task < l->failed_piece) {
        l->failed_piece = task;
        l->error = err;
    }
    pthread_mutex_unlock(&l->lock);
}

static hr_status load_trunk(struct model *m, hr_error *err)
{
    struct load_ctx l = {.m = m, .lock = PTHREAD_MUTEX_INITIALIZER, .failed_piece = UINT32_MAX};
    const uint64_t bytes = m->c->trunk_bytes;
    m->trunk = mem_alloc(&m->mem, (size_t)bytes);
    if (!m->trunk)
        return fail(err, HR_ERR_MEMORY, "cannot allocate %llu bytes for the trunk",
                    (unsigned long long)bytes);
    TRY(direct_file_open(m->c->dir_fd, "trunk.bin", m->params.direct != 0, &l.file, err));
    pool_run(m->pool, (uint32_t)((bytes + LOAD_PIECE - 1) / LOAD_PIECE), load_task, &l);
    direct_file_close(&l.file);
    if (l.failed_piece != UINT32_MAX) {
        if (err) *err = l.error;
        return (hr_status)l.error.code;
    }
    m->trunk_read = bytes;
    return HR_OK;
}

/* By itself only where the whole plan fits what was available: memory that others need must not be
 * pinned. */
static hr_status lock_trunk(struct model *m, hr_error *err)
{
    const size_t bytes = (size_t)m->c->trunk_bytes;
    struct machine_limits limits;
    char text[128], allowed[64] = "";
    if (m->params.lock == HR_LOCK_OFF) return HR_OK;
    if (m->params.lock == HR_LOCK_AUTO && m->plan.total > m->plan.available) return HR_OK;
    const int code = mem_lock(m->trunk, bytes);
    m->trunk_locked = code == 0;
    if (m->trunk_locked || m->params.lock == HR_LOCK_AUTO) return HR_OK;
    machine_limits_read("", &limits);
    if (limits.memlock != UINT64_MAX)
        snprintf(allowed, sizeof allowed, " (this process may lock %llu bytes)",
                 (unsigned long long)limits.memlock);
    return fail(err, HR_ERR_MEMORY,
                "%s: cannot lock the trunk's %zu bytes in memory: %s%s; raise the limit (ulimit -l, "
                "LimitMEMLOCK= of a service) or open it with lock auto or off",
                m->c->path, bytes, system_error(code, text), allowed);
}

static hr_status load_tokenizer(struct model *m, hr_error *err)
{
    if (!m->c->has_tokenizer) return HR_OK;
    TRY(container_read(m->c, "tokenizer.bin", &m->mem, &m->tokenizer_data, &m->tokenizer_bytes,
                       err));
    const hr_status st = tokenizer_open(m->tokenizer_data, m->tokenizer_bytes, m->arch.vocab_size,
                                        &m->mem, &m->tokenizer, err);
    return st == HR_OK ? HR_OK : fail_prefix(err, st, "%s/tokenizer.bin", m->c->path);
}

static hr_status open_ngram_rows(struct model *m, hr_error *err)
{
    const struct ngram_part *p = &m->arch.ngram;
    if (p->order == 0) return HR_OK;
    const uint32_t row_bytes = p->dim * (p->codec == CODEC_F32 ? 4 : 2);
    return row_table_open(m->c, "ngram.bin", p->rows, row_bytes, m->params.direct != 0, &m->mem,
                          &m->ngram_rows, err);
}

static hr_status check_params(const hr_model_params *p, hr_error *err)
{
    if (p->cache_policy < HR_CACHE_AUTO || p->cache_policy > HR_CACHE_LFU)
        return fail(err, HR_ERR_USAGE, "cache_policy %d is not known", p->cache_policy);
    if (p->verify < HR_VERIFY_FIRST || p->verify > HR_VERIFY_OFF)
        return fail(err, HR_ERR_USAGE, "verify %d is not known", p->verify);
    if (p->lock < HR_LOCK_AUTO || p->lock > HR_LOCK_OFF)
        return fail(err, HR_ERR_USAGE, "lock %d is not known", p->lock);
    if (!memchr(p->isa, 0, sizeof p->isa))
        return fail(err, HR_ERR_USAGE, "isa is not a terminated string");
    return HR_OK;
}

static hr_status allocate_layers(struct model *m, hr_error *err)
{
    const size_t bytes = m->arch.layers * sizeof(struct layer_weights);
    m->layers = mem_alloc(&m->mem, bytes);
    m->stack_count = architecture_stacks(&m->arch);
    if (m->stack_count) m->stacks = mem_alloc(&m->mem, m->stack_count * sizeof *m->stacks);
    if (m->layers && (m->stacks || m->stack_count == 0)) return HR_OK;
    return fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes to open the model",
                bytes + m->stack_count * sizeof *m->stacks);
}

static void free_layers(struct model *m)
{
    if (m->layers) mem_free(&m->mem, m->layers, m->arch.layers * sizeof(struct layer_weights));
    if (m->stacks) mem_free(&m->mem, m->stacks, m->stack_count * sizeof *m->stacks);
}

hr_status model_check(const struct container *c, struct architecture *arch, hr_error *err)
{
    struct model *m = mem_alloc(NULL, sizeof *m);
    if (!m) return fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes", sizeof *m);
    mem_budget_init(&m->mem, 0);
    m->c = (struct container *)(uintptr_t)c; /* only read */
    hr_status st = architecture_read(c, &m->arch, err);
    if (st == HR_OK) st = allocate_layers(m, err);
    if (st == HR_OK) st = model_bind(m, err);
    free_layers(m);
    *arch = m->arch;
    mem_free(NULL, m, sizeof *m);
    return st;
}

static hr_status open_steps(struct model *m, const char *path, hr_error *err)
{
    struct memory_probe memory;
    const char *usage = m->params.usage;
    m->params.usage = NULL; /* the caller's, for this call only */
    TRY(check_params(&m->params, err));
    TRY(kernels_choose(m->params.isa[0] ? m->params.isa : "auto", &m->nn.k, err));
    TRY(container_open_drives(path, m->params.drives, m->params.drive_count, &m->mem, &m->c, err));
    m->params.drives = NULL; /* the caller's, for this call only */
    const hr_status st = architecture_read(m->c, &m->arch, err);
    if (st != HR_OK) return fail_prefix(err, st, "%s", path);
    for (uint32_t i = 0; i < m->c->stop_count; i++)
        if ((uint32_t)m->c->stop_ids[i] >= m->arch.vocab_size)
            return fail(err, HR_ERR_FORMAT, "%s/manifest.json: stop id %d is outside the vocabulary of %u",
                        path, m->c->stop_ids[i], m->arch.vocab_size);
    memory_probe_read("", &memory);
    TRY(plan_make(m->c, &m->arch, &m->params, &memory, &m->plan, err));
    if (m->plan.floor > m->plan.ram)
        return fail(err, HR_ERR_MEMORY,
                    "%s needs at least %llu bytes of ram (trunk %llu, state for %u tokens %llu); %s %llu",
                    path, (unsigned long long)m->plan.floor, (unsigned long long)m->plan.trunk,
                    m->plan.ctx, (unsigned long long)m->plan.state,
                    m->params.ram ? "the budget is" : "safely available are",
                    (unsigned long long)m->plan.ram);
    atomic_store(&m->mem.limit, m->plan.ram);

    if (usage) TRY(cache_usage_check(m->c, usage, err));
    TRY(allocate_layers(m, err));
    TRY(model_bind(m, err)); /* shapes first: nothing is read for a container that does not fit */
    TRY(pool_create(m->plan.threads, &m->mem, &m->pool, err));
    m->nn.pool = m->pool;
    TRY(load_tokenizer(m, err));
    TRY(load_trunk(m, err));
    TRY(lock_trunk(m, err));
    TRY(model_bind(m, err));
    TRY(open_ngram_rows(m, err));
    TRY(expert_cache_create(m->c, &m->plan.cache_options, &m->mem, &m->cache, err));
    return usage ? cache_usage_load(m->cache, usage, err) : HR_OK;
}

hr_status model_open(const char *path, const hr_model_params *params, struct model **out,
                     hr_error *err)
{
    struct model *m = mem_alloc(NULL, sizeof *m);
    *out = NULL;
    if (!m) return fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes", sizeof *m);
    mem_budget_init(&m->mem, 0);
    pthread_mutex_init(&m->lock, NULL);
    m->params = *params;
    const uint64_t mode = float_mode_enter();
    const hr_status st = open_steps(m, path, err);
    float_mode_leave(mode);
    if (st != HR_OK) {
        model_close(m);
        return st;
    }
    *out = m;
    return HR_OK;
}

void model_close(struct model *m)
{
    if (!m) return;
    expert_cache_free(m->cache);
    row_table_close(m->ngram_rows);
    pool_free(m->pool);
    tokenizer_free(m->tokenizer);
    mem_free(&m->mem, m->tokenizer_data, m->tokenizer_bytes);
    if (m->trunk_locked) mem_unlock(m->trunk, (size_t)m->c->trunk_bytes);
    if (m->trunk) mem_free(&m->mem, m->trunk, (size_t)m->c->trunk_bytes);
    free_layers(m);
    container_close(m->c);
    pthread_mutex_destroy(&m->lock);
    mem_free(NULL, m, sizeof *m);
}

hr_status model_set_ram(struct model *m, uint64_t ram, hr_error *err)
{
    const struct plan *p = &m->plan;
    const uint64_t least = p->total - p->slots * p->record_bytes;
    if (ram < least)
        return fail(err, HR_ERR_MEMORY,
                    "%s as it was opened takes %llu bytes without a cache (chunk %u, %u sessions of %u "
                    "tokens); ram cannot be lowered to %llu", m->c->path, (unsigned long long)least,
                    p->chunk, p->sessions, p->ctx, (unsigned long long)ram);
    if (ram > p->ram) ram = p->ram;
    const uint64_t room = p->record_bytes ? (ram - least) / p->record_bytes : 0;
    pthread_mutex_lock(&m->lock);
    const bool raise = ram > atomic_load(&m->mem.limit);
    if (raise) atomic_store(&m->mem.limit, ram);
    expert_cache_resize(m->cache, room < p->slots ? (uint32_t)room : p->slots, true);
    if (!raise) atomic_store(&m->mem.limit, ram);
    pthread_mutex_unlock(&m->lock);
    return HR_OK;
}

void model_stats(struct model *m, hr_stats *out)
{
    struct cache_stats c;
    expert_cache_stats(m->cache, &c);
    memset(out, 0, sizeof *out);
    out->size = sizeof *out;
    out->hits = c.hits;
    out->misses = c.misses;
    out->reads = c.reads;
    out->bytes_read = c.bytes_read;
    out->trunk_bytes_read = m->trunk_read;
    out->read_retries = c.retries;
    out->records_verified = c.verified;
    out->evictions = c.evictions;
    out->transient_reads = c.transient_reads;
    out->read_fallbacks = c.fallbacks;
    out->read_ahead_issued = c.ahead_issued;
    out->read_ahead_used = c.ahead_used;
    out->read_ahead_wasted = c.ahead_wasted;
    out->read_ahead_cancelled = c.ahead_cancelled;
    out->read_ahead_bytes = c.ahead_bytes;
    out->leases = c.leases;
    out->cache_slots = c.slots;
    out->cache_used = c.used;
    out->cache_bytes = c.slots * m->plan.record_bytes;
    out->memory_used = atomic_load(&m->mem.used);
    out->memory_peak = atomic_load(&m->mem.peak);
    out->memory_limit = atomic_load(&m->mem.limit);
    pthread_mutex_lock(&m->lock);
    out->tokens_prefilled = m->totals.prefilled;
    out->tokens_decoded = m->totals.decoded;
    out->seconds_prefill = m->totals.seconds_prefill;
    out->seconds_decode = m->totals.seconds_decode;
    out->seconds_waiting = m->totals.seconds_waiting;
    out->seconds_compute = m->totals.seconds_compute;
    out->seconds_other = m->totals.seconds_other;
    pthread_mutex_unlock(&m->lock);
}
