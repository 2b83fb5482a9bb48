#include "quant/codebooks.h"
#include "store/manifest.h"

#include <stdio.h>
#include <string.h>

#include "base/carve.h"
#include "base/sort.h"
#include "store/direct_io.h"
#include "store/regular_file.h"
#include "store/row_table.h"

enum {
    NAME_MAX_BYTES = 127, /* of a tensor */
    LAYER_MAX = 999999,
    DIMENSION_MAX = INT32_MAX,
    STOP_MAX = 16,
};

static const uint64_t file_max = (uint64_t)INT64_MAX / 4;

uint64_t bank_bytes(const struct bank_entry *bank)
{
    return (uint64_t)bank->experts * bank->record.bytes;
}

static hr_status need_literal(const struct json *o, const char *key, const char *value,
                              const char *where, hr_error *err)
{
    const char *s;
    TRY(json_need_string(o, key, where, &s, err));
    if (strcmp(s, value) != 0)
        return fail(err, HR_ERR_FORMAT, "%s: \"%s\" is \"%.60s\", it must be \"%s\"", where, key, s,
                    value);
    return HR_OK;
}

enum { BANK_BOOKS = 3 }; /* gate, up, down */

static hr_status need_codec(const struct json *o, const char *where, enum codec *out, hr_error *err)
{
    const char *name;
    TRY(json_need_string(o, "codec", where, &name, err));
    *out = codec_from_name(name);
    if (*out == CODEC_NONE)
        return fail(err, HR_ERR_FORMAT, "%s: codec \"%.40s\" is not known", where, name);
    return HR_OK;
}

static hr_status need_crcs(const struct json *o, size_t count, const char *where, uint32_t *out,
                           hr_error *err)
{
    const struct json *array;
    TRY(json_need(o, "crc32c", JSON_ARRAY, where, &array, err));
    if (json_len(array) != count)
        return fail(err, HR_ERR_FORMAT, "%s: \"crc32c\" has %zu entries, %zu are needed", where,
                    json_len(array), count);
    for (size_t i = 0; i < count; i++) {
        int64_t v;
        if (!json_int(json_at(array, i), &v) || v < 0 || v > UINT32_MAX)
            return fail(err, HR_ERR_FORMAT, "%s: crc32c[%zu] is not a number of 32 bits", where, i);
        out[i] = (uint32_t)v;
    }
    return HR_OK;
}

static bool tensor_name_valid(const char *name)
{
    const size_t n = strlen(name);
    if (n == 0 || n > NAME_MAX_BYTES) return false;
    for (size_t i = 0; i < n; i++) {
        const char c = name[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '.' || c == '_' || c == '-'))
            return false;
    }
    return true;
}

/* One tensor; *end is where the one before ended and becomes where this one ends. */
static hr_status read_tensor(const struct json *v, size_t i, uint64_t trunk_bytes, uint64_t *end,
                             struct tensor_entry *t, hr_error *err)
{
    static const char *const keys[] = {"name", "codec", "shape", "offset", "bytes", NULL};
    char where[64 + NAME_MAX_BYTES + 1];
    const struct json *shape;
    int64_t dims[3] = {1, 1, 1}, offset, bytes;
    size_t derived;

