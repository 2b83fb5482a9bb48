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
    size_t stacked; /* matrices given out of m->stacks */
    hr_error *err;
};

static hr_status lookup_stack(struct binder *b, const char *part, uint32_t count, uint32_t rows,
                              uint32_t cols, const struct tensor_entry **out)
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
    if (t->count != count || t->rows != rows || t->cols != cols)
        return fail(b->err, HR_ERR_FORMAT,
                    "%s/manifest.json: tensor \"%s\" has shape %u x [%u, %u]; the model needs %u x [%u, %u]",
                    c->path, name, t->count, t->rows, t->cols, count, rows, cols);
    const size_t i = (size_t)(t - c->tensors);
    b->used[i / USED_BITS] |= (uint64_t)1 << (i % USED_BITS);
    *out = t;
    return HR_OK;
}

static hr_status lookup(struct binder *b, const char *part, uint32_t rows, uint32_t cols,
                        const struct tensor_entry **out)
{
    return lookup_stack(b, part, 1, rows, cols, out);
}

static const void *data_of(const struct binder *b, const struct tensor_entry *t)
{
    return b->m->trunk ? b->m->trunk + t->offset : NULL;
}

static const char any_weight[] = "f32, bf16, int8, mxfp4, int4, nl4";

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
    if (t->codec == CODEC_F64 || (steering && codec_reads_quantized(t->codec)))
        return wrong_codec(b, t, steering ? "f32, bf16" : any_weight);
    memset(out, 0, sizeof *out);
    if (b->m->trunk) matrix_bind(out, t->codec, rows, cols, data_of(b, t));
    return HR_OK;
}

static hr_status weight(struct binder *b, const char *part, uint32_t rows, uint32_t cols,
                        struct matrix *out)
{
    return bind_matrix(b, part, rows, cols, false, out);
}

/* Embedding and output matrix: four bits are too few for what every token passes through. */
static hr_status token_matrix(struct binder *b, const char *part, struct matrix *out)
{
    const struct architecture *a = &b->m->arch;
    const struct tensor_entry *t = NULL;
    TRY(lookup(b, part, a->vocab_size, a->hidden, &t));
    if (codec_is_4bit(t->codec)) return wrong_codec(b, t, "f32, bf16, int8");
    return weight(b, part, a->vocab_size, a->hidden, out);
}

/* Matrices whose results decide (router, gates, decay, beta) keep float weights. */
static hr_status steering(struct binder *b, const char *part, uint32_t rows, uint32_t cols,
                          struct matrix *out)
{
    return bind_matrix(b, part, rows, cols, true, out);
}

/* A stack of matrices into the model's own array; *out is its first. */
static hr_status stack(struct binder *b, const char *part, uint32_t count, uint32_t rows,
                       uint32_t cols, const struct matrix **out)
{
    const struct tensor_entry *t = NULL;
    TRY(lookup_stack(b, part, count, rows, cols, &t));
    if (t->codec == CODEC_F64) return wrong_codec(b, t, any_weight);
    *out = b->m->stacks + b->stacked;
    if (b->m->trunk)
        for (uint32_t i = 0; i < count; i++)
            matrix_bind(&b->m->stacks[b->stacked + i], t->codec, rows, cols,
                        (const uint8_t *)data_of(b, t) + (size_t)i * (t->bytes / count));
    b->stacked += count;
    return HR_OK;
}

static hr_status bind_rope(struct binder *b, const struct mixer_part *part,
                           const struct rope_part *rope, const double **out)
{
    const struct tensor_entry *t = NULL;
    if (rope->half == 0) return HR_OK;
    b->in_layer = false;
    TRY(lookup(b, part->rope, 1, rope->half, &t));
    b->in_layer = true;
    if (t->codec != CODEC_F64) return wrong_codec(b, t, "f64");
    *out = data_of(b, t);
    return HR_OK;
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
        TRY(vector(b, "attn.q_norm", p->qk_norm_vector ? q : p->head_dim, &w->q_norm));
        TRY(vector(b, "attn.k_norm", p->qk_norm_vector ? kv : p->head_dim, &w->k_norm));
    }
    if (p->bias) {
        TRY(vector(b, "attn.q_bias", q, &w->q_bias));
        TRY(vector(b, "attn.k_bias", kv, &w->k_bias));
        TRY(vector(b, "attn.v_bias", kv, &w->v_bias));
    }
    if (p->output_bias) TRY(vector(b, "attn.o_bias", hidden, &w->o_bias));
    if (p->sinks) TRY(vector(b, "attn.sinks", p->heads, &w->sinks));
    if (p->sparse.heads) {
        TRY(steering(b, "attn.index_q", p->sparse.heads * p->sparse.dim, hidden, &w->index_q));
        TRY(steering(b, "attn.index_k", p->sparse.dim, hidden, &w->index_k));
        TRY(vector(b, "attn.index_q_norm", p->sparse.dim, &w->index_q_norm));
        TRY(vector(b, "attn.index_k_norm", p->sparse.dim, &w->index_k_norm));
    }
    return bind_rope(b, part, &p->rope, &w->frequency);
}

