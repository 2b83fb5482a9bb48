#include "text/pretokenizer.h"

#include <string.h>

#include "text/code_table.h"
#include "text/codepoint.h"

#define SPLIT_BYTES 16u
#define NODE_BYTES 8u
#define SET_BYTES 32u
#define MAX_NODES 2048u
#define BLOCK 2048u /* bytes of text whose match ends are held at once */
#define BLOCK_ENDS (BLOCK + 3) /* borders move to the next code point */
#define NO_MATCH 0xFFFFFFFFu

/* A node's value at a position is the end of the match preferred from there, or NO_MATCH. */
enum {
    NODE_MATCH, /* the position itself */
    NODE_SET,   /* of a behind one code point of the set */
    NODE_SPLIT, /* of a, or else of b */
    NODE_LOOK,  /* of b, if a matches here */
    NODE_NOT,   /* of b, unless a matches here */
    NODE_END,   /* of a, at the end of the text */
    NODE_KINDS
};

struct node {
    uint32_t op, a, b, set;
};

static struct node node_at(const uint8_t *nodes, uint32_t i)
{
    const uint8_t *p = nodes + NODE_BYTES * (size_t)i;
    return (struct node){get_u16(p, 0), get_u16(p, 1), get_u16(p, 2), get_u16(p, 3)};
}

/* Edges that consume nothing must point to later nodes: one pass from the last node to the
 * first then meets every value before it is needed. */
static bool node_is_valid(const struct node *n, uint32_t i, uint32_t count, uint32_t sets)
{
    switch (n->op) {
    case NODE_MATCH: return true;
    case NODE_SET: return n->a < count && n->set < sets;
    case NODE_SPLIT:
    case NODE_LOOK:
    case NODE_NOT: return n->a > i && n->a < count && n->b > i && n->b < count;
    case NODE_END: return n->a > i && n->a < count;
    default: return false;
    }
}

hr_status pretokenizer_init(struct pretokenizer *p, const struct section sections[SPLIT_SECTIONS],
                            hr_error *err)
{
    const struct section splits = sections[SPLIT_TABLE], nodes = sections[SPLIT_NODES];
    const struct section sets = sections[SPLIT_SETS];
    if (splits.bytes % SPLIT_BYTES != 0 || splits.bytes / SPLIT_BYTES > MAX_SPLITS ||
        nodes.bytes % NODE_BYTES != 0 || nodes.bytes / NODE_BYTES > MAX_NODES ||
        sets.bytes % SET_BYTES != 0 || sets.bytes / SET_BYTES > MAX_NODES)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: pre-tokenizer sections of odd sizes");
    TRY(code_table_check(sections[SPLIT_INDEX], sections[SPLIT_BLOCKS], 1, "character class", err));
    memset(p, 0, sizeof *p);
    p->split_count = (uint32_t)(splits.bytes / SPLIT_BYTES);
    p->sets = sets.data;
    p->class_index = sections[SPLIT_INDEX].data;
    p->class_blocks = sections[SPLIT_BLOCKS].data;
    const uint32_t node_count = (uint32_t)(nodes.bytes / NODE_BYTES);
    const uint32_t set_count = (uint32_t)(sets.bytes / SET_BYTES);
    for (uint32_t s = 0; s < p->split_count; s++) {
        const uint8_t *record = splits.data + SPLIT_BYTES * (size_t)s;
        const uint32_t first = get_u32(record, 0), count = get_u32(record, 1);
        const uint32_t start = get_u32(record, 2), flags = get_u32(record, 3);
        if (count == 0 || count > node_count || first > node_count - count || start >= count ||
            flags > 1)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: split %u is bad", s);
        const uint8_t *own = nodes.data + NODE_BYTES * (size_t)first;
        for (uint32_t i = 0; i < count; i++) {
            const struct node n = node_at(own, i);
            if (!node_is_valid(&n, i, count, set_count))
                return fail(err, HR_ERR_FORMAT, "tokenizer.bin: split %u, node %u is bad", s, i);
        }
        p->splits[s] = (struct split_program){own, count, start, flags & 1};
    }
    return HR_OK;
}

