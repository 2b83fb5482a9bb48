#include "store/saved_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/direct_io.h"
#include "store/regular_file.h"

static hr_status refused(const char *path, const char *verb, hr_error *err)
{
    char text[128];
    return fail(err, HR_ERR_IO, "%s: cannot %s: %s", path, verb, system_error(errno, text));
}

static hr_status io_failed(const struct saved_file *f, const char *verb, hr_error *err)
{
    char text[128];
    return fail(err, HR_ERR_IO, "%s: cannot %s at offset %llu: %s", f->path, verb,
                (unsigned long long)f->at, system_error(errno, text));
}

static int open_again(const char *path, int flags, mode_t mode)
{
    int fd;
    do fd = open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static int sync_again(int fd)
{
    int rc;
    do rc = fsync(fd);
    while (rc != 0 && errno == EINTR);
    return rc;
}

hr_status saved_write(struct saved_file *f, const void *data, size_t n, hr_error *err)
{
    const uint8_t *p = data;
    while (n > 0) {
        const ssize_t done = write(f->fd, p, n < 1 << 20 ? n : 1 << 20);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return io_failed(f, "write", err);
        p += done;
        n -= (size_t)done;
        f->at += (uint64_t)done;
    }
    return HR_OK;
}

hr_status saved_read(struct saved_file *f, void *data, size_t n, hr_error *err)
{
    TRY(file_read_exact(f->fd, f->path, f->at, data, n, err));
    f->at += n;
    return HR_OK;
}

static hr_status sync_directory(const char *path, hr_error *err)
{
    char dir[PATH_MAX];
    const char *slash = strrchr(path, '/');
    const size_t n = slash ? (size_t)(slash - path) : 0;
    if (n >= sizeof dir) return HR_OK;
    snprintf(dir, sizeof dir, "%.*s", (int)n, path);
    const int fd = open_again(!slash ? "." : n == 0 ? "/" : dir, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return refused(path, "open its directory", err);
    /* Some file systems refuse to sync a directory; the rename itself has happened. */
    const hr_status st = sync_again(fd) == 0 || errno == EINVAL
                             ? HR_OK
                             : refused(path, "sync its directory", err);
    close(fd);
    return st;
}

/* One writer of a path at a time, of whatever process: who has NAME.partial locked. `mine` says whether
 * the file still has that name; who had it before has renamed or removed it. File systems that
 * cannot lock do without. */
static hr_status take_turn(struct saved_file *f, bool *mine, hr_error *err)
{
    struct stat own, named;
    int rc;
    do rc = flock(f->fd, LOCK_EX);
    while (rc != 0 && errno == EINTR);
    if (fstat(f->fd, &own) != 0) return io_failed(f, "stat", err);
    *mine = stat(f->path, &named) == 0 && named.st_dev == own.st_dev && named.st_ino == own.st_ino;
    if (!*mine) return HR_OK;
    if (!S_ISREG(own.st_mode)) {
        *mine = false;
        return fail(err, HR_ERR_IO, "%s: not a regular file", f->path);
    }
    do rc = ftruncate(f->fd, 0);
    while (rc != 0 && errno == EINTR);
    return rc == 0 ? HR_OK : io_failed(f, "cut", err);
}

static hr_status open_partial(const char *partial, struct saved_file *f, hr_error *err)
{
    for (bool mine = false; !mine;) {
        /* O_NONBLOCK: a fifo of that name must not block. */
        *f = (struct saved_file){
            open_again(partial, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0600), partial, 0};
        if (f->fd < 0) return refused(partial, "create", err);
        const hr_status st = take_turn(f, &mine, err);
        if (st != HR_OK && mine) unlink(partial);
        if (st != HR_OK || !mine) close(f->fd);
        if (st != HR_OK) return st;
    }
    return HR_OK;
}

hr_status saved_replace(const char *path, struct mem_budget *b, saved_body_fn body, void *user,
                        hr_error *err)
{
    const size_t n = strlen(path) + sizeof ".partial";
    struct stat there;
    if (stat(path, &there) == 0 && !S_ISREG(there.st_mode)) /* such as /dev/null */
        return fail(err, HR_ERR_IO, "%s: not a regular file", path);
    char *partial = mem_alloc(b, n);
    if (!partial) return fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes", n);
    snprintf(partial, n, "%s.partial", path);
    struct saved_file f;
    hr_status st = open_partial(partial, &f, err);
    if (st == HR_OK) {
        st = body(user, &f, err);
        if (st == HR_OK && sync_again(f.fd) != 0) st = io_failed(&f, "sync", err);
        if (st == HR_OK && rename(partial, path) != 0) st = refused(partial, "rename", err);
        if (st != HR_OK) unlink(partial);
        close(f.fd); /* ends the turn; what was synced cannot fail any more */
        if (st == HR_OK) st = sync_directory(path, err);
    }
    mem_free(b, partial, n);
    return st;
}

hr_status saved_open(const char *path, struct saved_file *out, uint64_t *bytes, hr_error *err)
{
    struct stat info;
    *out = (struct saved_file){open_again(path, O_RDONLY | O_NONBLOCK, 0), path, 0};
    if (out->fd < 0) return refused(path, "open", err);
    hr_status st = HR_OK;
    if (fstat(out->fd, &info) != 0)
        st = io_failed(out, "stat", err);
    else if (!S_ISREG(info.st_mode))
        st = fail(err, HR_ERR_FORMAT, "%s: not a regular file", path);
    if (st != HR_OK) {
        saved_close(out);
        return st;
    }
    *bytes = (uint64_t)info.st_size;
    return HR_OK;
}

void saved_close(struct saved_file *f)
{
    close(f->fd);
}

void saved_digest(const char *hex, uint8_t out[32])
{
    for (int i = 0; i < 32; i++) {
        unsigned v = 0;
        sscanf(hex + 2 * i, "%2x", &v);
        out[i] = (uint8_t)v;
    }
}
