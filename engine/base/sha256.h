/* SHA-256 (FIPS 180-4); the struct and functions are public in headrace.h. */
#ifndef BASE_SHA256_H
#define BASE_SHA256_H

#include "headrace.h"

void sha256_hex(const uint8_t digest[32], char out[65]);
/* The compression without special instructions, for tests and machines without them. */
void sha256_compress_portable(uint32_t state[8], const uint8_t *data, size_t blocks);

#endif
