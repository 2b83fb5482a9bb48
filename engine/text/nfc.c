#include "text/nfc.h"

#include <string.h>

#include "text/code_table.h"
#include "text/codepoint.h"

#define RECORD_BYTES 8u
#define PAIR_BYTES 12u
#define MAX_PARTS 8u
#define FLAG_UNSTABLE 1u
#define NO_CODE 0xFFFFFFFFu
#define MAX_BYTES ((size_t)1 << 31)
#define INLINE_CODES 64u
#define SORT_BY_INSERTION 16u

/* Hangul syllables are composed by a formula (the Unicode Standard, section 3.12). */
#define L_BASE 0x1100u
#define L_COUNT 19u
#define V_BASE 0x1161u
#define V_COUNT 21u
#define T_BASE 0x11A7u
#define T_COUNT 28u
#define S_BASE 0xAC00u
#define S_COUNT (L_COUNT * V_COUNT * T_COUNT)

/* A code point with its combining class in the upper byte. */
#define CODE_BITS 24
#define CODE_MASK 0xFFFFFFu

static const uint8_t *record_of(const struct nfc *t, uint32_t c)
{
    return t->records + RECORD_BYTES * (size_t)get_u16(t->blocks, code_table_place(t->index, c));
}

static bool is_scalar(uint32_t c)
{
    return c < CODEPOINT_LIMIT && (c < 0xD800 || c > 0xDFFF);
}

static hr_status check_records(struct section records, struct section parts, hr_error *err)
{
    const size_t part_count = parts.bytes / 4;
    for (size_t i = 0; i < records.bytes / RECORD_BYTES; i++) {
        const uint8_t *r = records.data + RECORD_BYTES * i;
        const size_t from = get_u32(r, 1);
        if (r[1] > FLAG_UNSTABLE || r[2] > MAX_PARTS || r[3] != 0 || from > part_count ||
            r[2] > part_count - from)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: normalisation record %zu is bad", i);
    }
    for (size_t i = 0; i < part_count; i++)
        if (!is_scalar(get_u32(parts.data, i)))
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: normalisation part %zu is bad", i);
    return HR_OK;
}

static hr_status check_pairs(struct section pairs, hr_error *err)
{
    for (size_t i = 0; i < pairs.bytes / PAIR_BYTES; i++) {
        const uint8_t *p = pairs.data + PAIR_BYTES * i;
        const uint32_t a = get_u32(p, 0), b = get_u32(p, 1), c = get_u32(p, 2);
        const bool codes = is_scalar(a) && is_scalar(b) && is_scalar(c);
        /* Composing never lengthens a text: the output buffer relies on it. */
        if (!codes || codepoint_bytes(c) > codepoint_bytes(a) + codepoint_bytes(b))
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: composition %zu is bad", i);
        if (i > 0) {
            const uint32_t before = get_u32(p - PAIR_BYTES, 0);
            if (before > a || (before == a && get_u32(p - PAIR_BYTES, 1) >= b))
                return fail(err, HR_ERR_FORMAT, "tokenizer.bin: composition %zu is out of order",
                            i);
        }
    }
    return HR_OK;
}

hr_status nfc_init(struct nfc *t, const struct section sections[NFC_SECTIONS], hr_error *err)
{
    const struct section index = sections[NFC_INDEX], blocks = sections[NFC_BLOCKS];
    const struct section records = sections[NFC_RECORDS], parts = sections[NFC_PARTS];
    const struct section pairs = sections[NFC_PAIRS];
    TRY(code_table_check(index, blocks, 2, "normalisation", err));
    if (records.bytes % RECORD_BYTES != 0 || parts.bytes % 4 != 0 ||
        pairs.bytes % PAIR_BYTES != 0 || pairs.bytes / PAIR_BYTES > CODEPOINT_LIMIT)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: normalisation sections of odd sizes");
    for (size_t i = 0; i < blocks.bytes / 2; i++)
        if (get_u16(blocks.data, i) >= records.bytes / RECORD_BYTES)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: normalisation record %u is missing",
                        get_u16(blocks.data, i));
    TRY(check_records(records, parts, err));
    TRY(check_pairs(pairs, err));
    *t = (struct nfc){index.data, blocks.data, records.data, parts.data, pairs.data,
                      (uint32_t)(pairs.bytes / PAIR_BYTES)};
    return HR_OK;
}