    snprintf(where, sizeof where, MANIFEST_NAME ": trunk.tensors[%zu]", i);
    if (json_kind(v) != JSON_OBJECT)
        return fail(err, HR_ERR_FORMAT, "%s is not an object", where);
    TRY(json_need_string(v, "name", where, &t->name, err));
    if (!tensor_name_valid(t->name))
        return fail(err, HR_ERR_FORMAT,
                    "%s: \"name\" must be 1 to %d of the characters A-Z a-z 0-9 . _ -", where,
                    NAME_MAX_BYTES);
    snprintf(where, sizeof where, MANIFEST_NAME ": tensor \"%s\"", t->name);
    TRY(json_only_keys(v, keys, where, err));
    TRY(need_codec(v, where, &t->codec, err));
    TRY(json_need(v, "shape", JSON_ARRAY, where, &shape, err));
    const size_t rank = json_len(shape);
    if (rank < 1 || rank > 3)
        return fail(err, HR_ERR_FORMAT, "%s: \"shape\" has %zu numbers, it must be [n], "
                    "[rows, cols] or [count, rows, cols]", where, rank);
    for (size_t d = 0; d < rank; d++) {
        int64_t *dim = &dims[d + 3 - rank];
        if (!json_int(json_at(shape, d), dim) || *dim < 1 || *dim > DIMENSION_MAX)
            return fail(err, HR_ERR_FORMAT, "%s: shape[%zu] is not a number from 1 to %d", where, d,
                        DIMENSION_MAX);
    }
    t->count = (uint32_t)dims[0];
    t->rows = (uint32_t)dims[1];
    t->cols = (uint32_t)dims[2];
    TRY(json_need_int(v, "offset", 0, (int64_t)file_max, where, &offset, err));
    TRY(json_need_int(v, "bytes", 1, (int64_t)file_max, where, &bytes, err));
    t->offset = (uint64_t)offset;
    t->bytes = (uint64_t)bytes;
    if (t->offset % IO_ALIGN != 0)
        return fail(err, HR_ERR_FORMAT, "%s: offset %llu is not a multiple of %d", where,
                    (unsigned long long)t->offset, IO_ALIGN);
    if (codec_is_rvq(t->codec))
        return fail(err, HR_ERR_FORMAT, "%s: codec %s is for experts only", where,
                    codec_name(t->codec));
    /* In a stack every matrix but the last is padded, so that the next begins aligned. */
    if (!codec_matrix_bytes(t->codec, t->rows, t->cols, &derived) ||
        (t->count > 1 && (derived > SIZE_MAX - 63 || !size_mul(round_up(derived, 64), t->count, &derived))) ||
        derived != t->bytes)
        return fail(err, HR_ERR_FORMAT, "%s: \"bytes\" is %llu, not what %u x %s [%u, %u] takes", where,
                    (unsigned long long)t->bytes, t->count, codec_name(t->codec), t->rows, t->cols);
    if (t->offset < *end)
        return fail(err, HR_ERR_FORMAT, "%s: offset %llu lies before the end of the tensor listed "
                    "before it (%llu)", where, (unsigned long long)t->offset,
                    (unsigned long long)*end);
    if (t->offset > trunk_bytes || t->bytes > trunk_bytes - t->offset)
        return fail(err, HR_ERR_FORMAT,
                    "%s: ends at byte %llu, " TRUNK_NAME " has only %llu bytes", where,
                    (unsigned long long)(t->offset + t->bytes), (unsigned long long)trunk_bytes);
    *end = t->offset + t->bytes;
    return HR_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct tensor_entry *)a)->name, ((const struct tensor_entry *)b)->name);
}

static hr_status read_trunk(struct container *c, const struct json *trunk, uint32_t *crc,
                            hr_error *err)
{
    static const char where[] = MANIFEST_NAME ": trunk";
    const struct json *tensors;
    uint64_t end = 0;

    TRY(need_crcs(trunk, c->trunk_chunks, where, crc, err));
    TRY(json_need(trunk, "tensors", JSON_ARRAY, where, &tensors, err));
    for (uint32_t i = 0; i < c->tensor_count; i++)
        TRY(read_tensor(json_at(tensors, i), i, c->trunk_bytes, &end, &c->tensors[i], err));
    sort_in_place(c->tensors, c->tensor_count, sizeof *c->tensors, by_name);
    for (uint32_t i = 1; i < c->tensor_count; i++)
        if (strcmp(c->tensors[i - 1].name, c->tensors[i].name) == 0)
            return fail(err, HR_ERR_FORMAT, MANIFEST_NAME ": tensor \"%s\" is listed twice",
                        c->tensors[i].name);
    return HR_OK;
}

/* 22 bits are for codecs whose products have kernels for them. */
static hr_status read_activations(const struct json *v, const char *where, struct bank_entry *k,
                                  hr_error *err)
{
    uint32_t bits;
    if (!json_get(v, "activations")) return HR_OK;
    TRY(json_need_u32(v, "activations", 8, 22, where, &bits, err));
    if (bits != 8 && bits != 22)
        return fail(err, HR_ERR_FORMAT, "%s: \"activations\" is %u, it must be 8 or 22", where, bits);
    if (k->codec != CODEC_MXFP4)
        return fail(err, HR_ERR_FORMAT, "%s: \"activations\" is for codec mxfp4, not %s", where,
                    codec_name(k->codec));
    k->fine = bits == 22;
    return HR_OK;
}

