#include <string.h>

#include "base/cpu.h"
#include "base/json_tree.h"
#include "base/mem.h"
#include "base/utf8.h"

enum { MOST_DEPTH = 16, MOST_DIGITS = 15, MOST_POWER = 22 };
#define MOST_VALUES ((size_t)4 << 20)
#define MOST_BYTES ((size_t)256 << 20)

/* The text is read twice by the same code. The first pass checks everything but duplicate keys and
 * measures; the second fills one block of exactly the measured size, so that the children of a
 * container lie side by side and hostile text cannot make anything grow. */
struct parser {
    const uint8_t *text;
    size_t n, at;
    const char *what;
    hr_error *err;
    bool building;
    bool saw_nul; /* in a string */
    size_t values;
    uint32_t *counts; /* children of each container, in order of opening brackets */
    size_t containers;
    uint8_t *nodes; /* arrays of children */
    size_t node_bytes;
    char *strings;
    size_t string_bytes;
};

struct json_doc {
    struct json root;
    size_t bytes; /* of the whole block: this struct, then nodes, then strings */
};

static hr_status parse_value(struct parser *p, unsigned depth, struct json *out);

static hr_status refuse(const struct parser *p, size_t at, const char *why)
{
    return fail(p->err, HR_ERR_FORMAT, "%s: byte %zu: %s", p->what, at, why);
}

static void skip_space(struct parser *p)
{
    while (p->at < p->n && (p->text[p->at] == ' ' || p->text[p->at] == '\t' ||
                            p->text[p->at] == '\n' || p->text[p->at] == '\r'))
        p->at++;
}

static bool next_is(const struct parser *p, char c)
{
    return p->at < p->n && p->text[p->at] == (uint8_t)c;
}

static bool is_digit(const struct parser *p)
{
    return p->at < p->n && p->text[p->at] >= '0' && p->text[p->at] <= '9';
}

/* Strings. */

static void put(struct parser *p, const void *bytes, size_t n)
{
    if (p->building) memcpy(p->strings + p->string_bytes, bytes, n);
    p->string_bytes += n;
}

static void put_code_point(struct parser *p, uint32_t c)
{
    uint8_t bytes[4];
    size_t n = 1;
    if (c == 0) p->saw_nul = true;
    if (c < 0x80) {
        bytes[0] = (uint8_t)c;
    } else if (c < 0x800) {
        n = 2;
        bytes[0] = (uint8_t)(0xC0 | c >> 6);
    } else if (c < 0x10000) {
        n = 3;
        bytes[0] = (uint8_t)(0xE0 | c >> 12);
    } else {
        n = 4;
        bytes[0] = (uint8_t)(0xF0 | c >> 18);
    }
    for (size_t i = 1; i < n; i++) bytes[i] = (uint8_t)(0x80 | ((c >> (6 * (n - 1 - i))) & 0x3F));
    put(p, bytes, n);
}

static int hex_value(uint8_t c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static hr_status parse_hex4(struct parser *p, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        const int digit = p->at < p->n ? hex_value(p->text[p->at]) : -1;
        if (digit < 0) return refuse(p, p->at, "\\u needs four hexadecimal digits");
        *out = *out << 4 | (uint32_t)digit;
    }
    return HR_OK;
}

static hr_status parse_escape(struct parser *p)
{
    const size_t start = p->at++;
    if (p->at >= p->n) return refuse(p, start, "a string is not closed");
    const uint8_t c = p->text[p->at++];
    static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    const char *name = memchr(names, c, sizeof names - 1);
    if (name) {
        put(p, meanings + (name - names), 1);
        return HR_OK;
    }
    if (c != 'u') return refuse(p, start, "unknown escape in a string");
    uint32_t unit;
    TRY(parse_hex4(p, &unit));
    if (unit >= 0xDC00 && unit <= 0xDFFF) return refuse(p, start, "a lone surrogate escape");
    if (unit >= 0xD800 && unit <= 0xDBFF) {
        if (p->n - p->at < 2 || p->text[p->at] != '\\' || p->text[p->at + 1] != 'u')
            return refuse(p, start, "a lone surrogate escape");
        p->at += 2;
        uint32_t low;
        TRY(parse_hex4(p, &low));
        if (low < 0xDC00 || low > 0xDFFF) return refuse(p, start, "a lone surrogate escape");
        unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
    }
    put_code_point(p, unit);
    return HR_OK;
}

