/* libFuzzer target: damaged bytes whose checksums agree. Records of every codec, resident tensors,
 * codebooks and pages of rows are changed, every checksum above them is repaired, and the model
 * evaluates tokens that are routed through the damaged expert.
 * Input: which container; how it is used (two bytes); edits: what, which, where, how, bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "quant/codebooks.h"
#include "store/manifest.h"
#include "store/record.h"
#include "store/row_table.h"
#include "work_container.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_ROUTED = 256, EDITS = 32, CHANGED = 8 };

struct routed {
    uint32_t bank, expert;
};

/* Per base: the parsed manifest and the experts that the evaluated tokens go through. */
static struct target {
    struct container *c;
    struct routed routed[MAX_ROUTED];
    size_t routed_count;
} targets[MAX_BASES];

static struct {
    unsigned long inputs, opened, evaluated, numeric;
} counts;

static void report(void)
{
    fprintf(stderr, "records: %lu inputs, %lu opened, %lu evaluated, %lu stopped as not finite\n",
            counts.inputs, counts.opened, counts.evaluated, counts.numeric);
}

static void fail_setup(const struct base *b, const char *why)
{
    fprintf(stderr, "%s: %s\n", b->name, why);
    exit(1);
}

static void find_routes(const struct base *b, struct target *t)
{
    static int32_t ids[1 << 14];
    static float weights[1 << 14];
    hr_model_params params;
    hr_model *model;
    hr_session *session;
    hr_error err;
    hr_model_info info = {.size = sizeof info};
    int32_t tokens[EVAL_TOKENS];
    hr_model_params_init(&params);
    params.ram = 48 << 20;
    params.ctx = 16;
    if (hr_model_open(b->dir, &params, &model, &err) != HR_OK) fail_setup(b, err.detail);
    if (hr_model_get_info(model, &info, &err) != HR_OK ||
        hr_session_create(model, &session, &err) != HR_OK ||
        hr_session_record_routes(session, EVAL_TOKENS, &err) != HR_OK)
        fail_setup(b, err.detail);
    for (int32_t i = 0; i < EVAL_TOKENS; i++) tokens[i] = (i * 5 + 1) % (int32_t)info.vocab_size;
    if ((size_t)info.moe_layers * EVAL_TOKENS * info.top_k > sizeof ids / sizeof *ids ||
        hr_eval(session, tokens, EVAL_TOKENS, HR_LOGITS_LAST, NULL, &err) != HR_OK ||
        hr_session_routes(session, EVAL_TOKENS, ids, weights, &err) != HR_OK)
        fail_setup(b, err.detail);
    for (uint32_t bank = 0; bank < info.moe_layers; bank++)
        for (uint32_t i = 0; i < EVAL_TOKENS * info.top_k; i++) {
            const int32_t id = ids[bank * EVAL_TOKENS * info.top_k + i];
            if (id < 0 || t->routed_count == MAX_ROUTED) continue;
            t->routed[t->routed_count++] = (struct routed){bank, (uint32_t)id};
        }
    hr_session_free(session);
    hr_model_close(model);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    bases_open(*argc, *argv);
    for (size_t i = 0; i < base_count; i++) {
        const struct base *b = &bases[i];
        const struct file *m = base_file(b, "manifest.json");
        hr_error err;
        if (manifest_parse((const char *)m->data, m->size, b->dir, NULL, &targets[i].c, &err) != HR_OK)
            fail_setup(b, err.detail);
        find_routes(b, &targets[i]);
    }
    atexit(report);
    return 0;
}

struct script {
    const uint8_t *at;
    size_t left;
};

static uint32_t take(struct script *s, unsigned bytes)
{
    uint32_t v = 0;
    for (unsigned i = 0; i < bytes && s->left > 0; i++, s->left--) v |= (uint32_t)*s->at++ << (8 * i);
    return v;
}