static hr_status read_bank(const struct json *v, size_t i, struct bank_entry *k, uint32_t *crc,
                           hr_error *err)
{
    static const char *const keys[] = {"layer",  "file",         "codec",  "experts", "hidden",
                                       "inner",  "record_bytes", "crc32c", "bias",    "activations", NULL};
    char where[64], file[32];
    int64_t record_bytes;

    snprintf(where, sizeof where, MANIFEST_NAME ": experts[%zu]", i);
    TRY(json_only_keys(v, keys, where, err));
    TRY(json_need_u32(v, "layer", 0, LAYER_MAX, where, &k->layer, err));
    TRY(json_need_u32(v, "experts", 1, DIMENSION_MAX, where, &k->experts, err));
    TRY(json_need_u32(v, "hidden", 1, DIMENSION_MAX, where, &k->hidden, err));
    TRY(json_need_u32(v, "inner", 1, DIMENSION_MAX, where, &k->inner, err));
    TRY(need_codec(v, where, &k->codec, err));
    if (k->codec == CODEC_F64)
        return fail(err, HR_ERR_FORMAT, "%s: codec f64 is not allowed for experts", where);
    TRY(json_need_string(v, "file", where, &k->file, err));
    snprintf(file, sizeof file, "experts-%04u.bin", k->layer);
    if (strcmp(k->file, file) != 0)
        return fail(err, HR_ERR_FORMAT, "%s: \"file\" is \"%.60s\", layer %u lies in \"%s\"", where,
                    k->file, k->layer, file);
    TRY(json_need_int(v, "record_bytes", 1, (int64_t)file_max, where, &record_bytes, err));
    if (json_get(v, "bias")) TRY(json_need_bool(v, "bias", where, &k->bias, err));
    TRY(read_activations(v, where, k, err));
    if (!record_layout(k->codec, k->hidden, k->inner, k->bias, &k->record) || k->record.bytes == 0)
        return fail(err, HR_ERR_FORMAT, "%s: hidden %u and inner %u make no valid record", where,
                    k->hidden, k->inner);
    if ((uint64_t)record_bytes != k->record.bytes)
        return fail(err, HR_ERR_FORMAT, "%s: \"record_bytes\" is %lld, codec and sizes make %zu",
                    where, (long long)record_bytes, k->record.bytes);
    if (k->record.bytes > file_max / k->experts)
        return fail(err, HR_ERR_FORMAT, "%s: %u experts of %zu bytes are more than a file can hold",
                    where, k->experts, k->record.bytes);
    TRY(need_crcs(v, k->experts, where, crc, err));
    k->crc = crc;
    return HR_OK;
}

static hr_status read_banks(struct container *c, const struct json *experts, uint32_t *crc,
                            struct rvq_books *books, hr_error *err)
{
    for (uint32_t i = 0; i < c->bank_count; i++) {
        TRY(read_bank(json_at(experts, i), i, &c->banks[i], crc, err));
        if (i > 0 && c->banks[i].layer <= c->banks[i - 1].layer)
            return fail(err, HR_ERR_FORMAT, MANIFEST_NAME ": experts[%u]: layer %u does not follow "
                        "layer %u: banks must be in ascending order", i, c->banks[i].layer,
                        c->banks[i - 1].layer);
        crc += c->banks[i].experts;
        if (!codec_is_rvq(c->banks[i].codec)) continue;
        c->banks[i].books = books;
        books += BANK_BOOKS;
        c->codebooks_bytes += BANK_BOOKS * codebooks_bytes(c->banks[i].codec);
    }
    return HR_OK;
}

static hr_status read_codebooks(struct container *c, const struct json *root, hr_error *err)
{
    static const char *const keys[] = {"file", "bytes", "crc32c", NULL};
    static const char where[] = MANIFEST_NAME ": codebooks";
    const struct json *v = json_get(root, "codebooks");
    int64_t bytes, crc;

    if (c->codebooks_bytes == 0) {
        if (v == NULL) return HR_OK;
        return fail(err, HR_ERR_FORMAT, "%s: no bank of experts has a codec that needs them", where);
    }
    TRY(json_need(root, "codebooks", JSON_OBJECT, MANIFEST_NAME, &v, err));
    TRY(json_only_keys(v, keys, where, err));
    TRY(need_literal(v, "file", CODEBOOKS_NAME, where, err));
    TRY(json_need_int(v, "bytes", 1, (int64_t)file_max, where, &bytes, err));
    TRY(json_need_int(v, "crc32c", 0, UINT32_MAX, where, &crc, err));
    if ((uint64_t)bytes != c->codebooks_bytes)
        return fail(err, HR_ERR_FORMAT, "%s: \"bytes\" is %lld, the banks' codecs make %llu", where,
                    (long long)bytes, (unsigned long long)c->codebooks_bytes);
    c->codebooks_crc = (uint32_t)crc;
    return HR_OK;
}