static hr_status parse_string(struct parser *p, struct json *out)
{
    const size_t start = p->at++, before = p->string_bytes;
    for (;;) {
        if (p->at >= p->n) return refuse(p, start, "a string is not closed");
        const uint8_t c = p->text[p->at];
        if (c == '"') break;
        if (c == '\\') {
            TRY(parse_escape(p));
            continue;
        }
        if (c < 0x20) return refuse(p, p->at, "a control character in a string");
        const size_t step = utf8_sequence(p->text + p->at, p->n - p->at);
        if (step == 0) return refuse(p, p->at, "ill-formed UTF-8");
        put(p, p->text + p->at, step);
        p->at += step;
    }
    p->at++;
    out->kind = JSON_STRING;
    out->len = (uint32_t)(p->string_bytes - before);
    out->as.text = p->building ? p->strings + before : NULL;
    put(p, "", 1);
    return HR_OK;
}

/* Numbers. */

/* The digits of a number as written; zeros at both ends carry no precision. */
struct decimal {
    uint64_t mantissa; /* the first digits, up to 19 */
    int64_t power;     /* of ten, that the mantissa is multiplied by */
    int digits;        /* significant ones; more than 19 are counted as 20 */
    int64_t zeros;     /* that were read after the last significant digit */
};

static void add_digit(struct decimal *d, unsigned digit)
{
    if (digit == 0) {
        if (d->digits > 0) d->zeros++;
        return;
    }
    if (d->digits + d->zeros + 1 > 19) {
        d->digits = 20;
        return;
    }
    for (; d->zeros > 0; d->zeros--, d->digits++) d->mantissa *= 10;
    d->mantissa = d->mantissa * 10 + digit;
    d->digits++;
}

static hr_status parse_digits(struct parser *p, struct decimal *d, int64_t power_each)
{
    if (!is_digit(p)) return refuse(p, p->at, "a digit is missing in a number");
    for (; is_digit(p); p->at++) {
        add_digit(d, (unsigned)(p->text[p->at] - '0'));
        d->power += power_each;
    }
    return HR_OK;
}

static hr_status parse_exponent(struct parser *p, struct decimal *d)
{
    const int64_t most = 1000000000;
    p->at++;
    const bool negative = next_is(p, '-');
    if (negative || next_is(p, '+')) p->at++;
    if (!is_digit(p)) return refuse(p, p->at, "a digit is missing in a number");
    int64_t exponent = 0;
    for (; is_digit(p); p->at++)
        if (exponent < most) exponent = exponent * 10 + (p->text[p->at] - '0');
    d->power += negative ? -exponent : exponent;
    return HR_OK;
}

/* One multiplication or division of two exact doubles: IEEE 754 rounds it correctly. */
static bool decimal_to_real(const struct decimal *d, bool negative, double *out)
{
    double value = 0.0;
    if (d->digits > 0) {
        const int64_t power = d->power + d->zeros;
        if (d->digits > MOST_DIGITS || power < -MOST_POWER || power > MOST_POWER) return false;
        double scale = 1.0;
        for (int64_t i = 0; i < (power < 0 ? -power : power); i++) scale *= 10.0;
        value = power < 0 ? (double)d->mantissa / scale : (double)d->mantissa * scale;
    }
    *out = negative ? -value : value;
    return true;
}

static hr_status parse_number(struct parser *p, struct json *out)
{
    const size_t start = p->at;
    const bool negative = next_is(p, '-');
    struct decimal d = {0, 0, 0, 0};
    if (negative) p->at++;
    const size_t first = p->at;
    TRY(parse_digits(p, &d, 0));
    if (p->text[first] == '0' && p->at > first + 1)
        return refuse(p, start, "a number with a leading zero");
    if (p->at < p->n && (p->text[p->at] == '.' || (p->text[p->at] | 0x20) == 'e')) {
        if (next_is(p, '.')) {
            p->at++;
            TRY(parse_digits(p, &d, -1));
        }
        if (p->at < p->n && (p->text[p->at] | 0x20) == 'e') TRY(parse_exponent(p, &d));
        out->kind = JSON_REAL;
        if (!decimal_to_real(&d, negative, &out->as.real))
            return refuse(p, start,
                          "a real of more than 15 digits or with a power of ten beyond 22: write "
                          "it as a hexadecimal float string such as \"0x1.8p-3\"");
        return HR_OK;
    }
    /* Below 10^19 the mantissa fits in 64 bits. */
    const uint64_t most = (uint64_t)INT64_MAX + (negative ? 1 : 0);
    bool fits = d.digits + d.zeros <= 19;
    for (int64_t i = 0; fits && i < d.zeros; i++) d.mantissa *= 10;
    if (!fits || d.mantissa > most)
        return refuse(p, start, "an integer that does not fit in 64 bits");
    out->kind = JSON_INT;
    if (!negative)
        out->as.integer = (int64_t)d.mantissa;
    else
        out->as.integer = d.mantissa == most ? INT64_MIN : -(int64_t)d.mantissa;
    return HR_OK;
}

