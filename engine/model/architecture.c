#include "model/architecture.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "model/part_reader.h"

static hr_status read_sparse(const struct json *o, const char *where, struct attention_part *p,
                             hr_error *err)
{
    static const char *const keys[] = {"heads", "dim", "budget", "block", NULL};
    const struct json *sparse = json_get(o, "sparse");
    struct sparse_part *s = &p->sparse;
    if (json_kind(sparse) == JSON_NULL) return HR_OK;
    TRY(json_need(o, "sparse", JSON_OBJECT, where, &sparse, err));
    TRY(json_only_keys(sparse, keys, where, err));
    TRY(json_need_u32(sparse, "heads", 1, MAX_HEADS, where, &s->heads, err));
    TRY(json_need_u32(sparse, "dim", 1, MAX_HEAD_DIM, where, &s->dim, err));
    TRY(json_need_u32(sparse, "block", 1, ATTN_BLOCK, where, &s->block, err));
    TRY(json_need_u32(sparse, "budget", s->block, 1 << 20, where, &s->budget, err));
    if (2 * p->rope.half > s->dim)
        return fail(err, HR_ERR_FORMAT, "%s: rotary_dim %u is wider than the indexer's dim %u", where,
                    2 * p->rope.half, s->dim);
    if (s->budget % s->block != 0)
        return fail(err, HR_ERR_FORMAT, "%s: budget %u is no multiple of block %u", where, s->budget,
                    s->block);
    if (p->window)
        return fail(err, HR_ERR_UNSUPPORTED, "%s: window and sparse together", where);
    return HR_OK;
}

static hr_status read_attention(const struct json *o, const char *where, float norm_eps,
                                struct mixer_part *out, hr_error *err)
{
    static const char *const keys[] = {"kind",    "heads",         "kv_heads",    "head_dim",
                                       "rotary_dim", "rope",       "rope_scale",  "qk_norm",
                                       "qk_norm_width", "output_gate", "bias",    "output_bias",
                                       "sinks",   "window",        "scale",       "sparse",
                                       NULL};
    static const char *const widths[] = {"head", "vector", NULL};
    struct attention_part *p = &out->attention;
    uint32_t rotary = 0, vector = 0;
    TRY(json_only_keys(o, keys, where, err));
    TRY(json_need_u32(o, "heads", 1, MAX_HEADS, where, &p->heads, err));
    TRY(json_need_u32(o, "kv_heads", 1, MAX_HEADS, where, &p->kv_heads, err));
    TRY(json_need_u32(o, "head_dim", 1, MAX_HEAD_DIM, where, &p->head_dim, err));
    TRY(json_need_u32(o, "rotary_dim", 0, p->head_dim, where, &rotary, err));
    TRY(json_need_bool(o, "qk_norm", where, &p->qk_norm, err));
    TRY(json_need_bool(o, "output_gate", where, &p->output_gate, err));
    TRY(optional_word(o, "qk_norm_width", widths, where, &vector, err));
    TRY(optional_bool(o, "bias", where, &p->bias, err));
    TRY(optional_bool(o, "output_bias", where, &p->output_bias, err));
    TRY(optional_bool(o, "sinks", where, &p->sinks, err));
    TRY(optional_u32(o, "window", 0, 0, 1 << 27, where, &p->window, err));
    TRY(optional_float(o, "scale", 0, 0, 1e6, where, &p->scale, err));
    p->qk_norm_vector = vector == 1;
    p->norm_eps = norm_eps;
    if (p->scale == 0) p->scale = 1.0f / sqrtf((float)p->head_dim);
    if (p->heads % p->kv_heads != 0)
        return fail(err, HR_ERR_FORMAT, "%s: %u heads do not divide among %u kv_heads", where,
                    p->heads, p->kv_heads);
    if (p->heads / p->kv_heads > MAX_GROUP)
        return fail(err, HR_ERR_UNSUPPORTED, "%s: %u query heads share a key head; at most %d can",
                    where, p->heads / p->kv_heads, MAX_GROUP);
    TRY(read_rope(o, rotary, where, &p->rope, out->rope, err));
    return read_sparse(o, where, p, err);
}