static hr_status read_stop_ids(struct container *c, const struct json *root, hr_error *err)
{
    const struct json *ids;
    int64_t vocab;

    TRY(json_need_int(c->model, "vocab_size", 1, INT32_MAX, MANIFEST_NAME ": model", &vocab, err));
    TRY(json_need(root, "stop_ids", JSON_ARRAY, MANIFEST_NAME, &ids, err));
    if (json_len(ids) > STOP_MAX)
        return fail(err, HR_ERR_FORMAT, MANIFEST_NAME ": \"stop_ids\" has %zu entries, at most %d "
                    "are allowed", json_len(ids), STOP_MAX);
    c->stop_count = (uint32_t)json_len(ids);
    for (uint32_t i = 0; i < c->stop_count; i++) {
        int64_t id;
        if (!json_int(json_at(ids, i), &id) || id < 0 || id >= vocab)
            return fail(err, HR_ERR_FORMAT, MANIFEST_NAME ": stop_ids[%u] is not a token id below "
                        "vocab_size (%lld)", i, (long long)vocab);
        c->stop_ids[i] = (int32_t)id;
    }
    return HR_OK;
}

static hr_status read_tokenizer(struct container *c, const struct json *root, hr_error *err)
{
    static const char *const keys[] = {"file", "bytes", NULL};
    static const char where[] = MANIFEST_NAME ": tokenizer";
    const struct json *v = json_get(root, "tokenizer");
    int64_t bytes;

    if (v == NULL) return fail(err, HR_ERR_FORMAT, MANIFEST_NAME ": \"tokenizer\" is missing");
    if (json_kind(v) == JSON_NULL) return HR_OK;
    if (json_kind(v) != JSON_OBJECT)
        return fail(err, HR_ERR_FORMAT, "%s is neither an object nor null", where);
    TRY(json_only_keys(v, keys, where, err));
    TRY(need_literal(v, "file", TOKENIZER_NAME, where, err));
    TRY(json_need_int(v, "bytes", 1, (int64_t)file_max, where, &bytes, err));
    c->has_tokenizer = true;
    c->tokenizer_bytes = (uint64_t)bytes;
    return HR_OK;
}

/* Only what the file's length and pages follow from; the model reads the rest. */
static hr_status read_ngram(struct container *c, hr_error *err)
{
    static const char where[] = MANIFEST_NAME ": model: ngram";
    const struct json *v = json_get(c->model, "ngram");
    struct ngram_entry *n = &c->ngram;
    enum codec codec = CODEC_NONE;
    int64_t rows;

    if (v == NULL || json_kind(v) == JSON_NULL) return HR_OK;
    if (json_kind(v) != JSON_OBJECT)
        return fail(err, HR_ERR_FORMAT, "%s is neither an object nor null", where);
    TRY(json_need_int(v, "rows", 1, (int64_t)1 << 40, where, &rows, err));
    TRY(json_need_u32(v, "dim", 1, ROW_PAGE_PAYLOAD / 4, where, &n->dim, err));
    TRY(need_codec(v, where, &codec, err));
    if (codec != CODEC_BF16 && codec != CODEC_F32)
        return fail(err, HR_ERR_FORMAT, "%s: codec %s is not allowed for rows", where,
                    codec_name(codec));
    n->rows = (uint64_t)rows;
    n->row_bytes = n->dim * (codec == CODEC_F32 ? 4 : 2);
    n->bytes = row_table_bytes(n->rows, n->row_bytes);
    return HR_OK;
}

