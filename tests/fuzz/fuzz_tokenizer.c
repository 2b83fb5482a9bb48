/* Opens a tokenizer.bin with the checksum and length made right, and encodes a text with it.
 * Input: mode (bit 0: recognise special spellings, bit 1: leave header as it is), length of
 * the text, the text, the file. tests/fuzz/tokenizer_seeds.py writes a corpus. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "text/tokenizer.h"
#include "text/utf8_stream.h"

#define MEMORY_LIMIT ((uint64_t)64 << 20)
#define CRC_OFFSET 12
#define LENGTH_OFFSET 16
#define HEADER_BYTES 40

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void put(uint8_t *p, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) p[i] = (uint8_t)(value >> (8 * i));
}

static void check(int condition)
{
    if (!condition) abort();
}

static void stream(const char *bytes, size_t n)
{
    struct utf8_stream s;
    char out[3 * (256 + 4)];
    utf8_stream_init(&s);
    while (n > 0) {
        const size_t step = n < 7 ? n : 7;
        check(utf8_stream_push(&s, bytes, step, out) <= 3 * (step + 4));
        bytes += step;
        n -= step;
    }
    utf8_stream_flush(&s, out);
}

static void encode(const struct tokenizer *t, const char *text, size_t n, int special)
{
    int32_t ids[1024];
    size_t count;
    const hr_status status = tokenizer_encode(t, text, n, special, ids, 1024, &count, NULL);
    if (status != HR_OK) return;
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(t, ids[i], &length);
        check(special || !tokenizer_is_control(t, ids[i]));
        check(length > 0);
        if (length <= 256) stream(bytes, length);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    const uint8_t mode = data[0];
    const size_t text_bytes = data[1] < size - 2 ? data[1] : size - 2;
    const char *text = (const char *)data + 2;
    const size_t file_bytes = size - 2 - text_bytes;
    uint8_t *file = malloc(file_bytes ? file_bytes : 1);
    check(file != NULL);
    memcpy(file, data + 2 + text_bytes, file_bytes);
    if (!(mode & 2) && file_bytes >= HEADER_BYTES) {
        put(file + LENGTH_OFFSET, file_bytes, 8);
        put(file + CRC_OFFSET, 0, 4);
        put(file + CRC_OFFSET, crc32c(0, file, file_bytes), 4);
    }
    struct mem_budget budget;
    mem_budget_init(&budget, MEMORY_LIMIT);
    struct tokenizer *t;
    if (tokenizer_open(file, file_bytes, 1 << 20, &budget, &t, NULL) == HR_OK) {
        encode(t, text, text_bytes, mode & 1);
        tokenizer_free(t);
    }
    stream(text, text_bytes);
    check(budget.used == 0);
    free(file);
    return 0;
}
