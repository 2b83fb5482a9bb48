#include "text/codepoint.h"

#include <string.h>

#include "base/utf8.h"

#define REPLACEMENT_BYTES 3
static const uint8_t replacement[REPLACEMENT_BYTES] = {0xEF, 0xBF, 0xBD};

uint32_t codepoint_bytes(uint32_t c)
{
    return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
}

uint32_t codepoint_encode(uint32_t c, uint8_t out[4])
{
    const uint32_t bytes = codepoint_bytes(c);
    if (bytes == 1) {
        out[0] = (uint8_t)c;
        return 1;
    }
    static const uint8_t mark[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (uint32_t i = bytes - 1; i > 0; i--) {
        out[i] = (uint8_t)(0x80 | (c & 0x3F));
        c >>= 6;
    }
    out[0] = (uint8_t)(mark[bytes] | c);
    return bytes;
}

size_t ill_formed_bytes(const uint8_t *p, size_t n, bool *open)
{
    const uint8_t lead = p[0];
    *open = false;
    if (lead < 0xC2 || lead > 0xF4) return 1;
    const size_t whole = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    size_t length = 1;
    if (length < n && p[1] >= low && p[1] <= high) {
        length = 2;
        while (length < n && length < whole && is_continuation(p[length])) length++;
    }
    *open = length == n && length < whole;
    return length;
}

bool utf8_valid(const uint8_t *text, size_t n)
{
    for (size_t at = 0; at < n;) {
        const size_t good = utf8_sequence(text + at, n - at);
        if (!good) return false;
        at += good;
    }
    return true;
}

size_t repaired_bytes(const uint8_t *text, size_t n)
{
    size_t out = 0;
    for (size_t at = 0; at < n;) {
        const size_t good = utf8_sequence(text + at, n - at);
        bool open;
        out += good ? good : REPLACEMENT_BYTES;
        at += good ? good : ill_formed_bytes(text + at, n - at, &open);
    }
    return out;
}

void repair(const uint8_t *text, size_t n, uint8_t *out)
{
    for (size_t at = 0; at < n;) {
        const size_t good = utf8_sequence(text + at, n - at);
        if (good) {
            memcpy(out, text + at, good);
            out += good;
            at += good;
        } else {
            bool open;
            memcpy(out, replacement, REPLACEMENT_BYTES);
            out += REPLACEMENT_BYTES;
            at += ill_formed_bytes(text + at, n - at, &open);
        }
    }
}