/* A weight count above what the tensors can hold is a lie; which padding counts is not ours. */
static hr_status read_parameters(struct container *c, const struct json *root, hr_error *err)
{
    int64_t parameters;
    double most = 0; /* exact enough for a bound, and cannot overflow */

    for (uint32_t i = 0; i < c->tensor_count; i++)
        most += (double)c->tensors[i].count * (double)c->tensors[i].rows * (double)c->tensors[i].cols;
    for (uint32_t i = 0; i < c->bank_count; i++) {
        const struct bank_entry *b = &c->banks[i];
        const double biases = b->bias ? 2.0 * b->inner + b->hidden : 0.0;
        most += (double)b->experts * (3.0 * (double)b->hidden * (double)b->inner + biases);
    }
    most += (double)c->ngram.rows * (double)c->ngram.dim;
    TRY(json_need_int(root, "parameters", 0, INT64_MAX, MANIFEST_NAME, &parameters, err));
    if ((double)parameters > most * (1 + 1e-9))
        return fail(err, HR_ERR_FORMAT,
                    MANIFEST_NAME ": \"parameters\" is %lld, the tensors hold only %.0f",
                    (long long)parameters, most);
    c->parameters = (uint64_t)parameters;
    return HR_OK;
}

struct counts {
    uint32_t tensors, banks, chunks, crcs, books;
    uint64_t trunk_bytes;
};

/* What has to be allocated, from lengths that are really there. */
static hr_status count(const struct json *trunk, const struct json *experts, struct counts *n,
                       hr_error *err)
{
    static const char *const keys[] = {"file", "bytes", "chunk", "crc32c", "tensors", NULL};
    static const char where[] = MANIFEST_NAME ": trunk";
    const struct json *array;
    int64_t v;

    TRY(json_only_keys(trunk, keys, where, err));
    TRY(need_literal(trunk, "file", TRUNK_NAME, where, err));
    TRY(json_need_int(trunk, "chunk", TRUNK_CHUNK, TRUNK_CHUNK, where, &v, err));
    TRY(json_need_int(trunk, "bytes", IO_ALIGN, (int64_t)file_max, where, &v, err));
    if (v % IO_ALIGN != 0)
        return fail(err, HR_ERR_FORMAT, "%s: \"bytes\" is %lld, not a multiple of %d", where,
                    (long long)v, IO_ALIGN);
    n->trunk_bytes = (uint64_t)v;
    const uint64_t chunks = (n->trunk_bytes + TRUNK_CHUNK - 1) / TRUNK_CHUNK;
    TRY(json_need(trunk, "crc32c", JSON_ARRAY, where, &array, err));
    if (json_len(array) != chunks)
        return fail(err, HR_ERR_FORMAT, "%s: \"crc32c\" has %zu entries, %llu are needed", where,
                    json_len(array), (unsigned long long)chunks);
    n->chunks = (uint32_t)chunks;
    TRY(json_need(trunk, "tensors", JSON_ARRAY, where, &array, err));
    n->tensors = (uint32_t)json_len(array);
    n->banks = (uint32_t)json_len(experts);
    n->crcs = n->books = 0;
    for (uint32_t i = 0; i < n->banks; i++) {
        char bank[64];
        const struct json *k = json_at(experts, i);
        snprintf(bank, sizeof bank, MANIFEST_NAME ": experts[%u]", i);
        if (json_kind(k) != JSON_OBJECT)
            return fail(err, HR_ERR_FORMAT, "%s is not an object", bank);
        TRY(json_need(k, "crc32c", JSON_ARRAY, bank, &array, err));
        enum codec codec;
        TRY(need_codec(k, bank, &codec, err));
        if (codec_is_rvq(codec)) n->books += BANK_BOOKS;
        n->crcs += (uint32_t)json_len(array); /* the reader's cap on values bounds the sum */
    }
    return HR_OK;
}

/* Lays the container out in `carve`, which only measures when it has no base. */
static struct container *lay_out(struct carve *carve, const struct counts *n, const char *path,
                                 uint32_t **trunk_crc, uint32_t **expert_crc,
                                 struct rvq_books **books)
{
    const size_t path_bytes = strlen(path) + 1;
    struct container *c = carve_take(carve, sizeof *c);
    struct tensor_entry *tensors = carve_take(carve, n->tensors * sizeof *tensors);
    struct bank_entry *banks = carve_take(carve, n->banks * sizeof *banks);
    *trunk_crc = carve_take(carve, n->chunks * sizeof **trunk_crc);
    *expert_crc = carve_take(carve, n->crcs * sizeof **expert_crc);
    *books = carve_take(carve, n->books * sizeof **books);
    char *copy = carve_take(carve, path_bytes);
    if (carve->base == NULL) return NULL;
    memcpy(copy, path, path_bytes);
    *c = (struct container){
        .path = copy,
        .dir_fd = -1,
        .drive_count = 1, /* where it lies itself */
        .tensor_count = n->tensors,
        .bank_count = n->banks,
        .tensors = tensors,
        .banks = banks,
        .trunk_bytes = n->trunk_bytes,
        .trunk_crc = *trunk_crc,
        .trunk_chunks = n->chunks,
    };
    return c;
}

