/* File calls of the C library that fail on demand; loaded with LD_PRELOAD. Linux only. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>
#include <pthread.h>

#include "plan.h"

enum { PATH_BYTES = 4096, DIRTY_MAX = 64 };

#define REAL(name) ((__typeof__(&name))next_symbol(#name))

static void *next_symbol(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

/* ---- which file a call is about ---------------------------------------------------- */

static bool path_of_fd(int fd, char out[PATH_BYTES])
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, out, PATH_BYTES - 1);
    if (n <= 0) return false;
    out[n] = '\0';
    return true;
}

static bool path_at(int dir, const char *path, char out[PATH_BYTES])
{
    char base[PATH_BYTES];
    int n;
    if (!path) return false;
    if (path[0] == '/')
        n = snprintf(out, PATH_BYTES, "%s", path);
    else if (dir == AT_FDCWD ? getcwd(base, sizeof base) != NULL : path_of_fd(dir, base))
        n = snprintf(out, PATH_BYTES, "%s/%s", base, path);
    else
        return false;
    return n > 0 && n < PATH_BYTES;
}

/* ---- what a power cut would lose ------------------------------------------------------ */

static pthread_mutex_t dirty_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char path[PATH_BYTES]; /* written and not synchronised; "" = free */
    off_t safe;            /* bytes that it had when it was last synchronised */
} dirty[DIRTY_MAX];

static off_t size_of(const char *path)
{
    struct stat st;
    return syscall(SYS_newfstatat, AT_FDCWD, path, &st, 0) == 0 ? st.st_size : 0;
}

static int dirty_find(const char *path)
{
    for (int i = 0; i < DIRTY_MAX; i++)
        if (strcmp(dirty[i].path, path) == 0) return i;
    return -1;
}

static void dirty_set(const char *path, bool is)
{
    pthread_mutex_lock(&dirty_lock);
    const int at = dirty_find(path), room = dirty_find("");
    if (!is && at >= 0) dirty[at].path[0] = '\0';
    if (is && at < 0 && room >= 0) {
        strcpy(dirty[room].path, path);
        dirty[room].safe = size_of(path);
    }
    pthread_mutex_unlock(&dirty_lock);
}

static void dirty_rename(const char *from, const char *to)
{
    pthread_mutex_lock(&dirty_lock);
    const int there = dirty_find(to), at = dirty_find(from);
    if (there >= 0) dirty[there].path[0] = '\0';
    if (at >= 0) strcpy(dirty[at].path, to);
    pthread_mutex_unlock(&dirty_lock);
}

static void dirty_fd(int fd, bool is)
{
    char path[PATH_BYTES];
    if (fault_wanted(CALL_WRITE) && path_of_fd(fd, path) && fault_path_matches(path))
        dirty_set(path, is);
}

static void cut_power(void)
{
    for (int i = 0; i < DIRTY_MAX; i++) {
        if (dirty[i].path[0] == '\0') continue;
        const off_t size = size_of(dirty[i].path), safe = dirty[i].safe;
        if (size > safe) (void)!syscall(SYS_truncate, dirty[i].path, safe + (size - safe) / 2);
    }
    fault_die();
}

/* ---- what happens to a call ------------------------------------------------------------ */

/* Pauses and deaths happen here; true when the call must fail, errno being set. */
static bool strike(struct fault f)
{
    switch (f.action) {
    case ACT_SLEEP:
    case ACT_JITTER: fault_pause(f.value); return false;
    case ACT_POWER: cut_power(); return false;
    case ACT_KILL:
    case ACT_TORN: fault_die();
    case ACT_ERRNO: errno = f.value; return true;
    case ACT_FULL: errno = ENOSPC; return true;
    default: return false;
    }
}

static struct fault fault_of_fd(enum fault_call call, int fd)
{
    char path[PATH_BYTES];
    const int saved = errno;
    struct fault f = {ACT_NONE, 0, false};
    if (fault_wanted(call) && path_of_fd(fd, path) && fault_path_matches(path)) f = fault_next(call);
    errno = saved;
    return f;
}

static struct fault fault_of_path(enum fault_call call, int dir, const char *path)
{
    char full[PATH_BYTES];
    const int saved = errno;
    struct fault f = {ACT_NONE, 0, false};
    if (fault_wanted(call) && path_at(dir, path, full) && fault_path_matches(full)) f = fault_next(call);
    errno = saved;
    return f;
}

