#include "repair.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "model/model.h"
#include "quant/codebooks.h"
#include "store/manifest.h"
#include "store/record.h"
#include "store/row_table.h"

enum { ROUNDS = 96, FILE_MAX = 4 << 20, TEXT_MAX = 1 << 20 };

static uint8_t *pattern; /* FILE_MAX bytes that are small numbers as f32, f64, bf16 and E8M0 */

static void pattern_make(void)
{
    uint32_t x = 1;
    if (pattern) return;
    pattern = malloc(FILE_MAX);
    if (!pattern) abort();
    for (size_t i = 0; i < FILE_MAX; i += 2) {
        x = x * 1664525u + 1013904223u;
        pattern[i] = (uint8_t)(0x70 | (x >> 16 & 7));
        pattern[i + 1] = 0x3d;
    }
}

static uint64_t number(struct node *object, const char *key)
{
    uint64_t v = 0;
    return node_int(node_get(object, key), &v) ? v : 0;
}

static enum codec codec_of(struct node *object)
{
    const struct node *v = node_get(object, "codec");
    return v && v->kind == JSON_STRING ? codec_from_name(v->text) : CODEC_NONE;
}

static void set_list(struct node *object, const char *key, const uint32_t *values, size_t n)
{
    struct node *list = node_get(object, key);
    if (!list) {
        list = node_new(&scratch, JSON_ARRAY, key, NULL);
        node_append(object, list);
    }
    list->kind = JSON_ARRAY;
    list->child = NULL;
    struct node **link = &list->child;
    for (size_t i = 0; i < n; i++) {
        char text[16];
        const size_t bytes = (size_t)snprintf(text, sizeof text, "%u", values[i]);
        *link = node_new(&scratch, JSON_INT, NULL, arena_copy(&scratch, text, bytes));
        link = &(*link)->next;
    }
}

static bool tensor_bytes(struct node *t, uint64_t *bytes)
{
    uint64_t dims[3] = {1, 1, 1};
    struct node *shape = node_get(t, "shape");
    const size_t rank = node_len(shape);
    size_t n;
    if (rank < 1 || rank > 3) return false;
    for (size_t d = 0; d < rank; d++)
        if (!node_int(node_at(shape, d), &dims[d + 3 - rank])) return false;
    if (dims[0] > 4096 || !codec_matrix_bytes(codec_of(t), dims[1], dims[2], &n) || n > FILE_MAX)
        return false;
    if (dims[0] > 1) n = (n + 63) / 64 * 64 * (size_t)dims[0];
    *bytes = n;
    return true;
}

static uint64_t pages(uint64_t n)
{
    return (n + 4095) & ~(uint64_t)4095;
}

static bool lay_out_trunk(struct node *manifest, uint64_t *end)
{
    struct node *trunk = node_get(manifest, "trunk"), *tensors = node_get(trunk, "tensors");
    uint32_t crc[FILE_MAX / TRUNK_CHUNK + 1];
    uint64_t bytes;
    *end = 0;
    if (!tensors) return false;
    for (struct node *t = tensors->child; t; t = t->next) {
        if (t->kind != JSON_OBJECT || !tensor_bytes(t, &bytes)) return false;
        node_set_int(&scratch, t, "offset", *end);
        node_set_int(&scratch, t, "bytes", bytes);
        *end += pages(bytes);
        if (*end > FILE_MAX) return false;
    }
    if (*end == 0) return false;
    size_t chunks = 0;
    for (uint64_t at = 0; at < *end; at += TRUNK_CHUNK, chunks++) {
        const uint64_t n = *end - at < TRUNK_CHUNK ? *end - at : TRUNK_CHUNK;
        crc[chunks] = crc32c(0, pattern + at, (size_t)n);
    }
    node_set_int(&scratch, trunk, "bytes", *end);
    set_list(trunk, "crc32c", crc, chunks);
    return true;
}

static void put(uint8_t *p, uint64_t v, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++) p[i] = (uint8_t)(v >> (8 * i));
}

