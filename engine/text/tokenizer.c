#include "text/tokenizer.h"

#include <string.h>

#include "base/crc32c.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/codepoint.h"
#include "text/nfc.h"
#include "text/pretokenizer.h"

#define HEADER_BYTES 40u
#define SECTION_BYTES 24u
#define CRC_OFFSET 12u
#define VERSION 1u
#define MODEL_BYTE_BPE 1u
#define FLAG_IGNORE_MERGES 1u
#define NORMALISER_NONE 0u
#define NORMALISER_NFC 1u
/* Normalisation and repair lengthen a text up to nine times: offsets stay below 2^32. */
#define MAX_TEXT ((size_t)1 << 28)

/* Kinds are the positions plus one. */
enum {
    SECTION_OFFSETS,
    SECTION_FLAGS,
    SECTION_BYTES_OF_TOKENS,
    SECTION_BYTE_IDS, /* four sections of bpe_init */
    SECTION_ADDED_RAW = SECTION_BYTE_IDS + BPE_SECTIONS,
    SECTION_ADDED_NORMALISED,
    SECTION_SPLITS, /* five sections of pretokenizer_init */
    SECTION_NFC = SECTION_SPLITS + SPLIT_SECTIONS,
    SECTION_COUNT = SECTION_NFC + NFC_SECTIONS
};

struct tokenizer {
    struct mem_budget *budget;
    struct vocabulary vocabulary;
    struct bpe bpe;
    struct added_tokens added_raw, added_normalised;
    struct pretokenizer pretokenizer;
    struct nfc nfc;
    bool normalise;
};

/* ---- opening ---- */

static bool checksum_is_right(const uint8_t *data, size_t bytes)
{
    static const uint8_t zero[4] = {0};
    uint32_t crc = crc32c(0, data, CRC_OFFSET);
    crc = crc32c(crc, zero, sizeof zero);
    crc = crc32c(crc, data + CRC_OFFSET + 4, bytes - CRC_OFFSET - 4);
    return crc == get_u32(data + CRC_OFFSET, 0);
}

static hr_status read_sections(const uint8_t *data, size_t bytes,
                               struct section sections[SECTION_COUNT], hr_error *err)
{
    size_t at = HEADER_BYTES + SECTION_BYTES * (size_t)SECTION_COUNT;
    if (bytes < at) return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %zu bytes are too few", bytes);
    for (uint32_t i = 0; i < SECTION_COUNT; i++) {
        const uint8_t *entry = data + HEADER_BYTES + SECTION_BYTES * (size_t)i;
        const uint64_t offset = get_u64(entry + 8), length = get_u64(entry + 16);
        if (get_u32(entry, 0) != i + 1 || get_u32(entry, 1) != 0 || offset % 8 != 0 ||
            offset < at || offset > bytes || length > bytes - offset)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: section %u is bad (offset %u)", i + 1,
                        HEADER_BYTES + SECTION_BYTES * i);
        sections[i] = (struct section){data + offset, (size_t)length};
        at = (size_t)(offset + length);
    }
    return HR_OK;
}

static hr_status read_file(struct tokenizer *t, const uint8_t *data, size_t bytes,
                           uint32_t vocab_size, hr_error *err)
{
    static const char magic[8] = "HRTOKENS";
    if (bytes < HEADER_BYTES || memcmp(data, magic, sizeof magic) != 0)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: not a Headrace tokenizer");
    if (get_u32(data + 8, 0) != VERSION)
        return fail(err, HR_ERR_UNSUPPORTED, "tokenizer.bin: version %u; this build reads %u",
                    get_u32(data + 8, 0), VERSION);
    if (get_u64(data + 16) != bytes)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %zu bytes, its header says %llu", bytes,
                    (unsigned long long)get_u64(data + 16));
    if (!checksum_is_right(data, bytes))
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: checksum is wrong, the file is damaged");
    const uint32_t model = get_u32(data + 24, 0), flags = get_u32(data + 28, 0);
    const uint32_t normaliser = get_u32(data + 32, 0), count = get_u32(data + 36, 0);
    if (model != MODEL_BYTE_BPE || flags > FLAG_IGNORE_MERGES || normaliser > NORMALISER_NFC)
        return fail(err, HR_ERR_UNSUPPORTED,
                    "tokenizer.bin: model %u, flags %u, normaliser %u are not known to this build",
                    model, flags, normaliser);
    if (count != SECTION_COUNT)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %u sections instead of %u", count,
                    (unsigned)SECTION_COUNT);

    struct section s[SECTION_COUNT];
    TRY(read_sections(data, bytes, s, err));
    TRY(vocabulary_init(&t->vocabulary, s[SECTION_OFFSETS], s[SECTION_FLAGS],
                        s[SECTION_BYTES_OF_TOKENS], vocab_size, err));
    TRY(bpe_init(&t->bpe, &t->vocabulary, s + SECTION_BYTE_IDS, err));
    if (t->bpe.whole_count > 0 && !(flags & FLAG_IGNORE_MERGES))
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: whole pieces without their flag");
    TRY(added_tokens_init(&t->added_raw, s[SECTION_ADDED_RAW], &t->vocabulary, err));
    TRY(added_tokens_init(&t->added_normalised, s[SECTION_ADDED_NORMALISED], &t->vocabulary, err));
    TRY(pretokenizer_init(&t->pretokenizer, s + SECTION_SPLITS, err));
    t->normalise = normaliser == NORMALISER_NFC;
    return t->normalise ? nfc_init(&t->nfc, s + SECTION_NFC, err) : HR_OK;
}

