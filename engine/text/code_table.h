/* Two-stage tables over the code space: an index for each 256 code points, then blocks of 256. */
#ifndef TEXT_CODE_TABLE_H
#define TEXT_CODE_TABLE_H

#include "base/status.h"
#include "text/bytes.h"

#define CODE_BLOCK 256u
#define CODE_BLOCKS 4352u /* 0x110000 / 256 */

/* Checks that the index has its size and points to blocks that exist; `width` is the bytes of a
 * value. The values themselves are the caller's to check. */
static inline hr_status code_table_check(struct section index, struct section blocks, size_t width,
                                         const char *what, hr_error *err)
{
    const size_t block = CODE_BLOCK * width;
    if (index.bytes != 2 * CODE_BLOCKS || blocks.bytes % block != 0)
        return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %s table of %zu and %zu bytes", what,
                    index.bytes, blocks.bytes);
    for (size_t i = 0; i < CODE_BLOCKS; i++)
        if (get_u16(index.data, i) >= blocks.bytes / block)
            return fail(err, HR_ERR_FORMAT, "tokenizer.bin: %s table, block %zu is missing", what,
                        i);
    return HR_OK;
}

/* Where the value of code point c is. */
static inline size_t code_table_place(const uint8_t *index, uint32_t c)
{
    return (size_t)get_u16(index, c / CODE_BLOCK) * CODE_BLOCK + c % CODE_BLOCK;
}

#endif
