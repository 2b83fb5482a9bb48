/* The public functions: argument checks, then the layer that does the work. */
#include "headrace.h"

#include <stdio.h>
#include <string.h>

#include "api/exchange.h"
#include "base/crc32c.h"
#include "generate/generate.h"
#include "kernels/kernels.h"
#include "model/session.h"
#include "model/token_cost.h"
#include "store/cache_drives.h"
#include "store/cache_usage.h"

/* The opaque types are the internal ones under their public names. */
static struct model *model_of(const hr_model *m)
{
    return (struct model *)(uintptr_t)m;
}

static struct session *session_of(const hr_session *s)
{
    return (struct session *)(uintptr_t)s;
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

const char *hr_version(void)
{
    return TEXT(HR_VERSION_MAJOR) "." TEXT(HR_VERSION_MINOR) "." TEXT(HR_VERSION_PATCH);
}

const char *hr_isa_name(uint32_t index)
{
    const char *const *names = kernels_available();
    for (uint32_t i = 0; names[i]; i++)
        if (i == index) return names[i];
    return NULL;
}

hr_status hr_model_open(const char *path, const hr_model_params *params, hr_model **out,
                        hr_error *err)
{
    hr_model_params p;
    struct model *m = NULL;
    if (!path || !out) return fail(err, HR_ERR_USAGE, "path or out is NULL");
    *out = NULL;
    TRY(take_params(params, &p, err));
    TRY(model_open(path, &p, &m, err));
    *out = (hr_model *)m;
    return HR_OK;
}

void hr_model_close(hr_model *model)
{
    model_close(model_of(model));
}

hr_status hr_model_set_ram(hr_model *model, uint64_t ram, hr_error *err)
{
    if (!model) return fail(err, HR_ERR_USAGE, "model is NULL");
    return model_set_ram(model_of(model), ram, err);
}

hr_status hr_model_save_usage(hr_model *model, const char *path, hr_error *err)
{
    if (!model || !path) return fail(err, HR_ERR_USAGE, "model or path is NULL");
    return cache_usage_save(model_of(model)->cache, path, err);
}

static void codec_of_experts(const struct model *m, hr_model_info *i)
{
    const struct bank_entry *b = m->c->banks;
    const uint32_t n = m->c->bank_count;
    const char *name = n ? codec_name(b[0].codec) : "none";
    i->expert_activations = n ? codec_activations(b[0].codec, b[0].fine) : 0;
    for (uint32_t k = 1; k < n; k++) {
        if (b[k].codec != b[0].codec) name = "mixed";
        if (codec_activations(b[k].codec, b[k].fine) != i->expert_activations) i->expert_activations = 0;
    }
    snprintf(i->expert_codec, sizeof i->expert_codec, "%s", name);
}

hr_status hr_model_get_info(const hr_model *model, hr_model_info *info, hr_error *err)
{
    const struct model *m = model_of(model);
    hr_model_info i = {.size = sizeof i};
    int64_t parameters = 0;
    if (!m || !info) return fail(err, HR_ERR_USAGE, "model or info is NULL");
    i.vocab_size = m->arch.vocab_size;
    i.hidden_size = m->arch.hidden;
    i.layers = m->arch.layers;
    i.moe_layers = m->arch.moe_layers;
    i.experts = m->arch.max_experts;
    i.top_k = m->arch.max_top_k;
    i.ctx = m->plan.ctx;
    i.max_position = m->arch.max_position;
    i.threads = m->plan.threads;
    i.io_threads = m->plan.io_threads;
    i.chunk = m->plan.chunk;
    i.has_tokenizer = m->tokenizer != NULL;
    i.stop_count = m->c->stop_count;
    memcpy(i.stop_ids, m->c->stop_ids, sizeof i.stop_ids);
    if (json_int(json_get(json_root(m->c->manifest), "parameters"), &parameters))
        i.parameters = (uint64_t)parameters;
    i.trunk_bytes = m->c->trunk_bytes;
    for (uint32_t b = 0; b < m->c->bank_count; b++)
        i.expert_bytes += (uint64_t)m->c->banks[b].experts * m->c->banks[b].record.bytes;
    i.record_bytes = m->plan.record_bytes;
    i.container_bytes = m->c->total_bytes;
    snprintf(i.name, sizeof i.name, "%s", m->arch.name);
    snprintf(i.isa, sizeof i.isa, "%s", m->nn.k->isa);
    snprintf(i.io_mode, sizeof i.io_mode, "%s", expert_cache_io_mode(m->cache));
    snprintf(i.trunk_codec, sizeof i.trunk_codec, "%s", codec_name(trunk_codec_of(m->c)));
    codec_of_experts(m, &i);
    i.drives = m->c->drive_count;
    i.trunk_locked = m->trunk_locked;
    snprintf(i.container_sha256, sizeof i.container_sha256, "%s", m->c->sha256);
    return give(info, info->size, &i, sizeof i, err);
}

hr_status hr_verify(const char *path, hr_verify_fn report, void *user, hr_error *err)
{
    return hr_verify_drives(path, NULL, 0, report, user, err);
}

hr_status hr_verify_drives(const char *path, const char *const *drives, uint32_t drive_count,
                           hr_verify_fn report, void *user, hr_error *err)
{
    if (!path) return fail(err, HR_ERR_USAGE, "path is NULL");
    return model_verify(path, drives, drive_count, report, user, err);
}

hr_status hr_tokenize(const hr_model *model, const char *text, size_t n, int32_t special,
                      int32_t *ids, size_t capacity, size_t *count, hr_error *err)
{
    const struct model *m = model_of(model);
    if (!m || !count || (!text && n) || (!ids && capacity))
        return fail(err, HR_ERR_USAGE, "a required argument is NULL");
    *count = 0;
    if (!m->tokenizer)
        return fail(err, HR_ERR_UNSUPPORTED, "%s has no tokenizer (an ids-only container)", m->c->path);
    return tokenizer_encode(m->tokenizer, text, n, special != 0, ids, capacity, count, err);
}

hr_status hr_detokenize(const hr_model *model, const int32_t *ids, size_t n, char *bytes,
                        size_t capacity, size_t *count, hr_error *err)
{
    const struct model *m = model_of(model);
    if (!m || !count || (!ids && n) || (!bytes && capacity))
        return fail(err, HR_ERR_USAGE, "a required argument is NULL");
    *count = 0;
    if (!m->tokenizer)
        return fail(err, HR_ERR_UNSUPPORTED, "%s has no tokenizer (an ids-only container)", m->c->path);
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        size_t len = 0;
        if (ids[i] < 0 || (uint32_t)ids[i] >= m->arch.vocab_size)
            return fail(err, HR_ERR_USAGE, "id %d is outside the vocabulary of %u", ids[i],
                        m->arch.vocab_size);
        tokenizer_bytes(m->tokenizer, ids[i], &len);
        total += len;
    }
    *count = total;
    if (total > capacity)
        return fail(err, HR_ERR_USAGE, "%zu bytes are needed and %zu given", total, capacity);
    for (size_t i = 0; i < n; i++) {
        size_t len = 0;
        const char *p = tokenizer_bytes(m->tokenizer, ids[i], &len);
        if (len) memcpy(bytes, p, len);
        bytes += len;
    }
    return HR_OK;
}