static hr_status bind_mla(struct binder *b, const struct mixer_part *part, struct mla_weights *w)
{
    const struct mla_part *p = &part->mla;
    const uint32_t hidden = b->m->arch.hidden, q = p->heads * (p->nope_dim + p->rope_dim);
    if (p->q_lora_rank) {
        TRY(weight(b, "mla.q_a", p->q_lora_rank, hidden, &w->q_a));
        TRY(vector(b, "mla.q_a_norm", p->q_lora_rank, &w->q_a_norm));
        TRY(weight(b, "mla.q_b", q, p->q_lora_rank, &w->q));
    } else {
        TRY(weight(b, "mla.q", q, hidden, &w->q));
    }
    TRY(weight(b, "mla.kv_a", p->kv_lora_rank + p->rope_dim, hidden, &w->kv_a));
    TRY(vector(b, "mla.kv_a_norm", p->kv_lora_rank, &w->kv_a_norm));
    TRY(stack(b, "mla.k_b", p->heads, p->kv_lora_rank, p->nope_dim, &w->k_b));
    TRY(stack(b, "mla.v_b", p->heads, p->v_dim, p->kv_lora_rank, &w->v_b));
    if (p->output_gate) TRY(weight(b, "mla.gate", p->heads * p->v_dim, hidden, &w->gate));
    TRY(weight(b, "mla.o", hidden, p->heads * p->v_dim, &w->o));
    return bind_rope(b, part, &p->rope, &w->frequency);
}

static hr_status bind_delta(struct binder *b, const struct delta_part *p, struct delta_weights *w)
{
    const uint32_t hidden = b->m->arch.hidden, vd = p->value_heads * p->value_dim;
    TRY(weight(b, "delta.qkv", delta_channels(p), hidden, &w->qkv));
    if (p->gate_rank) {
        TRY(weight(b, "delta.z_down", p->gate_rank, hidden, &w->z_down));
        TRY(weight(b, "delta.z_up", vd, p->gate_rank, &w->z));
    } else {
        TRY(weight(b, "delta.z", vd, hidden, &w->z));
    }
    if (p->decay_rank) {
        TRY(steering(b, "delta.a_down", p->decay_rank, hidden, &w->a_down));
        TRY(steering(b, "delta.a_up", delta_decays(p), p->decay_rank, &w->a));
    } else {
        TRY(steering(b, "delta.a", delta_decays(p), hidden, &w->a));
    }
    TRY(steering(b, "delta.b", p->value_heads, hidden, &w->b));
    TRY(table(b, "delta.conv", p->conv_taps, delta_channels(p), &w->conv));
    TRY(vector(b, "delta.a_log", p->value_heads, &w->a_log));
    TRY(vector(b, "delta.dt_bias", delta_decays(p), &w->dt_bias));
    TRY(vector(b, "delta.norm", p->value_dim, &w->norm));
    return weight(b, "delta.out", hidden, vd, &w->out);
}

