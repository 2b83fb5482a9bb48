#include "json_edit.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void arena_init(struct arena *a, size_t size)
{
    *a = (struct arena){malloc(size), 0, size};
    if (!a->base) abort();
}

void *arena_take(struct arena *a, size_t bytes)
{
    bytes = (bytes + 15) & ~(size_t)15;
    if (bytes > a->size - a->used) {
        fprintf(stderr, "the arena is full\n");
        exit(1);
    }
    void *p = a->base + a->used;
    a->used += bytes;
    return p;
}

const char *arena_copy(struct arena *a, const char *text, size_t n)
{
    char *p = arena_take(a, n + 1);
    memcpy(p, text, n);
    p[n] = '\0';
    return p;
}

struct node *node_new(struct arena *a, enum json_kind kind, const char *key, const char *text)
{
    struct node *v = arena_take(a, sizeof *v);
    *v = (struct node){kind, key, text, NULL, NULL};
    return v;
}

struct node *tree_read(struct arena *a, const struct json *v, const char *key)
{
    struct node *out = node_new(a, json_kind(v), key ? arena_copy(a, key, strlen(key)) : NULL, NULL);
    char text[64];
    int64_t integer;
    double real;
    bool truth;
    size_t n = 0;
    switch (out->kind) {
    case JSON_NULL: out->text = "null"; break;
    case JSON_BOOL: out->text = json_bool(v, &truth) && truth ? "true" : "false"; break;
    case JSON_INT:
        if (!json_int(v, &integer)) abort();
        n = (size_t)snprintf(text, sizeof text, "%" PRId64, integer);
        out->text = arena_copy(a, text, n);
        break;
    case JSON_REAL:
        if (!json_real(v, &real)) abort();
        n = (size_t)snprintf(text, sizeof text, "%.15g", real);
        out->text = arena_copy(a, text, n);
        break;
    case JSON_STRING: {
        const char *s = json_string(v, &n);
        out->text = arena_copy(a, s, n);
        break;
    }
    case JSON_ARRAY:
    case JSON_OBJECT: {
        struct node **link = &out->child;
        for (size_t i = 0; i < json_len(v); i++) {
            const bool object = out->kind == JSON_OBJECT;
            *link = object ? tree_read(a, json_value_at(v, i), json_key_at(v, i))
                           : tree_read(a, json_at(v, i), NULL);
            link = &(*link)->next;
        }
        break;
    }
    }
    return out;
}

struct node *tree_copy(struct arena *a, const struct node *from)
{
    struct node *out = node_new(a, from->kind, from->key, from->text);
    struct node **link = &out->child;
    for (const struct node *c = from->child; c; c = c->next) {
        *link = tree_copy(a, c);
        link = &(*link)->next;
    }
    return out;
}

struct writer {
    char *out;
    size_t used, max;
    unsigned depth;
};

static void put(struct writer *w, const char *text, size_t n)
{
    if (w->used + n <= w->max) memcpy(w->out + w->used, text, n);
    w->used += n;
}

static void put_string(struct writer *w, const char *text)
{
    put(w, "\"", 1);
    for (const char *p = text; *p; p++) {
        if (*p == '"' || *p == '\\') put(w, "\\", 1);
        put(w, p, 1);
    }
    put(w, "\"", 1);
}

static void write_node(struct writer *w, const struct node *v)
{
    if (w->depth > 64) {
        put(w, "0", 1);
        return;
    }
    if (v->key) {
        put_string(w, v->key);
        put(w, ":", 1);
    }
    if (v->kind == JSON_STRING) {
        put_string(w, v->text);
    } else if (v->kind == JSON_ARRAY || v->kind == JSON_OBJECT) {
        const bool object = v->kind == JSON_OBJECT;
        w->depth++;
        put(w, object ? "{" : "[", 1);
        for (const struct node *c = v->child; c; c = c->next) {
            write_node(w, c);
            if (c->next) put(w, ",", 1);
        }
        put(w, object ? "}" : "]", 1);
        w->depth--;
    } else {
        put(w, v->text, strlen(v->text));
    }
}

size_t tree_write(const struct node *root, char *out, size_t max)
{
    struct writer w = {out, 0, max, 0};
    write_node(&w, root);
    return w.used <= max ? w.used : 0;
}

struct node *node_get(struct node *object, const char *key)
{
    if (!object) return NULL;
    for (struct node *c = object->child; c; c = c->next)
        if (c->key && strcmp(c->key, key) == 0) return c;
    return NULL;
}

struct node *node_at(struct node *array, size_t i)
{
    struct node *c = array ? array->child : NULL;
    while (c && i-- > 0) c = c->next;
    return c;
}

size_t node_len(const struct node *v)
{
    size_t n = 0;
    for (const struct node *c = v ? v->child : NULL; c; c = c->next) n++;
    return n;
}