static hr_status check_root(const struct json *root, hr_error *err)
{
    static const char *const keys[] = {"format",     "version",   "model",    "trunk",
                                       "experts",    "tokenizer", "stop_ids", "parameters",
                                       "provenance", "codebooks", NULL};
    int64_t version;
    const struct json *provenance;

    if (json_kind(root) != JSON_OBJECT)
        return fail(err, HR_ERR_FORMAT, MANIFEST_NAME ": is not an object");
    TRY(need_literal(root, "format", "headrace-container", MANIFEST_NAME, err));
    TRY(json_need_int(root, "version", 1, INT32_MAX, MANIFEST_NAME, &version, err));
    if (version != 1)
        return fail(err, HR_ERR_UNSUPPORTED, MANIFEST_NAME ": container version %lld is newer than "
                    "this program reads (1); use a newer release", (long long)version);
    TRY(json_only_keys(root, keys, MANIFEST_NAME, err));
    return json_need(root, "provenance", JSON_OBJECT, MANIFEST_NAME, &provenance, err);
}

static hr_status build(struct json_doc *doc, const char *path, struct mem_budget *b,
                       struct container **out, hr_error *err)
{
    const struct json *root = json_root(doc), *trunk, *experts, *model;
    struct counts n;
    uint32_t *trunk_crc, *expert_crc;
    struct rvq_books *books;

    *out = NULL;
    TRY(check_root(root, err));
    TRY(json_need(root, "model", JSON_OBJECT, MANIFEST_NAME, &model, err));
    TRY(json_need(root, "trunk", JSON_OBJECT, MANIFEST_NAME, &trunk, err));
    TRY(json_need(root, "experts", JSON_ARRAY, MANIFEST_NAME, &experts, err));
    TRY(count(trunk, experts, &n, err));

    struct carve carve = {0};
    (void)lay_out(&carve, &n, path, &trunk_crc, &expert_crc, &books);
    const size_t bytes = carve.used;
    carve = (struct carve){.base = mem_alloc(b, bytes)};
    if (carve.base == NULL)
        return fail(err, HR_ERR_MEMORY, MANIFEST_NAME ": no memory for %zu bytes of index", bytes);
    struct container *c = lay_out(&carve, &n, path, &trunk_crc, &expert_crc, &books);
    c->mem = b;
    c->mem_bytes = bytes;
    c->model = model;

    hr_status s = read_trunk(c, trunk, trunk_crc, err);
    if (s == HR_OK) s = read_banks(c, experts, expert_crc, books, err);
    if (s == HR_OK) s = read_codebooks(c, root, err);
    if (s == HR_OK) s = read_tokenizer(c, root, err);
    if (s == HR_OK) s = read_ngram(c, err);
    if (s == HR_OK) s = read_stop_ids(c, root, err);
    if (s == HR_OK) s = read_parameters(c, root, err);
    if (s != HR_OK) {
        mem_free(b, carve.base, bytes);
        return s;
    }
    c->manifest = doc;
    c->total_bytes = c->trunk_bytes + c->tokenizer_bytes + c->ngram.bytes + c->codebooks_bytes;
    for (uint32_t i = 0; i < c->bank_count; i++) c->total_bytes += bank_bytes(&c->banks[i]);
    *out = c;
    return HR_OK;
}

hr_status manifest_parse(const char *text, size_t bytes, const char *path, struct mem_budget *b,
                         struct container **out, hr_error *err)
{
    struct json_doc *doc;

    *out = NULL;
    TRY(json_parse(text, bytes, MANIFEST_NAME, &doc, err));
    const hr_status s = build(doc, path, b, out, err);
    if (s != HR_OK) {
        json_free(doc);
        return s;
    }
    (*out)->total_bytes += bytes;
    return HR_OK;
}
