#include "model/moe_stream.h"

#include <string.h>

/* Experts computed in one go: enough to fill the threads, few enough that their records are
 * released while later reads need the room. */
enum { WAVE = 32 };

void moe_carve(struct carve *c, const struct moe_part *p, uint32_t hidden, uint32_t n,
               struct moe_scratch *s)
{
    const size_t pairs = (size_t)n * p->top_k;
    const uint32_t widest = p->inner > p->shared_inner ? p->inner : p->shared_inner;
    s->scores = carve_take(c, (size_t)n * p->experts * sizeof(float));
    s->ids = carve_take(c, pairs * sizeof(int32_t));
    s->weights = carve_take(c, pairs * sizeof(float));
    s->pair = carve_take(c, pairs * sizeof(uint32_t));
    s->token = carve_take(c, pairs * sizeof(uint32_t));
    s->first = carve_take(c, ((size_t)p->experts + 1) * sizeof(uint32_t));
    s->wanted = carve_take(c, p->experts * sizeof(uint32_t));
    s->result = carve_take(c, pairs * hidden * sizeof(float));
    s->shared = carve_take(c, (size_t)n * hidden * sizeof(float));
    s->shared_gate = carve_take(c, n * sizeof(float));
    glu_carve(c, (uint32_t)pairs + n, widest, &s->glu);
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
    *job = (struct glu_job){.gate = &w->gate[i],
                            .up = &w->up[i],
                            .down = &w->down[i],
                            .in = in,
                            .index = s->token + first,
                            .n = s->first[w->lease[i].expert + 1] - first,
                            .y = s->result + (size_t)first * call->hidden,
                            .ldy = call->hidden};
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

static hr_status compute_experts(struct moe_call *call, struct linear_input *in, hr_error *err)
{
    struct glu_job jobs[WAVE + 1];
    struct wave w = {.count = 0};
    const struct moe_part *p = call->part;
    struct moe_scratch *s = call->scratch;
    bool shared_pending = p->shared_inner > 0, finished = false;
    while (!finished) {
        const hr_status st = gather(call, &w, !shared_pending, &finished, err);
        if (st != HR_OK) {
            release(call, &w);
            return st;
        }
        uint32_t count = 0;
        for (uint32_t i = 0; i < w.count; i++) bind_expert(call, &w, i, in, &jobs[count++]);
        if (shared_pending) {
            jobs[count] = (struct glu_job){.gate = &call->weights->gate,
                                           .up = &call->weights->up,
                                           .down = &call->weights->down,
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

static void combine_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct combine_ctx *c = ctx;
    const struct moe_call *call = c->call;
    const struct kernels *k = call->nn->k;
    const struct moe_scratch *s = call->scratch;
    const uint32_t hidden = call->hidden, top_k = call->part->top_k;
    float *y = c->y + (size_t)t * c->ldy;
    (void)worker;
    memset(y, 0, hidden * sizeof(float));
    for (uint32_t r = 0; r < top_k; r++) {
        const size_t i = (size_t)t * top_k + r;
        k->axpy(y, s->weights[i], s->result + (size_t)s->pair[i] * hidden, hidden);
    }
    if (call->part->shared_inner == 0) return;
    const float *shared = s->shared + (size_t)t * hidden;
    if (call->part->shared_gate)
        k->axpy(y, s->shared_gate[t], shared, hidden);
    else
        k->add(y, shared, hidden);
}

hr_status moe_forward(struct moe_call *call, struct linear_input *in, float *y, size_t ldy,
                      hr_error *err)
{
    const struct moe_part *p = call->part;
    struct moe_scratch *s = call->scratch;
    router_forward(call->nn, p, &call->weights->router, in, s->scores, s->ids, s->weights);
    const uint32_t wanted = group_pairs(p, s, in->n);
    cache_begin(call->cache, call->lane, call->bank_index, s->wanted, wanted);
    if (p->shared_gate) {
        const struct linear_job gate = {&call->weights->shared_gate, s->shared_gate, 1};
        linear_run(call->nn, in, &gate, 1);
        call->nn->k->sigmoid(s->shared_gate, s->shared_gate, in->n);
    }
    const hr_status st = compute_experts(call, in, err);
    if (st != HR_OK) {
        cache_abort(call->cache, call->lane);
        return st;
    }
    struct combine_ctx c = {call, y, ldy};
    pool_run(call->nn->pool, in->n, combine_task, &c);
    return HR_OK;
}
