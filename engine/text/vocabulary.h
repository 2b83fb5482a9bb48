/* Bytes and flags of every token id. */
#ifndef TEXT_VOCABULARY_H
#define TEXT_VOCABULARY_H

#include <stdbool.h>

#include "base/status.h"
#include "text/bytes.h"

struct vocabulary {
    uint32_t size, longest; /* longest: bytes of an entry */
    const uint8_t *offsets, *flags, *bytes;
};

hr_status vocabulary_init(struct vocabulary *v, struct section offsets, struct section flags,
                          struct section bytes, uint32_t limit, hr_error *err);
/* id must be below size. */
struct section vocabulary_entry(const struct vocabulary *v, uint32_t id);
bool vocabulary_is_control(const struct vocabulary *v, uint32_t id);
bool vocabulary_is_added(const struct vocabulary *v, uint32_t id);
/* An added token whose spelling is recognised in any text; never a control token. */
bool vocabulary_is_ordinary(const struct vocabulary *v, uint32_t id);
/* Order of byte strings: like memcmp, a prefix first. */
int compare_bytes(struct section a, struct section b);

#endif
