#include "cli/json_out.h"

#include <math.h>
#include <string.h>

void json_out_init(struct json_out *j, FILE *file) { *j = (struct json_out){.file = file}; }

void json_out_end(struct json_out *j) { fputc('\n', j->file); }

/* Length of the well-formed UTF-8 sequence at p, or 0. */
static size_t sequence(const unsigned char *p, size_t n)
{
    static const unsigned char least[5] = {0, 0, 0xC2, 0xE0, 0xF0};
    const size_t need = p[0] < 0x80 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (need == 1) return 1;
    if (p[0] < least[need] || p[0] > 0xF4 || n < need) return 0;
    for (size_t i = 1; i < need; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) ||
        (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F))
        return 0;
    return need;
}

static void quoted(FILE *file, const char *text, size_t n)
{
    const unsigned char *p = (const unsigned char *)text;
    fputc('"', file);
    for (size_t i = 0; i < n;) {
        const unsigned char c = p[i];
        const size_t length = sequence(p + i, n - i);
        if (c == '"' || c == '\\') fprintf(file, "\\%c", c);
        else if (c == '\n') fputs("\\n", file);
        else if (c < 0x20 || c == 0x7F) fprintf(file, "\\u%04x", c);
        else if (length == 0) fputs("\xEF\xBF\xBD", file);
        else fwrite(p + i, 1, length, file);
        i += length > 0 ? length : 1;
    }
    fputc('"', file);
}

static void begin(struct json_out *j, const char *key)
{
    if (j->depth > 0) {
        if (j->filled[j->depth - 1]) fputs(", ", j->file);
        j->filled[j->depth - 1] = true;
    }
    if (key != NULL) {
        quoted(j->file, key, strlen(key));
        fputs(": ", j->file);
    }
}

void out_open(struct json_out *j, const char *key, char bracket)
{
    begin(j, key);
    fputc(bracket, j->file);
    j->filled[j->depth++] = false;
}

void out_close(struct json_out *j, char bracket)
{
    j->depth--;
    fputc(bracket, j->file);
}

void out_text(struct json_out *j, const char *key, const char *text, size_t n)
{
    begin(j, key);
    quoted(j->file, text, n);
}

void out_string(struct json_out *j, const char *key, const char *text)
{
    out_text(j, key, text, strlen(text));
}

void out_u64(struct json_out *j, const char *key, uint64_t value)
{
    begin(j, key);
    fprintf(j->file, "%llu", (unsigned long long)value);
}

void out_i64(struct json_out *j, const char *key, int64_t value)
{
    begin(j, key);
    fprintf(j->file, "%lld", (long long)value);
}

void out_f64(struct json_out *j, const char *key, double value)
{
    begin(j, key);
    if (isfinite(value)) fprintf(j->file, "%.17g", value);
    else fputs("null", j->file);
}

void out_bool(struct json_out *j, const char *key, bool value)
{
    begin(j, key);
    fputs(value ? "true" : "false", j->file);
}

void out_null(struct json_out *j, const char *key)
{
    begin(j, key);
    fputs("null", j->file);
}

void out_raw(struct json_out *j, const char *key, const char *text, size_t n)
{
    begin(j, key);
    fwrite(text, 1, n, j->file);
}
