#include "quant/codebooks.h"

#include <math.h>
#include <string.h>

#include "base/crc32c.h"

static const char magic[4] = {'H', 'R', 'C', 'B'};

struct header {
    char magic[4];
    uint16_t version, codec;
    float unit;
    uint8_t zero[48];
    uint32_t crc;
};
_Static_assert(sizeof(struct header) == CODEBOOKS_HEADER, "the header is 64 bytes");

size_t codebooks_bytes(enum codec c)
{
    const struct rvq_shape *shape = rvq_shape_of(c);
    return shape ? CODEBOOKS_HEADER + (size_t)shape->stages * shape->entries * RVQ_DIM : 0;
}

static uint32_t checksum(struct header h, const void *entries, size_t n)
{
    h.crc = 0;
    return crc32c(crc32c(0, &h, sizeof h), entries, n);
}

void codebooks_write(enum codec c, const int8_t *entries, float unit, void *set)
{
    const size_t n = codebooks_bytes(c) - CODEBOOKS_HEADER;
    struct header h = {.version = 1, .codec = (uint16_t)c, .unit = unit};
    memcpy(h.magic, magic, sizeof magic);
    h.crc = checksum(h, entries, n);
    memcpy(set, &h, sizeof h);
    memcpy((uint8_t *)set + CODEBOOKS_HEADER, entries, n);
}

hr_status codebooks_read(enum codec c, const void *set, struct rvq_books *books, float *unit,
                         hr_error *err)
{
    static const uint8_t zero[48];
    const struct rvq_shape *shape = rvq_shape_of(c);
    const int8_t *entries = (const int8_t *)set + CODEBOOKS_HEADER;
    struct header h;
    if (!shape) return fail(err, HR_ERR_USAGE, "codec %s has no codebooks", codec_name(c));
    memcpy(&h, set, sizeof h);
    if (memcmp(h.magic, magic, sizeof magic) != 0)
        return fail(err, HR_ERR_FORMAT, "codebooks do not begin with HRCB");
    if (h.crc != checksum(h, entries, codebooks_bytes(c) - CODEBOOKS_HEADER))
        return fail(err, HR_ERR_FORMAT, "codebooks are damaged: CRC32C is not %08x", h.crc);
    if (h.version != 1 || h.codec != c)
        return fail(err, HR_ERR_FORMAT, "codebooks have version %u and codec number %u, not 1 and %u",
                    h.version, h.codec, (unsigned)c);
    if (!(h.unit > 0 && h.unit < INFINITY) || memcmp(h.zero, zero, sizeof zero) != 0)
        return fail(err, HR_ERR_FORMAT, "the header of the codebooks holds an impossible unit or "
                    "bytes that must be zero");
    if (!rvq_books_set(books, shape, entries))
        return fail(err, HR_ERR_FORMAT, "an entry of the codebooks is beyond +-%d", shape->limit);
    *unit = h.unit;
    return HR_OK;
}
