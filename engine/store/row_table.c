#include "store/row_table.h"

#include <string.h>

#include "base/crc32c.h"
#include "store/direct_io.h"

enum { NUMBER_AT = ROW_PAGE_PAYLOAD, CRC_AT = 4092 };

struct row_table {
    struct direct_file file;
    struct mem_budget *mem;
    uint64_t rows;
    uint32_t row_bytes, per_page;
};

uint64_t row_table_cost(void)
{
    return mem_cost(sizeof(struct row_table));
}

hr_status row_table_open(const struct container *c, const char *name, uint64_t rows,
                         uint32_t row_bytes, bool direct, struct mem_budget *b,
                         struct row_table **out, hr_error *err)
{
    *out = NULL;
    if (row_bytes == 0 || row_bytes > ROW_PAGE_PAYLOAD)
        return fail(err, HR_ERR_UNSUPPORTED, "%s: rows of %u bytes do not fit a page", name, row_bytes);
    struct row_table *t = mem_alloc(b, sizeof *t);
    if (!t) return fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes", sizeof *t);
    t->mem = b;
    t->rows = rows;
    t->row_bytes = row_bytes;
    t->per_page = ROW_PAGE_PAYLOAD / row_bytes;
    hr_status st = direct_file_open(c->dir_fd, name, direct, &t->file, err);
    if (st != HR_OK) {
        mem_free(b, t, sizeof *t);
        return st;
    }
    const uint64_t bytes = rows == 0 ? 0 : row_table_bytes(rows, row_bytes);
    if (rows == 0 || t->file.bytes != bytes) {
        st = fail(err, HR_ERR_FORMAT, "%s/%s: has %llu bytes; %llu rows of %u bytes need %llu", c->path,
                  name, (unsigned long long)t->file.bytes, (unsigned long long)rows, row_bytes,
                  (unsigned long long)bytes);
        row_table_close(t);
        return st;
    }
    *out = t;
    return HR_OK;
}

void row_table_close(struct row_table *t)
{
    if (!t) return;
    direct_file_close(&t->file);
    mem_free(t->mem, t, sizeof *t);
}

static uint64_t load_le(const uint8_t *p, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

uint64_t row_table_bytes(uint64_t rows, uint32_t row_bytes)
{
    return ((rows - 1) / (ROW_PAGE_PAYLOAD / row_bytes) + 1) * ROW_PAGE;
}

bool row_page_valid(const uint8_t page[ROW_PAGE], uint64_t number)
{
    return crc32c(0, page, CRC_AT) == load_le(page + CRC_AT, 4) &&
           load_le(page + NUMBER_AT, 8) == number;
}

hr_status row_table_read(struct row_table *t, uint64_t row, void *out, hr_error *err)
{
    _Alignas(ROW_PAGE) uint8_t page[ROW_PAGE];
    uint64_t retries = 0;
    if (row >= t->rows)
        return fail(err, HR_ERR_FORMAT, "%s: row %llu of %llu", t->file.name,
                    (unsigned long long)row, (unsigned long long)t->rows);
    const uint64_t number = row / t->per_page;
    TRY(direct_read(&t->file, number * ROW_PAGE, page, ROW_PAGE, &retries, err));
    if (!row_page_valid(page, number))
        return fail(err, HR_ERR_FORMAT, "%s: checksum mismatch in the page at offset %llu; "
                    "copy or convert the container again", t->file.name,
                    (unsigned long long)(number * ROW_PAGE));
    memcpy(out, page + (row % t->per_page) * t->row_bytes, t->row_bytes);
    return HR_OK;
}
