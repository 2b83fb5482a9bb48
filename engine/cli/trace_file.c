#include "cli/trace_file.h"

#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/manifest_scan.h"

/* One token's row; false when the line is not one of this model's. */
static bool read_line(struct span line, uint32_t layers, uint32_t top_k, int32_t *row)
{
    struct span lists, list, id;
    size_t at = 0;
    uint32_t layer = 0;
    if (!scan_member(line, "layers", &lists)) return false;
    for (; scan_next(lists, &at, &list); layer++) {
        size_t in = 0;
        uint32_t k = 0;
        uint64_t number;
        if (layer == layers) return false;
        for (; scan_next(list, &in, &id); k++) {
            if (k == top_k || !scan_u64(id, &number) || number > INT32_MAX) return false;
            row[(size_t)layer * top_k + k] = (int32_t)number;
        }
        if (k == 0) return false;
        for (; k < top_k; k++) row[(size_t)layer * top_k + k] = -1;
    }
    return layer == layers;
}

static bool is_description(struct span line, uint64_t *format)
{
    struct span value, number;
    *format = 1;
    if (!scan_member(line, "headrace", &value)) return false;
    if (scan_member(value, "format", &number) && !scan_u64(number, format)) *format = UINT64_MAX;
    return true;
}

static int parse(const char *path, const char *text, size_t n, uint32_t layers, uint32_t top_k,
                 bool json, int32_t *ids, size_t *tokens)
{
    size_t number = 0;
    uint64_t format;
    *tokens = 0;
    for (size_t at = 0; at < n;) {
        const char *end = memchr(text + at, '\n', n - at);
        const size_t length = end ? (size_t)(end - text) - at : n - at;
        struct span line = {text + at, length};
        at += length + 1;
        number++;
        while (line.n > 0 && strchr(" \t\r", line.p[line.n - 1])) line.n--;
        if (line.n == 0) continue;
        if (*tokens == 0 && is_description(line, &format)) {
            if (format <= TRACE_FORMAT) continue;
            return report_failure(HR_ERR_FORMAT, json, "%s: line %zu: a format of routes that this "
                                  "version does not know; %d is the last it does", path, number,
                                  TRACE_FORMAT);
        }
        if (!read_line(line, layers, top_k, ids + *tokens * layers * top_k))
            return report_failure(HR_ERR_FORMAT, json,
                                  "%s: line %zu is no token of this model, which has %u layers with %u "
                                  "experts of a token", path, number, layers, top_k);
        ++*tokens;
    }
    if (*tokens > 0) return EXIT_OK;
    return report_failure(HR_ERR_FORMAT, json, "%s: there is no token in it", path);
}

int trace_file_read(const char *path, uint32_t layers, uint32_t top_k, bool json, int32_t **ids,
                    size_t *tokens)
{
    char *text;
    size_t n, lines = 1;
    int code = read_input(path, json, &text, &n);
    if (code != EXIT_OK) return code;
    for (size_t i = 0; i < n; i++) lines += text[i] == '\n';
    const size_t row = (size_t)layers * top_k * sizeof **ids;
    *ids = row > 0 && lines <= SIZE_MAX / row ? malloc(lines * row) : NULL;
    code = *ids ? parse(path, text, n, layers, top_k, json, *ids, tokens)
                : report_failure(HR_ERR_MEMORY, json, "%s: no memory for its routes", path);
    free(text);
    if (code != EXIT_OK) free(*ids);
    return code;
}