static ssize_t shortened(struct fault f, ssize_t got)
{
    if (f.action == ACT_ZERO) return 0;
    return f.action == ACT_SHORT && got > 1 ? got / 2 : got;
}

FAULT_EXPORT ssize_t read(int fd, void *buffer, size_t n)
{
    const struct fault f = fault_of_fd(CALL_READ, fd);
    if (strike(f)) return -1;
    /* The file's own position must not run ahead of what the caller gets. */
    if (f.action == ACT_SHORT && n > 1) n /= 2;
    if (f.action == ACT_ZERO) return 0;
    return REAL(read)(fd, buffer, n);
}

/* The whole is read and less admitted, because direct transfers must stay aligned. */
FAULT_EXPORT ssize_t pread64(int fd, void *buffer, size_t n, off64_t offset)
{
    const struct fault f = fault_of_fd(CALL_PREAD, fd);
    return strike(f) ? -1 : shortened(f, REAL(pread64)(fd, buffer, n, offset));
}

FAULT_EXPORT ssize_t pread(int fd, void *buffer, size_t n, off_t offset)
{
    return pread64(fd, buffer, n, offset);
}

/* Half of a write is done for short, full and torn. */
static bool halve(struct fault f, size_t *n)
{
    const bool half = *n > 1 && (f.action == ACT_SHORT || f.action == ACT_TORN ||
                                 (f.action == ACT_FULL && f.first));
    if (half) *n /= 2;
    return half;
}

FAULT_EXPORT ssize_t write(int fd, const void *data, size_t n)
{
    const struct fault f = fault_of_fd(CALL_WRITE, fd);
    const bool half = halve(f, &n);
    if (!half && strike(f)) return -1;
    dirty_fd(fd, true);
    const ssize_t done = REAL(write)(fd, data, n);
    if (f.action == ACT_TORN) fault_die();
    return done;
}

FAULT_EXPORT ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset)
{
    const struct fault f = fault_of_fd(CALL_PWRITE, fd);
    const bool half = halve(f, &n);
    if (!half && strike(f)) return -1;
    dirty_fd(fd, true);
    const ssize_t done = REAL(pwrite64)(fd, data, n, offset);
    if (f.action == ACT_TORN) fault_die();
    return done;
}

FAULT_EXPORT ssize_t pwrite(int fd, const void *data, size_t n, off_t offset)
{
    return pwrite64(fd, data, n, offset);
}

FAULT_EXPORT int ftruncate64(int fd, off64_t size)
{
    if (strike(fault_of_fd(CALL_TRUNCATE, fd))) return -1;
    dirty_fd(fd, true);
    return REAL(ftruncate64)(fd, size);
}

FAULT_EXPORT int ftruncate(int fd, off_t size)
{
    return ftruncate64(fd, size);
}

FAULT_EXPORT int fsync(int fd)
{
    if (strike(fault_of_fd(CALL_FSYNC, fd))) return -1;
    const int done = REAL(fsync)(fd);
    if (done == 0) dirty_fd(fd, false);
    return done;
}

FAULT_EXPORT int fdatasync(int fd)
{
    if (strike(fault_of_fd(CALL_FSYNC, fd))) return -1;
    const int done = REAL(fdatasync)(fd);
    if (done == 0) dirty_fd(fd, false);
    return done;
}

static int moved(int done, int from_dir, const char *from, int to_dir, const char *to)
{
    char a[PATH_BYTES], b[PATH_BYTES];
    if (done == 0 && fault_wanted(CALL_WRITE) && path_at(from_dir, from, a) && path_at(to_dir, to, b))
        dirty_rename(a, b);
    return done;
}

FAULT_EXPORT int rename(const char *from, const char *to)
{
    if (strike(fault_of_path(CALL_RENAME, AT_FDCWD, from))) return -1;
    return moved(REAL(rename)(from, to), AT_FDCWD, from, AT_FDCWD, to);
}

FAULT_EXPORT int renameat(int from_dir, const char *from, int to_dir, const char *to)
{
    if (strike(fault_of_path(CALL_RENAME, from_dir, from))) return -1;
    return moved(REAL(renameat)(from_dir, from, to_dir, to), from_dir, from, to_dir, to);
}

FAULT_EXPORT int mkdir(const char *path, mode_t mode)
{
    return strike(fault_of_path(CALL_MKDIR, AT_FDCWD, path)) ? -1 : REAL(mkdir)(path, mode);
}

