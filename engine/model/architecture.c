#include "model/architecture.h"

#include <stdio.h>
#include <string.h>

enum { MAX_DIM = 1 << 20, MAX_VOCAB = 1 << 24, MAX_HEADS = 4096, MAX_HEAD_DIM = 4096 };

/* An integer member in [min, max] as uint32_t. */
static hr_status need_u32(const struct json *o, const char *key, int64_t min, int64_t max,
                          const char *where, uint32_t *out, hr_error *err)
{
    int64_t v = 0;
    TRY(json_need_int(o, key, min, max, where, &v, err));
    *out = (uint32_t)v;
    return HR_OK;
}

static hr_status need_float(const struct json *o, const char *key, double min, double max,
                            const char *where, float *out, hr_error *err)
{
    double v = 0;
    TRY(json_need_real(o, key, min, max, where, &v, err));
    *out = (float)v;
    return HR_OK;
}

/* A string member that must be one particular word today. */
static hr_status need_word(const struct json *o, const char *key, const char *word,
                           const char *where, hr_error *err)
{
    const char *s = NULL;
    TRY(json_need_string(o, key, where, &s, err));
    if (strcmp(s, word) == 0) return HR_OK;
    return fail(err, HR_ERR_UNSUPPORTED, "%s: \"%s\" is \"%s\"; this version knows \"%s\"", where,
                key, s, word);
}

static hr_status read_attention(const struct json *o, const char *where, float norm_eps,
                                struct mixer_part *out, hr_error *err)
{
    static const char *const keys[] = {"kind",       "heads", "kv_heads", "head_dim",
                                       "rotary_dim", "rope",  "qk_norm",  "output_gate",
                                       NULL};
    struct attention_part *p = &out->attention;
    TRY(json_only_keys(o, keys, where, err));
    TRY(need_u32(o, "heads", 1, MAX_HEADS, where, &p->heads, err));
    TRY(need_u32(o, "kv_heads", 1, MAX_HEADS, where, &p->kv_heads, err));
    TRY(need_u32(o, "head_dim", 1, MAX_HEAD_DIM, where, &p->head_dim, err));
    TRY(need_u32(o, "rotary_dim", 0, p->head_dim, where, &p->rotary_dim, err));
    TRY(json_need_bool(o, "qk_norm", where, &p->qk_norm, err));
    TRY(json_need_bool(o, "output_gate", where, &p->output_gate, err));
    p->norm_eps = norm_eps;
    if (p->heads % p->kv_heads != 0)
        return fail(err, HR_ERR_FORMAT, "%s: %u heads do not divide among %u kv_heads", where,
                    p->heads, p->kv_heads);
    if (p->rotary_dim % 2 != 0)
        return fail(err, HR_ERR_FORMAT, "%s: rotary_dim %u is odd", where, p->rotary_dim);
    if (p->rotary_dim == 0) {
        if (json_kind(json_get(o, "rope")) != JSON_NULL)
            return fail(err, HR_ERR_FORMAT, "%s: rope must be null when rotary_dim is 0", where);
        return HR_OK;
    }
    const char *rope = NULL;
    TRY(json_need_string(o, "rope", where, &rope, err));
    if (strlen(rope) == 0 || strlen(rope) >= sizeof out->rope)
        return fail(err, HR_ERR_FORMAT, "%s: rope must name a tensor", where);
    snprintf(out->rope, sizeof out->rope, "%s", rope);
    return HR_OK;
}