bool nfc_is_stable(const struct nfc *t, const uint8_t *text, size_t n)
{
    uint32_t last = 0;
    for (size_t at = 0; at < n;) {
        uint32_t bytes;
        const uint32_t c = codepoint_decode(text + at, &bytes);
        at += bytes;
        const uint8_t *r = record_of(t, c);
        if (r[1] & FLAG_UNSTABLE || (r[0] != 0 && last > r[0])) return false;
        last = r[0];
    }
    return true;
}

static bool is_hangul_syllable(uint32_t c)
{
    return c - S_BASE < S_COUNT;
}

/* Writes the decomposition of c with classes; out has room for MAX_PARTS. */
static uint32_t decompose(const struct nfc *t, uint32_t c, uint32_t *out)
{
    if (is_hangul_syllable(c)) {
        const uint32_t s = c - S_BASE;
        out[0] = L_BASE + s / (V_COUNT * T_COUNT);
        out[1] = V_BASE + s / T_COUNT % V_COUNT;
        out[2] = T_BASE + s % T_COUNT;
        return s % T_COUNT ? 3 : 2;
    }
    const uint8_t *r = record_of(t, c);
    const uint32_t count = r[2];
    if (count == 0) {
        out[0] = c | (uint32_t)r[0] << CODE_BITS;
        return 1;
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t part = get_u32(t->parts, (size_t)get_u32(r, 1) + i);
        out[i] = part | (uint32_t)record_of(t, part)[0] << CODE_BITS;
    }
    return count;
}

static uint32_t compose_pair(const struct nfc *t, uint32_t a, uint32_t b)
{
    if (a - L_BASE < L_COUNT && b - V_BASE < V_COUNT)
        return S_BASE + ((a - L_BASE) * V_COUNT + (b - V_BASE)) * T_COUNT;
    if (is_hangul_syllable(a) && (a - S_BASE) % T_COUNT == 0 && b - T_BASE - 1 < T_COUNT - 1)
        return a + (b - T_BASE);
    uint32_t low = 0, high = t->pair_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const uint8_t *p = t->pairs + PAIR_BYTES * (size_t)middle;
        const uint32_t first = get_u32(p, 0), second = get_u32(p, 1);
        if (first == a && second == b) return get_u32(p, 2);
        if (first < a || (first == a && second < b)) low = middle + 1;
        else high = middle;
    }
    return NO_CODE;
}

/* Stable sort of a run of marks by class; `spare` holds n codes. */
static void sort_marks(uint32_t *codes, size_t n, uint32_t *spare)
{
    if (n <= SORT_BY_INSERTION) {
        for (size_t i = 1; i < n; i++) {
            const uint32_t code = codes[i];
            size_t j = i;
            for (; j > 0 && codes[j - 1] >> CODE_BITS > code >> CODE_BITS; j--)
                codes[j] = codes[j - 1];
            codes[j] = code;
        }
        return;
    }
    size_t begin[257] = {0};
    for (size_t i = 0; i < n; i++) begin[(codes[i] >> CODE_BITS) + 1]++;
    for (size_t k = 1; k < 257; k++) begin[k] += begin[k - 1];
    for (size_t i = 0; i < n; i++) spare[begin[codes[i] >> CODE_BITS]++] = codes[i];
    memcpy(codes, spare, n * sizeof *codes);
}

/* Canonical order, then composition, in place; returns the new length. */
static size_t compose(const struct nfc *t, uint32_t *codes, size_t n, uint32_t *spare)
{
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && codes[end] >> CODE_BITS) end++;
        sort_marks(codes + i, end - i, spare);
        i = end + 1;
    }
    size_t out = 0, starter = SIZE_MAX;
    uint32_t last = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t class = codes[i] >> CODE_BITS;
        if (starter != SIZE_MAX && (starter + 1 == out || last < class)) {
            const uint32_t whole =
                compose_pair(t, codes[starter] & CODE_MASK, codes[i] & CODE_MASK);
            if (whole != NO_CODE) {
                codes[starter] = whole;
                continue;
            }
        }
        if (class == 0) starter = out;
        last = class;
        codes[out++] = codes[i];
    }
    return out;
}