hr_status tokenizer_open(const void *data, size_t bytes, uint32_t vocab_size, struct mem_budget *b,
                         struct tokenizer **out, hr_error *err)
{
    *out = NULL;
    struct tokenizer *t = mem_alloc(b, sizeof *t);
    if (!t) return fail(err, HR_ERR_MEMORY, "no memory for the tokenizer");
    t->budget = b;
    const hr_status status = read_file(t, data, bytes, vocab_size, err);
    if (status != HR_OK) {
        tokenizer_free(t);
        return status;
    }
    *out = t;
    return HR_OK;
}

void tokenizer_free(struct tokenizer *t)
{
    if (t) mem_free(t->budget, t, sizeof *t);
}

uint64_t tokenizer_cost(size_t file_bytes)
{
    (void)file_bytes; /* its tables are used in place */
    return mem_cost(sizeof(struct tokenizer));
}

/* ---- encoding ---- */

struct encoder {
    const struct tokenizer *t;
    bool special, stable; /* stable: the whole text is known to be normalised */
    struct id_sink sink;
    struct bpe_scratch scratch;
};

typedef hr_status (*text_fn)(struct encoder *e, const uint8_t *text, size_t n, hr_error *err);

/* Emits the ids of the added tokens in a text and hands what is between them on. */
static hr_status around_added(struct encoder *e, const struct added_tokens *added,
                              const uint8_t *text, size_t n, text_fn between, hr_error *err)
{
    size_t at = 0;
    struct added_match match;
    while (added_tokens_find(added, &e->t->vocabulary, text, n, at, e->special, &match)) {
        TRY(between(e, text + at, match.at - at, err));
        id_sink_put(&e->sink, match.id);
        at = match.at + match.bytes;
    }
    return between(e, text + at, n - at, err);
}

static hr_status encode_piece(void *user, const uint8_t *piece, size_t n, hr_error *err)
{
    struct encoder *e = user;
    return bpe_encode(&e->t->bpe, &e->scratch, piece, n, &e->sink, err);
}

static hr_status encode_plain(struct encoder *e, const uint8_t *text, size_t n, hr_error *err)
{
    if (n == 0) return HR_OK;
    return pretokenizer_run(&e->t->pretokenizer, e->t->budget, text, n, encode_piece, e, err);
}

static hr_status encode_segment(struct encoder *e, const uint8_t *text, size_t n, hr_error *err)
{
    const struct tokenizer *t = e->t;
    if (n == 0) return HR_OK;
    if (!t->normalise || e->stable || nfc_is_stable(&t->nfc, text, n))
        return around_added(e, &t->added_normalised, text, n, encode_plain, err);
    uint8_t *normal;
    size_t capacity, length;
    TRY(nfc_normalise(&t->nfc, t->budget, text, n, &normal, &capacity, &length, err));
    const hr_status status =
        around_added(e, &t->added_normalised, normal, length, encode_plain, err);
    mem_free(t->budget, normal, capacity);
    return status;
}

static hr_status encode_pass(struct encoder *e, const uint8_t *text, size_t n, int32_t *ids,
                             size_t capacity, hr_error *err)
{
    e->sink = (struct id_sink){ids, capacity, 0};
    return around_added(e, &e->t->added_raw, text, n, encode_segment, err);
}

static hr_status encode_text(const struct tokenizer *t, const uint8_t *text, size_t n,
                             bool special, int32_t *ids, size_t capacity, size_t *count,
                             hr_error *err)
{
    struct encoder e = {.t = t, .special = special};
    e.stable = !t->normalise || nfc_is_stable(&t->nfc, text, n);
    bpe_scratch_init(&e.scratch, t->budget);
    /* A stable text has at most one id a byte. Otherwise ids are counted before any is written. */
    const bool fits = e.stable && capacity >= n;
    hr_status status = encode_pass(&e, text, n, ids, fits ? capacity : 0, err);
    if (status == HR_OK && !fits && e.sink.count <= capacity)
        status = encode_pass(&e, text, n, ids, capacity, err);
    bpe_scratch_free(&e.scratch);
    TRY(status);
    *count = e.sink.count;
    if (e.sink.count > capacity)
        return fail(err, HR_ERR_USAGE, "the text has %zu tokens, room is for %zu", e.sink.count,
                    capacity);
    return HR_OK;
}

hr_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, bool special,
                           int32_t *ids, size_t capacity, size_t *count, hr_error *err)
{
    *count = 0;
    if (n == 0) return HR_OK;
    if (n > MAX_TEXT)
        return fail(err, HR_ERR_USAGE, "a text of %zu bytes; encode at most %zu at once", n,
                    MAX_TEXT);
    const uint8_t *bytes = (const uint8_t *)text;
    if (utf8_valid(bytes, n)) return encode_text(t, bytes, n, special, ids, capacity, count, err);
    const size_t length = repaired_bytes(bytes, n);
    uint8_t *repaired = mem_alloc(t->budget, length);
    if (!repaired) return fail(err, HR_ERR_MEMORY, "no memory to repair a text of %zu bytes", n);
    repair(bytes, n, repaired);
    const hr_status status = encode_text(t, repaired, length, special, ids, capacity, count, err);
    mem_free(t->budget, repaired, length);
    return status;
}

/* ---- entries ---- */

const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *len)
{
    *len = 0;
    if (id < 0 || (uint32_t)id >= t->vocabulary.size) return "";
    const struct section entry = vocabulary_entry(&t->vocabulary, (uint32_t)id);
    *len = entry.bytes;
    return (const char *)entry.data;
}

size_t tokenizer_longest(const struct tokenizer *t)
{
    return t->vocabulary.longest;
}

uint32_t tokenizer_vocab(const struct tokenizer *t)
{
    return t->vocabulary.size;
}

bool tokenizer_is_control(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->vocabulary.size &&
           vocabulary_is_control(&t->vocabulary, (uint32_t)id);
}
