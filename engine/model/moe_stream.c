#include "model/moe_stream.h"

#include <string.h>

#include "base/clock.h"
#include "quant/rvq.h"

/* Experts computed in one go: enough to fill the threads, few enough that their records are
 * released while later reads need the room. */
enum { WAVE = 32, MAX_GUESS_RANKS = 64 };

void moe_carve(struct carve *c, const struct moe_part *p, uint32_t hidden, bool fine, uint32_t n,
               struct moe_scratch *s)
{
    const size_t pairs = (size_t)n * p->top_k;
    const uint32_t widest = p->inner > p->shared_inner ? p->inner : p->shared_inner;
    const uint32_t width = moe_width(p, hidden);
    router_carve(c, p, n, &s->router);
    s->ids = carve_take(c, pairs * sizeof(int32_t));
    s->weights = carve_take(c, pairs * sizeof(float));
    s->pair = carve_take(c, pairs * sizeof(uint32_t));
    s->token = carve_take(c, pairs * sizeof(uint32_t));
    s->first = carve_take(c, ((size_t)p->experts + 1) * sizeof(uint32_t));
    s->wanted = carve_take(c, p->experts * sizeof(uint32_t));
    s->result = carve_take(c, pairs * width * sizeof(float));
    s->latent = carve_take(c, (size_t)n * p->latent * sizeof(float));
    s->mixed = carve_take(c, (size_t)n * p->latent * sizeof(float));
    if (p->latent) {
        linear_input_carve(c, n, p->latent, fine, &s->latent_in);
        linear_input_carve(c, n, p->latent, false, &s->mixed_in);
    }
    s->shared = carve_take(c, (size_t)n * hidden * sizeof(float));
    s->shared_gate = carve_take(c, n * sizeof(float));
    glu_carve(c, (uint32_t)pairs + n, widest, fine, &s->glu);
}

/* Groups the (token, rank) pairs by expert, tokens ascending; returns the number of experts. */
static uint32_t group_pairs(const struct moe_part *p, struct moe_scratch *s, uint32_t n)
{
    const uint32_t pairs = n * p->top_k;
    uint32_t wanted = 0;
    memset(s->first, 0, ((size_t)p->experts + 1) * sizeof(uint32_t));
    for (uint32_t i = 0; i < pairs; i++) s->first[s->ids[i] + 1]++;
    for (uint32_t e = 0; e < p->experts; e++) {
        if (s->first[e + 1] > 0) s->wanted[wanted++] = e;
        s->first[e + 1] += s->first[e];
    }
    for (uint32_t i = 0; i < pairs; i++) {
        const uint32_t at = s->first[s->ids[i]]++;
        s->pair[i] = at;
        s->token[at] = i / p->top_k;
    }
    /* Every first[e] moved to the next expert's start: shift back. */
    memmove(s->first + 1, s->first, p->experts * sizeof(uint32_t));
    s->first[0] = 0;
    return wanted;
}

struct wave {
    struct cache_lease lease[WAVE];
    struct matrix gate[WAVE], up[WAVE], down[WAVE];
    uint32_t count;
};

/* Floats from one bias vector of a record to the next. */
static size_t bias_stride(uint32_t n)
{
    return round_up(n * sizeof(float), 64) / sizeof(float);
}

