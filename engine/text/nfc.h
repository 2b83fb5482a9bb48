/* Canonical composition (Unicode Standard Annex 15) with the tables of tokenizer.bin. */
#ifndef TEXT_NFC_H
#define TEXT_NFC_H

#include <stdbool.h>

#include "base/mem.h"
#include "base/status.h"
#include "text/bytes.h"

struct nfc {
    const uint8_t *index, *blocks, *records, *parts, *pairs;
    uint32_t pair_count;
};

enum { NFC_INDEX, NFC_BLOCKS, NFC_RECORDS, NFC_PARTS, NFC_PAIRS, NFC_SECTIONS };

hr_status nfc_init(struct nfc *t, const struct section sections[NFC_SECTIONS], hr_error *err);
/* False when the well-formed text may change under NFC. */
bool nfc_is_stable(const struct nfc *t, const uint8_t *text, size_t n);
/* The normalised text: *out is mem_alloc'ed with *capacity bytes, *length of them used. */
hr_status nfc_normalise(const struct nfc *t, struct mem_budget *b, const uint8_t *text, size_t n,
                        uint8_t **out, size_t *capacity, size_t *length, hr_error *err);

#endif