static hr_status read_mla(const struct json *o, const char *where, struct mixer_part *out,
                          hr_error *err)
{
    static const char *const keys[] = {"kind",     "heads", "q_lora_rank", "kv_lora_rank", "nope_dim",
                                       "rope_dim", "v_dim", "rope",        "rope_scale",   "scale",
                                       "output_gate", "inner_eps", NULL};
    struct mla_part *p = &out->mla;
    TRY(json_only_keys(o, keys, where, err));
    TRY(json_need_u32(o, "heads", 1, MAX_HEADS, where, &p->heads, err));
    TRY(json_need_u32(o, "q_lora_rank", 0, MAX_DIM, where, &p->q_lora_rank, err));
    TRY(json_need_u32(o, "kv_lora_rank", 1, MAX_HEAD_DIM, where, &p->kv_lora_rank, err));
    TRY(json_need_u32(o, "nope_dim", 1, MAX_HEAD_DIM, where, &p->nope_dim, err));
    TRY(json_need_u32(o, "rope_dim", 0, MAX_HEAD_DIM, where, &p->rope_dim, err));
    TRY(json_need_u32(o, "v_dim", 1, MAX_HEAD_DIM, where, &p->v_dim, err));
    TRY(need_float(o, "scale", 1e-6, 1e6, where, &p->scale, err));
    TRY(json_need_bool(o, "output_gate", where, &p->output_gate, err));
    TRY(need_float(o, "inner_eps", 0, 1, where, &p->inner_eps, err));
    const bool rotates = json_kind(json_get(o, "rope")) != JSON_NULL;
    return read_rope(o, rotates ? p->rope_dim : 0, where, &p->rope, out->rope, err);
}

static hr_status read_delta(const struct json *o, const char *where, struct delta_part *p,
                            hr_error *err)
{
    static const char *const keys[] = {"kind",       "key_heads",   "value_heads", "key_dim",
                                       "value_dim",  "conv_taps",   "decay",       "decay_gate",
                                       "decay_bound", "decay_rank", "gate",        "gate_rank",
                                       "qk_norm_eps", "norm_eps",   NULL};
    static const char *const decays[] = {"head", "channel", NULL};
    static const char *const decay_gates[] = {"softplus", "bounded", NULL};
    static const char *const gates[] = {"silu", "sigmoid", NULL};
    uint32_t decay = 0, decay_gate = 0, gate = 0;
    TRY(json_only_keys(o, keys, where, err));
    TRY(json_need_u32(o, "key_heads", 1, MAX_HEADS, where, &p->key_heads, err));
    TRY(json_need_u32(o, "value_heads", 1, MAX_HEADS, where, &p->value_heads, err));
    TRY(json_need_u32(o, "key_dim", 1, MAX_HEAD_DIM, where, &p->key_dim, err));
    TRY(json_need_u32(o, "value_dim", 1, MAX_HEAD_DIM, where, &p->value_dim, err));
    TRY(json_need_u32(o, "conv_taps", 1, 8, where, &p->conv_taps, err));
    TRY(need_word(o, "decay", decays, where, &decay, err));
    TRY(optional_word(o, "decay_gate", decay_gates, where, &decay_gate, err));
    TRY(need_word(o, "gate", gates, where, &gate, err));
    TRY(optional_u32(o, "decay_rank", 0, 0, MAX_DIM, where, &p->decay_rank, err));
    TRY(optional_u32(o, "gate_rank", 0, 0, MAX_DIM, where, &p->gate_rank, err));
    TRY(need_float(o, "qk_norm_eps", 0, 1, where, &p->qk_norm_eps, err));
    TRY(need_float(o, "norm_eps", 0, 1, where, &p->norm_eps, err));
    p->decay_channel = decay == 1;
    p->decay_bounded = decay_gate == 1;
    p->gate_sigmoid = gate == 1;
    if (p->decay_bounded) TRY(need_float(o, "decay_bound", -1e6, 0, where, &p->decay_bound, err));
    if (p->value_heads % p->key_heads != 0 || (p->decay_channel && p->value_heads != p->key_heads))
        return fail(err, HR_ERR_FORMAT, "%s: %u value_heads do not fit %u key_heads", where,
                    p->value_heads, p->key_heads);
    return HR_OK;
}

