/* Lines of the small files under /proc and /sys, without an allocation: how much memory there is
 * must be known also when there is none left. */
#ifndef BASE_TEXT_FILE_H
#define BASE_TEXT_FILE_H

#include <stdbool.h>
#include <stddef.h>

struct text_file {
    int fd;
    size_t at, filled;
    char buffer[1024];
};

/* Opens `root` followed by `path`; false when that cannot be read. */
bool text_file_open(struct text_file *f, const char *root, const char *path);
/* The next line without its newline, cut to fit; false at the end. */
bool text_file_line(struct text_file *f, char *line, size_t capacity);
void text_file_close(struct text_file *f);

#endif
