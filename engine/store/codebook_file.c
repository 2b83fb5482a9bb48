/* codebooks.bin: a set for gate, up and down of every bank that needs them, in the banks' order. */
#include "base/crc32c.h"
#include "quant/codebooks.h"
#include "store/direct_io.h"
#include "store/manifest.h"

static hr_status read_sets(const struct container *c, const uint8_t *data, hr_error *err)
{
    static const char *const kinds[] = {"gate", "up", "down"};
    for (uint32_t i = 0; i < c->bank_count; i++) {
        const struct bank_entry *k = &c->banks[i];
        for (int kind = 0; k->books != NULL && kind < 3; kind++) {
            float unit;
            const hr_status s = codebooks_read(k->codec, data, &k->books[kind], &unit, err);
            if (s != HR_OK)
                return fail_prefix(err, s, CODEBOOKS_NAME ": layer %u, %s", k->layer, kinds[kind]);
            data += codebooks_bytes(k->codec);
        }
    }
    return HR_OK;
}

hr_status codebooks_load(int dir_fd, const struct container *c, hr_error *err)
{
    void *data;
    size_t bytes;
    hr_status s = HR_OK;

    if (c->codebooks_bytes == 0) return HR_OK;
    TRY(file_read_whole(dir_fd, CODEBOOKS_NAME, c->codebooks_bytes, c->mem, &data, &bytes, err));
    if (bytes != c->codebooks_bytes)
        s = fail(err, HR_ERR_FORMAT, CODEBOOKS_NAME ": has %zu bytes, " MANIFEST_NAME " says %llu",
                 bytes, (unsigned long long)c->codebooks_bytes);
    else if (crc32c(0, data, bytes) != c->codebooks_crc)
        s = fail(err, HR_ERR_FORMAT, CODEBOOKS_NAME ": its CRC32C is not the one in " MANIFEST_NAME
                 ": the file is damaged or of another container");
    else
        s = read_sets(c, data, err);
    mem_free(c->mem, data, bytes);
    return s;
}