static hr_status read_mixer(const struct json *o, const char *where, float norm_eps,
                            struct mixer_part *out, hr_error *err)
{
    static const char *const kinds[] = {"attention", "mla", "delta", NULL};
    uint32_t kind = 0;
    TRY(need_word(o, "kind", kinds, where, &kind, err));
    out->kind = (enum mixer_kind)kind;
    switch (out->kind) {
    case MIXER_ATTENTION: return read_attention(o, where, norm_eps, out, err);
    case MIXER_MLA: return read_mla(o, where, out, err);
    case MIXER_DELTA: return read_delta(o, where, &out->delta, err);
    }
    return HR_OK;
}

static hr_status read_router(const struct json *o, const char *where, struct moe_part *p,
                             hr_error *err)
{
    static const char *const routers[] = {"softmax", "softmax_chosen", "sigmoid", NULL};
    static const char *const scores[] = {"top2", "max", NULL};
    uint32_t router = 0, score = 0;
    TRY(need_word(o, "router", routers, where, &router, err));
    TRY(optional_bool(o, "router_bias", where, &p->router_bias, err));
    TRY(optional_bool(o, "select_bias", where, &p->select_bias, err));
    TRY(optional_u32(o, "groups", 1, 1, 256, where, &p->groups, err));
    TRY(optional_u32(o, "top_groups", 1, 1, p->groups, where, &p->top_groups, err));
    TRY(optional_word(o, "group_score", scores, where, &score, err));
    TRY(json_need_bool(o, "renormalize", where, &p->renormalize, err));
    TRY(need_float(o, "scaling", 1e-6, 1e6, where, &p->scaling, err));
    p->router = (enum router_kind)router;
    p->group_max = score == 1;
    if (p->select_bias && p->router != ROUTER_SIGMOID)
        return fail(err, HR_ERR_UNSUPPORTED, "%s: select_bias with a softmax router", where);
    if (p->renormalize && p->router == ROUTER_SOFTMAX_CHOSEN)
        return fail(err, HR_ERR_FORMAT, "%s: softmax_chosen weights are normalised already", where);
    if (p->experts % p->groups != 0 || p->experts / p->groups * p->top_groups < p->top_k)
        return fail(err, HR_ERR_FORMAT, "%s: %u groups, of which %u are kept, do not fit %u experts and top_k %u",
                    where, p->groups, p->top_groups, p->experts, p->top_k);
    return HR_OK;
}

static hr_status read_moe(const struct json *o, const char *where, float norm_eps,
                          struct moe_part *p, hr_error *err)
{
    static const char *const keys[] = {
        "kind",        "experts",     "top_k",        "inner",       "router",      "router_bias",
        "select_bias", "groups",      "top_groups",   "group_score", "renormalize", "scaling",
        "activation",  "beta",        "linear_beta",  "alpha",       "limit",       "shared_inner",
        "shared_gate", "expert_bias", "latent",       "latent_norm", NULL};
    TRY(json_only_keys(o, keys, where, err));
    TRY(json_need_u32(o, "experts", 1, 65536, where, &p->experts, err));
    TRY(json_need_u32(o, "top_k", 1, p->experts < 256 ? p->experts : 256, where, &p->top_k, err));
    TRY(json_need_u32(o, "inner", 1, MAX_DIM, where, &p->inner, err));
    TRY(json_need_u32(o, "shared_inner", 0, MAX_DIM, where, &p->shared_inner, err));
    TRY(json_need_bool(o, "shared_gate", where, &p->shared_gate, err));
    TRY(optional_bool(o, "expert_bias", where, &p->expert_bias, err));
    TRY(optional_u32(o, "latent", 0, 0, MAX_DIM, where, &p->latent, err));
    TRY(optional_bool(o, "latent_norm", where, &p->latent_norm, err));
    TRY(read_activation(o, where, &p->act, err));
    p->norm_eps = norm_eps;
    if (p->shared_gate && p->shared_inner == 0)
        return fail(err, HR_ERR_FORMAT, "%s: shared_gate without a shared expert", where);
    if (p->latent_norm && p->latent == 0)
        return fail(err, HR_ERR_FORMAT, "%s: latent_norm without latent", where);
    return read_router(o, where, p, err);
}

