/* Splits a text into the pieces that byte pair encoding works on, by compiled expressions.
 * Time is linear: every node of a program is evaluated at most twice a code point. */
#ifndef TEXT_PRETOKENIZER_H
#define TEXT_PRETOKENIZER_H

#include <stdbool.h>

#include "base/mem.h"
#include "base/status.h"
#include "text/bytes.h"

#define MAX_SPLITS 8

struct split_program {
    const uint8_t *nodes;
    uint32_t count, start;
    bool drop; /* pieces that the expression does not match are dropped */
};

struct pretokenizer {
    struct split_program splits[MAX_SPLITS];
    uint32_t split_count;
    const uint8_t *sets, *class_index, *class_blocks;
};

enum { SPLIT_TABLE, SPLIT_NODES, SPLIT_SETS, SPLIT_INDEX, SPLIT_BLOCKS, SPLIT_SECTIONS };

hr_status pretokenizer_init(struct pretokenizer *p, const struct section sections[SPLIT_SECTIONS],
                            hr_error *err);

/* Called for each piece in order; an error stops. */
typedef hr_status (*piece_fn)(void *user, const uint8_t *piece, size_t n, hr_error *err);

/* text is well-formed and shorter than 2^32 - 1 bytes. */
hr_status pretokenizer_run(const struct pretokenizer *p, struct mem_budget *b, const uint8_t *text,
                           size_t n, piece_fn piece, void *user, hr_error *err);

#endif