static hr_status read_delta(const struct json *o, const char *where, struct delta_part *p,
                            hr_error *err)
{
    static const char *const keys[] = {"kind",      "key_heads", "value_heads", "key_dim",
                                       "value_dim", "conv_taps", "decay",       "gate",
                                       "qk_norm_eps", "norm_eps", NULL};
    TRY(json_only_keys(o, keys, where, err));
    TRY(need_u32(o, "key_heads", 1, MAX_HEADS, where, &p->key_heads, err));
    TRY(need_u32(o, "value_heads", 1, MAX_HEADS, where, &p->value_heads, err));
    TRY(need_u32(o, "key_dim", 1, MAX_HEAD_DIM, where, &p->key_dim, err));
    TRY(need_u32(o, "value_dim", 1, MAX_HEAD_DIM, where, &p->value_dim, err));
    TRY(need_u32(o, "conv_taps", 1, 8, where, &p->conv_taps, err));
    TRY(need_word(o, "decay", "head", where, err));
    TRY(need_word(o, "gate", "silu", where, err));
    TRY(need_float(o, "qk_norm_eps", 0, 1, where, &p->qk_norm_eps, err));
    TRY(need_float(o, "norm_eps", 0, 1, where, &p->norm_eps, err));
    if (p->value_heads % p->key_heads != 0)
        return fail(err, HR_ERR_FORMAT, "%s: %u value_heads do not divide among %u key_heads",
                    where, p->value_heads, p->key_heads);
    return HR_OK;
}

static hr_status read_mixer(const struct json *o, const char *where, float norm_eps,
                            struct mixer_part *out, hr_error *err)
{
    const char *kind = NULL;
    TRY(json_need_string(o, "kind", where, &kind, err));
    if (strcmp(kind, "attention") == 0) {
        out->kind = MIXER_ATTENTION;
        return read_attention(o, where, norm_eps, out, err);
    }
    if (strcmp(kind, "delta") == 0) {
        out->kind = MIXER_DELTA;
        return read_delta(o, where, &out->delta, err);
    }
    return fail(err, HR_ERR_UNSUPPORTED, "%s: mixer kind \"%s\" is not known to this version",
                where, kind);
}

static hr_status read_moe(const struct json *o, const char *where, struct moe_part *p,
                          hr_error *err)
{
    static const char *const keys[] = {"kind",    "experts",     "top_k",   "inner",
                                       "router",  "renormalize", "scaling", "activation",
                                       "shared_inner", "shared_gate", NULL};
    TRY(json_only_keys(o, keys, where, err));
    TRY(need_u32(o, "experts", 1, 65536, where, &p->experts, err));
    TRY(need_u32(o, "top_k", 1, p->experts < 256 ? p->experts : 256, where, &p->top_k, err));
    TRY(need_u32(o, "inner", 1, MAX_DIM, where, &p->inner, err));
    TRY(need_u32(o, "shared_inner", 0, MAX_DIM, where, &p->shared_inner, err));
    TRY(need_word(o, "router", "softmax", where, err));
    TRY(need_word(o, "activation", "silu_glu", where, err));
    TRY(json_need_bool(o, "renormalize", where, &p->renormalize, err));
    TRY(json_need_bool(o, "shared_gate", where, &p->shared_gate, err));
    TRY(need_float(o, "scaling", 1e-6, 1e6, where, &p->scaling, err));
    if (p->shared_gate && p->shared_inner == 0)
        return fail(err, HR_ERR_FORMAT, "%s: shared_gate without a shared expert", where);
    return HR_OK;
}

