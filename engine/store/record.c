#include "store/record.h"

#include <string.h>

#include "base/crc32c.h"

static uint64_t little_endian(const uint8_t *p, unsigned bytes)
{
    uint64_t v = 0;
    for (unsigned i = bytes; i-- > 0;) v = v << 8 | p[i];
    return v;
}

hr_status record_check_identity(const struct bank_entry *bank, uint32_t expert,
                                const uint8_t header[RECORD_HEADER], hr_error *err)
{
    const struct {
        const char *name;
        unsigned at, bytes;
        uint64_t value;
    } fields[] = {
        {"magic", 0, 4, little_endian((const uint8_t *)"HREX", 4)},
        {"record version", 4, 2, 1},
        {"codec", 6, 2, (uint64_t)bank->codec},
        {"layer", 8, 4, bank->layer},
        {"expert", 12, 4, expert},
        {"hidden", 16, 4, bank->hidden},
        {"inner", 20, 4, bank->inner},
        {"record length", 24, 8, bank->record.bytes},
        {"offset of gate", 32, 8, bank->record.gate},
        {"offset of up", 40, 8, bank->record.up},
        {"offset of down", 48, 8, bank->record.down},
        {"offset of biases", 56, 4, bank->record.bias},
        {"checksum", 60, 4, bank->crc[expert]},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const uint64_t found = little_endian(header + fields[i].at, fields[i].bytes);
        if (found == fields[i].value) continue;
        return fail(err, HR_ERR_FORMAT,
                    "%s: layer %u expert %u (record at byte %llu): %s in the header is 0x%llx, the "
                    "manifest makes it 0x%llx; the file is damaged or of another container",
                    bank->file, bank->layer, expert,
                    (unsigned long long)((uint64_t)expert * bank->record.bytes), fields[i].name,
                    (unsigned long long)found, (unsigned long long)fields[i].value);
    }
    return HR_OK;
}

uint32_t record_crc_start(const uint8_t header[RECORD_HEADER])
{
    uint8_t copy[RECORD_HEADER];
    memcpy(copy, header, sizeof copy);
    memset(copy + 60, 0, 4);
    return crc32c(0, copy, sizeof copy);
}

hr_status record_check_crc(const struct bank_entry *bank, uint32_t expert, uint32_t computed,
                           hr_error *err)
{
    if (computed == bank->crc[expert]) return HR_OK;
    return fail(err, HR_ERR_FORMAT,
                "%s: layer %u expert %u (record at byte %llu, %zu bytes): its CRC32C is 0x%08x, "
                "the manifest says 0x%08x; the file is damaged, copy or convert the container again",
                bank->file, bank->layer, expert,
                (unsigned long long)((uint64_t)expert * bank->record.bytes), bank->record.bytes,
                computed, bank->crc[expert]);
}

struct part {
    const char *name;
    uint64_t at, rows, cols;
    enum codec codec;
};

/* The parts in the order that they lie in; returns how many. */
static size_t record_parts(const struct bank_entry *k, struct part out[RECORD_PARTS])
{
    const uint64_t stride = round_up((uint64_t)k->inner * sizeof(float), 64);
    const uint64_t bias = k->record.bias;
    const struct part all[RECORD_PARTS] = {
        {"gate", k->record.gate, k->inner, k->hidden, k->codec},
        {"up", k->record.up, k->inner, k->hidden, k->codec},
        {"down", k->record.down, k->hidden, k->inner, k->codec},
        {"the bias of gate", bias, 1, k->inner, CODEC_F32},
        {"the bias of up", bias + stride, 1, k->inner, CODEC_F32},
        {"the bias of down", bias + 2 * stride, 1, k->hidden, CODEC_F32},
    };
    memcpy(out, all, sizeof all);
    return bias ? RECORD_PARTS : RECORD_PARTS / 2;
}

void record_scan(const struct bank_entry *bank, uint64_t start, const uint8_t *bytes, size_t n,
                 struct unfit part[RECORD_PARTS])
{
    struct part p[RECORD_PARTS];
    const size_t count = record_parts(bank, p);
    for (size_t i = 0; i < count; i++) {
        size_t length;
        if (!codec_matrix_bytes(p[i].codec, p[i].rows, p[i].cols, &length)) continue;
        const uint64_t from = p[i].at > start ? p[i].at : start;
        const uint64_t to = p[i].at + length < start + n ? p[i].at + length : start + n;
        if (from < to)
            finite_scan(p[i].codec, p[i].rows, p[i].cols, from - p[i].at, bytes + (from - start),
                        (size_t)(to - from), &part[i]);
    }
}

hr_status record_check_finite(const struct bank_entry *bank, uint32_t expert,
                              const struct unfit part[RECORD_PARTS], hr_error *err)
{
    struct part p[RECORD_PARTS];
    const size_t count = record_parts(bank, p);
    const uint64_t record = (uint64_t)expert * bank->record.bytes;
    uint64_t found = 0;
    size_t first = RECORD_PARTS;
    for (size_t i = 0; i < count; i++) {
        if (part[i].count > 0 && first == RECORD_PARTS) first = i;
        found += part[i].count;
    }
    if (found == 0) return HR_OK;
    return fail(err, HR_ERR_FORMAT,
                "%s: layer %u expert %u (record at byte %llu): %llu numbers that must be finite are not, "
                "the first is a %s of %s at byte %llu of the file; convert the checkpoint again",
                bank->file, bank->layer, expert, (unsigned long long)record,
                (unsigned long long)found, finite_noun(p[first].codec), p[first].name,
                (unsigned long long)(record + p[first].at + part[first].first));
}

hr_status record_check(const struct bank_entry *bank, uint32_t expert, const uint8_t *record,
                       bool crc, hr_error *err)
{
    enum { PIECE = 1 << 18 }; /* scanned while a cache still holds what the checksum read */
    /* The weights of float codecs would cost another pass. */
    const bool scan = codec_reads_quantized(bank->codec);
    const size_t bytes = bank->record.bytes;
    struct unfit part[RECORD_PARTS] = {{0, 0}};
    TRY(record_check_identity(bank, expert, record, err));
    if (!crc) return HR_OK;
    uint32_t computed = record_crc_start(record);
    for (size_t at = 0; at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE, skip = at == 0 ? RECORD_HEADER : 0;
        computed = crc32c(computed, record + at + skip, n - skip);
        if (scan) record_scan(bank, at, record + at, n, part);
    }
    TRY(record_check_crc(bank, expert, computed, err));
    return record_check_finite(bank, expert, part, err);
}