static uint32_t class_of(const struct pretokenizer *p, uint32_t c)
{
    return p->class_blocks[code_table_place(p->class_index, c)];
}

/* Values of all nodes at `at`; `after` holds those behind the code point there. */
static void evaluate(const struct pretokenizer *p, const struct split_program *g, uint32_t at,
                     uint32_t class, const uint32_t *after, uint32_t *now)
{
    const uint8_t *set_byte = p->sets + class / 8;
    const uint32_t bit = class % 8;
    for (uint32_t i = g->count; i-- > 0;) {
        const struct node n = node_at(g->nodes, i);
        uint32_t value = NO_MATCH;
        switch (n.op) {
        case NODE_MATCH: value = at; break;
        case NODE_SET:
            if (set_byte[SET_BYTES * (size_t)n.set] >> bit & 1) value = after[n.a];
            break;
        case NODE_SPLIT: value = now[n.a] != NO_MATCH ? now[n.a] : now[n.b]; break;
        case NODE_LOOK: value = now[n.a] != NO_MATCH ? now[n.b] : NO_MATCH; break;
        case NODE_NOT: value = now[n.a] == NO_MATCH ? now[n.b] : NO_MATCH; break;
        default: break;
        }
        now[i] = value;
    }
}

/* Values of all nodes at the end of the text, n bytes long. */
static void evaluate_end(const struct split_program *g, uint32_t n, uint32_t *now)
{
    for (uint32_t i = g->count; i-- > 0;) {
        const struct node node = node_at(g->nodes, i);
        uint32_t value = NO_MATCH;
        switch (node.op) {
        case NODE_MATCH: value = n; break;
        case NODE_SPLIT: value = now[node.a] != NO_MATCH ? now[node.a] : now[node.b]; break;
        case NODE_LOOK: value = now[node.a] != NO_MATCH ? now[node.b] : NO_MATCH; break;
        case NODE_NOT: value = now[node.a] == NO_MATCH ? now[node.b] : NO_MATCH; break;
        case NODE_END: value = now[node.a]; break;
        default: break;
        }
        now[i] = value;
    }
}

struct level {
    uint32_t *ends, *now, *after; /* [BLOCK_ENDS], [nodes], [nodes] */
    uint32_t *saved;              /* values at the end of each block but the last */
    size_t saved_bytes;
};

struct run {
    const struct pretokenizer *p;
    struct mem_budget *budget;
    piece_fn piece;
    void *user;
    struct level levels[MAX_SPLITS];
};

static uint32_t block_begin(const uint8_t *text, uint32_t n, uint32_t block)
{
    size_t at = (size_t)block * BLOCK;
    while (at < n && is_continuation(text[at])) at++;
    return at < n ? (uint32_t)at : n;
}

/* Evaluates [begin, end) backwards from the values in level->after, which it leaves as those at
 * begin. Keeps where matches from each code point end. */
static void scan_block(const struct pretokenizer *p, const struct split_program *g,
                       struct level *level, const uint8_t *text, uint32_t begin, uint32_t end)
{
    for (uint32_t at = end; at > begin;) {
        at--;
        while (at > begin && is_continuation(text[at])) at--;
        uint32_t bytes;
        const uint32_t c = codepoint_decode(text + at, &bytes);
        evaluate(p, g, at, class_of(p, c), level->after, level->now);
        level->ends[at - begin] = level->now[g->start];
        uint32_t *swap = level->now;
        level->now = level->after;
        level->after = swap;
    }
}

/* Scans once from the end and saves the values at the block borders: memory is a small part of
 * the text's length although matching starts at the end. */
