#include "store/direct_io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/vfs.h>
#endif

#include "store/regular_file.h"

enum {
    EIO_RETRIES = 2,    /* per read */
    STUCK_RETRIES = 2,  /* reads in a row that bring nothing although the file is long enough */
    TRANSFER = 1 << 30, /* most bytes of one call: some systems refuse more than INT_MAX */
};

static int64_t system_pread(int fd, void *buffer, size_t bytes, int64_t offset)
{
    return (int64_t)pread(fd, buffer, bytes, (off_t)offset);
}

static _Atomic(pread_fn) pread_hook = system_pread;

void direct_io_set_pread(pread_fn fn)
{
    atomic_store(&pread_hook, fn != NULL ? fn : system_pread);
}

/* A read that ended early: the file was cut, or the system lied. */
static hr_status stuck(int fd, const char *name, uint64_t at, uint64_t end, unsigned times,
                       hr_error *err)
{
    struct stat st;
    if (fstat(fd, &st) == 0 && st.st_size >= 0 && (uint64_t)st.st_size < end)
        return fail(err, HR_ERR_FORMAT,
                    "%s: ends at byte %llu, but bytes up to %llu are needed: the file was cut; "
                    "make or copy it again",
                    name, (unsigned long long)st.st_size, (unsigned long long)end);
    if (times <= STUCK_RETRIES) return HR_OK;
    return fail(err, HR_ERR_IO, "%s: reading at byte %llu returns nothing although the file is "
                "longer; check the drive and the file system",
                name, (unsigned long long)at);
}

static hr_status read_range(int fd, const char *name, bool direct, uint64_t offset, uint8_t *buffer,
                            size_t bytes, uint64_t *retries, hr_error *err)
{
    const pread_fn read_at = atomic_load(&pread_hook);
    size_t done = 0;
    unsigned eio = 0, idle = 0;

    if (offset > INT64_MAX || bytes > INT64_MAX - offset)
        return fail(err, HR_ERR_USAGE, "%s: offset out of range", name);
    while (done < bytes) {
        const size_t want = bytes - done < TRANSFER ? bytes - done : TRANSFER;
        const uint64_t at = offset + done;
        const int64_t got = read_at(fd, buffer + done, want, (int64_t)at);
        if (got == (int64_t)want) {
            done += want;
            idle = 0;
            continue;
        }
        ++*retries;
        if (got < 0) {
            const int code = errno;
            char text[128];
            if (code == EINTR || (code == EIO && eio++ < EIO_RETRIES)) continue;
            return fail(err, HR_ERR_IO, "%s: reading %zu bytes at byte %llu: %s%s", name, want,
                        (unsigned long long)at, system_error(code, text),
                        code == EIO ? " (three times); check the drive" : "");
        }
        if ((uint64_t)got > want)
            return fail(err, HR_ERR_IO, "%s: reading at byte %llu returned more than was asked",
                        name, (unsigned long long)at);
        /* What follows the last full block is read again: a direct offset must stay aligned. */
        const size_t step = direct ? (size_t)got & ~(size_t)(IO_ALIGN - 1) : (size_t)got;
        if (step == 0)
            TRY(stuck(fd, name, at, offset + bytes, ++idle, err));
        else
            idle = 0;
        done += step;
    }
    return HR_OK;
}

hr_status file_read_exact(int fd, const char *name, uint64_t offset, void *buffer, size_t bytes,
                          hr_error *err)
{
    uint64_t retries = 0;
    return read_range(fd, name, false, offset, buffer, bytes, &retries, err);
}

hr_status file_read_whole(int dir_fd, const char *name, uint64_t max, struct mem_budget *b,
                          void **data, size_t *bytes, hr_error *err)
{
    int fd;
    uint64_t n;

    *data = NULL;
    *bytes = 0;
    TRY(file_open_beneath(dir_fd, name, &fd, &n, err));
    if (n == 0 || n > max) {
        close(fd);
        return fail(err, HR_ERR_FORMAT, "%s: has %llu bytes, allowed are 1 to %llu", name,
                    (unsigned long long)n, (unsigned long long)max);
    }
    void *p = n <= SIZE_MAX ? mem_alloc(b, (size_t)n) : NULL;
    if (p == NULL) {
        close(fd);
        return fail(err, HR_ERR_MEMORY, "%s: no memory for its %llu bytes", name,
                    (unsigned long long)n);
    }
    const hr_status s = file_read_exact(fd, name, 0, p, (size_t)n, err);
    close(fd);
    if (s != HR_OK) {
        mem_free(b, p, (size_t)n);
        return s;
    }
    *data = p;
    *bytes = (size_t)n;
    return HR_OK;
}