static void bind_expert(const struct moe_call *call, struct wave *w, uint32_t i,
                        struct linear_input *in, struct glu_job *job)
{
    const struct bank_entry *b = call->bank;
    const struct moe_scratch *s = call->scratch;
    const uint8_t *record = w->lease[i].record;
    const uint32_t first = s->first[w->lease[i].expert];
    matrix_bind(&w->gate[i], b->codec, b->inner, b->hidden, record + b->record.gate);
    matrix_bind(&w->up[i], b->codec, b->inner, b->hidden, record + b->record.up);
    matrix_bind(&w->down[i], b->codec, b->hidden, b->inner, record + b->record.down);
    w->gate[i].fine = w->up[i].fine = w->down[i].fine = b->fine;
    if (b->books) {
        w->gate[i].books = &b->books[0];
        w->up[i].books = &b->books[1];
        w->down[i].books = &b->books[2];
    }
    *job = (struct glu_job){.gate = &w->gate[i],
                            .up = &w->up[i],
                            .down = &w->down[i],
                            .act = call->part->act,
                            .in = in,
                            .index = s->token + first,
                            .n = s->first[w->lease[i].expert + 1] - first,
                            .y = s->result + (size_t)first * b->hidden,
                            .ldy = b->hidden};
    if (b->bias) {
        job->gate_bias = (const float *)(const void *)(record + b->record.bias);
        job->up_bias = job->gate_bias + bias_stride(b->inner);
        job->down_bias = job->up_bias + bias_stride(b->inner);
    }
    glu_slice(&s->glu, first, job);
}

/* Takes what is ready, waiting only for the first when `block`. */
static hr_status gather(struct moe_call *call, struct wave *w, bool block, bool *finished,
                        hr_error *err)
{
    w->count = 0;
    *finished = false;
    while (w->count < WAVE) {
        bool got = false;
        const bool wait = block && w->count == 0;
        TRY(cache_next(call->cache, call->lane, wait, &w->lease[w->count], &got, &call->waited,
                       err));
        if (!got) {
            *finished = wait;
            return HR_OK;
        }
        w->count++;
    }
    return HR_OK;
}

static void release(struct moe_call *call, struct wave *w)
{
    for (uint32_t i = 0; i < w->count; i++)
        cache_release(call->cache, call->lane, &w->lease[i]);
    w->count = 0;
}

/* Routed experts read `routed`, the shared one reads `in`. */
static hr_status compute_experts(struct moe_call *call, struct linear_input *routed,
                                 struct linear_input *in, hr_error *err)
{
    struct glu_job jobs[WAVE + 1];
    struct wave w = {.count = 0};
    const struct moe_part *p = call->part;
    struct moe_scratch *s = call->scratch;
    bool shared_pending = p->shared_inner > 0, finished = false;
    while (!finished) {
        if (call->cancel && atomic_load(call->cancel))
            return fail(err, HR_ERR_CANCELLED, "cancelled while experts were read");
        const double start = clock_seconds();
        const hr_status st = gather(call, &w, !shared_pending, &finished, err);
        call->stored += clock_seconds() - start;
        if (st != HR_OK) {
            release(call, &w);
            return st;
        }
        uint32_t count = 0;
        for (uint32_t i = 0; i < w.count; i++) bind_expert(call, &w, i, routed, &jobs[count++]);
        if (shared_pending) {
            jobs[count] = (struct glu_job){.gate = &call->weights->gate,
                                           .up = &call->weights->up,
                                           .down = &call->weights->down,
                                           .act = p->act,
                                           .in = in,
                                           .n = in->n,
                                           .y = s->shared,
                                           .ldy = call->hidden};
            glu_slice(&s->glu, in->n * p->top_k, &jobs[count++]);
            shared_pending = false;
        }
        if (count > 0) glu_run(call->nn, jobs, count);
        release(call, &w);
    }
    return HR_OK;
}

struct combine_ctx {
    const struct moe_call *call;
    float *y;
    size_t ldy;
};

/* out[width] = sum over ranks of weight * result, in rank order. */
static void add_ranks(const struct moe_call *call, uint32_t t, uint32_t width, float *out)
{
    const struct moe_scratch *s = call->scratch;
    const uint32_t top_k = call->part->top_k;
    memset(out, 0, width * sizeof(float));
    for (uint32_t r = 0; r < top_k; r++) {
        const size_t i = (size_t)t * top_k + r;
        call->nn->k->axpy(out, s->weights[i], s->result + (size_t)s->pair[i] * width, width);
    }
}