static hr_status save_borders(struct run *r, const struct split_program *g, struct level *level,
                              const uint8_t *text, uint32_t n, uint32_t blocks, hr_error *err)
{
    const size_t one = g->count * sizeof(uint32_t);
    size_t need;
    if (!size_mul(one, blocks - 1, &need)) need = SIZE_MAX;
    if (need > level->saved_bytes) {
        uint32_t *fresh = mem_alloc(r->budget, need);
        if (!fresh) return fail(err, HR_ERR_MEMORY, "no memory to split a text of %u bytes", n);
        mem_free(r->budget, level->saved, level->saved_bytes);
        level->saved = fresh;
        level->saved_bytes = need;
    }
    evaluate_end(g, n, level->after);
    for (uint32_t block = blocks - 1; block > 0; block--) {
        const uint32_t begin = block_begin(text, n, block);
        scan_block(r->p, g, level, text, begin, block_begin(text, n, block + 1));
        memcpy(level->saved + (size_t)(block - 1) * g->count, level->after, one);
    }
    return HR_OK;
}

static hr_status run_level(struct run *r, uint32_t depth, const uint8_t *text, size_t size,
                           hr_error *err)
{
    if (size == 0) return HR_OK;
    if (depth == r->p->split_count) return r->piece(r->user, text, size, err);
    const struct split_program *g = &r->p->splits[depth];
    struct level *level = &r->levels[depth];
    const uint32_t n = (uint32_t)size;
    const uint32_t blocks = (n - 1) / BLOCK + 1;
    if (blocks > 1) TRY(save_borders(r, g, level, text, n, blocks, err));
    uint32_t at = 0, unmatched = 0;
    for (uint32_t block = 0; block < blocks; block++) {
        const uint32_t begin = block_begin(text, n, block), end = block_begin(text, n, block + 1);
        if (at >= end) continue;
        if (block + 1 < blocks)
            memcpy(level->after, level->saved + (size_t)block * g->count,
                   g->count * sizeof(uint32_t));
        else evaluate_end(g, n, level->after);
        scan_block(r->p, g, level, text, begin, end);
        while (at < end) {
            const uint32_t stop = level->ends[at - begin];
            if (stop == NO_MATCH || stop <= at) {
                at++;
                while (at < n && is_continuation(text[at])) at++;
                continue;
            }
            if (!g->drop) TRY(run_level(r, depth + 1, text + unmatched, at - unmatched, err));
            TRY(run_level(r, depth + 1, text + at, stop - at, err));
            at = unmatched = stop;
        }
    }
    return g->drop ? HR_OK : run_level(r, depth + 1, text + unmatched, n - unmatched, err);
}

hr_status pretokenizer_run(const struct pretokenizer *p, struct mem_budget *b, const uint8_t *text,
                           size_t n, piece_fn piece, void *user, hr_error *err)
{
    struct run r = {.p = p, .budget = b, .piece = piece, .user = user};
    size_t words = 0;
    for (uint32_t s = 0; s < p->split_count; s++)
        words += BLOCK_ENDS + 2 * (size_t)p->splits[s].count;
    const size_t bytes = words * sizeof(uint32_t);
    uint32_t *memory = NULL;
    if (p->split_count > 0) {
        memory = mem_alloc(b, bytes);
        if (!memory) return fail(err, HR_ERR_MEMORY, "no memory to split a text of %zu bytes", n);
    }
    uint32_t *next = memory;
    for (uint32_t s = 0; s < p->split_count; s++) {
        const uint32_t count = p->splits[s].count;
        r.levels[s].ends = next;
        r.levels[s].now = next + BLOCK_ENDS;
        r.levels[s].after = next + BLOCK_ENDS + count;
        next += BLOCK_ENDS + 2 * (size_t)count;
    }
    const hr_status status = run_level(&r, 0, text, n, err);
    for (uint32_t s = 0; s < p->split_count; s++)
        mem_free(b, r.levels[s].saved, r.levels[s].saved_bytes);
    mem_free(b, memory, bytes);
    return status;
}