FAULT_EXPORT int mkdirat(int dir, const char *path, mode_t mode)
{
    return strike(fault_of_path(CALL_MKDIR, dir, path)) ? -1 : REAL(mkdirat)(dir, path, mode);
}

static int forgotten(int done, int dir, const char *path)
{
    char full[PATH_BYTES];
    if (done == 0 && fault_wanted(CALL_WRITE) && path_at(dir, path, full)) dirty_set(full, false);
    return done;
}

FAULT_EXPORT int unlink(const char *path)
{
    if (strike(fault_of_path(CALL_UNLINK, AT_FDCWD, path))) return -1;
    return forgotten(REAL(unlink)(path), AT_FDCWD, path);
}

FAULT_EXPORT int unlinkat(int dir, const char *path, int flags)
{
    if (strike(fault_of_path(CALL_UNLINK, dir, path))) return -1;
    return forgotten(REAL(unlinkat)(dir, path, flags), dir, path);
}

static int open_any(int dir, const char *path, int flags, mode_t mode)
{
    const enum fault_call call = flags & O_CREAT ? CALL_CREATE : CALL_OPEN;
    return strike(fault_of_path(call, dir, path)) ? -1 : REAL(openat)(dir, path, flags, mode);
}

static bool has_mode(int flags)
{
    return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
}

#define OPEN(name)                                       \
    FAULT_EXPORT int name(const char *path, int flags, ...) \
    {                                                    \
        mode_t mode = 0;                                 \
        if (has_mode(flags)) {                           \
            va_list list;                                \
            va_start(list, flags);                       \
            mode = va_arg(list, mode_t);                 \
            va_end(list);                                \
        }                                                \
        return open_any(AT_FDCWD, path, flags, mode);    \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                              \
    FAULT_EXPORT int name(int dir, const char *path, int flags, ...) \
    {                                                             \
        mode_t mode = 0;                                          \
        if (has_mode(flags)) {                                    \
            va_list list;                                         \
            va_start(list, flags);                                \
            mode = va_arg(list, mode_t);                          \
            va_end(list);                                         \
        }                                                         \
        return open_any(dir, path, flags, mode);                  \
    }

/* REAL(openat) above asks for the C library's, not this one. */
OPENAT(openat)
OPENAT(openat64)

/* Closed all the same, as Linux does. */
FAULT_EXPORT int close(int fd)
{
    const bool struck = strike(fault_of_fd(CALL_CLOSE, fd));
    const int code = errno, done = REAL(close)(fd);
    if (struck) errno = code;
    return struck ? -1 : done;
}

FAULT_EXPORT int fstat(int fd, struct stat *st)
{
    return strike(fault_of_fd(CALL_STAT, fd)) ? -1 : REAL(fstat)(fd, st);
}

FAULT_EXPORT int stat(const char *path, struct stat *st)
{
    return strike(fault_of_path(CALL_STAT, AT_FDCWD, path)) ? -1 : REAL(stat)(path, st);
}

FAULT_EXPORT int lstat(const char *path, struct stat *st)
{
    return strike(fault_of_path(CALL_STAT, AT_FDCWD, path)) ? -1 : REAL(lstat)(path, st);
}

FAULT_EXPORT int stat64(const char *path, struct stat64 *st)
{
    return strike(fault_of_path(CALL_STAT, AT_FDCWD, path)) ? -1 : REAL(stat64)(path, st);
}

FAULT_EXPORT int lstat64(const char *path, struct stat64 *st)
{
    return strike(fault_of_path(CALL_STAT, AT_FDCWD, path)) ? -1 : REAL(lstat64)(path, st);
}

FAULT_EXPORT int fstatat(int dir, const char *path, struct stat *st, int flags)
{
    return strike(fault_of_path(CALL_STAT, dir, path)) ? -1 : REAL(fstatat)(dir, path, st, flags);
}

FAULT_EXPORT int fstat64(int fd, struct stat64 *st)
{
    return strike(fault_of_fd(CALL_STAT, fd)) ? -1 : REAL(fstat64)(fd, st);
}

FAULT_EXPORT int fstatat64(int dir, const char *path, struct stat64 *st, int flags)
{
    return strike(fault_of_path(CALL_STAT, dir, path)) ? -1 : REAL(fstatat64)(dir, path, st, flags);
}
