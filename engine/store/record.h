/* An expert record as it lies on disk: is it the one the manifest means, and is it whole? */
#ifndef STORE_RECORD_H
#define STORE_RECORD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "quant/finite.h"
#include "store/container.h"

enum { RECORD_HEADER = 64, RECORD_PARTS = 6 }; /* gate, up, down, the bias of each */

/* Compares every field of the 64-byte header with what the manifest derives. */
hr_status record_check_identity(const struct bank_entry *bank, uint32_t expert,
                                const uint8_t header[RECORD_HEADER], hr_error *err);
/* CRC32C over the header with its checksum field zero: the start of a record's checksum. */
uint32_t record_crc_start(const uint8_t header[RECORD_HEADER]);
hr_status record_check_crc(const struct bank_entry *bank, uint32_t expert, uint32_t computed,
                           hr_error *err);
/* Adds the numbers of each part that are not finite, in bytes [start, start + n) of a record; start
 * is a multiple of 64. */
void record_scan(const struct bank_entry *bank, uint64_t start, const uint8_t *bytes, size_t n,
                 struct unfit part[RECORD_PARTS]);
/* Refuses a record that has some, with their number and the first. */
hr_status record_check_finite(const struct bank_entry *bank, uint32_t expert,
                              const struct unfit part[RECORD_PARTS], hr_error *err);
/* Identity; when `crc`, the checksum of the whole record too, and the scales of quantised codecs. */
hr_status record_check(const struct bank_entry *bank, uint32_t expert, const uint8_t *record,
                       bool crc, hr_error *err);

#endif