static hr_status bind_moe(struct binder *b, const struct moe_part *p, struct moe_weights *w)
{
    const uint32_t hidden = b->m->arch.hidden;
    TRY(steering(b, "moe.router", p->experts, hidden, &w->router));
    if (p->router_bias) TRY(vector(b, "moe.router_bias", p->experts, &w->router_bias));
    if (p->select_bias) TRY(vector(b, "moe.select_bias", p->experts, &w->select_bias));
    if (p->latent) {
        TRY(weight(b, "moe.latent_down", p->latent, hidden, &w->latent_down));
        TRY(weight(b, "moe.latent_up", hidden, p->latent, &w->latent_up));
        if (p->latent_norm) TRY(vector(b, "moe.latent_norm", p->latent, &w->latent_norm));
    }
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

/* What a place of reading needs, under `name` ("mixer", "ffn", "final"). */
static hr_status bind_site(struct binder *b, const char *name, bool writes,
                           struct residual_site *site)
{
    const struct architecture *a = &b->m->arch;
    const struct residual_part *r = &a->residual;
    const uint32_t width = stream_width(a);
    char part[48];
    if (r->kind != RESIDUAL_HYPER) {
        snprintf(part, sizeof part, "%s_norm", name);
        TRY(vector(b, part, a->hidden, &site->norm));
        if (r->kind == RESIDUAL_PLAIN) return HR_OK;
        snprintf(part, sizeof part, "%s_res", name);
        return vector(b, part, a->hidden, &site->res);
    }
    snprintf(part, sizeof part, "%s_hc.norm", name);
    TRY(vector(b, part, width, &site->norm));
    snprintf(part, sizeof part, "%s_hc.down", name);
    TRY(steering(b, part, r->lowrank, width, &site->down));
    snprintf(part, sizeof part, "%s_hc.up", name);
    TRY(steering(b, part, width, r->lowrank, &site->up));
    if (!writes) return HR_OK;
    snprintf(part, sizeof part, "%s_hc.inject", name);
    TRY(steering(b, part, r->count, width, &site->inject));
    site->inject.rows = r->count; /* also when only checking */
    return HR_OK;
}

static hr_status bind_ngram(struct binder *b, struct ngram_weights *w)
{
    const struct architecture *a = &b->m->arch;
    const uint32_t width = stream_width(a), e = a->ngram.tables * a->ngram.dim;
    TRY(weight(b, "ngram.key", width, e, &w->key));
    TRY(weight(b, "ngram.value", a->hidden, e, &w->value));
    TRY(vector(b, "ngram.norm_key", width, &w->norm_key));
    TRY(vector(b, "ngram.norm_query", width, &w->norm_query));
    TRY(vector(b, "ngram.norm_conv", width, &w->norm_conv));
    return table(b, "ngram.conv", a->ngram.conv_taps, width, &w->conv);
}

/* Banks are in ascending layer order: the next one must be this layer's. */
static hr_status match_bank(struct binder *b, const struct moe_part *p, uint32_t bank)
{
    const struct container *c = b->m->c;
    const uint32_t hidden = moe_width(p, b->m->arch.hidden);
    if (bank >= c->bank_count || c->banks[bank].layer != b->layer)
        return fail(b->err, HR_ERR_FORMAT, "%s/manifest.json: layer %u needs a bank of experts and has none",
                    c->path, b->layer);
    const struct bank_entry *e = &c->banks[bank];
    if (e->bias != p->expert_bias)
        return fail(b->err, HR_ERR_FORMAT, "%s/manifest.json: the bank of layer %u %s biases; the model says otherwise",
                    c->path, b->layer, e->bias ? "has" : "has no");
    if (e->experts == p->experts && e->hidden == hidden && e->inner == p->inner) return HR_OK;
    return fail(b->err, HR_ERR_FORMAT,
                "%s/manifest.json: the bank of layer %u holds %u experts [%u, %u]; the model needs %u [%u, %u]",
                c->path, b->layer, e->experts, e->inner, e->hidden, p->experts, p->inner, hidden);
}

static hr_status bind_mixer(struct binder *b, const struct mixer_part *p, struct layer_weights *w)
{
    switch (p->kind) {
    case MIXER_ATTENTION: return bind_attention(b, p, &w->attention);
    case MIXER_MLA: return bind_mla(b, p, &w->mla);
    case MIXER_DELTA: return bind_delta(b, &p->delta, &w->delta);
    }
    return HR_OK;
}

static hr_status bind_all(struct binder *b)
{
    struct model *m = b->m;
    const struct architecture *a = &m->arch;
    TRY(token_matrix(b, "embed", &m->embed));
    TRY(bind_site(b, "final", false, &m->final_site));
    if (a->tied)
        m->head = m->embed;
    else
        TRY(token_matrix(b, "head", &m->head));
    uint32_t bank = 0;
    b->in_layer = true;
    for (uint32_t i = 0; i < a->layers; i++) {
        struct layer_weights *w = &m->layers[i];
        const struct mixer_part *mixer = layer_mixer(a, i);
        const struct ffn_part *ffn = layer_ffn(a, i);
        b->layer = i;
        TRY(bind_site(b, "mixer", true, &w->mixer_site));
        TRY(bind_site(b, "ffn", true, &w->ffn_site));
        TRY(bind_mixer(b, mixer, w));
        if (ffn->kind == FFN_DENSE) {
            TRY(bind_dense(b, &ffn->dense, &w->dense));
            continue;
        }
        TRY(match_bank(b, &ffn->moe, bank));
        w->bank = bank++;
        TRY(bind_moe(b, &ffn->moe, &w->moe));
    }
    for (uint32_t i = 0; i < a->ngram.site_count; i++) {
        b->layer = a->ngram.sites[i].layer;
        TRY(bind_ngram(b, &m->ngram[i]));
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