static hr_status read_ffn(const struct json *o, const char *where, struct ffn_part *out,
                          hr_error *err)
{
    static const char *const dense_keys[] = {"kind", "inner", "activation", NULL};
    const char *kind = NULL;
    TRY(json_need_string(o, "kind", where, &kind, err));
    if (strcmp(kind, "moe") == 0) {
        out->kind = FFN_MOE;
        return read_moe(o, where, &out->moe, err);
    }
    if (strcmp(kind, "dense") == 0) {
        out->kind = FFN_DENSE;
        TRY(json_only_keys(o, dense_keys, where, err));
        TRY(need_word(o, "activation", "silu_glu", where, err));
        return need_u32(o, "inner", 1, MAX_DIM, where, &out->dense.inner, err);
    }
    return fail(err, HR_ERR_UNSUPPORTED, "%s: ffn kind \"%s\" is not known to this version", where,
                kind);
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

static hr_status read_layers(const struct json *list, struct architecture *a, hr_error *err)
{
    static const char *const keys[] = {"mixer", "ffn", NULL};
    for (uint32_t i = 0; i < a->layers; i++) {
        const struct json *o = json_at(list, i);
        char where[64];
        uint32_t mixer = 0, ffn = 0;
        snprintf(where, sizeof where, "manifest.json: model: layers[%u]", i);
        if (json_kind(o) != JSON_OBJECT)
            return fail(err, HR_ERR_FORMAT, "%s is not an object", where);
        TRY(json_only_keys(o, keys, where, err));
        TRY(need_u32(o, "mixer", 0, (int64_t)a->mixer_count - 1, where, &mixer, err));
        TRY(need_u32(o, "ffn", 0, (int64_t)a->ffn_count - 1, where, &ffn, err));
        a->layer[i].mixer = (uint8_t)mixer;
        a->layer[i].ffn = (uint8_t)ffn;
        const struct ffn_part *f = &a->ffns[ffn];
        if (f->kind != FFN_MOE) continue;
        a->moe_layers++;
        if (f->moe.experts > a->max_experts) a->max_experts = f->moe.experts;
        if (f->moe.top_k > a->max_top_k) a->max_top_k = f->moe.top_k;
    }
    return HR_OK;
}

hr_status architecture_read(const struct json *model, struct architecture *a, hr_error *err)
{
    static const char *const keys[] = {"name",     "vocab_size", "hidden_size", "max_position",
                                       "norm_eps", "residual",   "head",        "mixers",
                                       "ffns",     "layers",     NULL};
    static const char *const residual_keys[] = {"kind", NULL};
    const char *where = "manifest.json: model", *name = NULL, *head = NULL;
    const struct json *residual = NULL, *list = NULL;
    memset(a, 0, sizeof *a);
    TRY(json_only_keys(model, keys, where, err));
    TRY(json_need_string(model, "name", where, &name, err));
    if (strlen(name) >= sizeof a->name)
        return fail(err, HR_ERR_FORMAT, "%s: name is longer than %zu bytes", where,
                    sizeof a->name - 1);
    snprintf(a->name, sizeof a->name, "%s", name);
    TRY(need_u32(model, "vocab_size", 1, MAX_VOCAB, where, &a->vocab_size, err));
    TRY(need_u32(model, "hidden_size", 1, 1 << 17, where, &a->hidden, err));
    TRY(need_u32(model, "max_position", 1, 1 << 27, where, &a->max_position, err));
    TRY(need_float(model, "norm_eps", 0, 1, where, &a->norm_eps, err));
    TRY(json_need(model, "residual", JSON_OBJECT, where, &residual, err));
    TRY(json_only_keys(residual, residual_keys, "manifest.json: model: residual", err));
    TRY(need_word(residual, "kind", "plain", "manifest.json: model: residual", err));
    TRY(json_need_string(model, "head", where, &head, err));
    if (strcmp(head, "head") != 0 && strcmp(head, "embed") != 0)
        return fail(err, HR_ERR_FORMAT, "%s: head is \"%s\"; it must be \"head\" or \"embed\"",
                    where, head);
    a->tied = strcmp(head, "embed") == 0;

    char at[64];
    TRY(need_list(model, "mixers", MAX_PARTS, &list, &a->mixer_count, err));
    for (uint32_t i = 0; i < a->mixer_count; i++) {
        snprintf(at, sizeof at, "manifest.json: model: mixers[%u]", i);
        TRY(read_mixer(json_at(list, i), at, a->norm_eps, &a->mixers[i], err));
    }
    TRY(need_list(model, "ffns", MAX_PARTS, &list, &a->ffn_count, err));
    for (uint32_t i = 0; i < a->ffn_count; i++) {
        snprintf(at, sizeof at, "manifest.json: model: ffns[%u]", i);
        TRY(read_ffn(json_at(list, i), at, &a->ffns[i], err));
    }
    TRY(need_list(model, "layers", MAX_LAYERS, &list, &a->layers, err));
    return read_layers(list, a, err);
}
