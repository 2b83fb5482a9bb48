/* A strict JSON reader for hostile input: UTF-8 validated, duplicate keys refused, depth <= 16,
 * at most 4M values, numbers are int64 or exactly representable doubles, nothing after the value. */
#ifndef BASE_JSON_H
#define BASE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum json_kind { JSON_NULL, JSON_BOOL, JSON_INT, JSON_REAL, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

/* A value. Owned by its document. Accessors accept NULL and return "absent". */
struct json;
struct json_doc; /* the tree and its memory */

/* `what` names the text in errors ("manifest.json"). The text may be freed afterwards. Errors
 * carry the byte offset. A number with a fraction or exponent must be exactly computable from at
 * most 15 digits and a power of ten within 10^22 (then it is correctly rounded everywhere); other
 * reals are written as C99 hex-float strings and read by json_real. */
hr_status json_parse(const char *text, size_t n, const char *what, struct json_doc **out,
                     hr_error *err);
void json_free(struct json_doc *doc);
size_t json_bytes(const struct json_doc *doc); /* memory the document holds */
const struct json *json_root(const struct json_doc *doc);

enum json_kind json_kind(const struct json *v);
const struct json *json_get(const struct json *object, const char *key); /* NULL when absent */
size_t json_len(const struct json *v);                                  /* array or object; else 0 */
const struct json *json_at(const struct json *array, size_t i);         /* O(1); NULL when out of range */
const char *json_key_at(const struct json *object, size_t i); /* document order; keys hold no NUL */
const struct json *json_value_at(const struct json *object, size_t i);
const char *json_string(const struct json *v, size_t *len); /* NULL when not a string; may hold NUL inside: compare len */
bool json_bool(const struct json *v, bool *out);
bool json_int(const struct json *v, int64_t *out);
bool json_real(const struct json *v, double *out); /* int, real or hex-float string such as "0x1.8p-3" */

/* Required members with limits: the error names `where` and the key, the value and the range. */
hr_status json_need_int(const struct json *object, const char *key, int64_t min, int64_t max,
                        const char *where, int64_t *out, hr_error *err);
hr_status json_need_u32(const struct json *object, const char *key, int64_t min, int64_t max,
                        const char *where, uint32_t *out, hr_error *err);
hr_status json_need_real(const struct json *object, const char *key, double min, double max,
                         const char *where, double *out, hr_error *err);
hr_status json_need_bool(const struct json *object, const char *key, const char *where, bool *out,
                         hr_error *err);
hr_status json_need_string(const struct json *object, const char *key, const char *where,
                           const char **out, hr_error *err); /* refuses an embedded NUL */
hr_status json_need(const struct json *object, const char *key, enum json_kind kind,
                    const char *where, const struct json **out, hr_error *err);
/* Refuses keys that are not in the NULL-terminated list: a key that is not understood is an error. */
hr_status json_only_keys(const struct json *object, const char *const *keys, const char *where,
                         hr_error *err);

#endif