static hr_status read_ffn(const struct json *o, const char *where, float norm_eps,
                          struct ffn_part *out, hr_error *err)
{
    static const char *const kinds[] = {"dense", "moe", NULL};
    static const char *const dense_keys[] = {"kind",  "inner", "activation", "beta", "linear_beta",
                                             "alpha", "limit", NULL};
    uint32_t kind = 0;
    TRY(need_word(o, "kind", kinds, where, &kind, err));
    out->kind = (enum ffn_kind)kind;
    if (out->kind == FFN_MOE) return read_moe(o, where, norm_eps, &out->moe, err);
    TRY(json_only_keys(o, dense_keys, where, err));
    TRY(json_need_u32(o, "inner", 1, MAX_DIM, where, &out->dense.inner, err));
    return read_activation(o, where, &out->dense.act, err);
}

static hr_status read_residual(const struct json *model, struct architecture *a, hr_error *err)
{
    static const char *const kinds[] = {"plain", "attn_res", "hyper", NULL};
    static const char *const plain_keys[] = {"kind", "multiplier", NULL};
    static const char *const attn_res_keys[] = {"kind", "block", NULL};
    static const char *const hyper_keys[] = {"kind", "count", "lowrank", NULL};
    const char *where = "manifest.json: model: residual";
    struct residual_part *r = &a->residual;
    const struct json *o = NULL;
    uint32_t kind = 0;
    TRY(json_need(model, "residual", JSON_OBJECT, "manifest.json: model", &o, err));
    TRY(need_word(o, "kind", kinds, where, &kind, err));
    r->kind = (enum residual_kind)kind;
    r->norm_eps = a->norm_eps;
    switch (r->kind) {
    case RESIDUAL_PLAIN:
        TRY(json_only_keys(o, plain_keys, where, err));
        return optional_float(o, "multiplier", 1, -1e6, 1e6, where, &r->multiplier, err);
    case RESIDUAL_ATTN_RES:
        TRY(json_only_keys(o, attn_res_keys, where, err));
        return json_need_u32(o, "block", 1, MAX_LAYERS, where, &r->block, err);
    case RESIDUAL_HYPER:
        TRY(json_only_keys(o, hyper_keys, where, err));
        TRY(json_need_u32(o, "count", 1, 16, where, &r->count, err));
        return json_need_u32(o, "lowrank", 1, MAX_DIM, where, &r->lowrank, err);
    }
    return HR_OK;
}

/* An array member of 1..max objects. */
static hr_status need_list(const struct json *o, const char *key, uint32_t max,
                           const struct json **out, uint32_t *count, hr_error *err)
{
    TRY(json_need(o, key, JSON_ARRAY, "manifest.json: model", out, err));
    const size_t n = json_len(*out);
    if (n == 0 || n > max)
        return fail(err, HR_ERR_FORMAT, "manifest.json: model: \"%s\" has %zu entries, 1 to %u are allowed",
                    key, n, max);
    *count = (uint32_t)n;
    return HR_OK;
}

/* The tensors of a layer bound a part's dimensions; one without layers nothing bounds. */
static hr_status all_used(const struct architecture *a, hr_error *err)
{
    uint64_t mixers = 0, ffns = 0;
    for (uint32_t i = 0; i < a->layers; i++) {
        mixers |= (uint64_t)1 << a->layer[i].mixer;
        ffns |= (uint64_t)1 << a->layer[i].ffn;
    }
    for (uint32_t i = 0; i < MAX_PARTS; i++) {
        const bool mixer = i < a->mixer_count && !(mixers >> i & 1);
        if (mixer || (i < a->ffn_count && !(ffns >> i & 1)))
            return fail(err, HR_ERR_FORMAT, "manifest.json: model: %s[%u] belongs to no layer",
                        mixer ? "mixers" : "ffns", i);
    }
    return HR_OK;
}