/* The records of a bank, as the format says; NULL when it cannot be. The caller frees. */
static uint8_t *make_bank(struct node *bank, size_t *bytes, uint32_t *crc)
{
    const uint64_t experts = number(bank, "experts"), hidden = number(bank, "hidden");
    const uint64_t inner = number(bank, "inner");
    const enum codec codec = codec_of(bank);
    const struct node *bias = node_get(bank, "bias");
    struct record_layout r;
    if (experts == 0 || experts > 512 || hidden > 1 << 20 || inner > 1 << 20) return NULL;
    if (!record_layout(codec, (uint32_t)hidden, (uint32_t)inner, bias && bias->text[0] == 't', &r))
        return NULL;
    if (r.bytes > FILE_MAX || experts * r.bytes > FILE_MAX) return NULL;
    *bytes = (size_t)experts * r.bytes;
    uint8_t *data = malloc(*bytes);
    if (!data) abort();
    for (uint64_t e = 0; e < experts; e++) {
        uint8_t *p = data + e * r.bytes;
        memcpy(p, pattern, r.bytes);
        memset(p, 0, RECORD_HEADER);
        memcpy(p, "HREX", 4);
        const uint64_t fields[][3] = {{4, 2, 1}, {6, 2, (uint64_t)codec},
                                      {8, 4, number(bank, "layer")}, {12, 4, e},
                                      {16, 4, hidden}, {20, 4, inner}, {24, 8, r.bytes},
                                      {32, 8, r.gate}, {40, 8, r.up}, {48, 8, r.down},
                                      {56, 4, r.bias}};
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
            put(p + fields[i][0], fields[i][2], (unsigned)fields[i][1]);
        crc[e] = crc32c(0, p, r.bytes);
        put(p + 60, crc[e], 4);
    }
    node_set_int(&scratch, bank, "record_bytes", r.bytes);
    set_list(bank, "crc32c", crc, (size_t)experts);
    return data;
}

/* codebooks.bin for the banks that need it; returns its bytes. */
static size_t make_books(struct node *manifest, uint8_t *out, size_t max)
{
    static int8_t entries[RVQ_MAX_CODES * RVQ_DIM];
    struct node *banks = node_get(manifest, "experts"), *old = node_get(manifest, "codebooks");
    size_t used = 0;
    for (struct node *k = banks ? banks->child : NULL; k; k = k->next) {
        const struct rvq_shape *shape = rvq_shape_of(codec_of(k));
        const size_t one = codebooks_bytes(codec_of(k));
        for (int kind = 0; shape && kind < 3; kind++) {
            if (used + one > max) return 0;
            for (size_t i = 0; i < sizeof entries; i++)
                entries[i] = (int8_t)((pattern[2 * i] % (2 * shape->limit + 1)) - shape->limit);
            codebooks_write(codec_of(k), entries, 1.0f, out + used);
            used += one;
        }
    }
    if (used == 0) {
        if (old) node_remove(manifest, old);
        return 0;
    }
    if (!old || old->kind != JSON_OBJECT) {
        if (old) node_remove(manifest, old);
        old = node_new(&scratch, JSON_OBJECT, "codebooks", NULL);
        node_append(old, node_new(&scratch, JSON_STRING, "file", "codebooks.bin"));
        node_append(manifest, old);
    }
    node_set_int(&scratch, old, "bytes", used);
    node_set_int(&scratch, old, "crc32c", crc32c(0, out, used));
    return used;
}

static void set_shape(struct node *t, uint64_t count, uint64_t rows, uint64_t cols)
{
    uint32_t dims[3] = {(uint32_t)count, (uint32_t)rows, (uint32_t)cols};
    const size_t skip = count > 1 ? 0 : rows > 1 ? 1 : 2;
    set_list(t, "shape", dims + skip, 3 - skip);
}