static void latent_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct combine_ctx *c = ctx;
    const struct moe_part *p = c->call->part;
    float *mixed = c->call->scratch->mixed + (size_t)t * p->latent;
    (void)worker;
    add_ranks(c->call, t, p->latent, mixed);
    if (p->latent_norm)
        c->call->nn->k->rms_norm(mixed, c->call->weights->latent_norm, p->latent, p->norm_eps,
                                 mixed);
}

static void combine_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct combine_ctx *c = ctx;
    const struct moe_call *call = c->call;
    const struct moe_scratch *s = call->scratch;
    float *y = c->y + (size_t)t * c->ldy;
    (void)worker;
    if (!call->part->latent) add_ranks(call, t, call->hidden, y);
    if (call->part->shared_inner == 0) return;
    const float *shared = s->shared + (size_t)t * call->hidden;
    if (call->part->shared_gate)
        call->nn->k->axpy(y, s->shared_gate[t], shared, call->hidden);
    else
        call->nn->k->add(y, shared, call->hidden);
}

/* Brings the routed experts' sum from the latent back to the full width. */
static void leave_latent(struct moe_call *call, struct combine_ctx *c, uint32_t n)
{
    const uint32_t latent = call->part->latent;
    struct moe_scratch *s = call->scratch;
    pool_run(call->nn->pool, n, latent_task, c);
    linear_input_set(&s->mixed_in, s->mixed, latent, n, latent);
    const struct linear_job up = {&call->weights->latent_up, c->y, c->ldy};
    linear_run(call->nn, &s->mixed_in, &up, 1);
}

/* Has experts read that the next MoE layer's router likes, given what this layer reads: the state
 * changes little from one layer to the next. */
static void guess_next(struct moe_call *call, struct linear_input *in)
{
    const struct moe_guess *g = call->guess;
    uint32_t experts[GUESS_TOKENS * MAX_GUESS_RANKS], count = 0;
    router_forward(call->nn, g->part, g->weights, in, g->router, g->ids, g->mixing);
    for (uint32_t rank = 0; rank < g->width && rank < g->part->top_k; rank++)
        for (uint32_t t = 0; t < in->n; t++)
            experts[count++] = (uint32_t)g->ids[t * g->part->top_k + rank];
    const double start = clock_seconds();
    cache_read_ahead(call->cache, call->lane, g->bank_index, experts, count);
    call->stored += clock_seconds() - start;
}

hr_status moe_forward(struct moe_call *call, struct linear_input *in, float *y, size_t ldy,
                      hr_error *err)
{
    const struct moe_part *p = call->part;
    struct moe_scratch *s = call->scratch;
    struct linear_input *routed = in;
    router_forward(call->nn, p, call->weights, in, &s->router, s->ids, s->weights);
    const uint32_t wanted = group_pairs(p, s, in->n);
    const struct cache_uses uses = {in->n, s->first, s->token};
    const double start = clock_seconds();
    cache_begin(call->cache, call->lane, call->bank_index, s->wanted, wanted, &uses);
    call->stored += clock_seconds() - start;
    if (call->guess && in->n <= GUESS_TOKENS) guess_next(call, in);
    if (p->shared_gate) {
        const struct linear_job gate = {&call->weights->shared_gate, s->shared_gate, 1};
        linear_run(call->nn, in, &gate, 1);
        call->nn->k->sigmoid(s->shared_gate, s->shared_gate, in->n);
    }
    if (p->latent) {
        const struct linear_job down = {&call->weights->latent_down, s->latent, p->latent};
        linear_run(call->nn, in, &down, 1);
        routed = &s->latent_in;
        linear_input_set(routed, s->latent, p->latent, in->n, p->latent);
    }
    const hr_status st = compute_experts(call, routed, in, err);
    if (st != HR_OK) {
        cache_abort(call->cache, call->lane);
        return st;
    }
    struct combine_ctx c = {call, y, ldy};
    if (p->latent) leave_latent(call, &c, in->n);
    pool_run(call->nn->pool, in->n, combine_task, &c);
    return HR_OK;
}
