/* The well-formed byte sequences of UTF-8 (Unicode, table 3-7). */
#ifndef BASE_UTF8_H
#define BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Length (1..4) of the well-formed sequence that starts at p, or 0 when the bytes at p are
 * ill-formed or cut short by n. Overlong forms, surrogates and values above 10FFFF are
 * ill-formed. */
size_t utf8_sequence(const uint8_t *p, size_t n);

/* Whether the sequence of `length` bytes at p is a control character (C0, DEL, C1), which a terminal
 * may obey. */
bool utf8_is_control(const uint8_t *p, size_t length);
/* Well-formed, and none of them. */
bool utf8_is_printable(const char *text);

#endif