static struct node *tensor_named(struct node *manifest, const char *name)
{
    struct node *tensors = node_get(node_get(manifest, "trunk"), "tensors");
    for (struct node *t = tensors ? tensors->child : NULL; t; t = t->next) {
        const struct node *n = node_get(t, "name");
        if (n && n->kind == JSON_STRING && strcmp(n->text, name) == 0) return t;
    }
    return NULL;
}

static void add_tensor(struct node *manifest, const char *name, uint64_t rows, uint64_t cols)
{
    struct node *t = node_new(&scratch, JSON_OBJECT, NULL, NULL);
    const char *codec = strncmp(name, "rope", 4) == 0 ? "f64" : "f32";
    node_append(t, node_new(&scratch, JSON_STRING, "name", arena_copy(&scratch, name, strlen(name))));
    node_append(t, node_new(&scratch, JSON_STRING, "codec", codec));
    set_shape(t, 1, rows, cols);
    node_append(node_get(node_get(manifest, "trunk"), "tensors"), t);
}

static struct node *bank_of(struct node *manifest, unsigned layer)
{
    struct node *banks = node_get(manifest, "experts");
    for (struct node *k = banks ? banks->child : NULL; k; k = k->next)
        if (number(k, "layer") == layer) return k;
    return NULL;
}

/* Banks are in ascending layer. */
static void add_bank(struct node *manifest, unsigned layer)
{
    struct node *banks = node_get(manifest, "experts"), *k = node_new(&scratch, JSON_OBJECT, NULL, NULL);
    char file[32];
    if (!banks) return;
    const size_t n = (size_t)snprintf(file, sizeof file, "experts-%04u.bin", layer);
    node_append(k, node_new(&scratch, JSON_STRING, "file", arena_copy(&scratch, file, n)));
    node_append(k, node_new(&scratch, JSON_STRING, "codec", "bf16"));
    node_set_int(&scratch, k, "layer", layer);
    node_set_int(&scratch, k, "experts", 1);
    node_set_int(&scratch, k, "hidden", 1);
    node_set_int(&scratch, k, "inner", 1);
    struct node **link = &banks->child;
    while (*link && number(*link, "layer") < layer) link = &(*link)->next;
    k->next = *link;
    *link = k;
}

/* Does what the engine's error asks for. False when it asks for nothing that a file could have. */
static bool obey(struct node *manifest, const char *detail)
{
    char name[160], codec[16];
    unsigned layer, v[6];
    const char *at = strstr(detail, "manifest.json: ");
    if (!at) return false;
    at += strlen("manifest.json: ");
    if (sscanf(at, "tensor \"%159[^\"]\" [%u, %u] is missing", name, v, v + 1) == 3) {
        add_tensor(manifest, name, v[0], v[1]);
        return true;
    }
    if (sscanf(at, "tensor \"%159[^\"]\" has shape %u x [%u, %u]; the model needs %u x [%u, %u]", name, v,
               v + 1, v + 2, v + 3, v + 4, v + 5) == 7) {
        struct node *t = tensor_named(manifest, name);
        if (t) set_shape(t, v[3], v[4], v[5]);
        return t != NULL;
    }
    if (sscanf(at, "tensor \"%159[^\"]\" is %*15[^;]; allowed here: %15[a-z0-9]", name, codec) == 2) {
        struct node *t = tensor_named(manifest, name), *c = node_get(t, "codec");
        if (c) c->text = arena_copy(&scratch, codec, strlen(codec));
        return c != NULL;
    }
    if (strstr(at, "belongs to no part") && sscanf(at, "tensor \"%159[^\"]\"", name) == 1) {
        struct node *t = tensor_named(manifest, name);
        if (t) node_remove(node_get(node_get(manifest, "trunk"), "tensors"), t);
        return t != NULL;
    }
    if (strstr(at, "and has none") && sscanf(at, "layer %u needs", &layer) == 1) {
        add_bank(manifest, layer);
        return true;
    }
    if (strstr(at, "which has none") &&
        sscanf(at, "a bank of experts is given for layer %u", &layer) == 1) {
        struct node *k = bank_of(manifest, layer);
        if (k) node_remove(node_get(manifest, "experts"), k);
        return k != NULL;
    }
    if (sscanf(at, "the bank of layer %u holds %u experts [%u, %u]; the model needs %u [%u, %u]", &layer,
               v, v + 1, v + 2, v + 3, v + 4, v + 5) == 7) {
        struct node *k = bank_of(manifest, layer);
        if (!k) return false;
        node_set_int(&scratch, k, "experts", v[3]);
        node_set_int(&scratch, k, "inner", v[4]);
        node_set_int(&scratch, k, "hidden", v[5]);
        return true;
    }
    if (strstr(at, "the model says otherwise") && sscanf(at, "the bank of layer %u", &layer) == 1) {
        struct node *k = bank_of(manifest, layer), *bias = node_get(k, "bias");
        if (bias)
            node_remove(k, bias);
        else if (k)
            node_append(k, node_new(&scratch, JSON_BOOL, "bias", "true"));
        return k != NULL;
    }
    return false;
}

