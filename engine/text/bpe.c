#include "text/bpe.h"

#include <string.h>

#define MERGE_BYTES 12u
#define NONE 0xFFFFFFFFu

/* The bytes of `whole` are those of `left` and then those of `right`. */
static bool is_joined(struct section whole, struct section left, struct section right)
{
    return whole.bytes == left.bytes + right.bytes &&
           memcmp(whole.data, left.data, left.bytes) == 0 &&
           memcmp(whole.data + left.bytes, right.data, right.bytes) == 0;
}

static hr_status check_merges(const struct vocabulary *v, const uint8_t *index,
                              struct section merges, hr_error *err)
{
    const size_t count = merges.bytes / MERGE_BYTES;
    size_t at = 0;
    if (get_u32(index, 0) != 0) return fail(err, HR_ERR_FORMAT, "tokenizer.bin: bad merge index");
    for (uint32_t left = 0; left < v->size; left++) {
        const size_t stop = get_u32(index, (size_t)left + 1);
        if (stop < at || stop > count)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: bad merge index of token %u", left);
        uint32_t previous = 0;
        for (bool first = true; at < stop; at++, first = false) {
            const uint8_t *m = merges.data + MERGE_BYTES * at;
            const uint32_t right = get_u32(m, 0), id = get_u32(m, 2);
            if (right >= v->size || id >= v->size || (!first && right <= previous) ||
                vocabulary_is_control(v, id) ||
                !is_joined(vocabulary_entry(v, id), vocabulary_entry(v, left),
                           vocabulary_entry(v, right)))
                return fail(err, HR_ERR_FORMAT, "tokenizer.bin: merge %zu is bad", at);
            previous = right;
        }
    }
    if (at != count)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %zu merges, %zu indexed", count, at);
    return HR_OK;
}

static hr_status check_whole(const struct vocabulary *v, struct section whole, hr_error *err)
{
    for (size_t i = 0; i < whole.bytes / 4; i++) {
        const uint32_t id = get_u32(whole.data, i);
        if (id >= v->size || vocabulary_is_control(v, id) ||
            (i > 0 && compare_bytes(vocabulary_entry(v, get_u32(whole.data, i - 1)),
                                    vocabulary_entry(v, id)) >= 0))
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: whole piece %zu is bad", i);
    }
    return HR_OK;
}

hr_status bpe_init(struct bpe *t, const struct vocabulary *vocabulary,
                   const struct section sections[BPE_SECTIONS], hr_error *err)
{
    const struct section byte_ids = sections[BPE_BYTE_IDS], index = sections[BPE_MERGE_INDEX];
    const struct section merges = sections[BPE_MERGES], whole = sections[BPE_WHOLE];
    const struct vocabulary *v = vocabulary;
    if (byte_ids.bytes != 4 * 256 || index.bytes != 4 * ((size_t)v->size + 1) ||
        merges.bytes % MERGE_BYTES != 0 || merges.bytes / MERGE_BYTES > UINT32_MAX / 2 ||
        whole.bytes % 4 != 0 || whole.bytes / 4 > v->size)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: byte pair sections of odd sizes");
    for (uint32_t byte = 0; byte < 256; byte++) {
        const uint32_t id = get_u32(byte_ids.data, byte);
        const bool known = id < v->size && !vocabulary_is_control(v, id);
        const struct section entry = known ? vocabulary_entry(v, id) : (struct section){0};
        if (entry.bytes != 1 || entry.data[0] != byte)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: bad token for byte 0x%02X", byte);
    }
    TRY(check_merges(v, index.data, merges, err));
    TRY(check_whole(v, whole, err));
    *t = (struct bpe){v, byte_ids.data, index.data, merges.data, whole.data,
                      (uint32_t)(whole.bytes / 4)};
    return HR_OK;
}

void bpe_scratch_init(struct bpe_scratch *s, struct mem_budget *b)
{
    s->budget = b;
    s->symbols = s->small_symbols;
    s->heap = s->small_heap;
    s->capacity = BPE_INLINE;
}

void bpe_scratch_free(struct bpe_scratch *s)
{
    if (s->symbols != s->small_symbols)
        mem_free(s->budget, s->symbols, s->capacity * sizeof *s->symbols);
    if (s->heap != s->small_heap)
        mem_free(s->budget, s->heap, 2 * s->capacity * sizeof *s->heap);
    bpe_scratch_init(s, s->budget);
}

