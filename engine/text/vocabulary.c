#include "text/vocabulary.h"

#include <string.h>

#define FLAG_CONTROL 1
#define FLAG_ADDED 2
#define FLAG_ORDINARY 4
#define MAX_TOKEN_BYTES 65536u

hr_status vocabulary_init(struct vocabulary *v, struct section offsets, struct section flags,
                          struct section bytes, uint32_t limit, hr_error *err)
{
    if (flags.bytes == 0 || flags.bytes > UINT32_MAX / 4 - 1)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: vocabulary of %zu entries", flags.bytes);
    if (flags.bytes > limit)
        return fail(err, HR_ERR_FORMAT,
                    "tokenizer.bin: token id %zu is outside the model's vocabulary of %u",
                    flags.bytes - 1, limit);
    const uint32_t size = (uint32_t)flags.bytes;
    if (offsets.bytes != 4 * ((size_t)size + 1))
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %zu bytes of offsets for %u entries",
                    offsets.bytes, size);
    uint32_t at = get_u32(offsets.data, 0), longest = 0;
    if (at != 0) return fail(err, HR_ERR_FORMAT, "tokenizer.bin: vocabulary begins at %u", at);
    for (uint32_t id = 0; id < size; id++) {
        const uint32_t next = get_u32(offsets.data, (size_t)id + 1);
        if (next < at || next - at > MAX_TOKEN_BYTES || next > bytes.bytes)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: token %u has a bad extent", id);
        if (flags.data[id] & ~(FLAG_CONTROL | FLAG_ADDED | FLAG_ORDINARY) ||
            ((flags.data[id] & FLAG_ORDINARY) && (flags.data[id] & FLAG_CONTROL)))
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: token %u has unknown flags", id);
        if (next - at > longest) longest = next - at;
        at = next;
    }
    if (at != bytes.bytes)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %zu bytes of tokens, %u described",
                    bytes.bytes, at);
    if (get_u32(offsets.data, size - 1) == at)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: the last token %u has no bytes", size - 1);
    v->size = size;
    v->longest = longest;
    v->offsets = offsets.data;
    v->flags = flags.data;
    v->bytes = bytes.data;
    return HR_OK;
}

struct section vocabulary_entry(const struct vocabulary *v, uint32_t id)
{
    const uint32_t from = get_u32(v->offsets, id);
    return (struct section){v->bytes + from, get_u32(v->offsets, (size_t)id + 1) - from};
}

bool vocabulary_is_control(const struct vocabulary *v, uint32_t id)
{
    return v->flags[id] & FLAG_CONTROL;
}

bool vocabulary_is_added(const struct vocabulary *v, uint32_t id)
{
    return v->flags[id] & FLAG_ADDED;
}

bool vocabulary_is_ordinary(const struct vocabulary *v, uint32_t id)
{
    return v->flags[id] & FLAG_ORDINARY;
}

int compare_bytes(struct section a, struct section b)
{
    const size_t common = a.bytes < b.bytes ? a.bytes : b.bytes;
    const int order = common ? memcmp(a.data, b.data, common) : 0;
    return order ? order : (a.bytes > b.bytes) - (a.bytes < b.bytes);
}
