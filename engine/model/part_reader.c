#include "model/part_reader.h"

#include <stdio.h>
#include <string.h>

hr_status need_float(const struct json *o, const char *key, double min, double max,
                     const char *where, float *out, hr_error *err)
{
    double v = 0;
    TRY(json_need_real(o, key, min, max, where, &v, err));
    *out = (float)v;
    return HR_OK;
}

hr_status need_word(const struct json *o, const char *key, const char *const *words,
                    const char *where, uint32_t *out, hr_error *err)
{
    const char *s = NULL;
    TRY(json_need_string(o, key, where, &s, err));
    for (uint32_t i = 0; words[i]; i++) {
        if (strcmp(s, words[i]) != 0) continue;
        *out = i;
        return HR_OK;
    }
    return fail(err, HR_ERR_UNSUPPORTED, "%s: %s \"%s\" is not known to this version", where, key, s);
}

hr_status optional_u32(const struct json *o, const char *key, uint32_t otherwise, int64_t min,
                       int64_t max, const char *where, uint32_t *out, hr_error *err)
{
    *out = otherwise;
    return json_get(o, key) ? json_need_u32(o, key, min, max, where, out, err) : HR_OK;
}

hr_status optional_float(const struct json *o, const char *key, float otherwise, double min,
                         double max, const char *where, float *out, hr_error *err)
{
    *out = otherwise;
    return json_get(o, key) ? need_float(o, key, min, max, where, out, err) : HR_OK;
}

hr_status optional_bool(const struct json *o, const char *key, const char *where, bool *out,
                        hr_error *err)
{
    *out = false;
    return json_get(o, key) ? json_need_bool(o, key, where, out, err) : HR_OK;
}

hr_status optional_word(const struct json *o, const char *key, const char *const *words,
                        const char *where, uint32_t *out, hr_error *err)
{
    *out = 0;
    return json_get(o, key) ? need_word(o, key, words, where, out, err) : HR_OK;
}

hr_status read_rope(const struct json *o, uint32_t rotary, const char *where,
                    struct rope_part *out, char name[64], hr_error *err)
{
    const char *rope = NULL;
    TRY(optional_float(o, "rope_scale", 1, 1e-6, 1e6, where, &out->scale, err));
    out->half = rotary / 2;
    name[0] = 0;
    if (rotary % 2 != 0 || out->half > MAX_ROTARY_HALF)
        return fail(err, HR_ERR_FORMAT, "%s: %u rotary dimensions", where, rotary);
    if (rotary == 0) {
        if (json_kind(json_get(o, "rope")) == JSON_NULL) return HR_OK;
        return fail(err, HR_ERR_FORMAT, "%s: rope must be null when nothing is rotated", where);
    }
    TRY(json_need_string(o, "rope", where, &rope, err));
    if (strlen(rope) == 0 || strlen(rope) >= 64)
        return fail(err, HR_ERR_FORMAT, "%s: rope must name a tensor", where);
    snprintf(name, 64, "%s", rope);
    return HR_OK;
}

hr_status read_activation(const struct json *o, const char *where, struct activation *out,
                          hr_error *err)
{
    static const char *const kinds[] = {"silu_glu", "situ_glu", "clamped_glu", NULL};
    uint32_t kind = 0;
    TRY(need_word(o, "activation", kinds, where, &kind, err));
    out->kind = (enum activation_kind)kind;
    switch (out->kind) {
    case ACT_SILU_GLU: return HR_OK;
    case ACT_SITU_GLU:
        TRY(need_float(o, "beta", 1e-6, 1e6, where, &out->a, err));
        return need_float(o, "linear_beta", 0, 1e6, where, &out->b, err);
    case ACT_CLAMPED_GLU:
        TRY(need_float(o, "alpha", 1e-6, 1e6, where, &out->a, err));
        return need_float(o, "limit", 1e-6, 1e6, where, &out->b, err);
    }
    return HR_OK;
}

static hr_status read_u64_list(const struct json *o, const char *key, uint32_t count, int64_t max,
                               const char *where, uint64_t *out, hr_error *err)
{
    const struct json *list = NULL;
    TRY(json_need(o, key, JSON_ARRAY, where, &list, err));
    if (json_len(list) != count)
        return fail(err, HR_ERR_FORMAT, "%s: %s has %zu entries, %u are needed", where, key,
                    json_len(list), count);
    for (uint32_t i = 0; i < count; i++) {
        int64_t v = 0;
        if (!json_int(json_at(list, i), &v) || v < 0 || v > max)
            return fail(err, HR_ERR_FORMAT, "%s: %s[%u] is no integer in 0 .. %lld", where, key, i,
                        (long long)max);
        out[i] = (uint64_t)v;
    }
    return HR_OK;
}