hr_status hr_session_create(hr_model *model, hr_session **out, hr_error *err)
{
    struct session *s = NULL;
    if (!model || !out) return fail(err, HR_ERR_USAGE, "model or out is NULL");
    *out = NULL;
    TRY(session_create(model_of(model), &s, err));
    *out = (hr_session *)s;
    return HR_OK;
}

void hr_session_free(hr_session *session)
{
    session_free(session_of(session));
}

void hr_session_reset(hr_session *session)
{
    if (session) session_reset(session_of(session));
}

uint32_t hr_session_position(const hr_session *session)
{
    return session ? session_of(session)->position : 0;
}

hr_status hr_session_save(const hr_session *session, const char *path, hr_error *err)
{
    if (!session || !path) return fail(err, HR_ERR_USAGE, "session or path is NULL");
    return session_save(session_of(session), path, err);
}

hr_status hr_session_load(hr_session *session, const char *path, hr_error *err)
{
    if (!session || !path) return fail(err, HR_ERR_USAGE, "session or path is NULL");
    return session_load(session_of(session), path, err);
}

hr_status hr_session_fork(const hr_session *session, hr_session **out, hr_error *err)
{
    struct session *copy = NULL;
    if (!session || !out) return fail(err, HR_ERR_USAGE, "session or out is NULL");
    *out = NULL;
    TRY(session_fork(session_of(session), &copy, err));
    *out = (hr_session *)copy;
    return HR_OK;
}

hr_status hr_eval(hr_session *session, const int32_t *ids, size_t n, int32_t which, float *logits,
                  hr_error *err)
{
    struct session *s = session_of(session);
    if (!s) return fail(err, HR_ERR_USAGE, "session is NULL");
    session_cancel_clear(s);
    const int32_t pending = s->pending;
    if (pending >= 0 && !s->poisoned) {
        TRY(session_check(s, ids, n, which, logits, err));
        if (n + 1 > s->model->plan.ctx - s->position)
            return fail(err, HR_ERR_CONTEXT, "%zu tokens are needed (one is pending) and %u available",
                        n + 1, s->model->plan.ctx - s->position);
        TRY(session_eval(s, &pending, 1, HR_LOGITS_NONE, NULL, err));
        s->pending = -1;
    }
    return session_eval(s, ids, n, which, logits, err);
}