#if defined(__linux__) && defined(O_DIRECT)

/* File systems that take O_DIRECT and then serve the page cache anyway. */
static bool memory_backed(int fd)
{
    struct statfs fs;
    if (fstatfs(fd, &fs) != 0) return false;
    const unsigned long type = (unsigned long)fs.f_type & 0xfffffffful;
    return type == 0x01021994ul /* tmpfs */ || type == 0x858458f6ul /* ramfs */;
}

/* What the file system itself says; true where it says nothing. */
static bool alignment_allows(int fd)
{
#if defined(STATX_DIOALIGN)
    struct statx sx;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &sx) == 0 && (sx.stx_mask & STATX_DIOALIGN))
        return sx.stx_dio_offset_align != 0 && sx.stx_dio_offset_align <= IO_ALIGN &&
               sx.stx_dio_mem_align <= IO_ALIGN;
#else
    (void)fd;
#endif
    return true;
}

static bool direct_on(int fd)
{
    return !memory_backed(fd) && alignment_allows(fd) && fcntl(fd, F_SETFL, O_DIRECT) == 0;
}

static void direct_off(int fd)
{
    (void)fcntl(fd, F_SETFL, 0);
}

#elif defined(__APPLE__)

static bool direct_on(int fd)
{
    return fcntl(fd, F_NOCACHE, 1) == 0;
}

static void direct_off(int fd)
{
    (void)fcntl(fd, F_NOCACHE, 0);
}

#elif defined(_WIN32)

static bool direct_on(int fd)
{
    return posix_set_direct(fd, 1) == 0;
}

static void direct_off(int fd)
{
    (void)posix_set_direct(fd, 0);
}

#else

static bool direct_on(int fd)
{
    (void)fd;
    return false;
}

static void direct_off(int fd)
{
    (void)fd;
}

#endif

static void read_ahead_off(int fd)
{
#if defined(__APPLE__)
    (void)fcntl(fd, F_RDAHEAD, 0);
#elif defined(POSIX_FADV_RANDOM)
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
#else
    (void)fd;
#endif
}

/* One transfer of the smallest unit, at the oddest multiples of it the engine will ever use. */
static bool probe(int fd, uint64_t file_bytes)
{
    uint8_t raw[4 * IO_ALIGN];
    const size_t odd = 2 * IO_ALIGN - 1;
    uint8_t *buffer = raw + (((uintptr_t)raw + odd) / (2 * IO_ALIGN) * (2 * IO_ALIGN) -
                             (uintptr_t)raw) + IO_ALIGN;
    const int64_t offset = file_bytes >= 2 * IO_ALIGN ? IO_ALIGN : 0;
    if (file_bytes < IO_ALIGN) return false;
    const pread_fn read_at = atomic_load(&pread_hook);
    for (unsigned tries = 0; tries < 8; tries++) { /* a first EINTR or EIO proves nothing */
        const int64_t got = read_at(fd, buffer, IO_ALIGN, offset);
        if (got == IO_ALIGN) return true;
        if (got >= 0 || (errno != EINTR && errno != EIO)) return false;
    }
    return false;
}

void direct_file_adopt(int fd, uint64_t bytes, const char *name, bool want_direct,
                       struct direct_file *out)
{
    *out = (struct direct_file){.fd = fd, .bytes = bytes};
    snprintf(out->name, sizeof out->name, "%s", name);
    if (want_direct && direct_on(fd)) {
        out->direct = probe(fd, bytes);
        if (!out->direct) direct_off(fd);
    }
    read_ahead_off(fd);
}

hr_status direct_file_open(int dir_fd, const char *name, bool want_direct, struct direct_file *out,
                           hr_error *err)
{
    int fd;
    uint64_t bytes;
    *out = (struct direct_file){.fd = -1};
    TRY(file_open_beneath(dir_fd, name, &fd, &bytes, err));
    direct_file_adopt(fd, bytes, name, want_direct, out);
    return HR_OK;
}

void direct_file_close(struct direct_file *f)
{
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

hr_status direct_read(struct direct_file *f, uint64_t offset, void *buffer, size_t bytes,
                      uint64_t *retries, hr_error *err)
{
    TRY(read_range(f->fd, f->name, f->direct, offset, buffer, bytes, retries, err));
#if defined(POSIX_FADV_DONTNEED)
    if (!f->direct)
        (void)posix_fadvise(f->fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
#endif
    return HR_OK;
}
