#include "generate/generate.h"

#include <stdbool.h>
#include <string.h>

#include "base/clock.h"
#include "generate/sampler.h"
#include "generate/text_gate.h"
#include "model/session.h"
#include "text/tokenizer.h"

/* One running generation. */
struct run {
    struct session *session;
    hr_generate_params params;
    hr_token_fn callback;
    void *user;
    struct sampler sampler;
    struct text_gate gate;
    hr_stats before;
    hr_generation result;
};

void generate_params_init(hr_generate_params *p)
{
    *p = (hr_generate_params){.size = sizeof *p, .top_p = 1, .repetition_penalty = 1};
}

static void stats_now(const struct session *s, hr_stats *out)
{
    memset(out, 0, sizeof *out);
    out->size = sizeof *out;
    session_stats(s, out);
    out->size = sizeof *out;
}

/* Counters become differences; tokens and seconds are counted here, for this session alone; what
 * describes the present (cache, memory, leases) stays. */
static void update_stats(struct run *r)
{
    hr_stats now;
    stats_now(r->session, &now);
    const hr_stats *b = &r->before, *own = &r->result.stats;
    now.tokens_prefilled = own->tokens_prefilled;
    now.tokens_decoded = own->tokens_decoded;
    now.seconds_prefill = own->seconds_prefill;
    now.seconds_decode = own->seconds_decode;
    now.hits -= b->hits;
    now.misses -= b->misses;
    now.reads -= b->reads;
    now.bytes_read -= b->bytes_read;
    now.trunk_bytes_read -= b->trunk_bytes_read;
    now.read_retries -= b->read_retries;
    now.records_verified -= b->records_verified;
    now.evictions -= b->evictions;
    now.transient_reads -= b->transient_reads;
    now.seconds_waiting -= b->seconds_waiting;
    now.seconds_compute -= b->seconds_compute;
    now.seconds_other -= b->seconds_other;
    now.read_fallbacks -= b->read_fallbacks;
    now.read_ahead_issued -= b->read_ahead_issued;
    now.read_ahead_used -= b->read_ahead_used;
    now.read_ahead_wasted -= b->read_ahead_wasted;
    now.read_ahead_cancelled -= b->read_ahead_cancelled;
    now.read_ahead_bytes -= b->read_ahead_bytes;
    r->result.stats = now;
}

static hr_status eval_prompt(struct run *r, const int32_t *ids, size_t n, hr_error *err)
{
    const double start = clock_seconds();
    const hr_status status = session_eval(r->session, ids, n, HR_LOGITS_LAST, NULL, err);
    r->result.stats.seconds_prefill += clock_seconds() - start;
    if (status == HR_OK) r->result.stats.tokens_prefilled += n;
    return status;
}

static hr_status eval_pending(struct run *r, int32_t which, hr_error *err)
{
    const double start = clock_seconds();
    const int32_t id = session_pending(r->session);
    session_set_pending(r->session, -1);
    const hr_status status = session_eval(r->session, &id, 1, which, NULL, err);
    r->result.stats.seconds_decode += clock_seconds() - start;
    if (status == HR_OK) r->result.stats.tokens_decoded++;
    return status;
}

static hr_status check_params(const struct session *s, const hr_generate_params *p, hr_error *err)
{
    const uint32_t vocab = session_vocab(s);
    if (p->stop_id_count > 0 && p->stop_ids == NULL)
        return fail(err, HR_ERR_USAGE, "stop_ids is NULL but stop_id_count is %zu",
                    p->stop_id_count);
    for (size_t i = 0; i < p->stop_id_count; i++)
        if (p->stop_ids[i] < 0 || (uint32_t)p->stop_ids[i] >= vocab)
            return fail(err, HR_ERR_USAGE, "stop id %d is outside the vocabulary of %u tokens",
                        p->stop_ids[i], vocab);
    if (p->stop_count > 0 && session_tokenizer(s) == NULL)
        return fail(err, HR_ERR_UNSUPPORTED,
                    "stop strings need a tokenizer and this container has none: use stop ids");
    return HR_OK;
}

