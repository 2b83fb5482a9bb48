/* A file that a command writes: it appears under its name when it is whole, or not at all. */
#ifndef CLI_OUT_FILE_H
#define CLI_OUT_FILE_H

#include <stdbool.h>
#include <stdio.h>

struct out_file {
    FILE *file;
    const char *path;
    char *partial; /* NULL: written as it is (standard output, a pipe, a device) */
};

/* "-" is standard output. False with errno when it cannot be created. */
bool out_file_open(struct out_file *f, const char *path);
/* Publishes the file; with `keep` false, or when something could not be written, removes it. False with
 * errno (0 when unknown) when what should be kept is not. */
bool out_file_close(struct out_file *f, bool keep);

#endif