struct code_buffer {
    struct mem_budget *budget;
    uint32_t *codes; /* capacity codes and as many spare ones */
    size_t capacity;
    uint32_t small[2 * INLINE_CODES];
};

static bool reserve(struct code_buffer *buffer, size_t codes)
{
    if (codes <= buffer->capacity) return true;
    size_t bytes, grown;
    if (!size_mul(codes, 2, &grown) || !size_mul(grown, 2 * sizeof *buffer->codes, &bytes))
        return false;
    uint32_t *fresh = mem_alloc(buffer->budget, bytes);
    if (!fresh) return false;
    if (buffer->codes != buffer->small)
        mem_free(buffer->budget, buffer->codes, 2 * buffer->capacity * sizeof *buffer->codes);
    buffer->codes = fresh;
    buffer->capacity = grown;
    return true;
}

/* End of the segment at `from`: the next code point that can neither move nor combine with
 * what stands before it. *codes is an upper bound of the decomposed length. */
static size_t segment_end(const struct nfc *t, const uint8_t *text, size_t n, size_t from,
                          size_t *codes)
{
    size_t at = from;
    *codes = 0;
    while (at < n) {
        uint32_t bytes;
        const uint32_t c = codepoint_decode(text + at, &bytes);
        const uint8_t *r = record_of(t, c);
        if (at > from && r[0] == 0 && !(r[1] & FLAG_UNSTABLE)) break;
        *codes += r[2] > 3 ? r[2] : 3;
        at += bytes;
    }
    return at;
}

/* An upper bound of the normalised length: that of the full decomposition. */
static size_t decomposed_bytes(const struct nfc *t, const uint8_t *text, size_t n)
{
    size_t total = 0;
    for (size_t at = 0; at < n;) {
        uint32_t bytes, parts[MAX_PARTS];
        const uint32_t c = codepoint_decode(text + at, &bytes);
        at += bytes;
        const uint32_t count = decompose(t, c, parts);
        for (uint32_t i = 0; i < count; i++) total += codepoint_bytes(parts[i] & CODE_MASK);
    }
    return total;
}

hr_status nfc_normalise(const struct nfc *t, struct mem_budget *b, const uint8_t *text, size_t n,
                        uint8_t **out, size_t *capacity, size_t *length, hr_error *err)
{
    struct code_buffer buffer = {.budget = b, .capacity = INLINE_CODES};
    buffer.codes = buffer.small;
    *out = NULL;
    *capacity = decomposed_bytes(t, text, n);
    if (*capacity > MAX_BYTES)
        return fail(err, HR_ERR_USAGE, "a text of %zu bytes is too long to normalise", n);
    *out = mem_alloc(b, *capacity);
    if (!*out) goto no_memory;
    size_t written = 0;
    for (size_t at = 0; at < n;) {
        size_t bound;
        const size_t end = segment_end(t, text, n, at, &bound);
        if (!reserve(&buffer, bound)) goto no_memory;
        size_t count = 0;
        while (at < end) {
            uint32_t bytes;
            const uint32_t c = codepoint_decode(text + at, &bytes);
            count += decompose(t, c, buffer.codes + count);
            at += bytes;
        }
        count = compose(t, buffer.codes, count, buffer.codes + buffer.capacity);
        for (size_t i = 0; i < count; i++) {
            uint8_t encoded[4];
            const uint32_t bytes = codepoint_encode(buffer.codes[i] & CODE_MASK, encoded);
            memcpy(*out + written, encoded, bytes);
            written += bytes;
        }
    }
    *length = written;
    if (buffer.codes != buffer.small)
        mem_free(b, buffer.codes, 2 * buffer.capacity * sizeof *buffer.codes);
    return HR_OK;

no_memory:
    if (buffer.codes != buffer.small)
        mem_free(b, buffer.codes, 2 * buffer.capacity * sizeof *buffer.codes);
    mem_free(b, *out, *capacity);
    *out = NULL;
    return fail(err, HR_ERR_MEMORY, "no memory to normalise a text of %zu bytes", n);
}
