/* Byte-level BPE from tokenizer.bin (formats/tokenizer.md). Immutable after opening; all
 * functions are thread-safe. Knows no model. */
#ifndef TEXT_TOKENIZER_H
#define TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

struct tokenizer;

/* `data` is the whole file; it is copied or referenced: it must outlive the tokenizer. Every count
 * and offset is checked; `vocab_size` is the model's: ids at or above it are refused. */
hr_status tokenizer_open(const void *data, size_t bytes, uint32_t vocab_size, struct mem_budget *b,
                         struct tokenizer **out, hr_error *err);
void tokenizer_free(struct tokenizer *t);
/* Upper bound of what tokenizer_open allocates beside the file itself. */
uint64_t tokenizer_cost(size_t file_bytes);

/* The contract of hr_tokenize. What it needs beside the stack (some tens of kilobytes, more for
 * long pieces and for texts to repair or normalise) comes from the budget and goes back to it. */
hr_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, bool special,
                           int32_t *ids, size_t capacity, size_t *count, hr_error *err);
/* Raw bytes of one id (an added token: its spelling); length 0 for ids without an entry. */
const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *len);
size_t tokenizer_longest(const struct tokenizer *t); /* bytes of an id */
uint32_t tokenizer_vocab(const struct tokenizer *t); /* largest id with an entry, plus one */
bool tokenizer_is_control(const struct tokenizer *t, int32_t id);

#endif
