#include "text/added_tokens.h"

#include <string.h>

#include "text/codepoint.h"

#define NO_PREFIX 0xFFFFFFFFu

static struct section spelling(const struct added_tokens *a, const struct vocabulary *v,
                               uint32_t index)
{
    return vocabulary_entry(v, get_u32(a->entries, 2 * (size_t)index));
}

static bool begins_with(struct section text, struct section prefix)
{
    return prefix.bytes <= text.bytes && memcmp(text.data, prefix.data, prefix.bytes) == 0;
}

hr_status added_tokens_init(struct added_tokens *a, struct section entries,
                            const struct vocabulary *v, hr_error *err)
{
    memset(a, 0, sizeof *a);
    if (entries.bytes % 8 != 0 || entries.bytes / 8 > v->size)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %zu bytes of added tokens", entries.bytes);
    a->count = (uint32_t)(entries.bytes / 8);
    a->entries = entries.data;
    for (uint32_t i = 0; i < a->count; i++) {
        const uint32_t id = get_u32(a->entries, 2 * (size_t)i);
        const uint32_t prefix = get_u32(a->entries, 2 * (size_t)i + 1);
        if (id >= v->size || !vocabulary_is_added(v, id))
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: added token %u is not one", id);
        const struct section own = vocabulary_entry(v, id);
        /* Matches must begin and end between code points. */
        if (own.bytes == 0 || !utf8_valid(own.data, own.bytes))
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: added token %u is not text", id);
        if (i > 0 && compare_bytes(spelling(a, v, i - 1), own) >= 0)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: added token %u is out of order", id);
        /* Smaller indices only: a walk along the prefixes ends. */
        if (prefix != NO_PREFIX && (prefix >= i || !begins_with(own, spelling(a, v, prefix))))
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: added token %u has a bad prefix", id);
        const uint32_t word = own.data[0] >> 5, bit = 1u << (own.data[0] & 31);
        a->begins[word] |= bit;
        if (vocabulary_is_ordinary(v, id)) {
            a->ordinary_begins[word] |= bit;
            a->has_ordinary = true;
        }
    }
    return HR_OK;
}

bool added_tokens_find(const struct added_tokens *a, const struct vocabulary *v,
                       const uint8_t *text, size_t n, size_t from, bool special,
                       struct added_match *match)
{
    if (a->count == 0 || (!special && !a->has_ordinary)) return false;
    const uint32_t *begins = special ? a->begins : a->ordinary_begins;
    for (size_t at = from; at < n; at++) {
        if (!(begins[text[at] >> 5] >> (text[at] & 31) & 1)) continue;
        const struct section rest = {text + at, n - at};
        uint32_t low = 0, high = a->count; /* the spellings before `low` are not after rest */
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            if (compare_bytes(spelling(a, v, middle), rest) <= 0) low = middle + 1;
            else high = middle;
        }
        /* Every spelling that rest begins with is a prefix of the last one not after rest. */
        for (uint32_t i = low ? low - 1 : NO_PREFIX; i != NO_PREFIX;
             i = get_u32(a->entries, 2 * (size_t)i + 1)) {
            const struct section own = spelling(a, v, i);
            const uint32_t id = get_u32(a->entries, 2 * (size_t)i);
            if (!begins_with(rest, own) || (!special && !vocabulary_is_ordinary(v, id))) continue;
            *match = (struct added_match){at, own.bytes, id};
            return true;
        }
    }
    return false;
}