static hr_status read_ngram_site(const struct json *o, uint32_t layers, const char *where,
                                 const struct ngram_part *p, struct ngram_site *s, hr_error *err)
{
    static const char *const keys[] = {"layer", "multipliers", "primes", "offsets", NULL};
    TRY(json_only_keys(o, keys, where, err));
    TRY(json_need_u32(o, "layer", 0, (int64_t)layers - 1, where, &s->layer, err));
    TRY(read_u64_list(o, "multipliers", p->order, INT64_MAX, where, s->multipliers, err));
    TRY(read_u64_list(o, "primes", p->tables, (int64_t)1 << 40, where, s->primes, err));
    TRY(read_u64_list(o, "offsets", p->tables, (int64_t)1 << 40, where, s->offsets, err));
    for (uint32_t i = 0; i < p->tables; i++)
        if (s->primes[i] == 0 || s->offsets[i] + s->primes[i] > p->rows)
            return fail(err, HR_ERR_FORMAT, "%s: table %u reaches beyond the %llu rows", where, i,
                        (unsigned long long)p->rows);
    return HR_OK;
}

static hr_status read_ngram_sites(const struct json *o, uint32_t layers, struct ngram_part *p,
                                  hr_error *err)
{
    const struct json *list = NULL;
    char where[64];
    TRY(json_need(o, "sites", JSON_ARRAY, "manifest.json: model: ngram", &list, err));
    const size_t count = json_len(list);
    if (count == 0 || count > MAX_NGRAM_SITES)
        return fail(err, HR_ERR_UNSUPPORTED, "manifest.json: model: ngram: %zu sites, 1 to %d are supported",
                    count, MAX_NGRAM_SITES);
    p->site_count = (uint32_t)count;
    for (uint32_t i = 0; i < p->site_count; i++) {
        snprintf(where, sizeof where, "manifest.json: model: ngram: sites[%u]", i);
        TRY(read_ngram_site(json_at(list, i), layers, where, p, &p->sites[i], err));
        if (i > 0 && p->sites[i].layer <= p->sites[i - 1].layer)
            return fail(err, HR_ERR_FORMAT, "%s: layer %u does not follow layer %u", where,
                        p->sites[i].layer, p->sites[i - 1].layer);
    }
    return HR_OK;
}

hr_status ngram_read(const struct json *model, uint32_t layers, bool hyper, struct ngram_part *p,
                     hr_error *err)
{
    static const char *const keys[] = {"order",    "heads", "dim",   "rows",  "conv_taps",
                                       "dilation", "eos",   "codec", "sites", NULL};
    const char *where = "manifest.json: model: ngram", *codec = NULL;
    const struct json *o = json_get(model, "ngram");
    int64_t rows = 0, eos = 0;
    if (json_kind(o) == JSON_NULL) return HR_OK;
    TRY(json_need(model, "ngram", JSON_OBJECT, "manifest.json: model", &o, err));
    TRY(json_only_keys(o, keys, where, err));
    if (!hyper) return fail(err, HR_ERR_UNSUPPORTED, "%s: needs a hyper residual", where);
    TRY(json_need_u32(o, "order", 2, MAX_NGRAM_ORDER, where, &p->order, err));
    TRY(json_need_u32(o, "heads", 1, MAX_NGRAM_TABLES / (p->order - 1), where, &p->heads, err));
    TRY(json_need_u32(o, "dim", 1, 1000, where, &p->dim, err));
    TRY(json_need_u32(o, "conv_taps", 1, 8, where, &p->conv_taps, err));
    TRY(json_need_u32(o, "dilation", 1, 64, where, &p->dilation, err));
    TRY(json_need_int(o, "rows", 1, (int64_t)1 << 40, where, &rows, err));
    TRY(json_need_int(o, "eos", 0, MAX_VOCAB, where, &eos, err));
    TRY(json_need_string(o, "codec", where, &codec, err));
    p->codec = codec_from_name(codec);
    if (p->codec != CODEC_BF16 && p->codec != CODEC_F32)
        return fail(err, HR_ERR_UNSUPPORTED, "%s: rows of codec \"%s\"", where, codec);
    p->rows = (uint64_t)rows;
    p->eos = (int32_t)eos;
    p->tables = (p->order - 1) * p->heads;
    return read_ngram_sites(o, layers, p, err);
}