void hr_cancel(hr_session *session)
{
    if (session) atomic_store(&session_of(session)->cancel, 1);
}

hr_status hr_session_record_routes(hr_session *session, uint32_t tokens, hr_error *err)
{
    if (!session) return fail(err, HR_ERR_USAGE, "session is NULL");
    return session_record_routes(session_of(session), tokens, err);
}

hr_status hr_session_routes(const hr_session *session, size_t n, int32_t *ids, float *weights,
                            hr_error *err)
{
    const struct session *s = session_of(session);
    if (!s || !ids || !weights) return fail(err, HR_ERR_USAGE, "a required argument is NULL");
    if (s->route_tokens == 0 || s->route_tokens != n)
        return fail(err, HR_ERR_USAGE, "the last call recorded the routes of %u tokens, not of %zu",
                    s->route_tokens, n);
    const size_t values = (size_t)s->model->arch.moe_layers * n * s->model->arch.max_top_k;
    memcpy(ids, s->route_ids, values * sizeof *ids);
    memcpy(weights, s->route_weights, values * sizeof *weights);
    return HR_OK;
}

hr_status hr_session_tap(hr_session *session, hr_moe_fn fn, void *user, hr_error *err)
{
    if (!session) return fail(err, HR_ERR_USAGE, "session is NULL");
    session_of(session)->tap = fn;
    session_of(session)->tap_user = user;
    return HR_OK;
}

hr_status hr_session_tap_guesses(hr_session *session, hr_guess_fn fn, void *user, hr_error *err)
{
    if (!session) return fail(err, HR_ERR_USAGE, "session is NULL");
    return session_tap_guesses(session_of(session), fn, user, err);
}

void hr_generate_params_init(hr_generate_params *params)
{
    generate_params_init(params);
}

hr_status hr_generate(hr_session *session, const int32_t *ids, size_t n,
                      const hr_generate_params *params, hr_token_fn callback, void *user,
                      hr_generation *out, hr_error *err)
{
    hr_generate_params p;
    hr_generation g = {.size = sizeof g};
    if (!session || (!ids && n)) return fail(err, HR_ERR_USAGE, "session or ids is NULL");
    hr_generate_params_init(&p);
    if (params) {
        if (params->size < sizeof(size_t) || params->size > 4096)
            return fail(err, HR_ERR_USAGE, "hr_generate_params.size is %zu; call hr_generate_params_init first",
                        params->size);
        memcpy(&p, params, params->size < sizeof p ? params->size : sizeof p);
        p.size = sizeof p;
    }
    const hr_status st = generate(session_of(session), ids, n, &p, callback, user, &g, err);
    if (out) {
        hr_error ignored;
        if (give(out, out->size, &g, sizeof g, st == HR_OK ? err : &ignored) != HR_OK && st == HR_OK)
            return HR_ERR_USAGE;
    }
    return st;
}

hr_status hr_get_stats(const hr_model *model, hr_stats *stats, hr_error *err)
{
    hr_stats s;
    if (!model || !stats) return fail(err, HR_ERR_USAGE, "model or stats is NULL");
    model_stats(model_of(model), &s);
    return give(stats, stats->size, &s, sizeof s, err);
}

uint32_t hr_crc32c(uint32_t crc, const void *data, size_t n)
{
    return crc32c(crc, data, n);
}

hr_status hr_get_drive(const hr_model *model, uint32_t drive, hr_drive_info *info, hr_error *err)
{
    const struct model *m = model_of(model);
    struct cache_drive_stats s;
    hr_drive_info i = {.size = sizeof i};
    if (!m || !info) return fail(err, HR_ERR_USAGE, "model or info is NULL");
    if (drive >= m->c->drive_count)
        return fail(err, HR_ERR_USAGE, "there is no drive %u; the model has %u", drive,
                    m->c->drive_count);
    expert_cache_drive(m->cache, drive, &s);
    i.reads = s.reads;
    i.bytes_read = s.bytes;
    i.failures = s.failures;
    i.seconds_reading = s.seconds;
    i.probed = s.probed;
    i.banks = s.banks;
    i.in_flight = s.depth;
    i.left_out = s.left_out;
    snprintf(i.io_mode, sizeof i.io_mode, "%s", s.mode);
    snprintf(i.path, sizeof i.path, "%s", s.path);
    return give(info, info->size, &i, sizeof i, err);
}
