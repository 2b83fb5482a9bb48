#include "cli/manifest_scan.h"

#include <string.h>

static size_t skip_space(struct span s, size_t at)
{
    while (at < s.n && memchr(" \t\r\n", s.p[at], 4) != NULL) at++;
    return at;
}

static size_t skip_string(struct span s, size_t at)
{
    for (at++; at < s.n && s.p[at] != '"'; at++)
        if (s.p[at] == '\\') at++;
    return at < s.n ? at + 1 : s.n;
}

/* End of the value that starts at `at`. */
static size_t skip_value(struct span s, size_t at)
{
    size_t depth = 0;
    while (at < s.n) {
        const char c = s.p[at];
        if (c == '"') {
            at = skip_string(s, at);
        } else if (c == '{' || c == '[') {
            depth++;
            at++;
        } else if (c == '}' || c == ']') {
            if (depth == 0) return at;
            depth--;
            at++;
        } else if (depth == 0 && (c == ',' || memchr(" \t\r\n", c, 4) != NULL)) {
            return at;
        } else {
            at++;
            continue;
        }
        if (depth == 0) return at;
    }
    return s.n;
}

static struct span cut(struct span s, size_t from, size_t to)
{
    return (struct span){s.p + from, to > from ? to - from : 0};
}

static bool opens_with(struct span s, char c) { return s.n > 0 && s.p[0] == c; }

bool scan_member(struct span object, const char *key, struct span *value)
{
    if (!opens_with(object, '{')) return false;
    const size_t length = strlen(key);
    for (size_t at = skip_space(object, 1); at < object.n && object.p[at] == '"';) {
        const size_t name = at + 1, after = skip_string(object, at);
        const bool found =
            after - 1 - name == length && memcmp(object.p + name, key, length) == 0;
        at = skip_space(object, after);
        if (at >= object.n || object.p[at] != ':') return false;
        at = skip_space(object, at + 1);
        const size_t end = skip_value(object, at);
        if (found) {
            *value = cut(object, at, end);
            return true;
        }
        at = skip_space(object, end);
        if (at < object.n && object.p[at] == ',') at = skip_space(object, at + 1);
    }
    return false;
}

bool scan_next(struct span array, size_t *at, struct span *value)
{
    if (!opens_with(array, '[')) return false;
    size_t from = skip_space(array, *at == 0 ? 1 : *at);
    if (from < array.n && array.p[from] == ',') from = skip_space(array, from + 1);
    const size_t end = skip_value(array, from);
    if (end == from) return false;
    *value = cut(array, from, end);
    *at = end;
    return true;
}

bool scan_string(struct span value, struct span *text)
{
    if (value.n < 2 || value.p[0] != '"') return false;
    *text = cut(value, 1, value.n - 1);
    return true;
}

bool scan_u64(struct span value, uint64_t *number)
{
    uint64_t result = 0;
    if (value.n == 0 || value.n > 19) return false;
    for (size_t i = 0; i < value.n; i++) {
        if (value.p[i] < '0' || value.p[i] > '9') return false;
        result = result * 10 + (uint64_t)(value.p[i] - '0');
    }
    *number = result;
    return true;
}
