/* A table of fixed-size rows on disk, read one by one and never resident. */
#ifndef STORE_ROW_TABLE_H
#define STORE_ROW_TABLE_H

#include "store/container.h"

enum { ROW_PAGE = 4096, ROW_PAGE_PAYLOAD = 4084 };

struct row_table;

/* Bytes of the file; rows and row_bytes (at most ROW_PAGE_PAYLOAD) are above 0. */
uint64_t row_table_bytes(uint64_t rows, uint32_t row_bytes);
/* Does the page carry this number and its own checksum? */
bool row_page_valid(const uint8_t page[ROW_PAGE], uint64_t number);

/* The file holds pages of 4096 bytes: whole rows from the start, the page's number (u64) at 4084,
 * the CRC32C of the 4092 bytes before it at 4092. Its size must be what rows and row_bytes give. */
hr_status row_table_open(const struct container *c, const char *name, uint64_t rows,
                         uint32_t row_bytes, bool direct, struct mem_budget *b,
                         struct row_table **out, hr_error *err);
void row_table_close(struct row_table *t);
uint64_t row_table_cost(void);
/* Copies one row; verifies its page. Thread-safe. */
hr_status row_table_read(struct row_table *t, uint64_t row, void *out, hr_error *err);

#endif