static hr_status read_layers(const struct json *list, struct architecture *a, hr_error *err)
{
    static const char *const keys[] = {"mixer", "ffn", NULL};
    for (uint32_t i = 0; i < a->layers; i++) {
        const struct json *o = json_at(list, i);
        char where[64];
        uint32_t mixer = 0, ffn = 0;
        snprintf(where, sizeof where, "manifest.json: model: layers[%u]", i);
        TRY(json_only_keys(o, keys, where, err));
        TRY(json_need_u32(o, "mixer", 0, (int64_t)a->mixer_count - 1, where, &mixer, err));
        TRY(json_need_u32(o, "ffn", 0, (int64_t)a->ffn_count - 1, where, &ffn, err));
        a->layer[i].mixer = (uint8_t)mixer;
        a->layer[i].ffn = (uint8_t)ffn;
        const struct ffn_part *f = &a->ffns[ffn];
        if (f->kind != FFN_MOE) continue;
        a->moe_layers++;
        if (f->moe.experts > a->max_experts) a->max_experts = f->moe.experts;
        if (f->moe.top_k > a->max_top_k) a->max_top_k = f->moe.top_k;
    }
    if (a->residual.kind == RESIDUAL_ATTN_RES &&
        (a->layers - 1) / a->residual.block + 1 > MAX_SNAPSHOTS)
        return fail(err, HR_ERR_UNSUPPORTED, "manifest.json: model: residual: more than %d blocks",
                    MAX_SNAPSHOTS);
    return all_used(a, err);
}

static hr_status read_top(const struct json *model, struct architecture *a, hr_error *err)
{
    static const char *const keys[] = {"name",        "vocab_size",  "hidden_size", "max_position",
                                       "norm_eps",    "embed_scale", "logit_scale", "residual",
                                       "head",        "mixers",      "ffns",        "layers",
                                       "ngram",       NULL};
    static const char *const heads[] = {"head", "embed", NULL};
    const char *where = "manifest.json: model", *name = NULL;
    uint32_t head = 0;
    TRY(json_only_keys(model, keys, where, err));
    TRY(json_need_string(model, "name", where, &name, err));
    if (strlen(name) >= sizeof a->name)
        return fail(err, HR_ERR_FORMAT, "%s: name is longer than %zu bytes", where,
                    sizeof a->name - 1);
    if (!utf8_is_printable(name))
        return fail(err, HR_ERR_FORMAT, "%s: name holds control characters", where);
    snprintf(a->name, sizeof a->name, "%s", name);
    TRY(json_need_u32(model, "vocab_size", 1, MAX_VOCAB, where, &a->vocab_size, err));
    TRY(json_need_u32(model, "hidden_size", 1, 1 << 17, where, &a->hidden, err));
    TRY(json_need_u32(model, "max_position", 1, 1 << 27, where, &a->max_position, err));
    TRY(need_float(model, "norm_eps", 0, 1, where, &a->norm_eps, err));
    TRY(optional_float(model, "embed_scale", 1, -1e6, 1e6, where, &a->embed_scale, err));
    TRY(optional_float(model, "logit_scale", 1, -1e6, 1e6, where, &a->logit_scale, err));
    TRY(need_word(model, "head", heads, where, &head, err));
    a->tied = head == 1;
    return read_residual(model, a, err);
}

size_t architecture_stacks(const struct architecture *a)
{
    size_t n = 0;
    for (uint32_t i = 0; i < a->layers; i++)
        if (layer_mixer(a, i)->kind == MIXER_MLA) n += 2 * (size_t)layer_mixer(a, i)->mla.heads;
    return n;
}

hr_status architecture_read(const struct container *c, struct architecture *a, hr_error *err)
{
    const struct json *model = c->model;
    const struct json *list = NULL;
    char at[64];
    memset(a, 0, sizeof *a);
    for (uint32_t i = 0; i < c->bank_count; i++) a->fine = a->fine || c->banks[i].fine;
    TRY(read_top(model, a, err));
    TRY(need_list(model, "mixers", MAX_PARTS, &list, &a->mixer_count, err));
    for (uint32_t i = 0; i < a->mixer_count; i++) {
        snprintf(at, sizeof at, "manifest.json: model: mixers[%u]", i);
        TRY(read_mixer(json_at(list, i), at, a->norm_eps, &a->mixers[i], err));
    }
    TRY(need_list(model, "ffns", MAX_PARTS, &list, &a->ffn_count, err));
    for (uint32_t i = 0; i < a->ffn_count; i++) {
        snprintf(at, sizeof at, "manifest.json: model: ffns[%u]", i);
        TRY(read_ffn(json_at(list, i), at, a->norm_eps, &a->ffns[i], err));
    }
    TRY(need_list(model, "layers", MAX_LAYERS, &list, &a->layers, err));
    TRY(read_layers(list, a, err));
    return ngram_read(model, a->layers, a->residual.kind == RESIDUAL_HYPER, &a->ngram, err);
}
