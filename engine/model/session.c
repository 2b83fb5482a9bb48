#include "model/session.h"

#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"

static size_t logits_bytes(const struct model *m)
{
    return (size_t)m->arch.vocab_size * sizeof(float);
}

static hr_status take_lane(struct model *m, uint32_t *lane, hr_error *err)
{
    hr_status st = HR_ERR_MEMORY;
    pthread_mutex_lock(&m->lock);
    for (uint32_t i = 0; i < m->plan.sessions && st != HR_OK; i++) {
        if (m->lanes >> i & 1) continue;
        m->lanes |= (uint64_t)1 << i;
        *lane = i;
        st = HR_OK;
    }
    pthread_mutex_unlock(&m->lock);
    if (st == HR_OK) return HR_OK;
    return fail(err, st, "%u sessions are alive, as many as max_sessions planned memory for",
                m->plan.sessions);
}

static hr_status allocate(struct session *s, hr_error *err)
{
    struct model *m = s->model;
    struct carve state = {NULL, 0}, scratch = {NULL, 0};
    const uint32_t workers = pool_threads(m->pool);
    state_carve(&state, &m->arch, m->plan.ctx, &s->state);
    forward_carve(&scratch, &m->arch, m->plan.ctx, m->plan.chunk, workers, &s->scratch);
    s->state_bytes = state.used;
    s->scratch_bytes = scratch.used;
    s->state_block = mem_alloc(&m->mem, s->state_bytes);
    s->scratch_block = mem_alloc(&m->mem, s->scratch_bytes);
    s->state.layers = mem_alloc(&m->mem, m->arch.layers * sizeof *s->state.layers);
    s->logits = mem_alloc(&m->mem, logits_bytes(m));
    s->workspace_bytes = plan_workspace(m->arch.vocab_size,
                                        m->tokenizer ? tokenizer_longest(m->tokenizer) : 0);
    s->workspace = mem_alloc(&m->mem, s->workspace_bytes);
    if (!s->state_block || !s->scratch_block || !s->state.layers || !s->logits || !s->workspace)
        return fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes for a session",
                    s->state_bytes + s->scratch_bytes + s->workspace_bytes);
    state = (struct carve){s->state_block, 0};
    scratch = (struct carve){s->scratch_block, 0};
    state_carve(&state, &m->arch, m->plan.ctx, &s->state);
    forward_carve(&scratch, &m->arch, m->plan.ctx, m->plan.chunk, workers, &s->scratch);
    state_clear(&m->arch, &s->state);
    return HR_OK;
}

hr_status session_create(struct model *m, struct session **out, hr_error *err)
{
    uint32_t lane = 0;
    *out = NULL;
    TRY(take_lane(m, &lane, err));
    struct session *s = mem_alloc(&m->mem, sizeof *s);
    hr_status st = s ? HR_OK : fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes", sizeof *s);
    if (s) {
        s->model = m;
        s->lane = lane;
        s->pending = -1;
        read_ahead_init(&s->ahead, m->plan.read_ahead, m->plan.read_ahead_adaptive);
        st = allocate(s, err);
        if (st == HR_OK) {
            *out = s;
            return HR_OK;
        }
        session_free(s);
        return st;
    }
    pthread_mutex_lock(&m->lock);
    m->lanes &= ~((uint64_t)1 << lane);
    pthread_mutex_unlock(&m->lock);
    return st;
}

static size_t route_values(const struct session *s, uint32_t tokens)
{
    return (size_t)s->model->arch.moe_layers * tokens * s->model->arch.max_top_k;
}

static void drop_routes(struct session *s)
{
    const size_t n = route_values(s, s->route_room);
    mem_free(&s->model->mem, s->route_ids, n * sizeof(int32_t));
    mem_free(&s->model->mem, s->route_weights, n * sizeof(float));
    s->route_ids = NULL;
    s->route_weights = NULL;
    s->route_room = s->route_tokens = 0;
}

void session_free(struct session *s)
{
    if (!s) return;
    struct model *m = s->model;
    drop_routes(s);
    mem_free(&m->mem, s->told_block, s->told_bytes);
    mem_free(&m->mem, s->state_block, s->state_bytes);
    mem_free(&m->mem, s->scratch_block, s->scratch_bytes);
    mem_free(&m->mem, s->state.layers, m->arch.layers * sizeof *s->state.layers);
    mem_free(&m->mem, s->logits, logits_bytes(m));
    mem_free(&m->mem, s->workspace, s->workspace_bytes);
    pthread_mutex_lock(&m->lock);
    m->lanes &= ~((uint64_t)1 << s->lane);
    pthread_mutex_unlock(&m->lock);
    mem_free(&m->mem, s, sizeof *s);
}

