#include "store/regular_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool plain_char(char c)
{
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}

bool file_name_valid(const char *name)
{
    if (!plain_char(name[0])) return false;
    size_t n = 1;
    for (; name[n] != '\0'; n++) {
        if (n >= 128) return false;
        const char c = name[n];
        if (!plain_char(c) && c != '.' && c != '_' && c != '-') return false;
    }
    return n <= 128;
}

/* strerror_r returns a pointer (glibc) or a status (POSIX, musl, macOS). */
static const char *text_of_pointer(const char *text, const char *buffer)
{
    return text != NULL ? text : buffer;
}

static const char *text_of_status(int status, const char *buffer)
{
    return status == 0 ? buffer : "unknown system error";
}

const char *system_error(int code, char text[128])
{
    text[0] = '\0';
    return _Generic(strerror_r(code, text, 128), int: text_of_status, default: text_of_pointer)(
        strerror_r(code, text, 128), text);
}

bool file_missing_beneath(int dir_fd, const char *name)
{
    struct stat st;
    return fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT;
}

hr_status file_open_beneath(int dir_fd, const char *name, int *fd, uint64_t *bytes, hr_error *err)
{
    char text[128];
    struct stat st;

    *fd = -1;
    if (!file_name_valid(name))
        return fail(err, HR_ERR_FORMAT, "a file name of the container is not allowed "
                    "([A-Za-z0-9][A-Za-z0-9._-]{0,127})");
    if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT)
            return fail(err, HR_ERR_FORMAT, "%s: missing from the container", name);
        return fail(err, HR_ERR_IO, "%s: %s", name, system_error(errno, text));
    }
    if (S_ISLNK(st.st_mode))
        return fail(err, HR_ERR_FORMAT,
                    "%s: is a symbolic link; a container holds regular files only", name);
    if (!S_ISREG(st.st_mode))
        return fail(err, HR_ERR_FORMAT, "%s: is not a regular file", name);

    /* The name may be exchanged between the two calls: O_NONBLOCK keeps a fifo from blocking. */
    const int flags = O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    int f;
    do f = openat(dir_fd, name, flags);
    while (f < 0 && errno == EINTR);
    if (f < 0) {
        const int code = errno;
        return fail(err, code == ELOOP || code == ENOENT ? HR_ERR_FORMAT : HR_ERR_IO, "%s: %s",
                    name, system_error(code, text));
    }
    if (fstat(f, &st) != 0) {
        const int code = errno;
        close(f);
        return fail(err, HR_ERR_IO, "%s: %s", name, system_error(code, text));
    }
    if (!S_ISREG(st.st_mode) || st.st_size < 0) {
        close(f);
        return fail(err, HR_ERR_FORMAT, "%s: is not a regular file", name);
    }
    (void)fcntl(f, F_SETFL, 0);
    *fd = f;
    *bytes = (uint64_t)st.st_size;
    return HR_OK;
}
