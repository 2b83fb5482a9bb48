/* Recorded routes, as `headrace trace` writes them. */
#ifndef CLI_TRACE_FILE_H
#define CLI_TRACE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TRACE_FORMAT = 2 }; /* formats/trace.md; up to it they are read */

/* Returns an exit code; *ids [tokens][layers][top_k], -1 behind shorter lists, is malloc'ed. Numbers
 * that are no expert ids are left for hr_simulate to refuse. */
int trace_file_read(const char *path, uint32_t layers, uint32_t top_k, bool json, int32_t **ids,
                    size_t *tokens);

#endif
