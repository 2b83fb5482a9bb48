#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

const char *hr_status_name(int32_t code)
{
    switch (code) {
    case HR_OK: return "ok";
    case HR_ERR_USAGE: return "usage";
    case HR_ERR_FORMAT: return "format";
    case HR_ERR_MEMORY: return "memory";
    case HR_ERR_IO: return "io";
    case HR_ERR_CONTEXT: return "context";
    case HR_ERR_CANCELLED: return "cancelled";
    case HR_ERR_NUMERIC: return "numeric";
    case HR_ERR_UNSUPPORTED: return "unsupported";
    default: return "unknown";
    }
}

/* Details quote paths and keys from files: keep the promise of one line of valid UTF-8. */
static void make_printable(char *text)
{
    size_t n = strlen(text);
    for (size_t i = 0; i < n;) {
        const size_t step = utf8_sequence((const uint8_t *)text + i, n - i);
        if (step == 0)
            text[i++] = '?';
        else if (utf8_is_control((const uint8_t *)text + i, step))
            for (size_t end = i + step; i < end; i++) text[i] = '?';
        else
            i += step;
    }
}

/* snprintf may have cut a character in two. */
static void drop_cut_tail(char *text, size_t capacity)
{
    size_t n = strlen(text);
    if (n + 1 < capacity) return;
    size_t back = n;
    while (back > 0 && n - back < 3 && ((uint8_t)text[back - 1] & 0xC0) == 0x80) back--;
    if (back > 0 && (uint8_t)text[back - 1] >= 0xC0 &&
        utf8_sequence((const uint8_t *)text + back - 1, n - back + 1) == 0)
        text[back - 1] = '\0';
}

static void format_detail(char *out, size_t capacity, const char *fmt, va_list args)
{
    if (vsnprintf(out, capacity, fmt, args) < 0) out[0] = '\0';
    drop_cut_tail(out, capacity);
    make_printable(out);
}

hr_status fail(hr_error *err, hr_status code, const char *fmt, ...)
{
    if (err) {
        va_list args;
        va_start(args, fmt);
        err->code = (int32_t)code;
        format_detail(err->detail, sizeof err->detail, fmt, args);
        va_end(args);
    }
    return code;
}

hr_status fail_prefix(hr_error *err, hr_status code, const char *fmt, ...)
{
    if (!err) return code;
    char before[sizeof err->detail];
    char joined[sizeof err->detail];
    va_list args;
    va_start(args, fmt);
    format_detail(before, sizeof before, fmt, args);
    va_end(args);

    const int had_detail = err->code != HR_OK && err->detail[0] != '\0';
    if (err->code == HR_OK) err->code = (int32_t)code;
    size_t used = strlen(before);
    memcpy(joined, before, used + 1);
    if (had_detail) {
        const char *const parts[2] = {": ", err->detail};
        for (int i = 0; i < 2; i++) {
            size_t add = strlen(parts[i]);
            if (add > sizeof joined - 1 - used) add = sizeof joined - 1 - used;
            memcpy(joined + used, parts[i], add);
            used += add;
        }
        joined[used] = '\0';
        drop_cut_tail(joined, sizeof joined);
    }
    memcpy(err->detail, joined, strlen(joined) + 1);
    return (hr_status)err->code;
}