/* Numbers that arithmetic stumbles over, as float32; bfloat16 takes the upper half. */
static const uint32_t floats[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffc00001, 0x7f7fffff,
                                  0xff7fffff, 0x00000001, 0x80000001, 0x00800000, 0x007fffff, 0x80000000,
                                  0x00000000, 0x3f800000, 0xbf800000, 0x5f000000, 0x7e800000, 0x1e800000};

/* Changes bytes of [p, p + n): bytes of the script, one value at many places, or a float. */
static void damage(uint8_t *p, size_t n, struct script *s)
{
    const uint32_t how = take(s, 1);
    size_t at = take(s, 2) | (size_t)take(s, 1) << 16;
    const size_t unit = (size_t)1 << (how >> 3 & 3);
    uint8_t value[8];
    uint64_t wide;
    if (n == 0) return;
    at = at % n / unit * unit;
    switch (how & 7) {
    case 0: /* as given */
    case 1:
        for (uint32_t k = take(s, 1) % 64 + 1; k > 0 && at < n && s->left > 0; k--, at++)
            p[at] = (uint8_t)take(s, 1);
        return;
    case 2: p[at] ^= (uint8_t)(1u << (take(s, 1) & 7)); return;
    case 3: memset(p + at, (int)take(s, 1), n - at); return;
    default: break;
    }
    const uint32_t f = floats[take(s, 1) % (sizeof floats / sizeof *floats)];
    float narrow;
    double real;
    memcpy(&narrow, &f, 4);
    real = (double)narrow;
    memcpy(&wide, &real, 8);
    if (unit == 8)
        memcpy(value, &wide, 8);
    else if (unit == 4)
        memcpy(value, &f, 4);
    else
        for (size_t i = 0; i < unit; i++) value[i] = (uint8_t)(f >> (32 - 8 * unit + 8 * i));
    const size_t step = (how & 7) < 6 ? n : unit * (take(s, 1) % 128 + 1); /* once, or a column */
    for (; at + unit <= n; at += step) memcpy(p + at, value, unit);
}

/* Files of this input that differ from the base. */
struct changed {
    const struct file *file[CHANGED];
    uint8_t *data[CHANGED];
    size_t count;
};

static uint8_t *change(struct changed *c, const struct base *b, const char *name, size_t *size)
{
    const struct file *f = base_file(b, name);
    if (!f || f->size == 0) return NULL;
    *size = f->size;
    for (size_t i = 0; i < c->count; i++)
        if (c->file[i] == f) return c->data[i];
    if (c->count == CHANGED) return NULL;
    c->file[c->count] = f;
    uint8_t *copy = arena_take(&scratch, f->size);
    memcpy(copy, f->data, f->size);
    return c->data[c->count++] = copy;
}

static void set_crc(struct node *list, size_t i, uint32_t crc)
{
    char text[16];
    struct node *v = node_at(list, i);
    if (v) v->text = arena_copy(&scratch, text, (size_t)snprintf(text, sizeof text, "%u", crc));
}

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (8 * i));
}

/* One of the experts that are routed to: its header, one of its matrices, or all of it. */
static void edit_record(const struct base *b, const struct target *t, struct changed *c,
                        struct node *manifest, uint32_t which, struct script *s)
{
    const uint32_t part = take(s, 1);
    size_t size;
    if (t->routed_count == 0) return;
    const struct routed r = t->routed[which % t->routed_count];
    const struct bank_entry *k = &t->c->banks[r.bank];
    uint8_t *file = change(c, b, k->file, &size);
    if (!file) return;
    uint8_t *record = file + (size_t)r.expert * k->record.bytes;
    const size_t starts[] = {k->record.gate, k->record.up, k->record.down,
                             k->record.bias ? k->record.bias : k->record.gate, 0};
    const size_t start = starts[part % 8 < 4 ? part % 8 : part % 8 == 4 ? 4 : 0];
    damage(record + start, part % 8 == 4 ? RECORD_HEADER : k->record.bytes - start, s);
    put32(record + 60, 0);
    const uint32_t crc = crc32c(0, record, k->record.bytes);
    put32(record + 60, crc);
    set_crc(node_get(node_at(node_get(manifest, "experts"), r.bank), "crc32c"), r.expert, crc);
}