void node_append(struct node *parent, struct node *child)
{
    struct node **link = &parent->child;
    while (*link) link = &(*link)->next;
    *link = child;
}

void node_remove(struct node *parent, const struct node *child)
{
    for (struct node **link = &parent->child; *link; link = &(*link)->next) {
        if (*link != child) continue;
        *link = child->next;
        return;
    }
}

bool node_int(const struct node *v, uint64_t *out)
{
    char *end;
    if (!v || v->kind != JSON_INT || v->text[0] == '-') return false;
    *out = strtoull(v->text, &end, 10);
    return *end == '\0';
}

void node_set_int(struct arena *a, struct node *object, const char *key, uint64_t value)
{
    char text[24];
    const size_t n = (size_t)snprintf(text, sizeof text, "%" PRIu64, value);
    struct node *v = node_get(object, key);
    if (!v) {
        v = node_new(a, JSON_INT, arena_copy(a, key, strlen(key)), NULL);
        node_append(object, v);
    }
    v->kind = JSON_INT;
    v->child = NULL;
    v->text = arena_copy(a, text, n);
}

/* ---- scripts ---- */

enum { MAX_WORDS = 512, MAX_NODES = 1 << 14 };

static const char *words[MAX_WORDS];
static size_t word_count;

static void word_add(const char *word)
{
    for (size_t i = 0; i < word_count; i++)
        if (strcmp(words[i], word) == 0) return;
    if (word_count < MAX_WORDS && strlen(word) < 24) words[word_count++] = word;
}

void words_add(const struct node *v)
{
    static const char *const format[] = {
        "f32", "f64", "bf16", "int8", "mxfp4", "int4", "nl4", "rvq4x64", "rvq3x256", "rvq2x256",
        "plain", "attn_res", "hyper", "attention", "mla", "delta", "dense", "moe", "softmax",
        "softmax_chosen", "sigmoid", "silu", "top2", "max", "head", "channel", "vector", "softplus",
        "bounded", "silu_glu", "situ_glu", "clamped_glu", "embed", "window", "sinks", "sparse",
        "bias", "output_bias", "multiplier", "embed_scale", "logit_scale", "beta", "linear_beta",
        "alpha", "limit", "groups", "top_groups", "latent", "latent_norm", "expert_bias",
        "decay_bound", "decay_rank", "gate_rank", "../x", "", "0x1p-1074", "0x1.fffffep+127", "\xff"};
    if (word_count == 0)
        for (size_t i = 0; i < sizeof format / sizeof *format; i++) word_add(format[i]);
    if (v->key) word_add(v->key);
    if (v->kind == JSON_STRING) word_add(v->text);
    for (const struct node *c = v->child; c; c = c->next) words_add(c);
}

struct place {
    struct node *parent, *v;
};

static struct place places[MAX_NODES];
static size_t place_count;

/* Checksums are many and dull: only the first of a list can be chosen, unless `all`. */
static void collect(struct node *parent, struct node *v, bool all)
{
    if (place_count == MAX_NODES) return;
    places[place_count++] = (struct place){parent, v};
    const bool dull = v->key && strcmp(v->key, "crc32c") == 0 && !all;
    for (struct node *c = v->child; c; c = c->next) {
        collect(v, c, all);
        if (dull) break;
    }
}

static const char *const awkward[] = {
    "0", "1", "2", "3", "-1", "7", "8", "16", "31", "32", "33", "63", "64", "65", "96", "127", "128",
    "255", "256", "257", "1000", "1024", "4095", "4096", "4097", "65535", "65536", "65537", "1000000",
    "1048576", "1048577", "16777216", "16777217", "2147483647", "2147483648", "4294967295",
    "4294967296", "1099511627776", "1152921504606846976", "2305843009213693951",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775808",
    "0.5", "1e-6", "1.5", "-0", "-0.0", "1e22", "1e300", "1e309", "0.1", "1e-7", "null", "true", "false",
    "[]", "{}", "\"\"", "[0]", "[[]]", "NaN", "01", "+1", "1.", "\"0x1p-1074\"", "\"0x1p+1024\"",
    "\"0x1.8p-3\"", "\"0x1.fffffffffffffp+1023\"", "\"0x1p-149\"", "\"nan\"", "[1,2,3,4]"};
enum { AWKWARD = sizeof awkward / sizeof *awkward };

/* A literal stands in a node as it is written. */
static void set_literal(struct node *v, const char *literal)
{
    v->kind = JSON_REAL;
    v->text = literal;
    v->child = NULL;
    if (literal[0] != '-' && strspn(literal, "0123456789") == strlen(literal)) v->kind = JSON_INT;
}

static void set_number(struct arena *a, struct node *v, uint64_t value)
{
    char text[24];
    v->text = arena_copy(a, text, (size_t)snprintf(text, sizeof text, "%" PRIu64, value));
    v->kind = JSON_INT;
    v->child = NULL;
}

