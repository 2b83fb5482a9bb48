#include "base/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

enum { PATH_BYTES = 8192 };

bool text_file_open(struct text_file *f, const char *root, const char *path)
{
    char full[PATH_BYTES];
    const int n = snprintf(full, sizeof full, "%s%s", root, path);
    f->at = f->filled = 0;
    if (n <= 0 || (size_t)n >= sizeof full) return false;
    do f->fd = open(full, O_RDONLY | O_CLOEXEC);
    while (f->fd < 0 && errno == EINTR);
    return f->fd >= 0;
}

static bool fill(struct text_file *f)
{
    ssize_t n;
    do n = read(f->fd, f->buffer, sizeof f->buffer);
    while (n < 0 && errno == EINTR);
    f->at = 0;
    f->filled = n > 0 ? (size_t)n : 0;
    return f->filled > 0;
}

bool text_file_line(struct text_file *f, char *line, size_t capacity)
{
    size_t n = 0;
    bool any = false;
    while (f->at < f->filled || fill(f)) {
        const char c = f->buffer[f->at++];
        any = true;
        if (c == '\n') break;
        if (n + 1 < capacity) line[n++] = c;
    }
    line[n] = '\0';
    return any;
}

void text_file_close(struct text_file *f)
{
    if (f->fd >= 0) (void)close(f->fd);
    f->fd = -1;
}
