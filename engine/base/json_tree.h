/* The nodes of a parsed document; shared by the reader and the accessors only. */
#ifndef BASE_JSON_TREE_H
#define BASE_JSON_TREE_H

#include "base/json.h"

struct json_member;

struct json {
    uint8_t kind; /* enum json_kind */
    bool truth;
    uint32_t len; /* elements, members, or bytes of a string */
    union {
        int64_t integer;
        double real;
        const char *text; /* NUL-terminated besides len */
        const struct json *items;
        const struct json_member *members; /* document order; `len` sorted indices follow them */
    } as;
};

struct json_member {
    struct json key; /* a string */
    struct json value;
};

static inline const uint32_t *json_sorted(const struct json *object)
{
    return (const uint32_t *)(const void *)(object->as.members + object->len);
}

/* Order of keys: bytes, then length. */
int json_compare_keys(const char *a, size_t a_len, const char *b, size_t b_len);

/* The value of a C99 hexadecimal float such as "-0x1.8p-3"; false when it is none, or when a
 * double cannot hold it exactly. */
bool json_hex_float(const char *text, size_t n, double *out);

#endif
