/* Starting from what the disk holds, and proof that a run read it. */
#ifndef CLI_COLD_H
#define CLI_COLD_H

#include <stdbool.h>
#include <stdint.h>

/* Asks the system to forget cached pages of the files in a directory; what cannot be dropped stays. */
void cold_drop(const char *directory);
/* Bytes that this process had fetched from storage so far; false where the system does not tell. */
bool cold_physical_bytes(uint64_t *bytes);

#endif