void session_reset(struct session *s)
{
    state_clear(&s->model->arch, &s->state);
    s->position = 0;
    s->pending = -1;
    s->poisoned = false;
    s->has_logits = false;
    s->route_tokens = 0;
}

hr_status session_fork(const struct session *s, struct session **out, hr_error *err)
{
    struct model *m = s->model;
    struct session *copy = NULL;
    if (s->poisoned) return fail(err, HR_ERR_USAGE, "the session failed before; reset it first");
    TRY(session_create(m, &copy, err));
    state_copy(&m->arch, copy->state_block, (struct state *)(uintptr_t)&s->state, s->state_block,
               s->position);
    copy->position = s->position;
    copy->pending = s->pending;
    copy->has_logits = s->has_logits;
    memcpy(copy->logits, s->logits, logits_bytes(m));
    *out = copy;
    return HR_OK;
}

hr_status session_tap_guesses(struct session *s, hr_guess_fn fn, void *user, hr_error *err)
{
    struct model *m = s->model;
    struct carve c = {NULL, 0};
    guess_carve(&c, &m->arch, m->plan.chunk, &s->told);
    if (fn && !s->told_block && c.used > 0) {
        s->told_block = mem_alloc(&m->mem, c.used);
        if (!s->told_block)
            return fail(err, HR_ERR_MEMORY, "guesses for chunks of %u tokens need %zu bytes more than "
                        "the budget has; choose a smaller chunk or more ram", m->plan.chunk, c.used);
        s->told_bytes = c.used;
    } else if (!fn) {
        mem_free(&m->mem, s->told_block, s->told_bytes);
        s->told_block = NULL;
    }
    c = (struct carve){s->told_block, 0};
    guess_carve(&c, &m->arch, m->plan.chunk, &s->told);
    s->tap_guess = fn;
    s->guess_user = user;
    return HR_OK;
}

hr_status session_record_routes(struct session *s, uint32_t tokens, hr_error *err)
{
    struct model *m = s->model;
    if (tokens > m->plan.ctx) tokens = m->plan.ctx;
    if (tokens == s->route_room) return HR_OK;
    drop_routes(s);
    if (tokens == 0) return HR_OK;
    const size_t values = route_values(s, tokens);
    s->route_room = tokens;
    s->route_ids = mem_alloc(&m->mem, values * sizeof(int32_t));
    s->route_weights = mem_alloc(&m->mem, values * sizeof(float));
    if (s->route_ids && s->route_weights) return HR_OK;
    drop_routes(s);
    return fail(err, HR_ERR_MEMORY, "recording the routes of %u tokens needs %zu bytes more than the budget has",
                tokens, values * (sizeof(int32_t) + sizeof(float)));
}

struct spent {
    double compute, waiting;
};

static void learn_ahead(struct session *s, double seconds, uint32_t guesses)
{
    uint64_t used, wasted;
    cache_ahead_counts(s->model->cache, s->lane, &used, &wasted);
    read_ahead_learn(&s->ahead, seconds, guesses, used, wasted);
}

/* Adds to *spent the seconds of arithmetic and those blocked on reads. */
static hr_status eval_chunks(struct session *s, const int32_t *ids, uint32_t n, int32_t which,
                             float *logits, struct spent *spent, hr_error *err)
{
    struct model *m = s->model;
    const size_t vocab = m->arch.vocab_size;
    struct forward_call call = {.model = m, .lane = s->lane, .state = &s->state,
                                .scratch = &s->scratch, .cancel = n > 1 ? &s->cancel : NULL,
                                .tap = s->tap, .tap_user = s->tap_user,
                                .tap_guess = s->tap_guess, .guess_user = s->guess_user,
                                .told = &s->told};
    for (uint32_t at = 0; at < n;) {
        const uint32_t step = n - at < m->plan.chunk ? n - at : m->plan.chunk;
        const bool last = at + step == n;
        uint32_t rows = which == HR_LOGITS_ALL ? step : which == HR_LOGITS_LAST && last ? 1 : 0;
        float *to = which == HR_LOGITS_ALL ? logits + at * vocab : s->logits;
        call.position = s->position;
        if (s->route_room) {
            const size_t width = m->arch.max_top_k;
            call.route_stride = (size_t)n * width;
            call.route_ids = s->route_ids + at * width;
            call.route_weights = s->route_weights + at * width;
        }
        const bool guess = step <= GUESS_TOKENS && !expert_cache_whole(m->cache);
        call.ahead = guess ? read_ahead_width(&s->ahead) : 0;
        call.guesses = 0;
        const double start = clock_seconds();
        const hr_status st = forward(&call, ids + at, step, rows, to, err);
        const double took = clock_seconds() - start;
        spent->compute += took - call.stored;
        if (guess && step == 1) learn_ahead(s, took, call.guesses);
        spent->waiting += call.waited;
        call.waited = call.stored = 0;
        if (st != HR_OK) return st;
        s->position += step;
        at += step;
    }
    if (which == HR_LOGITS_ALL)
        memcpy(s->logits, logits + (n - 1) * vocab, vocab * sizeof(float));
    else if (which == HR_LOGITS_LAST && logits)
        memcpy(logits, s->logits, vocab * sizeof(float));
    return HR_OK;
}

