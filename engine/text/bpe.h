/* Byte pair encoding of one piece: the pair of lowest rank is merged first, leftmost among
 * equals, until no neighbours are a pair. Time n log n in the piece's length. */
#ifndef TEXT_BPE_H
#define TEXT_BPE_H

#include "base/mem.h"
#include "text/vocabulary.h"

struct bpe {
    const struct vocabulary *vocabulary;
    const uint8_t *byte_ids;     /* [256] */
    const uint8_t *merge_index;  /* [size + 1]: the merges whose left id is i */
    const uint8_t *merges;       /* (right id, rank, new id), ascending right id for each left id */
    const uint8_t *whole;        /* ids in ascending order of bytes: pieces that are one token */
    uint32_t whole_count;
};

enum { BPE_BYTE_IDS, BPE_MERGE_INDEX, BPE_MERGES, BPE_WHOLE, BPE_SECTIONS };

#define BPE_INLINE 128

struct bpe_symbol {
    uint32_t id, previous, next;
};

struct bpe_merge {
    uint32_t rank, at, id;
};

/* Working memory of one encoder, kept from piece to piece. */
struct bpe_scratch {
    struct mem_budget *budget;
    struct bpe_symbol *symbols; /* [capacity] */
    struct bpe_merge *heap;     /* [2 * capacity] */
    size_t capacity;
    struct bpe_symbol small_symbols[BPE_INLINE];
    struct bpe_merge small_heap[2 * BPE_INLINE];
};

/* Token ids on their way out: counted always, kept while they fit. */
struct id_sink {
    int32_t *ids;
    size_t capacity, count;
};

static inline void id_sink_put(struct id_sink *s, uint32_t id)
{
    if (s->count < s->capacity) s->ids[s->count] = (int32_t)id;
    s->count++;
}

/* `vocabulary` must stay where it is. No merge and no whole piece may be a control token. */
hr_status bpe_init(struct bpe *t, const struct vocabulary *vocabulary,
                   const struct section sections[BPE_SECTIONS], hr_error *err);
void bpe_scratch_init(struct bpe_scratch *s, struct mem_budget *b);
void bpe_scratch_free(struct bpe_scratch *s);
/* 0 < n < 2^32 - 1. */
hr_status bpe_encode(const struct bpe *t, struct bpe_scratch *s, const uint8_t *piece, size_t n,
                     struct id_sink *out, hr_error *err);

#endif
