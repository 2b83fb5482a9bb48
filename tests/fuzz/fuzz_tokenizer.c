/* libFuzzer target: opens a tokenizer.bin with the checksum and length made right, and encodes a text
 * with it. Input: mode (bit 0: recognise special spellings, bit 1: leave the header as it is, bit 2:
 * edit a file), length of the text, the text, and the file; or which file of --tokenizers=DIR is
 * edited, and edits of its sections. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "text/tokenizer.h"
#include "text/utf8_stream.h"

#define MEMORY_LIMIT ((uint64_t)64 << 20)
#define CRC_OFFSET 12
#define LENGTH_OFFSET 16
#define HEADER_BYTES 40
#define SECTIONS 19
#define MAX_FILES 16
#define MAX_FILE_BYTES ((size_t)4 << 20)

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct {
    uint8_t *data;
    size_t size;
} files[MAX_FILES];
static size_t file_count;

static void put(uint8_t *p, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) p[i] = (uint8_t)(value >> (8 * i));
}

static void check(int condition)
{
    if (!condition) abort();
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    char *names[MAX_FILES], path[512];
    const char *dir = NULL;
    size_t count = 0;
    for (int i = 1; i < *argc; i++)
        if (strncmp((*argv)[i], "--tokenizers=", 13) == 0) dir = (*argv)[i] + 13;
    DIR *d = dir ? opendir(dir) : NULL;
    for (struct dirent *e; d && (e = readdir(d)) != NULL;)
        if (e->d_name[0] != '.' && count < MAX_FILES) names[count++] = strdup(e->d_name);
    if (d) closedir(d);
    qsort(names, count, sizeof *names, by_name);
    for (size_t i = 0; i < count; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        FILE *f = fopen(path, "rb");
        files[file_count].data = malloc(MAX_FILE_BYTES);
        check(f != NULL && files[file_count].data != NULL);
        files[file_count].size = fread(files[file_count].data, 1, MAX_FILE_BYTES, f);
        fclose(f);
        free(names[i]);
        if (files[file_count].size > HEADER_BYTES + 24 * SECTIONS) file_count++;
    }
    return 0;
}

struct script {
    const uint8_t *at;
    size_t left;
};

static uint32_t take(struct script *s, unsigned bytes)
{
    uint32_t v = 0;
    for (unsigned i = 0; i < bytes && s->left > 0; i++, s->left--) v |= (uint32_t)*s->at++ << (8 * i);
    return v;
}

static uint64_t get64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

/* Changes numbers of a section, or its length. */
static void edit(uint8_t *file, size_t size, struct script *s)
{
    static const uint32_t awkward[] = {0, 1, 2, 0xff, 0xffff, 0x7fffffff, 0xffffffff, 0x10000, 256, 0xfffe};
    uint8_t *entry = file + HEADER_BYTES + 24 * (take(s, 1) % SECTIONS);
    const uint32_t how = take(s, 1);
    const uint64_t offset = get64(entry + 8), length = get64(entry + 16);
    const unsigned unit = 1u << (how & 3) == 8 ? 4 : 1u << (how & 3);
    if (how >= 240) {
        put(entry + 16, length + take(s, 1) - 128, 8);
        return;
    }
    if (length < unit || offset > size || length > size - offset) return;
    uint64_t at = take(s, 3) % (length / unit) * unit;
    const uint32_t value = how & 4 ? awkward[take(s, 1) % 10] : take(s, unit);
    uint8_t *p = file + offset + at;
    if (how & 8) { /* a little more or less */
        put(p, (uint64_t)p[0] + (how & 16 ? 1u : 255u), 1);
        return;
    }
    for (uint32_t n = how & 32 ? take(s, 1) + 1 : 1; n > 0 && at + unit <= length; n--, at += unit)
        put(file + offset + at, value, (int)unit);
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
    size_t file_bytes = size - 2 - text_bytes;
    const uint8_t *from = data + 2 + text_bytes;
    struct script script = {from, 0};
    if (mode & 4 && file_count > 0 && file_bytes > 1) {
        const size_t which = *from % file_count;
        script = (struct script){from + 1, file_bytes - 1};
        from = files[which].data;
        file_bytes = files[which].size;
    }
    uint8_t *file = malloc(file_bytes ? file_bytes : 1);
    check(file != NULL);
    memcpy(file, from, file_bytes);
    for (int edits = 0; script.left > 0 && edits < 16; edits++) edit(file, file_bytes, &script);
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