hr_status session_check(const struct session *s, const int32_t *ids, size_t n, int32_t which,
                        const float *logits, hr_error *err)
{
    const struct model *m = s->model;
    if (s->poisoned)
        return fail(err, HR_ERR_USAGE, "the session failed half-way through an eval; reset it or load a saved one");
    if (which < HR_LOGITS_NONE || which > HR_LOGITS_ALL || (which == HR_LOGITS_ALL && !logits))
        return fail(err, HR_ERR_USAGE, "which is %d and logits is %s", which,
                    logits ? "given" : "NULL");
    if (n == 0 || !ids) return fail(err, HR_ERR_USAGE, "no token to evaluate");
    if (n > m->plan.ctx - s->position)
        return fail(err, HR_ERR_CONTEXT, "%zu tokens are needed and %u of %u are available; "
                    "shorten the input or open the model with a larger ctx", n,
                    m->plan.ctx - s->position, m->plan.ctx);
    if (s->route_room && n > s->route_room)
        return fail(err, HR_ERR_USAGE, "%zu tokens in a call that records routes, and room was taken for %u",
                    n, s->route_room);
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= m->arch.vocab_size)
            return fail(err, HR_ERR_USAGE, "token %zu has id %d; the vocabulary has %u", i, ids[i],
                        m->arch.vocab_size);
    return HR_OK;
}

hr_status session_eval(struct session *s, const int32_t *ids, size_t n, int32_t which,
                       float *logits, hr_error *err)
{
    struct model *m = s->model;
    TRY(session_check(s, ids, n, which, logits, err));
    if (s->route_room) s->route_tokens = (uint32_t)n;
    const double start = clock_seconds();
    const uint64_t mode = float_mode_enter();
    struct spent spent = {0, 0};
    const hr_status st = eval_chunks(s, ids, (uint32_t)n, which, logits, &spent, err);
    float_mode_leave(mode);
    const double seconds = clock_seconds() - start;
    s->poisoned = st != HR_OK;
    s->has_logits = st == HR_OK && which != HR_LOGITS_NONE;
    pthread_mutex_lock(&m->lock);
    m->totals.seconds_waiting += spent.waiting;
    m->totals.seconds_compute += spent.compute;
    m->totals.seconds_other += seconds - spent.waiting - spent.compute;
    if (n == 1) {
        m->totals.decoded += st == HR_OK;
        m->totals.seconds_decode += seconds;
    } else {
        m->totals.prefilled += st == HR_OK ? n : 0;
        m->totals.seconds_prefill += seconds;
    }
    pthread_mutex_unlock(&m->lock);
    return st;
}

uint32_t session_vocab(const struct session *s)
{
    return s->model->arch.vocab_size;
}

uint32_t session_ctx(const struct session *s)
{
    return s->model->plan.ctx;
}

uint32_t session_position(const struct session *s)
{
    return s->position;
}

bool session_has_logits(const struct session *s)
{
    return s->has_logits;
}

const float *session_logits(const struct session *s)
{
    return s->logits;
}

bool session_cancelled(const struct session *s)
{
    return atomic_load(&s->cancel) != 0;
}

void session_cancel_clear(struct session *s)
{
    atomic_store(&s->cancel, 0);
}

int32_t session_pending(const struct session *s)
{
    return s->pending;
}

void session_set_pending(struct session *s, int32_t id)
{
    s->pending = id;
}

void session_stats(const struct session *s, hr_stats *out)
{
    model_stats(s->model, out);
}

const struct kernels *session_kernels(const struct session *s)
{
    return s->model->nn.k;
}

void *session_workspace(const struct session *s)
{
    return s->workspace;
}

const struct tokenizer *session_tokenizer(const struct session *s)
{
    return s->model->tokenizer;
}

const int32_t *session_stop_ids(const struct session *s, uint32_t *count)
{
    *count = s->model->c->stop_count;
    return s->model->c->stop_ids;
}
