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

hr_status record_check(const struct bank_entry *bank, uint32_t expert, const uint8_t *record,
                       bool crc, hr_error *err)
{
    TRY(record_check_identity(bank, expert, record, err));
    if (!crc) return HR_OK;
    const uint32_t computed = crc32c(record_crc_start(record), record + RECORD_HEADER,
                                     bank->record.bytes - RECORD_HEADER);
    return record_check_crc(bank, expert, computed, err);
}