/* Every number in the tree that equals `from`: what a dimension is, it is in all places. */
static void replace_everywhere(struct arena *a, struct node *v, uint64_t from, uint64_t to)
{
    uint64_t value;
    if (node_int(v, &value) && value == from) set_number(a, v, to);
    if (v->key && strcmp(v->key, "crc32c") == 0) return;
    for (struct node *c = v->child; c; c = c->next) replace_everywhere(a, c, from, to);
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

/* A place: where to look (the model, the tensors and banks, or everything) and which. */
static struct place choose(struct node *root, struct script *s)
{
    static const char *const parts[] = {"model", "model", "trunk", "experts"};
    const uint32_t where = take(s, 1), which = take(s, 2);
    struct node *from = (where & 7) < 4 ? node_get(root, parts[where & 3]) : NULL;
    place_count = 0;
    collect(NULL, from ? from : root, (where & 7) == 7);
    struct place p = places[which % place_count];
    if (p.v == from && from) p.parent = root;
    return p;
}

static void insert_after(struct node *v, struct node *fresh)
{
    fresh->next = v->next;
    v->next = fresh;
}

static void edit_number(struct arena *a, struct place p, uint32_t how, uint32_t by)
{
    uint64_t value;
    if (!node_int(p.v, &value)) return;
    switch (how % 6) {
    case 0: value += by; break;
    case 1: value = value >= by ? value - by : 0; break;
    case 2: value *= by; break;
    case 3: value = by ? value / by : 0; break;
    case 4: value = by; break;
    default: value ^= (uint64_t)1 << (by % 63); break;
    }
    set_number(a, p.v, value);
}

static void edit(struct arena *a, struct node *root, unsigned op, struct script *s)
{
    const struct place p = choose(root, s);
    const uint32_t x = take(s, 1);
    uint64_t value;
    struct node *fresh;
    switch (op) {
    case 0: set_literal(p.v, awkward[x % AWKWARD]); break;
    case 1: edit_number(a, p, x, take(s, 1)); break;
    case 2: edit_number(a, p, x, take(s, 4)); break;
    case 3:
        if (p.parent) node_remove(p.parent, p.v);
        break;
    case 4:
        if (p.parent) insert_after(p.v, tree_copy(a, p.v));
        break;
    case 5:
        if (p.v->key) p.v->key = words[(x | take(s, 1) << 8) % word_count];
        break;
    case 6:
        if (p.v->kind == JSON_STRING) p.v->text = words[(x | take(s, 1) << 8) % word_count];
        break;
    case 7: /* a new member or element */
        if (p.v->kind != JSON_OBJECT && p.v->kind != JSON_ARRAY) break;
        fresh = node_new(a, JSON_REAL, NULL, NULL);
        if (p.v->kind == JSON_OBJECT) fresh->key = words[(x | take(s, 1) << 8) % word_count];
        set_literal(fresh, awkward[take(s, 1) % AWKWARD]);
        node_append(p.v, fresh);
        break;
    case 8: { /* another place's value */
        const struct node *from = tree_copy(a, choose(root, s).v);
        const char *key = p.v->key;
        struct node *next = p.v->next;
        *p.v = *from;
        p.v->key = key;
        p.v->next = next;
        break;
    }
    case 9:
        if (node_int(p.v, &value)) replace_everywhere(a, root, value, x);
        break;
    case 10:
        if (node_int(p.v, &value)) replace_everywhere(a, root, value, (uint64_t)x << (take(s, 1) % 24));
        break;
    case 11: /* deeper and deeper */
        for (uint32_t i = 0; i < x % 20; i++) {
            fresh = node_new(a, p.v->kind, NULL, p.v->text);
            fresh->child = p.v->child;
            p.v->kind = JSON_ARRAY;
            p.v->child = fresh;
        }
        break;
    case 12: /* many of them */
        for (uint32_t i = 0; p.parent && i < x % 64 && a->used < a->size / 4; i++)
            insert_after(p.v, tree_copy(a, p.v));
        break;
    case 13:
        if (p.v->kind == JSON_STRING) {
            const size_t n = s->left < x % 32 ? s->left : x % 32;
            p.v->text = arena_copy(a, (const char *)s->at, n);
            s->at += n;
            s->left -= n;
        }
        break;
    default:
        if (p.v->kind == JSON_BOOL) p.v->text = p.v->text[0] == 't' ? "false" : "true";
        break;
    }
}

size_t tree_edit(struct arena *a, struct node *root, const uint8_t *script, size_t n)
{
    struct script s = {script, n};
    for (unsigned edits = 0; s.left > 0 && edits < 64; edits++) {
        const unsigned op = take(&s, 1) % 16;
        if (op == EDIT_STOP) break;
        if (a->used > a->size / 4) break; /* copies of copies */
        edit(a, root, op, &s);
    }
    return n - s.left;
}