/* Everything that can refuse the prompt, before anything is evaluated. */
static hr_status check_prompt(const struct session *s, const int32_t *ids, size_t n, hr_error *err)
{
    const uint32_t vocab = session_vocab(s), ctx = session_ctx(s), at = session_position(s);
    const uint32_t pending = session_pending(s) >= 0;
    if (n > 0 && ids == NULL) return fail(err, HR_ERR_USAGE, "ids is NULL but n is %zu", n);
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab)
            return fail(err, HR_ERR_USAGE,
                        "prompt id %d at index %zu is outside the vocabulary of %u tokens", ids[i],
                        i, vocab);
    const uint64_t available = ctx > at ? ctx - at : 0;
    if ((uint64_t)n > available || (uint64_t)n + pending > available)
        return fail(err, HR_ERR_CONTEXT,
                    "the prompt needs %llu token(s)%s and %llu of the context's %u are available "
                    "(position %u): shorten it, reset the session, or open with a larger ctx",
                    (unsigned long long)n + pending,
                    pending ? " (with the last generated one, not yet evaluated)" : "",
                    (unsigned long long)available, ctx, at);
    if (n == 0 && !pending && !session_has_logits(s))
        return fail(err, HR_ERR_USAGE,
                    "the prompt is empty and the session holds no logits to sample from: give at "
                    "least one token");
    return n > 0 ? session_check(s, ids, n, HR_LOGITS_LAST, NULL, err) : HR_OK;
}

static bool is_listed(int32_t id, const int32_t *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (list[i] == id) return true;
    return false;
}

static bool is_stop_id(const struct run *r, int32_t id)
{
    uint32_t own_count = 0;
    const int32_t *own = session_stop_ids(r->session, &own_count);
    return (!r->params.ignore_stop_ids && is_listed(id, own, own_count)) ||
           is_listed(id, r->params.stop_ids, r->params.stop_id_count);
}

static int32_t report(struct run *r, int32_t id, uint32_t index, const char *bytes, size_t n,
                      float logprob)
{
    int32_t stop = 0;
    if (r->callback != NULL) {
        update_stats(r);
        const hr_token token = {.size = sizeof token,
                                .id = id,
                                .index = index,
                                .bytes = bytes,
                                .bytes_len = n,
                                .text = r->gate.text,
                                .text_len = r->gate.ready,
                                .logprob = logprob,
                                .stats = &r->result.stats};
        stop = r->callback(r->user, &token);
    }
    text_gate_take(&r->gate);
    return stop;
}

/* Text held back when no token follows to carry it: a last call without a token. */
static hr_status report_held(struct run *r, hr_error *err)
{
    int32_t stopped;
    TRY(text_gate_push(&r->gate, "", 0, true, &stopped, err));
    if (r->gate.ready > 0) report(r, -1, r->result.tokens, "", 0, 0);
    return HR_OK;
}

/* Samples, reports; *finish is what ends the generation with this token, or -1. */
static hr_status step(struct run *r, int32_t *finish, hr_error *err)
{
    int32_t id, stopped;
    float logprob;
    hr_generation *result = &r->result;
    *finish = -1;
    TRY(sampler_next(&r->sampler, session_logits(r->session), result->tokens, &id, &logprob, err));
    if (is_stop_id(r, id)) {
        result->stop_id = id;
        *finish = HR_FINISH_STOP;
        return report_held(r, err);
    }
    sampler_see(&r->sampler, &id, 1);
    if (result->tokens + 1 == r->params.max_tokens) *finish = HR_FINISH_LENGTH;
    else if (session_position(r->session) >= session_ctx(r->session)) *finish = HR_FINISH_CONTEXT;

    const struct tokenizer *tokenizer = session_tokenizer(r->session);
    size_t length = 0;
    const char *bytes = tokenizer != NULL ? tokenizer_bytes(tokenizer, id, &length) : NULL;
    if (bytes == NULL) {
        bytes = "";
        length = 0;
    }
    TRY(text_gate_push(&r->gate, bytes, length, *finish >= 0, &stopped, err));
    session_set_pending(r->session, id);
    const uint32_t index = result->tokens++;
    if (stopped >= 0) {
        result->stop_string = stopped;
        *finish = HR_FINISH_STOP;
    }
    if (report(r, id, index, bytes, length, logprob) != 0) {
        result->stop_string = -1;
        *finish = HR_FINISH_CANCELLED;
    }
    return HR_OK;
}

