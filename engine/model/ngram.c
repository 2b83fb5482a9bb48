#include "model/ngram.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

void ngram_carve(struct carve *c, const struct architecture *a, uint32_t n,
                 struct ngram_scratch *s)
{
    const size_t f = sizeof(float), width = stream_width(a);
    const uint32_t e = a->ngram.tables * a->ngram.dim;
    s->e = carve_take(c, (size_t)n * e * f);
    s->key = carve_take(c, n * width * f);
    s->value = carve_take(c, (size_t)n * a->hidden * f);
    s->gated = carve_take(c, n * width * f);
    s->normed = carve_take(c, n * width * f);
    s->query = carve_take(c, (size_t)n * a->hidden * f);
    linear_input_carve(c, n, e, false, &s->in);
}

struct ngram_ctx {
    const struct ngram_call *call;
    struct ngram_scratch *s;
    const int32_t *ids;
    _Atomic int failed;
    hr_error *errors; /* unused rows stay empty; the caller reports the first */
};

/* The token `back` places before token t of the chunk, from the chunk or the history. */
static int32_t token_before(const struct ngram_ctx *c, uint32_t t, uint32_t back)
{
    if (back <= t) return c->ids[t - back];
    const uint32_t kept = c->call->arch->ngram.order - 1;
    return (int32_t)c->call->state->history[kept - (back - t)];
}

/* Rows of one token. A place before the start, or behind an end-of-text token, counts as that
 * token; the current token itself does not cut. */
static void row_numbers(const struct ngram_ctx *c, uint32_t t, uint64_t *rows)
{
    const struct ngram_part *p = &c->call->arch->ngram;
    const struct ngram_site *s = c->call->site;
    uint64_t mixed = (uint64_t)(uint32_t)c->ids[t] * s->multipliers[0];
    bool cut = false;
    for (uint32_t back = 1; back < p->order; back++) {
        const int32_t before = token_before(c, t, back);
        cut = cut || before < 0 || before == p->eos;
        const uint64_t id = (uint64_t)(uint32_t)(cut ? p->eos : before);
        mixed ^= id * s->multipliers[back];
        for (uint32_t h = 0; h < p->heads; h++) {
            const uint32_t i = (back - 1) * p->heads + h;
            rows[i] = s->offsets[i] + mixed % s->primes[i];
        }
    }
}

static hr_status read_rows(const struct ngram_ctx *c, uint32_t t, hr_error *err)
{
    const struct ngram_part *p = &c->call->arch->ngram;
    uint64_t rows[MAX_NGRAM_TABLES];
    float *e = c->s->e + (size_t)t * p->tables * p->dim;
    uint16_t half[1024];
    row_numbers(c, t, rows);
    for (uint32_t i = 0; i < p->tables; i++) {
        float *to = e + (size_t)i * p->dim;
        if (c->call->cancel && atomic_load(c->call->cancel))
            return fail(err, HR_ERR_CANCELLED, "cancelled while rows were read");
        if (p->codec == CODEC_F32) {
            TRY(row_table_read(c->call->rows, rows[i], to, err));
            continue;
        }
        TRY(row_table_read(c->call->rows, rows[i], half, err));
        struct matrix row;
        matrix_bind(&row, CODEC_BF16, 1, p->dim, half);
        matrix_row(&row, 0, to);
    }
    return HR_OK;
}

static void rows_task(void *ctx, uint32_t t, uint32_t worker)
{
    struct ngram_ctx *c = ctx;
    hr_error err;
    (void)worker;
    if (read_rows(c, t, &err) == HR_OK) return;
    if (atomic_exchange(&c->failed, 1) == 0 && c->errors) *c->errors = err;
}

