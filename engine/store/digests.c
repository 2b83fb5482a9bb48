#include "store/digests.h"

#include <string.h>

#include "store/direct_io.h"
#include "store/regular_file.h"

#define LIST_NAME "manifest.sha256"

enum {
    HEX = 64,
    LINE_MIN = HEX + 2 + 1 + 1, /* digest, two spaces, a name, newline */
    LIST_MAX = 16 << 20,
};

static int hex_value(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* Takes the line at *at apart and moves *at behind it. */
static bool parse_line(char *text, size_t n, size_t *at, struct digest *out)
{
    char *line = text + *at;
    char *end = memchr(line, '\n', n - *at);
    if (end == NULL || end - line < LINE_MIN - 1) return false;
    for (size_t i = 0; i < sizeof out->sha256; i++) {
        const int high = hex_value(line[2 * i]), low = hex_value(line[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        out->sha256[i] = (uint8_t)(high * 16 + low);
    }
    if (line[HEX] != ' ' || line[HEX + 1] != ' ') return false;
    char *name = line + HEX + 2;
    if (memchr(name, '\0', (size_t)(end - name)) != NULL) return false;
    *end = '\0';
    out->name = name;
    *at += (size_t)(end - line) + 1;
    return file_name_valid(name) && strcmp(name, LIST_NAME) != 0;
}

hr_status digest_list_read(int dir_fd, struct mem_budget *b, struct digest_list *out, hr_error *err)
{
    void *data;

    *out = (struct digest_list){.mem = b};
    TRY(file_read_whole(dir_fd, LIST_NAME, LIST_MAX, b, &data, &out->text_bytes, err));
    out->text = data;
    const size_t room = out->text_bytes / LINE_MIN;
    out->entries = mem_alloc(b, room * sizeof *out->entries);
    if (out->entries == NULL) {
        digest_list_free(out);
        return fail(err, HR_ERR_MEMORY, LIST_NAME ": no memory to read it");
    }
    size_t at = 0;
    while (at < out->text_bytes) {
        struct digest d;
        if (!parse_line(out->text, out->text_bytes, &at, &d)) {
            const size_t line = out->count + 1;
            digest_list_free(out);
            return fail(err, HR_ERR_FORMAT, LIST_NAME ": line %zu is not "
                        "'<64 hex digits><two spaces><file name>'", line);
        }
        if (out->count > 0 && strcmp(out->entries[out->count - 1].name, d.name) >= 0) {
            const size_t line = out->count + 1;
            digest_list_free(out);
            return fail(err, HR_ERR_FORMAT,
                        LIST_NAME ": line %zu is not in ascending order of names", line);
        }
        out->entries[out->count++] = d;
    }
    return HR_OK;
}

void digest_list_free(struct digest_list *list)
{
    mem_free(list->mem, list->entries, list->text_bytes / LINE_MIN * sizeof *list->entries);
    mem_free(list->mem, list->text, list->text_bytes);
    list->entries = NULL;
    list->text = NULL;
    list->count = 0;
}

const struct digest *digest_find(const struct digest_list *list, const char *name)
{
    size_t low = 0, high = list->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = strcmp(list->entries[middle].name, name);
        if (order == 0) return &list->entries[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}
