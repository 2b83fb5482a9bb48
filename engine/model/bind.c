#include <stdio.h>
#include <string.h>

#include "model/model.h"

enum { USED_BITS = 64 };

/* Looks tensors up, compares codec and shape with what the part needs, points into the trunk. */
struct binder {
    struct model *m;
    uint64_t *used; /* bit per tensor: the manifest must hold no other */
    uint32_t layer;
    bool in_layer;
    hr_error *err;
};

static hr_status lookup(struct binder *b, const char *part, uint32_t rows, uint32_t cols,
                        const struct tensor_entry **out)
{
    const struct container *c = b->m->c;
    char name[128];
    if (b->in_layer)
        snprintf(name, sizeof name, "layers.%u.%s", b->layer, part);
    else
        snprintf(name, sizeof name, "%s", part);
    const struct tensor_entry *t = container_tensor(c, name);
    if (!t)
        return fail(b->err, HR_ERR_FORMAT, "%s/manifest.json: tensor \"%s\" [%u, %u] is missing",
                    c->path, name, rows, cols);
    if (t->rows != rows || t->cols != cols)
        return fail(b->err, HR_ERR_FORMAT,
                    "%s/manifest.json: tensor \"%s\" has shape [%u, %u]; the model needs [%u, %u]",
                    c->path, name, t->rows, t->cols, rows, cols);
    const size_t i = (size_t)(t - c->tensors);
    b->used[i / USED_BITS] |= (uint64_t)1 << (i % USED_BITS);
    *out = t;
    return HR_OK;
}

static const void *data_of(const struct binder *b, const struct tensor_entry *t)
{
    return b->m->trunk ? b->m->trunk + t->offset : NULL;
}

static hr_status wrong_codec(struct binder *b, const struct tensor_entry *t, const char *allowed)
{
    return fail(b->err, HR_ERR_FORMAT, "%s/manifest.json: tensor \"%s\" is %s; allowed here: %s",
                b->m->c->path, t->name, codec_name(t->codec), allowed);
}

static hr_status vector(struct binder *b, const char *part, uint32_t n, const float **out)
{
    const struct tensor_entry *t = NULL;
    TRY(lookup(b, part, 1, n, &t));
    if (t->codec != CODEC_F32) return wrong_codec(b, t, "f32");
    *out = data_of(b, t);
    return HR_OK;
}

static hr_status table(struct binder *b, const char *part, uint32_t rows, uint32_t cols,
                       const float **out)
{
    const struct tensor_entry *t = NULL;
    TRY(lookup(b, part, rows, cols, &t));
    if (t->codec != CODEC_F32) return wrong_codec(b, t, "f32");
    *out = data_of(b, t);
    return HR_OK;
}

static hr_status bind_matrix(struct binder *b, const char *part, uint32_t rows, uint32_t cols,
                             bool steering, struct matrix *out)
{
    const struct tensor_entry *t = NULL;
    TRY(lookup(b, part, rows, cols, &t));
    if (t->codec == CODEC_F64 || (steering && t->codec == CODEC_INT8))
        return wrong_codec(b, t, steering ? "f32, bf16" : "f32, bf16, int8");
    memset(out, 0, sizeof *out);
    if (b->m->trunk) matrix_bind(out, t->codec, rows, cols, data_of(b, t));
    return HR_OK;
}

static hr_status weight(struct binder *b, const char *part, uint32_t rows, uint32_t cols,
                        struct matrix *out)
{
    return bind_matrix(b, part, rows, cols, false, out);
}

/* Matrices whose results decide (router, gates, decay, beta) keep float weights. */
static hr_status steering(struct binder *b, const char *part, uint32_t rows, uint32_t cols,
                          struct matrix *out)
{
    return bind_matrix(b, part, rows, cols, true, out);
}

static hr_status bind_attention(struct binder *b, const struct mixer_part *part,
                                struct attention_weights *w)
{
    const struct attention_part *p = &part->attention;
    const uint32_t hidden = b->m->arch.hidden, q = p->heads * p->head_dim;
    const uint32_t kv = p->kv_heads * p->head_dim;
    TRY(weight(b, "attn.q", q, hidden, &w->q));
    TRY(weight(b, "attn.k", kv, hidden, &w->k));
    TRY(weight(b, "attn.v", kv, hidden, &w->v));
    TRY(weight(b, "attn.o", hidden, q, &w->o));
    if (p->output_gate) TRY(weight(b, "attn.gate", q, hidden, &w->gate));
    if (p->qk_norm) {
        TRY(vector(b, "attn.q_norm", p->head_dim, &w->q_norm));
        TRY(vector(b, "attn.k_norm", p->head_dim, &w->k_norm));
    }
    if (p->rotary_dim == 0) return HR_OK;
    const struct tensor_entry *t = NULL;
    b->in_layer = false;
    TRY(lookup(b, part->rope, 1, p->rotary_dim / 2, &t));
    b->in_layer = true;
    if (t->codec != CODEC_F64) return wrong_codec(b, t, "f64");
    w->frequency = data_of(b, t);
    return HR_OK;
}

