#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "model/session.h"
#include "store/direct_io.h"
#include "store/regular_file.h"

enum { HEADER = 128, VERSION = 1 };

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (8 * i));
}

static void put64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> (8 * i));
}

static uint32_t get32(const uint8_t *p)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) v |= (uint32_t)p[i] << (8 * i);
    return v;
}

static uint64_t get64(const uint8_t *p)
{
    return get32(p) | (uint64_t)get32(p + 4) << 32;
}

struct transfer {
    int fd;
    const char *path;
    uint64_t at;
    const struct session *session; /* whose state it is */
};

static hr_status refused(const char *path, const char *verb, hr_error *err)
{
    char text[128];
    return fail(err, HR_ERR_IO, "%s: cannot %s: %s", path, verb, system_error(errno, text));
}

static hr_status io_failed(const struct transfer *t, const char *verb, hr_error *err)
{
    char text[128];
    return fail(err, HR_ERR_IO, "%s: cannot %s at offset %llu: %s", t->path, verb,
                (unsigned long long)t->at, system_error(errno, text));
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

static hr_status write_all(struct transfer *t, const void *data, size_t n, hr_error *err)
{
    const uint8_t *p = data;
    while (n > 0) {
        const ssize_t done = write(t->fd, p, n < 1 << 20 ? n : 1 << 20);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return io_failed(t, "write", err);
        p += done;
        n -= (size_t)done;
        t->at += (uint64_t)done;
    }
    return HR_OK;
}

static hr_status read_all(struct transfer *t, void *data, size_t n, hr_error *err)
{
    TRY(file_read_exact(t->fd, t->path, t->at, data, n, err));
    t->at += n;
    return HR_OK;
}

static hr_status add_bytes(void *user, float *data, size_t floats, hr_error *err)
{
    uint64_t *total = user;
    (void)data;
    (void)err;
    *total += floats * sizeof(float) + 8;
    return HR_OK;
}

static hr_status write_piece(void *user, float *data, size_t floats, hr_error *err)
{
    uint8_t tail[8] = {0};
    put32(tail, crc32c(0, data, floats * sizeof(float)));
    TRY(write_all(user, data, floats * sizeof(float), err));
    return write_all(user, tail, sizeof tail, err);
}

static hr_status check_tail(struct transfer *t, uint32_t crc, hr_error *err)
{
    uint8_t tail[8];
    const uint64_t at = t->at;
    TRY(read_all(t, tail, sizeof tail, err));
    if (get32(tail) == crc && get32(tail + 4) == 0) return HR_OK;
    return fail(err, HR_ERR_FORMAT, "%s: checksum mismatch in the piece that ends at offset %llu; "
                "the file is damaged", t->path, (unsigned long long)at);
}

/* Token ids are kept as floats: the only state whose values are more than numbers. */
static hr_status check_history(const struct transfer *t, const uint8_t *bytes, size_t floats,
                               hr_error *err)
{
    for (size_t i = 0; i < floats; i++) {
        float id;
        memcpy(&id, bytes + i * sizeof id, sizeof id);
        if (id >= -1 && id < (float)t->session->model->arch.vocab_size && id == floorf(id)) continue;
        return fail(err, HR_ERR_FORMAT, "%s: the token history that ends at offset %llu holds no token ids",
                    t->path, (unsigned long long)t->at);
    }
    return HR_OK;
}

static bool is_history(const struct session *s, const float *data)
{
    for (uint32_t i = 0; i < s->model->arch.ngram.site_count; i++)
        if (s->state.ngram[i].history == data) return true;
    return false;
}

/* First pass of a load: reads through a small buffer and touches no state. */
static hr_status check_piece(void *user, float *data, size_t floats, hr_error *err)
{
    struct transfer *t = user;
    uint8_t buffer[16384];
    uint32_t crc = 0;
    for (size_t left = floats * sizeof(float); left > 0;) {
        const size_t n = left < sizeof buffer ? left : sizeof buffer;
        TRY(read_all(t, buffer, n, err));
        crc = crc32c(crc, buffer, n);
        left -= n;
    }
    if (is_history(t->session, data)) TRY(check_history(t, buffer, floats, err));
    return check_tail(t, crc, err);
}

static hr_status read_piece(void *user, float *data, size_t floats, hr_error *err)
{
    const struct transfer *t = user;
    TRY(read_all(user, data, floats * sizeof(float), err));
    if (is_history(t->session, data)) TRY(check_history(t, (const uint8_t *)data, floats, err));
    return check_tail(user, crc32c(0, data, floats * sizeof(float)), err);
}

static hr_status each_piece(struct session *s, uint32_t position, bool logits, state_piece_fn fn,
                            void *user, hr_error *err)
{
    const struct architecture *a = &s->model->arch;
    if (logits) TRY(fn(user, s->logits, a->vocab_size, err));
    return state_pieces(a, &s->state, position, fn, user, err);
}

static void container_digest(const struct session *s, uint8_t out[32])
{
    for (int i = 0; i < 32; i++) {
        unsigned v = 0;
        sscanf(s->model->c->sha256 + 2 * i, "%2x", &v);
        out[i] = (uint8_t)v;
    }
}

static void header_fill(struct session *s, uint8_t h[HEADER])
{
    uint64_t bytes = HEADER;
    each_piece(s, s->position, s->has_logits, add_bytes, &bytes, NULL);
    memset(h, 0, HEADER);
    memcpy(h, "HRSESS01", 8);
    put32(h + 8, VERSION);
    put32(h + 12, s->model->arch.layers);
    container_digest(s, h + 16);
    put32(h + 48, s->model->arch.vocab_size);
    put32(h + 52, s->position);
    put32(h + 56, (uint32_t)s->pending);
    put32(h + 60, s->has_logits);
    put64(h + 64, bytes);
    put32(h + 124, crc32c(0, h, HEADER));
}

static hr_status header_check(struct session *s, const uint8_t h[HEADER], uint64_t file_bytes,
                              const char *path, hr_error *err)
{
    const struct model *m = s->model;
    uint8_t copy[HEADER], digest[32];
    memcpy(copy, h, HEADER);
    put32(copy + 124, 0);
    if (memcmp(h, "HRSESS01", 8) != 0)
        return fail(err, HR_ERR_FORMAT, "%s: not a session file", path);
    if (crc32c(0, copy, HEADER) != get32(h + 124))
        return fail(err, HR_ERR_FORMAT, "%s: checksum mismatch in the header; the file is damaged", path);
    if (get32(h + 8) != VERSION)
        return fail(err, HR_ERR_UNSUPPORTED, "%s: version %u; this build reads %d", path,
                    get32(h + 8), VERSION);
    container_digest(s, digest);
    if (memcmp(h + 16, digest, 32) != 0 || get32(h + 12) != m->arch.layers ||
        get32(h + 48) != m->arch.vocab_size)
        return fail(err, HR_ERR_FORMAT, "%s: saved with another container", path);
    const uint32_t position = get32(h + 52), has_logits = get32(h + 60);
    const int32_t pending = (int32_t)get32(h + 56);
    if (position > m->plan.ctx)
        return fail(err, HR_ERR_CONTEXT, "%s: holds %u tokens; this session has room for %u", path,
                    position, m->plan.ctx);
    if (has_logits > 1 || pending < -1 || pending >= (int32_t)m->arch.vocab_size)
        return fail(err, HR_ERR_FORMAT, "%s: the header holds a value out of range", path);
    uint64_t bytes = HEADER;
    each_piece(s, position, has_logits != 0, add_bytes, &bytes, NULL);
    if (get64(h + 64) != bytes || file_bytes != bytes)
        return fail(err, HR_ERR_FORMAT, "%s: has %llu bytes; %llu are needed", path,
                    (unsigned long long)file_bytes, (unsigned long long)bytes);
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

static hr_status write_file(struct session *s, struct transfer *t, hr_error *err)
{
    uint8_t header[HEADER];
    header_fill(s, header);
    TRY(write_all(t, header, HEADER, err));
    TRY(each_piece(s, s->position, s->has_logits, write_piece, t, err));
    return sync_again(t->fd) == 0 ? HR_OK : io_failed(t, "sync", err);
}

hr_status session_save(const struct session *session, const char *path, hr_error *err)
{
    struct session *s = (struct session *)(uintptr_t)session; /* pieces are only read */
    if (s->poisoned) return fail(err, HR_ERR_USAGE, "the session failed before; there is nothing sound to save");
    const size_t n = strlen(path) + sizeof ".partial";
    char *partial = mem_alloc(&s->model->mem, n);
    if (!partial) return fail(err, HR_ERR_MEMORY, "cannot allocate %zu bytes", n);
    snprintf(partial, n, "%s.partial", path);
    struct transfer t = {open_again(partial, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600), partial,
                         0, s};
    hr_status st = HR_OK;
    if (t.fd < 0) {
        st = refused(partial, "create", err);
    } else {
        st = write_file(s, &t, err);
        if (close(t.fd) != 0 && errno != EINTR && st == HR_OK) st = io_failed(&t, "close", err);
        if (st == HR_OK && rename(partial, path) != 0) st = refused(partial, "rename", err);
        if (st != HR_OK)
            unlink(partial);
        else
            st = sync_directory(path, err);
    }
    mem_free(&s->model->mem, partial, n);
    return st;
}

static hr_status load_from(struct session *s, struct transfer *t, hr_error *err)
{
    uint8_t header[HEADER];
    struct stat info;
    if (fstat(t->fd, &info) != 0) return io_failed(t, "stat", err);
    if (!S_ISREG(info.st_mode)) return fail(err, HR_ERR_FORMAT, "%s: not a regular file", t->path);
    TRY(read_all(t, header, HEADER, err));
    TRY(header_check(s, header, (uint64_t)info.st_size, t->path, err));
    const uint32_t position = get32(header + 52);
    const bool has_logits = get32(header + 60) != 0;
    TRY(each_piece(s, position, has_logits, check_piece, t, err));
    t->at = HEADER;
    const hr_status st = each_piece(s, position, has_logits, read_piece, t, err);
    /* Only a file that changes between the two passes gets here with an error. */
    s->poisoned = st != HR_OK;
    if (st != HR_OK) return st;
    s->position = position;
    s->pending = (int32_t)get32(header + 56);
    s->has_logits = has_logits;
    return HR_OK;
}

hr_status session_load(struct session *s, const char *path, hr_error *err)
{
    struct transfer t = {open_again(path, O_RDONLY | O_NONBLOCK, 0), path, 0, s};
    if (t.fd < 0) return refused(path, "open", err);
    const hr_status st = load_from(s, &t, err);
    close(t.fd);
    return st;
}