static hr_status cancelled(struct run *r, int32_t *finish, hr_error *err)
{
    *finish = HR_FINISH_CANCELLED;
    return report_held(r, err);
}

static hr_status loop(struct run *r, const int32_t *ids, size_t n, hr_error *err)
{
    struct session *s = r->session;
    int32_t *finish = &r->result.finish;
    hr_status status = HR_OK;
    const int32_t pending = session_pending(s);
    if (pending >= 0) {
        sampler_see(&r->sampler, &pending, 1);
        status = eval_pending(r, n == 0 ? HR_LOGITS_LAST : HR_LOGITS_NONE, err);
    }
    sampler_see(&r->sampler, ids, n);
    if (status == HR_OK && n > 0) status = eval_prompt(r, ids, n, err);
    for (;;) {
        if (status == HR_ERR_CANCELLED || (status == HR_OK && session_cancelled(s)))
            return cancelled(r, finish, err);
        if (status != HR_OK) return status;
        int32_t ended;
        TRY(step(r, &ended, err));
        if (ended >= 0) {
            *finish = ended;
            return HR_OK;
        }
        if (session_cancelled(s)) return cancelled(r, finish, err);
        status = eval_pending(r, HR_LOGITS_LAST, err);
    }
}

static hr_status open_run(struct run *r, const int32_t *ids, size_t n, hr_error *err)
{
    const struct session *s = r->session;
    const hr_generate_params *p = &r->params;
    const struct sampler_params sampling = {.temperature = p->temperature,
                                            .top_k = p->top_k,
                                            .top_p = p->top_p,
                                            .min_p = p->min_p,
                                            .repetition_penalty = p->repetition_penalty,
                                            .seed = p->seed};
    TRY(check_params(s, p, err));
    TRY(sampler_check(&sampling, err));
    TRY(check_prompt(s, ids, n, err));
    struct carve c = {session_workspace(s), 0};
    const struct tokenizer *tokenizer = session_tokenizer(s);
    text_gate_carve(&c, tokenizer != NULL ? tokenizer_longest(tokenizer) : 0, &r->gate);
    sampler_carve(&c, session_vocab(s), &r->sampler);
    TRY(text_gate_open(&r->gate, p->stop, p->stop_count, err));
    return sampler_open(&r->sampler, &sampling, session_vocab(s), session_kernels(s), err);
}

hr_status generate(struct session *s, const int32_t *ids, size_t n, const hr_generate_params *p,
                   hr_token_fn callback, void *user, hr_generation *out, hr_error *err)
{
    if (out != NULL && out->size < sizeof *out)
        return fail(err, HR_ERR_USAGE, "out->size is %zu: set it to sizeof(hr_generation)",
                    out->size);
    if (p != NULL && p->size < sizeof *p)
        return fail(err, HR_ERR_USAGE, "params->size is %zu: call hr_generate_params_init first",
                    p->size);
    struct run r = {.session = s, .callback = callback, .user = user};
    r.result = (hr_generation){
        .finish = HR_FINISH_ERROR, .stop_id = -1, .stop_string = -1, .stats.size = sizeof(hr_stats)};
    generate_params_init(&r.params);
    if (p != NULL) r.params = *p;
    stats_now(s, &r.before);
    session_cancel_clear(s);
    hr_status status = open_run(&r, ids, n, err);
    if (status == HR_OK) status = loop(&r, ids, n, err);
    if (status != HR_OK) r.result.finish = HR_FINISH_ERROR;
    update_stats(&r);
    if (out != NULL) {
        const size_t size = out->size;
        *out = r.result;
        out->size = size;
    }
    return status;
}