static void edit_trunk(const struct base *b, const struct target *t, struct changed *c,
                       struct node *manifest, uint32_t which, struct script *s)
{
    size_t size;
    uint8_t *file = change(c, b, TRUNK_NAME, &size);
    if (!file || t->c->tensor_count == 0) return;
    const struct tensor_entry *e = &t->c->tensors[which % t->c->tensor_count];
    damage(file + e->offset, (size_t)e->bytes, s);
    struct node *list = node_get(node_get(manifest, "trunk"), "crc32c");
    for (size_t at = 0, i = 0; at < size; at += TRUNK_CHUNK, i++)
        set_crc(list, i, crc32c(0, file + at, size - at < TRUNK_CHUNK ? size - at : TRUNK_CHUNK));
}

static void edit_books(const struct base *b, const struct target *t, struct changed *c,
                       struct node *manifest, uint32_t which, struct script *s)
{
    size_t size;
    uint8_t *file = change(c, b, CODEBOOKS_NAME, &size), *set = file;
    if (!file) return;
    uint32_t left = which % (3 * t->c->bank_count);
    for (uint32_t i = 0; i < t->c->bank_count; i++) {
        const size_t bytes = codebooks_bytes(t->c->banks[i].codec);
        for (int kind = 0; bytes > 0 && kind < 3; kind++, set += bytes) {
            if (left-- != 0) continue;
            damage(set, bytes, s);
            put32(set + 60, 0);
            put32(set + 60, crc32c(0, set, bytes));
        }
    }
    struct node *entry = node_get(manifest, "codebooks");
    if (entry) node_set_int(&scratch, entry, "crc32c", crc32c(0, file, size));
}

static void edit_rows(const struct base *b, struct changed *c, uint32_t which, struct script *s)
{
    size_t size;
    uint8_t *file = change(c, b, NGRAM_NAME, &size);
    if (!file || size < ROW_PAGE) return;
    uint8_t *page = file + which % (size / ROW_PAGE) * ROW_PAGE;
    damage(page, ROW_PAGE - 4, s);
    put32(page + ROW_PAGE - 4, crc32c(0, page, ROW_PAGE - 4));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct outcome first, second;
    struct way way, other;
    struct changed changed = {.count = 0};
    if (size < 8) return 0;
    struct base *b = base_choose(data[0]);
    const struct target *t = &targets[b - bases];
    struct node *manifest = tree_copy(&scratch, b->manifest);
    const bool twice = data[1] != data[2];
    struct script s = {data + 3, size - 3};
    way_of(data[1], &way);
    way_of(data[2], &other);
    for (int i = 0; i < EDITS && s.left > 0; i++) {
        const uint32_t what = take(&s, 1), which = take(&s, 1);
        switch (what % 8) {
        case 4:
        case 5: edit_trunk(b, t, &changed, manifest, which, &s); break;
        case 6: edit_books(b, t, &changed, manifest, which, &s); break;
        case 7: edit_rows(b, &changed, which, &s); break;
        default: edit_record(b, t, &changed, manifest, which, &s); break;
        }
    }
    for (size_t i = 0; i < changed.count; i++)
        work_store(b, changed.file[i]->name, changed.data[i], changed.file[i]->size);
    work_manifest(b, manifest);
    work_run(b, &way, &first);
    counts.inputs++;
    counts.opened += first.open == HR_OK;
    counts.evaluated += first.eval == HR_OK;
    counts.numeric += first.eval == HR_ERR_NUMERIC;
    if (first.open != HR_OK || !twice) return 0;
    work_run(b, &other, &second);
    outcomes_equal(&first, &second);
    return 0;
}
