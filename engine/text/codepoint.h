/* Code points in UTF-8, and the repair of ill-formed text. */
#ifndef TEXT_CODEPOINT_H
#define TEXT_CODEPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CODEPOINT_LIMIT 0x110000u

/* The code point at p, which begins a well-formed sequence; its length goes to *bytes. */
static inline uint32_t codepoint_decode(const uint8_t *p, uint32_t *bytes)
{
    const uint32_t lead = p[0];
    if (lead < 0x80) {
        *bytes = 1;
        return lead;
    }
    if (lead < 0xE0) {
        *bytes = 2;
        return (lead & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    }
    if (lead < 0xF0) {
        *bytes = 3;
        return (lead & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    }
    *bytes = 4;
    return (lead & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

static inline bool is_continuation(uint8_t byte)
{
    return (byte & 0xC0) == 0x80;
}

/* Bytes of c in UTF-8. */
uint32_t codepoint_bytes(uint32_t c);
/* Writes c (below CODEPOINT_LIMIT) to out and returns its length. */
uint32_t codepoint_encode(uint32_t c, uint8_t out[4]);

/* Length of the maximal ill-formed sequence at p (n > 0; utf8_sequence gave 0): the longest
 * beginning of a well-formed one, at least 1. *open is true when the text ends inside it. */
size_t ill_formed_bytes(const uint8_t *p, size_t n, bool *open);

bool utf8_valid(const uint8_t *text, size_t n);
/* Length of the text once every maximal ill-formed sequence is U+FFFD. */
size_t repaired_bytes(const uint8_t *text, size_t n);
/* Writes that text; out holds repaired_bytes. */
void repair(const uint8_t *text, size_t n, uint8_t *out);

#endif
