#include "base/utf8.h"

#include <string.h>

size_t utf8_sequence(const uint8_t *p, size_t n)
{
    if (n == 0) return 0;
    const uint8_t lead = p[0];
    if (lead < 0x80) return 1;
    if (lead < 0xC2 || lead > 0xF4) return 0;

    const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (n < length) return 0;
    /* The second byte's range excludes overlong forms, surrogates and values above 10FFFF. */
    const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (p[1] < low || p[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    return length;
}

bool utf8_is_control(const uint8_t *p, size_t length)
{
    return (length == 1 && (p[0] < 0x20 || p[0] == 0x7f)) || (length == 2 && p[0] == 0xC2 && p[1] < 0xA0);
}

bool utf8_is_printable(const char *text)
{
    const uint8_t *p = (const uint8_t *)text;
    for (size_t n = strlen(text), i = 0; i < n;) {
        const size_t step = utf8_sequence(p + i, n - i);
        if (step == 0 || utf8_is_control(p + i, step)) return false;
        i += step;
    }
    return true;
}