/* Gate per branch: sigmoid of the signed root of <key, query> / sqrt(hidden), times the value. */
static void gate_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct ngram_ctx *c = ctx;
    const struct architecture *a = c->call->arch;
    const struct ngram_weights *w = c->call->weights;
    const struct kernels *k = c->call->nn->k;
    const size_t hidden = a->hidden, width = stream_width(a);
    float *query = c->s->query + t * hidden;
    const float *value = c->s->value + t * hidden;
    (void)worker;
    for (uint32_t b = 0; b < a->residual.count; b++) {
        const size_t at = b * hidden;
        float *key = c->s->key + t * width + at, *gated = c->s->gated + t * width + at;
        k->rms_norm(key, w->norm_key + at, hidden, a->norm_eps, key);
        k->rms_norm(c->call->stream + t * width + at, w->norm_query + at, hidden, a->norm_eps, query);
        float g = k->dot(key, query, hidden) / sqrtf((float)hidden);
        const float size = sqrtf(fmaxf(fabsf(g), 1e-6f));
        g = g < 0 ? -size : g > 0 ? size : 0;
        k->sigmoid(&g, &g, 1);
        memset(gated, 0, hidden * sizeof(float));
        k->axpy(gated, g, value, hidden);
        k->rms_norm(gated, w->norm_conv + at, hidden, a->norm_eps, c->s->normed + t * width + at);
    }
}

static void add_task(void *ctx, uint32_t t, uint32_t worker)
{
    const struct ngram_ctx *c = ctx;
    const struct architecture *a = c->call->arch;
    const struct ngram_part *p = &a->ngram;
    const size_t width = stream_width(a);
    const uint32_t back = (p->conv_taps - 1) * p->dilation;
    const float *rows[8];
    float *h = c->call->stream + t * width, *conv = c->s->key + t * width;
    (void)worker;
    for (uint32_t j = 0; j < p->conv_taps; j++) {
        const uint32_t ago = (p->conv_taps - 1 - j) * p->dilation;
        rows[j] = ago <= t ? c->s->normed + (t - ago) * width
                           : c->call->state->conv + (back - (ago - t)) * width;
    }
    c->call->nn->k->conv_silu(c->call->weights->conv, rows, p->conv_taps, width, conv);
    c->call->nn->k->add(h, c->s->gated + t * width, width);
    c->call->nn->k->add(h, conv, width);
}

static void keep_state(const struct ngram_ctx *c, uint32_t n)
{
    const struct architecture *a = c->call->arch;
    const size_t width = stream_width(a);
    const uint32_t ids = a->ngram.order - 1, rows = (a->ngram.conv_taps - 1) * a->ngram.dilation;
    float *history = c->call->state->history, *conv = c->call->state->conv;
    for (uint32_t i = 0; i < ids; i++)
        history[i] = i + n < ids ? history[i + n] : (float)c->ids[n - (ids - i)];
    if (rows == 0) return;
    if (n < rows) memmove(conv, conv + n * width, (rows - n) * width * sizeof(float));
    const uint32_t fresh = n < rows ? n : rows;
    memcpy(conv + (rows - fresh) * width, c->s->normed + (n - fresh) * width,
           fresh * width * sizeof(float));
}

hr_status ngram_forward(const struct ngram_call *call, struct ngram_scratch *s, const int32_t *ids,
                        uint32_t n, hr_error *err)
{
    const struct architecture *a = call->arch;
    const uint32_t e = a->ngram.tables * a->ngram.dim;
    struct ngram_ctx c = {.call = call, .s = s, .ids = ids, .errors = err};
    pool_run(call->nn->pool, n, rows_task, &c);
    if (atomic_load(&c.failed)) return err ? (hr_status)err->code : HR_ERR_IO;
    linear_input_set(&s->in, s->e, e, n, e);
    const struct linear_job jobs[] = {{&call->weights->key, s->key, stream_width(a)},
                                      {&call->weights->value, s->value, a->hidden}};
    linear_run(call->nn, &s->in, jobs, 2);
    pool_run(call->nn->pool, n, gate_task, &c);
    pool_run(call->nn->pool, n, add_task, &c);
    keep_state(&c, n);
    return HR_OK;
}