/* Containers. */

/* Starts a container: in the second pass its children get their places at once. */
static void open_container(struct parser *p, size_t child_bytes, size_t index_bytes,
                           size_t *number, uint8_t **children)
{
    *number = p->containers++;
    *children = NULL;
    if (!p->building) return;
    *children = p->nodes + p->node_bytes;
    p->node_bytes += round_up(p->counts[*number] * (child_bytes + index_bytes), 8);
}

static void close_container(struct parser *p, size_t child_bytes, size_t index_bytes, size_t number,
                            size_t count)
{
    if (p->building) return;
    p->counts[number] = (uint32_t)count;
    p->node_bytes += round_up(count * (child_bytes + index_bytes), 8);
}

/* After a child: true when another one follows; p->at stands on it. */
static hr_status after_child(struct parser *p, char close, const char *expected, bool *more)
{
    skip_space(p);
    *more = next_is(p, ',');
    if (!*more && !next_is(p, close)) return refuse(p, p->at, expected);
    p->at++;
    return HR_OK;
}

static hr_status parse_array(struct parser *p, unsigned depth, struct json *out)
{
    size_t number, count = 0;
    uint8_t *children;
    open_container(p, sizeof(struct json), 0, &number, &children);
    p->at++;
    skip_space(p);
    bool more = !next_is(p, ']');
    if (!more) p->at++;
    while (more) {
        struct json scratch;
        struct json *child = children ? (struct json *)(void *)children + count : &scratch;
        TRY(parse_value(p, depth, child));
        count++;
        TRY(after_child(p, ']', "expected ',' or ']' in an array", &more));
    }
    close_container(p, sizeof(struct json), 0, number, count);
    out->kind = JSON_ARRAY;
    out->len = (uint32_t)count;
    out->as.items = (const struct json *)(const void *)children;
    return HR_OK;
}

static int compare_members(const struct json_member *members, uint32_t a, uint32_t b)
{
    return json_compare_keys(members[a].key.as.text, members[a].key.len, members[b].key.as.text,
                             members[b].key.len);
}

/* Heapsort: no memory, and no order of keys makes it slow. */
static void sift(const struct json_member *members, uint32_t *order, size_t at, size_t n)
{
    const uint32_t moved = order[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && compare_members(members, order[child], order[child + 1]) < 0) child++;
        if (compare_members(members, moved, order[child]) >= 0) break;
        order[at] = order[child];
        at = child;
    }
    order[at] = moved;
}

static hr_status sort_members(struct parser *p, size_t start, const struct json_member *members,
                              uint32_t *order, size_t n)
{
    for (size_t i = 0; i < n; i++) order[i] = (uint32_t)i;
    for (size_t i = n / 2; i > 0; i--) sift(members, order, i - 1, n);
    for (size_t end = n; end > 1; end--) {
        const uint32_t largest = order[0];
        order[0] = order[end - 1];
        order[end - 1] = largest;
        sift(members, order, 0, end - 1);
    }
    for (size_t i = 1; i < n; i++)
        if (compare_members(members, order[i - 1], order[i]) == 0)
            return fail(p->err, HR_ERR_FORMAT,
                        "%s: byte %zu: the object that begins here has the key \"%.80s\" twice",
                        p->what, start, members[order[i]].key.as.text);
    return HR_OK;
}

static hr_status parse_object(struct parser *p, unsigned depth, struct json *out)
{
    const size_t member = sizeof(struct json_member), index = sizeof(uint32_t), start = p->at;
    size_t number, count = 0;
    uint8_t *children;
    open_container(p, member, index, &number, &children);
    struct json_member *members = (struct json_member *)(void *)children;
    p->at++;
    skip_space(p);
    bool more = !next_is(p, '}');
    if (!more) p->at++;
    while (more) {
        struct json_member scratch;
        struct json_member *child = members ? members + count : &scratch;
        skip_space(p);
        if (!next_is(p, '"')) return refuse(p, p->at, "expected a key in double quotes");
        const size_t key_at = p->at;
        p->saw_nul = false;
        TRY(parse_string(p, &child->key));
        if (p->saw_nul) return refuse(p, key_at, "a key with a NUL character");
        skip_space(p);
        if (!next_is(p, ':')) return refuse(p, p->at, "expected ':' after a key");
        p->at++;
        TRY(parse_value(p, depth, &child->value));
        count++;
        TRY(after_child(p, '}', "expected ',' or '}' in an object", &more));
    }
    close_container(p, member, index, number, count);
    out->kind = JSON_OBJECT;
    out->len = (uint32_t)count;
    out->as.members = members;
    if (p->building)
        TRY(sort_members(p, start, members, (uint32_t *)(void *)(members + count), count));
    return HR_OK;
}

