/* SHA-256 (FIPS 180-4); the struct and functions are public in headrace.h. */
#ifndef BASE_SHA256_H
#define BASE_SHA256_H

#include "headrace.h"

void sha256_hex(const uint8_t digest[32], char out[65]);

#endif
