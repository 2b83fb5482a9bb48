/* Files of a container: their names, and how they are opened. */
#ifndef STORE_REGULAR_FILE_H
#define STORE_REGULAR_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* [A-Za-z0-9][A-Za-z0-9._-]{0,127} */
bool file_name_valid(const char *name);

/* Opens a regular file directly beneath the directory: no link is followed, nothing that could
 * block or act on being opened is opened. */
hr_status file_open_beneath(int dir_fd, const char *name, int *fd, uint64_t *bytes, hr_error *err);

/* Nothing of that name is there. */
bool file_missing_beneath(int dir_fd, const char *name);

/* strerror that any number of threads may call. */
const char *system_error(int code, char text[128]);

#endif