/* Values. */

static bool take_word(struct parser *p, const char *word)
{
    const size_t n = strlen(word);
    if (p->n - p->at < n || memcmp(p->text + p->at, word, n) != 0) return false;
    p->at += n;
    return true;
}

static hr_status parse_value(struct parser *p, unsigned depth, struct json *out)
{
    skip_space(p);
    if (p->at >= p->n) return refuse(p, p->at, "the text ends where a value is expected");
    if (++p->values > MOST_VALUES) return refuse(p, p->at, "more than 4194304 values");
    memset(out, 0, sizeof *out);
    switch (p->text[p->at]) {
    case '{':
    case '[':
        if (depth >= MOST_DEPTH) return refuse(p, p->at, "nested deeper than 16");
        return p->text[p->at] == '{' ? parse_object(p, depth + 1, out)
                                     : parse_array(p, depth + 1, out);
    case '"': return parse_string(p, out);
    case 't':
    case 'f':
        out->kind = JSON_BOOL;
        out->truth = p->text[p->at] == 't';
        if (take_word(p, out->truth ? "true" : "false")) return HR_OK;
        break;
    case 'n':
        out->kind = JSON_NULL;
        if (take_word(p, "null")) return HR_OK;
        break;
    default:
        if (next_is(p, '-') || is_digit(p)) return parse_number(p, out);
        break;
    }
    return refuse(p, p->at, "not a JSON value");
}

static hr_status parse_text(struct parser *p, struct json *root)
{
    p->at = p->values = p->containers = p->node_bytes = p->string_bytes = 0;
    TRY(parse_value(p, 0, root));
    skip_space(p);
    if (p->at < p->n) return refuse(p, p->at, "something follows the value");
    return HR_OK;
}

static hr_status no_memory(const struct parser *p, size_t bytes)
{
    return fail(p->err, HR_ERR_MEMORY, "%s: no memory for %zu bytes of parsed JSON", p->what,
                bytes);
}

/* Brackets bound the containers from above, and values bound them again. */
static size_t most_containers(const uint8_t *text, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += text[i] == '{' || text[i] == '[';
    return count < MOST_VALUES ? count : MOST_VALUES;
}

static hr_status build(struct parser *p, struct json_doc **out)
{
    struct json scratch;
    TRY(parse_text(p, &scratch));
    const size_t head = round_up(sizeof(struct json_doc), 16);
    const size_t bytes = head + p->node_bytes + p->string_bytes;
    struct json_doc *doc = mem_alloc(NULL, bytes);
    if (!doc) return no_memory(p, bytes);
    doc->bytes = bytes;
    p->building = true;
    p->nodes = (uint8_t *)doc + head;
    p->strings = (char *)doc + head + p->node_bytes;
    const hr_status status = parse_text(p, &doc->root);
    if (status == HR_OK)
        *out = doc;
    else
        json_free(doc);
    return status;
}

hr_status json_parse(const char *text, size_t n, const char *what, struct json_doc **out,
                     hr_error *err)
{
    *out = NULL;
    struct parser p = {.text = (const uint8_t *)text, .n = n, .what = what, .err = err};
    if (n > MOST_BYTES)
        return fail(err, HR_ERR_FORMAT, "%s: %zu bytes of JSON, the most is %zu", what, n,
                    MOST_BYTES);
    const size_t counts_bytes = most_containers(p.text, n) * sizeof *p.counts;
    p.counts = mem_alloc(NULL, counts_bytes);
    if (!p.counts) return no_memory(&p, counts_bytes);
    const uint64_t mode = float_mode_enter();
    const hr_status status = build(&p, out);
    float_mode_leave(mode);
    mem_free(NULL, p.counts, counts_bytes);
    return status;
}

size_t json_bytes(const struct json_doc *doc)
{
    return doc->bytes;
}

void json_free(struct json_doc *doc)
{
    if (doc) mem_free(NULL, doc, doc->bytes);
}

const struct json *json_root(const struct json_doc *doc)
{
    return doc ? &doc->root : NULL;
}
