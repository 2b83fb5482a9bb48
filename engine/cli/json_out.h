/* Writes one JSON value to a stream. Strings are escaped; ill-formed UTF-8 becomes U+FFFD. */
#ifndef CLI_JSON_OUT_H
#define CLI_JSON_OUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { JSON_OUT_DEPTH = 16 };

struct json_out {
    FILE *file;
    int depth;
    bool filled[JSON_OUT_DEPTH]; /* the value at this depth has a member already */
};

void json_out_init(struct json_out *j, FILE *file);
/* Ends the line; every container must be closed. */
void json_out_end(struct json_out *j);

/* `key` is NULL inside arrays and at the top. */
void out_open(struct json_out *j, const char *key, char bracket); /* '{' or '[' */
void out_close(struct json_out *j, char bracket);                 /* '}' or ']' */
void out_text(struct json_out *j, const char *key, const char *text, size_t n);
void out_string(struct json_out *j, const char *key, const char *text);
void out_u64(struct json_out *j, const char *key, uint64_t value);
void out_i64(struct json_out *j, const char *key, int64_t value);
void out_f64(struct json_out *j, const char *key, double value); /* null unless finite */
void out_bool(struct json_out *j, const char *key, bool value);
void out_null(struct json_out *j, const char *key);
/* Text that is a JSON value already. */
void out_raw(struct json_out *j, const char *key, const char *text, size_t n);

#endif
