/* CRC32C (Castagnoli), hardware instruction in three interleaved chains where there is one. */
#ifndef BASE_CRC32C_H
#define BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continues `crc` (0 to start) over n bytes; crc32c("123456789") = 0xE3069283. */
uint32_t crc32c(uint32_t crc, const void *data, size_t n);
/* The table implementation, for tests and machines without the instruction. */
uint32_t crc32c_table(uint32_t crc, const void *data, size_t n);

#endif