static bool reserve(struct bpe_scratch *s, size_t n)
{
    if (n <= s->capacity) return true;
    size_t capacity, symbols, heap;
    if (!size_add(n, n / 4, &capacity) || !size_mul(capacity, sizeof *s->symbols, &symbols) ||
        !size_mul(capacity, 2 * sizeof *s->heap, &heap))
        return false;
    bpe_scratch_free(s);
    struct bpe_symbol *new_symbols = mem_alloc(s->budget, symbols);
    struct bpe_merge *new_heap = mem_alloc(s->budget, heap);
    if (!new_symbols || !new_heap) {
        mem_free(s->budget, new_symbols, symbols);
        mem_free(s->budget, new_heap, heap);
        return false;
    }
    s->symbols = new_symbols;
    s->heap = new_heap;
    s->capacity = capacity;
    return true;
}

/* Rank and new id of merging left and right; false when they are no pair. */
static bool find_merge(const struct bpe *t, uint32_t left, uint32_t right, uint32_t *rank,
                       uint32_t *id)
{
    uint32_t low = get_u32(t->merge_index, left), high = get_u32(t->merge_index, (size_t)left + 1);
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const uint8_t *m = t->merges + MERGE_BYTES * (size_t)middle;
        const uint32_t found = get_u32(m, 0);
        if (found == right) {
            *rank = get_u32(m, 1);
            *id = get_u32(m, 2);
            return true;
        }
        if (found < right) low = middle + 1;
        else high = middle;
    }
    return false;
}

static uint32_t find_whole(const struct bpe *t, struct section piece)
{
    uint32_t low = 0, high = t->whole_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const uint32_t id = get_u32(t->whole, middle);
        const int order = compare_bytes(vocabulary_entry(t->vocabulary, id), piece);
        if (order == 0) return id;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NONE;
}

static bool is_before(const struct bpe_merge *a, const struct bpe_merge *b)
{
    return a->rank < b->rank || (a->rank == b->rank && a->at < b->at);
}

static void heap_push(struct bpe_merge *heap, size_t *size, struct bpe_merge merge)
{
    size_t i = (*size)++;
    while (i > 0 && is_before(&merge, &heap[(i - 1) / 2])) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = merge;
}

static struct bpe_merge heap_pop(struct bpe_merge *heap, size_t *size)
{
    const struct bpe_merge top = heap[0], last = heap[--*size];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= *size) break;
        if (child + 1 < *size && is_before(&heap[child + 1], &heap[child])) child++;
        if (!is_before(&heap[child], &last)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

static void propose(const struct bpe *t, struct bpe_scratch *s, size_t *size, uint32_t at)
{
    struct bpe_merge merge = {.at = at};
    const uint32_t next = s->symbols[at].next;
    if (next != NONE &&
        find_merge(t, s->symbols[at].id, s->symbols[next].id, &merge.rank, &merge.id))
        heap_push(s->heap, size, merge);
}

hr_status bpe_encode(const struct bpe *t, struct bpe_scratch *s, const uint8_t *piece, size_t n,
                     struct id_sink *out, hr_error *err)
{
    if (t->whole_count > 0) {
        const uint32_t id = find_whole(t, (struct section){piece, n});
        if (id != NONE) {
            id_sink_put(out, id);
            return HR_OK;
        }
    }
    if (!reserve(s, n))
        return fail(err, HR_ERR_MEMORY, "no memory to encode a piece of %zu bytes", n);
    struct bpe_symbol *symbols = s->symbols;
    for (size_t i = 0; i < n; i++)
        symbols[i] = (struct bpe_symbol){get_u32(t->byte_ids, piece[i]), (uint32_t)i - 1,
                                         i + 1 < n ? (uint32_t)i + 1 : NONE};
    /* At most n - 1 proposals now; each merge takes one and makes two: 2n hold them all. */
    size_t size = 0;
    for (uint32_t i = 0; i + 1 < n; i++) propose(t, s, &size, i);
    while (size > 0) {
        const struct bpe_merge merge = heap_pop(s->heap, &size);
        struct bpe_symbol *left = &symbols[merge.at];
        if (left->id == NONE || left->next == NONE) continue;
        struct bpe_symbol *right = &symbols[left->next];
        uint32_t rank, id;
        /* One of the two may have been merged since the proposal. */
        if (!find_merge(t, left->id, right->id, &rank, &id) || id != merge.id) continue;
        left->id = id;
        right->id = NONE;
        left->next = right->next;
        if (left->next != NONE) symbols[left->next].previous = merge.at;
        if (left->previous != NONE) propose(t, s, &size, left->previous);
        propose(t, s, &size, merge.at);
    }
    for (uint32_t i = 0; i != NONE; i = symbols[i].next) id_sink_put(out, symbols[i].id);
    return HR_OK;
}
