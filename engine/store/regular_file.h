/* Files of a container: their names, how they are opened, and whole small ones read. */
#ifndef STORE_REGULAR_FILE_H
#define STORE_REGULAR_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

/* [A-Za-z0-9][A-Za-z0-9._-]{0,127} */
bool file_name_valid(const char *name);

/* Opens a regular file directly beneath the directory: no link is followed, nothing that could
 * block or act on being opened is opened. */
hr_status file_open_beneath(int dir_fd, const char *name, int *fd, uint64_t *bytes, hr_error *err);

/* Reads exactly `bytes` at `offset`, repeating EINTR, short reads and first EIOs (direct_io.c). */
hr_status file_read_exact(int fd, const char *name, uint64_t offset, void *buffer, size_t bytes,
                          hr_error *err);

/* The whole of a file of 1..max bytes; *data is mem_alloc'ed from b. */
hr_status file_read_whole(int dir_fd, const char *name, uint64_t max, struct mem_budget *b,
                          void **data, size_t *bytes, hr_error *err);

/* strerror that any number of threads may call. */
const char *system_error(int code, char text[128]);

#endif