static void store_rows(struct base *b, struct node *manifest)
{
    static uint8_t data[FILE_MAX];
    struct node *ngram = node_get(node_get(manifest, "model"), "ngram");
    const uint64_t rows = number(ngram, "rows"), dim = number(ngram, "dim");
    const uint64_t row = dim * (codec_of(ngram) == CODEC_F32 ? 4 : 2);
    if (rows == 0 || row == 0 || row > ROW_PAGE_PAYLOAD || rows > 1 << 20) return;
    const uint64_t bytes = row_table_bytes(rows, (uint32_t)row);
    if (bytes > sizeof data) return;
    for (uint64_t page = 0; page < bytes / ROW_PAGE; page++) {
        uint8_t *p = data + page * ROW_PAGE;
        memcpy(p, pattern, ROW_PAGE);
        put(p + ROW_PAGE_PAYLOAD, page, 8);
        put(p + 4092, crc32c(0, p, 4092), 4);
    }
    work_store(b, "ngram.bin", data, (size_t)bytes);
}

/* Sizes and checksums that follow from the tree; with `store` the files too. */
static bool lay_out(struct base *b, struct node *manifest, bool store)
{
    static uint8_t books[1 << 19];
    static uint32_t crc[512];
    uint64_t trunk;
    size_t bytes;
    struct node *banks = node_get(manifest, "experts");
    if (!banks || !lay_out_trunk(manifest, &trunk)) return false;
    if (store) work_store(b, "trunk.bin", pattern, (size_t)trunk);
    for (struct node *k = banks->child; k; k = k->next) {
        uint8_t *records = make_bank(k, &bytes, crc);
        const struct node *file = node_get(k, "file");
        if (!records) return false;
        if (store && file && strncmp(file->text, "experts-", 8) == 0 && strlen(file->text) < 32 &&
            !strchr(file->text, '/'))
            work_store(b, file->text, records, bytes);
        free(records);
    }
    bytes = make_books(manifest, books, sizeof books);
    if (store && bytes > 0) work_store(b, "codebooks.bin", books, bytes);
    if (store) store_rows(b, manifest);
    node_set_int(&scratch, manifest, "parameters", 0);
    return true;
}

static hr_status check(const struct node *manifest, hr_error *err)
{
    static char text[TEXT_MAX];
    static struct architecture arch;
    struct container *c;
    const size_t n = tree_write(manifest, text, sizeof text);
    if (n == 0) return HR_ERR_MEMORY;
    hr_status s = manifest_parse(text, n, "work", NULL, &c, err);
    if (s != HR_OK) return s;
    s = model_check(c, &arch, err);
    container_close(c);
    return s;
}

bool repair_container(struct base *b, struct node *manifest)
{
    hr_error err = {0};
    pattern_make();
    for (int round = 0; round < ROUNDS; round++) {
        if (scratch.used > scratch.size / 2 || !lay_out(b, manifest, false)) return false;
        if (check(manifest, &err) == HR_OK) return lay_out(b, manifest, true);
        if (!obey(manifest, err.detail)) return false;
    }
    return false;
}
