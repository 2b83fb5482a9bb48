/* Finds the spellings of added tokens in a text: leftmost, then longest. */
#ifndef TEXT_ADDED_TOKENS_H
#define TEXT_ADDED_TOKENS_H

#include "text/vocabulary.h"

struct added_tokens {
    uint32_t count;
    const uint8_t *entries; /* (id, index of the longest other entry it begins with), by spelling */
    uint32_t begins[8];     /* bit set of the first bytes of all spellings */
    uint32_t ordinary_begins[8]; /* of those recognised in any text */
    bool has_ordinary;
};

struct added_match {
    size_t at, bytes;
    uint32_t id;
};

hr_status added_tokens_init(struct added_tokens *a, struct section entries,
                            const struct vocabulary *v, hr_error *err);
/* The first match at or after `from`, of ordinary tokens only unless `special`; false when there
 * is none. */
bool added_tokens_find(const struct added_tokens *a, const struct vocabulary *v,
                       const uint8_t *text, size_t n, size_t from, bool special,
                       struct added_match *match);

#endif
