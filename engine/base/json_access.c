#include <inttypes.h>
#include <string.h>

#include "base/json_tree.h"

static bool is(const struct json *v, enum json_kind kind)
{
    return v && v->kind == kind;
}

enum json_kind json_kind(const struct json *v)
{
    return v ? (enum json_kind)v->kind : JSON_NULL;
}

int json_compare_keys(const char *a, size_t a_len, const char *b, size_t b_len)
{
    const int order = memcmp(a, b, a_len < b_len ? a_len : b_len);
    if (order != 0) return order;
    return a_len < b_len ? -1 : a_len > b_len;
}

const struct json *json_get(const struct json *object, const char *key)
{
    if (!is(object, JSON_OBJECT)) return NULL;
    const uint32_t *sorted = json_sorted(object);
    const size_t n = strlen(key);
    size_t low = 0, high = object->len;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const struct json_member *m = &object->as.members[sorted[middle]];
        const int order = json_compare_keys(key, n, m->key.as.text, m->key.len);
        if (order == 0) return &m->value;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

size_t json_len(const struct json *v)
{
    return is(v, JSON_ARRAY) || is(v, JSON_OBJECT) ? v->len : 0;
}

const struct json *json_at(const struct json *array, size_t i)
{
    return is(array, JSON_ARRAY) && i < array->len ? &array->as.items[i] : NULL;
}

const char *json_key_at(const struct json *object, size_t i)
{
    return is(object, JSON_OBJECT) && i < object->len ? object->as.members[i].key.as.text : NULL;
}

const struct json *json_value_at(const struct json *object, size_t i)
{
    return is(object, JSON_OBJECT) && i < object->len ? &object->as.members[i].value : NULL;
}

const char *json_string(const struct json *v, size_t *len)
{
    if (!is(v, JSON_STRING)) return NULL;
    if (len) *len = v->len;
    return v->as.text;
}

bool json_bool(const struct json *v, bool *out)
{
    if (!is(v, JSON_BOOL)) return false;
    *out = v->truth;
    return true;
}

bool json_int(const struct json *v, int64_t *out)
{
    if (!is(v, JSON_INT)) return false;
    *out = v->as.integer;
    return true;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* Digits of the mantissa with the power of two of the last one taken in. */
struct hex_mantissa {
    uint64_t value;
    int64_t power;
    size_t digits; /* that were written */
    bool overflow;
};

static size_t take_hex_digits(const char *text, size_t at, size_t n, bool fraction,
                              struct hex_mantissa *m)
{
    for (int digit; at < n && (digit = hex_digit(text[at])) >= 0; at++, m->digits++) {
        /* Trailing zeros beyond 64 bits are allowed, anything else there is not exact. */
        if (m->value >> 60) {
            m->overflow = m->overflow || digit != 0;
            if (!fraction) m->power += 4;
            continue;
        }
        m->value = m->value << 4 | (uint64_t)digit;
        if (fraction) m->power -= 4;
    }
    return at;
}

/* The double of `odd` * 2^power, where the lowest bit of odd is set. */
static bool pack_double(uint64_t odd, int64_t power, bool negative, double *out)
{
    int width = 0;
    while (width < 64 && odd >> width) width++;
    const int64_t top = power + width - 1;
    if (width > 53 || top > 1023 || power < -1074) return false;
    uint64_t bits;
    if (top >= -1022)
        bits = (uint64_t)(top + 1023) << 52 | ((odd << (53 - width)) & (((uint64_t)1 << 52) - 1));
    else
        bits = odd << (power + 1074);
    bits |= (uint64_t)negative << 63;
    memcpy(out, &bits, sizeof *out);
    return true;
}

bool json_hex_float(const char *text, size_t n, double *out)
{
    const int64_t most = 1000000000;
    struct hex_mantissa m = {0, 0, 0, false};
    size_t at = 0;
    const bool negative = n > 0 && text[0] == '-';
    if (negative || (n > 0 && text[0] == '+')) at++;
    if (n - at < 2 || text[at] != '0' || (text[at + 1] | 0x20) != 'x') return false;
    at = take_hex_digits(text, at + 2, n, false, &m);
    if (at < n && text[at] == '.') at = take_hex_digits(text, at + 1, n, true, &m);
    if (m.digits == 0 || m.overflow || at >= n || (text[at] | 0x20) != 'p') return false;

    at++;
    const bool down = at < n && text[at] == '-';
    if (down || (at < n && text[at] == '+')) at++;
    if (at >= n) return false;
    int64_t exponent = 0;
    for (; at < n; at++) {
        if (text[at] < '0' || text[at] > '9') return false;
        if (exponent < most) exponent = exponent * 10 + (text[at] - '0');
    }
    if (m.value == 0) {
        *out = negative ? -0.0 : 0.0;
        return true;
    }
    for (; (m.value & 1) == 0; m.value >>= 1) m.power++;
    return pack_double(m.value, m.power + (down ? -exponent : exponent), negative, out);
}

bool json_real(const struct json *v, double *out)
{
    const int64_t exact = (int64_t)1 << 53;
    if (is(v, JSON_REAL)) {
        *out = v->as.real;
        return true;
    }
    if (is(v, JSON_INT)) {
        if (v->as.integer < -exact || v->as.integer > exact) return false;
        *out = (double)v->as.integer;
        return true;
    }
    return is(v, JSON_STRING) && json_hex_float(v->as.text, v->len, out);
}

static const char *kind_name(enum json_kind kind)
{
    switch (kind) {
    case JSON_NULL: return "null";
    case JSON_BOOL: return "true or false";
    case JSON_INT: return "an integer";
    case JSON_REAL: return "a real";
    case JSON_STRING: return "a string";
    case JSON_ARRAY: return "an array";
    case JSON_OBJECT: return "an object";
    }
    return "unknown";
}

static hr_status find(const struct json *object, const char *key, const char *where,
                      const struct json **out, hr_error *err)
{
    if (!is(object, JSON_OBJECT))
        return fail(err, HR_ERR_FORMAT, "%s: is %s, must be an object", where,
                    object ? kind_name(json_kind(object)) : "missing");
    *out = json_get(object, key);
    if (!*out) return fail(err, HR_ERR_FORMAT, "%s: \"%s\" is missing", where, key);
    return HR_OK;
}

static hr_status wrong_kind(const struct json *v, const char *key, const char *wanted,
                            const char *where, hr_error *err)
{
    return fail(err, HR_ERR_FORMAT, "%s: \"%s\" is %s, must be %s", where, key,
                kind_name(json_kind(v)), wanted);
}

hr_status json_need(const struct json *object, const char *key, enum json_kind kind,
                    const char *where, const struct json **out, hr_error *err)
{
    TRY(find(object, key, where, out, err));
    if (!is(*out, kind)) return wrong_kind(*out, key, kind_name(kind), where, err);
    return HR_OK;
}

hr_status json_need_int(const struct json *object, const char *key, int64_t min, int64_t max,
                        const char *where, int64_t *out, hr_error *err)
{
    const struct json *v = NULL;
    TRY(json_need(object, key, JSON_INT, where, &v, err));
    if (v->as.integer < min || v->as.integer > max)
        return fail(err, HR_ERR_FORMAT,
                    "%s: \"%s\" is %" PRId64 ", must be from %" PRId64 " to %" PRId64, where, key,
                    v->as.integer, min, max);
    *out = v->as.integer;
    return HR_OK;
}

hr_status json_need_u32(const struct json *object, const char *key, int64_t min, int64_t max,
                        const char *where, uint32_t *out, hr_error *err)
{
    int64_t v = 0;
    TRY(json_need_int(object, key, min, max, where, &v, err));
    *out = (uint32_t)v;
    return HR_OK;
}

hr_status json_need_real(const struct json *object, const char *key, double min, double max,
                         const char *where, double *out, hr_error *err)
{
    const struct json *v = NULL;
    double value;
    TRY(find(object, key, where, &v, err));
    if (!json_real(v, &value)) {
        if (is(v, JSON_STRING))
            return fail(err, HR_ERR_FORMAT,
                        "%s: \"%s\" is \"%.60s\", must be a number or a hexadecimal float string "
                        "such as \"0x1.8p-3\" that a double holds exactly",
                        where, key, v->as.text);
        return wrong_kind(v, key, is(v, JSON_INT) ? "within 2^53" : "a number", where, err);
    }
    if (!(value >= min && value <= max))
        return fail(err, HR_ERR_FORMAT, "%s: \"%s\" is %.17g, must be from %.17g to %.17g", where,
                    key, value, min, max);
    *out = value;
    return HR_OK;
}

hr_status json_need_bool(const struct json *object, const char *key, const char *where, bool *out,
                         hr_error *err)
{
    const struct json *v = NULL;
    TRY(json_need(object, key, JSON_BOOL, where, &v, err));
    *out = v->truth;
    return HR_OK;
}

hr_status json_need_string(const struct json *object, const char *key, const char *where,
                           const char **out, hr_error *err)
{
    const struct json *v = NULL;
    TRY(json_need(object, key, JSON_STRING, where, &v, err));
    if (strlen(v->as.text) != v->len)
        return fail(err, HR_ERR_FORMAT, "%s: \"%s\" holds a NUL character", where, key);
    *out = v->as.text;
    return HR_OK;
}

hr_status json_only_keys(const struct json *object, const char *const *keys, const char *where,
                         hr_error *err)
{
    if (!is(object, JSON_OBJECT))
        return fail(err, HR_ERR_FORMAT, "%s: is %s, must be an object", where,
                    object ? kind_name(json_kind(object)) : "missing");
    for (size_t i = 0; i < object->len; i++) {
        const struct json *key = &object->as.members[i].key;
        bool known = false;
        for (size_t k = 0; keys[k] && !known; k++)
            known = json_compare_keys(keys[k], strlen(keys[k]), key->as.text, key->len) == 0;
        if (!known)
            return fail(err, HR_ERR_FORMAT,
                        "%s: the key \"%.80s\" is not understood by this version", where,
                        key->as.text);
    }
    return HR_OK;
}