static hr_status bind_delta(struct binder *b, const struct delta_part *p, struct delta_weights *w)
{
    const uint32_t hidden = b->m->arch.hidden, vd = p->value_heads * p->value_dim;
    TRY(weight(b, "delta.qkv", delta_channels(p), hidden, &w->qkv));
    TRY(weight(b, "delta.z", vd, hidden, &w->z));
    TRY(steering(b, "delta.a", p->value_heads, hidden, &w->a));
    TRY(steering(b, "delta.b", p->value_heads, hidden, &w->b));
    TRY(table(b, "delta.conv", p->conv_taps, delta_channels(p), &w->conv));
    TRY(vector(b, "delta.a_log", p->value_heads, &w->a_log));
    TRY(vector(b, "delta.dt_bias", p->value_heads, &w->dt_bias));
    TRY(vector(b, "delta.norm", p->value_dim, &w->norm));
    return weight(b, "delta.out", hidden, vd, &w->out);
}

static hr_status bind_moe(struct binder *b, const struct moe_part *p, struct moe_weights *w)
{
    const uint32_t hidden = b->m->arch.hidden;
    TRY(steering(b, "moe.router", p->experts, hidden, &w->router));
    if (p->shared_inner == 0) return HR_OK;
    TRY(weight(b, "moe.shared.gate", p->shared_inner, hidden, &w->gate));
    TRY(weight(b, "moe.shared.up", p->shared_inner, hidden, &w->up));
    TRY(weight(b, "moe.shared.down", hidden, p->shared_inner, &w->down));
    if (p->shared_gate) TRY(steering(b, "moe.shared_gate", 1, hidden, &w->shared_gate));
    return HR_OK;
}

static hr_status bind_dense(struct binder *b, const struct dense_part *p, struct dense_weights *w)
{
    const uint32_t hidden = b->m->arch.hidden;
    TRY(weight(b, "ffn.gate", p->inner, hidden, &w->gate));
    TRY(weight(b, "ffn.up", p->inner, hidden, &w->up));
    return weight(b, "ffn.down", hidden, p->inner, &w->down);
}

/* Banks are in ascending layer order: the next one must be this layer's. */
static hr_status match_bank(struct binder *b, const struct moe_part *p, uint32_t bank)
{
    const struct container *c = b->m->c;
    const uint32_t hidden = b->m->arch.hidden;
    if (bank >= c->bank_count || c->banks[bank].layer != b->layer)
        return fail(b->err, HR_ERR_FORMAT, "%s/manifest.json: layer %u needs a bank of experts and has none",
                    c->path, b->layer);
    const struct bank_entry *e = &c->banks[bank];
    if (e->experts == p->experts && e->hidden == hidden && e->inner == p->inner) return HR_OK;
    return fail(b->err, HR_ERR_FORMAT,
                "%s/manifest.json: the bank of layer %u holds %u experts [%u, %u]; the model needs %u [%u, %u]",
                c->path, b->layer, e->experts, e->inner, e->hidden, p->experts, p->inner, hidden);
}

static hr_status bind_all(struct binder *b)
{
    struct model *m = b->m;
    const struct architecture *a = &m->arch;
    TRY(weight(b, "embed", a->vocab_size, a->hidden, &m->embed));
    TRY(vector(b, "final_norm", a->hidden, &m->final_norm));
    if (a->tied)
        m->head = m->embed;
    else
        TRY(weight(b, "head", a->vocab_size, a->hidden, &m->head));
    uint32_t bank = 0;
    b->in_layer = true;
    for (uint32_t i = 0; i < a->layers; i++) {
        struct layer_weights *w = &m->layers[i];
        const struct mixer_part *mixer = layer_mixer(a, i);
        const struct ffn_part *ffn = layer_ffn(a, i);
        b->layer = i;
        TRY(vector(b, "mixer_norm", a->hidden, &w->mixer_norm));
        TRY(vector(b, "ffn_norm", a->hidden, &w->ffn_norm));
        if (mixer->kind == MIXER_ATTENTION)
            TRY(bind_attention(b, mixer, &w->attention));
        else
            TRY(bind_delta(b, &mixer->delta, &w->delta));
        if (ffn->kind == FFN_DENSE) {
            TRY(bind_dense(b, &ffn->dense, &w->dense));
            continue;
        }
        TRY(match_bank(b, &ffn->moe, bank));
        w->bank = bank++;
        TRY(bind_moe(b, &ffn->moe, &w->moe));
    }
    if (bank < m->c->bank_count)
        return fail(b->err, HR_ERR_FORMAT, "%s/manifest.json: a bank of experts is given for layer %u, which has none",
                    m->c->path, m->c->banks[bank].layer);
    for (uint32_t i = 0; i < m->c->tensor_count; i++)
        if (!(b->used[i / USED_BITS] >> (i % USED_BITS) & 1))
            return fail(b->err, HR_ERR_FORMAT, "%s/manifest.json: tensor \"%s\" belongs to no part of the model",
                        m->c->path, m->c->tensors[i].name);
    return HR_OK;
}

hr_status model_bind(struct model *m, hr_error *err)
{
    const size_t bytes = (m->c->tensor_count / USED_BITS + 1) * sizeof(uint64_t);
    struct binder b = {.m = m, .used = mem_alloc(&m->mem, bytes), .err = err};
    if (!b.used) return fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes to open the model", bytes);
    const hr_status st = bind_all(&b);
    mem_free(&m->mem, b.used, bytes);
    return st;
}
