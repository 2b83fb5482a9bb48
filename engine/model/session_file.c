#include <math.h>
#include <string.h>

#include "base/crc32c.h"
#include "model/session.h"
#include "store/saved_file.h"

enum { HEADER = 128, VERSION = 1 };

struct transfer {
    struct saved_file *file;
    struct session *session; /* whose state it is */
};

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
    const struct transfer *t = user;
    uint8_t tail[8] = {0};
    put32(tail, crc32c(0, data, floats * sizeof(float)));
    TRY(saved_write(t->file, data, floats * sizeof(float), err));
    return saved_write(t->file, tail, sizeof tail, err);
}

static hr_status check_tail(const struct transfer *t, uint32_t crc, hr_error *err)
{
    uint8_t tail[8];
    const uint64_t at = t->file->at;
    TRY(saved_read(t->file, tail, sizeof tail, err));
    if (get32(tail) == crc && get32(tail + 4) == 0) return HR_OK;
    return fail(err, HR_ERR_FORMAT, "%s: checksum mismatch in the piece that ends at offset %llu; "
                "the file is damaged", t->file->path, (unsigned long long)at);
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
                    t->file->path, (unsigned long long)t->file->at);
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
    const struct transfer *t = user;
    uint8_t buffer[16384];
    uint32_t crc = 0;
    for (size_t left = floats * sizeof(float); left > 0;) {
        const size_t n = left < sizeof buffer ? left : sizeof buffer;
        TRY(saved_read(t->file, buffer, n, err));
        crc = crc32c(crc, buffer, n);
        left -= n;
    }
    if (is_history(t->session, data)) TRY(check_history(t, buffer, floats, err));
    return check_tail(t, crc, err);
}

static hr_status read_piece(void *user, float *data, size_t floats, hr_error *err)
{
    const struct transfer *t = user;
    TRY(saved_read(t->file, data, floats * sizeof(float), err));
    if (is_history(t->session, data)) TRY(check_history(t, (const uint8_t *)data, floats, err));
    return check_tail(t, crc32c(0, data, floats * sizeof(float)), err);
}

static hr_status each_piece(struct session *s, uint32_t position, bool logits, state_piece_fn fn,
                            void *user, hr_error *err)
{
    const struct architecture *a = &s->model->arch;
    if (logits) TRY(fn(user, s->logits, a->vocab_size, err));
    return state_pieces(a, &s->state, position, fn, user, err);
}

static void header_fill(struct session *s, uint8_t h[HEADER])
{
    uint64_t bytes = HEADER;
    each_piece(s, s->position, s->has_logits, add_bytes, &bytes, NULL);
    memset(h, 0, HEADER);
    memcpy(h, "HRSESS01", 8);
    put32(h + 8, VERSION);
    put32(h + 12, s->model->arch.layers);
    saved_digest(s->model->c->sha256, h + 16);
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
    saved_digest(m->c->sha256, digest);
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

static hr_status write_body(void *user, struct saved_file *f, hr_error *err)
{
    struct session *s = user;
    struct transfer t = {f, s};
    uint8_t header[HEADER];
    header_fill(s, header);
    TRY(saved_write(f, header, HEADER, err));
    return each_piece(s, s->position, s->has_logits, write_piece, &t, err);
}

hr_status session_save(const struct session *session, const char *path, hr_error *err)
{
    struct session *s = (struct session *)(uintptr_t)session; /* pieces are only read */
    if (s->poisoned) return fail(err, HR_ERR_USAGE, "the session failed before; there is nothing sound to save");
    return saved_replace(path, &s->model->mem, write_body, s, err);
}

static hr_status load_from(struct session *s, struct saved_file *f, uint64_t bytes, hr_error *err)
{
    struct transfer t = {f, s};
    uint8_t header[HEADER];
    TRY(saved_read(f, header, HEADER, err));
    TRY(header_check(s, header, bytes, f->path, err));
    const uint32_t position = get32(header + 52);
    const bool has_logits = get32(header + 60) != 0;
    TRY(each_piece(s, position, has_logits, check_piece, &t, err));
    f->at = HEADER;
    const hr_status st = each_piece(s, position, has_logits, read_piece, &t, err);
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
    struct saved_file f;
    uint64_t bytes;
    TRY(saved_open(path, &f, &bytes, err));
    const hr_status st = load_from(s, &f, bytes, err);
    saved_close(&f);
    return st;
}
