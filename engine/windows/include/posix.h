/* Windows: the part of POSIX that the engine uses, over the Windows API. Every source file of a
 * Windows build sees this first (engine/windows/meson.build); what other systems compile does not
 * know of it. Paths are UTF-8, files are bytes, descriptors are those of the C run-time. */
#ifndef WINDOWS_POSIX_H
#define WINDOWS_POSIX_H

#define tell crt_tell /* a name that the engine uses itself */
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#undef tell

/* Descriptors are never inherited and never block on being opened. */
#define O_CLOEXEC O_NOINHERIT
#define O_NONBLOCK 0
#define O_NOCTTY 0
#define O_NOFOLLOW 0x02000000
#define O_DIRECTORY 0x04000000
#define F_SETFL 4
#define AT_SYMLINK_NOFOLLOW 0x100

#undef S_IFLNK
#undef S_ISLNK
#define S_IFLNK 0xA000
#define S_ISLNK(mode) (((mode) & S_IFMT) == S_IFLNK)

#define _SC_PAGESIZE 30
#define STDIN_FILENO 0
#define STDOUT_FILENO 1
#define STDERR_FILENO 2

struct posix_stat {
    unsigned st_mode; /* file, directory or link: anything that redirects counts as a link */
    int64_t st_size;
    uint64_t st_dev, st_ino;
};

int posix_open(const char *path, int flags, ...);
/* Beneath a directory's descriptor: `name` is one component and no device. Such a descriptor serves
 * pread and pwrite only, any number of them at once. */
int posix_openat(int directory, const char *name, int flags, ...);
int posix_fstat(int fd, struct posix_stat *out);
int posix_fstatat(int directory, const char *name, struct posix_stat *out, int flags);
int posix_stat(const char *path, struct posix_stat *out);
int64_t posix_pread(int fd, void *buffer, size_t bytes, int64_t offset);
int64_t posix_pwrite(int fd, const void *buffer, size_t bytes, int64_t offset);
int64_t posix_read(int fd, void *buffer, size_t bytes);
int64_t posix_write(int fd, const void *buffer, size_t bytes);
int posix_fsync(int fd); /* EINVAL for a directory, which Windows cannot sync */
int posix_rename(const char *from, const char *to); /* replaces, and returns when it is on the disk */
int posix_unlink(const char *path);
int posix_unlinkat(int directory, const char *name, int flags);
FILE *posix_fopen(const char *path, const char *mode);
long posix_sysconf(int name);
int posix_memalign(void **out, size_t alignment, size_t bytes); /* given back by aligned_free */
void posix_aligned_free(void *p);
int strerror_r(int code, char *text, size_t capacity);

/* The same file under the same descriptor, past the cache or through it. */
int posix_set_direct(int fd, int on);

#undef stat
#undef fstat
#define stat posix_stat
#define fstat(fd, out) posix_fstat(fd, out)
#define fstatat(directory, name, out, flags) posix_fstatat(directory, name, out, flags)
#define open(...) posix_open(__VA_ARGS__)
#define openat(...) posix_openat(__VA_ARGS__)
#define read posix_read /* also the members of that name, alike everywhere */
#define write posix_write
#define pread(fd, buffer, bytes, offset) posix_pread(fd, buffer, bytes, offset)
#define pwrite(fd, buffer, bytes, offset) posix_pwrite(fd, buffer, bytes, offset)
#define fsync(fd) posix_fsync(fd)
#define rename(from, to) posix_rename(from, to)
#define unlink(path) posix_unlink(path)
#define unlinkat(directory, name, flags) posix_unlinkat(directory, name, flags)
#define fopen(path, mode) posix_fopen(path, mode)
#define sysconf(name) posix_sysconf(name)
#define fcntl(fd, command, value) ((void)(fd), 0) /* F_SETFL of flags that do not exist here */

/* The macro of the headers makes a float of a double on the way. */
#undef isfinite
#define isfinite(x) __builtin_isfinite(x)

#endif
