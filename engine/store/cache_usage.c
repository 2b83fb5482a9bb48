#include "store/cache_usage.h"

#include <string.h>

#include "base/crc32c.h"
#include "base/sha256.h"
#include "store/cache_state.h"
#include "store/saved_file.h"

enum { HEADER = 64, VERSION = 1, TRAILER = 4, PIECE = 1024 /* counts read or written at once */ };
/* A bank that has seen so many tokens forgets half of them, and with them half of each count. */
#define TOKENS_MOST ((uint32_t)1 << 17)

void cache_usage_turn(struct expert_cache *x, uint32_t bank, uint32_t tokens)
{
    uint32_t *seen = &x->usage.tokens[bank];
    if ((uint64_t)*seen + tokens > TOKENS_MOST) {
        *seen /= 2;
        for (uint32_t i = x->first[bank]; i < x->first[bank + 1]; i++) x->usage.count[i] /= 2;
    }
    *seen = (uint64_t)*seen + tokens < TOKENS_MOST ? *seen + tokens : TOKENS_MOST;
}

/* ---- the file ---- */

static uint64_t file_bytes(const struct container *c)
{
    uint64_t n = HEADER + TRAILER;
    for (uint32_t i = 0; i < c->bank_count; i++) n += 4 * (1 + (uint64_t)c->banks[i].experts);
    return n;
}

static void usage_header(const struct container *c, uint8_t h[HEADER])
{
    memset(h, 0, HEADER);
    memcpy(h, "HRUSAGE1", 8);
    put32(h + 8, VERSION);
    put32(h + 12, c->bank_count);
    saved_digest(c->sha256, h + 16);
    put64(h + 48, file_bytes(c));
    put32(h + 60, crc32c(0, h, HEADER));
}

static hr_status usage_check(const struct container *c, const uint8_t h[HEADER], uint64_t bytes,
                             const char *path, hr_error *err)
{
    uint8_t copy[HEADER], digest[32];
    char theirs[65];
    memcpy(copy, h, HEADER);
    put32(copy + 60, 0);
    if (memcmp(h, "HRUSAGE1", 8) != 0)
        return fail(err, HR_ERR_FORMAT, "%s: not a file of use counts", path);
    if (crc32c(0, copy, HEADER) != get32(h + 60))
        return fail(err, HR_ERR_FORMAT, "%s: checksum mismatch in the header; the file is damaged: "
                    "delete it", path);
    if (get32(h + 8) != VERSION)
        return fail(err, HR_ERR_UNSUPPORTED, "%s: version %u; this build reads %d", path,
                    get32(h + 8), VERSION);
    saved_digest(c->sha256, digest);
    sha256_hex(h + 16, theirs);
    if (memcmp(h + 16, digest, 32) != 0)
        return fail(err, HR_ERR_FORMAT, "%s: counts uses of another container, %s; this one is %s: "
                    "give each its own file", path, theirs, c->sha256);
    if (get32(h + 12) != c->bank_count || get64(h + 48) != file_bytes(c) || bytes != file_bytes(c))
        return fail(err, HR_ERR_FORMAT, "%s: has %llu bytes for %u layers; %llu for %u are needed",
                    path, (unsigned long long)bytes, get32(h + 12),
                    (unsigned long long)file_bytes(c), c->bank_count);
    return HR_OK;
}

/* Reads n numbers, none above `most`, to `out` if there is one. */
static hr_status read_numbers(struct saved_file *f, uint32_t n, uint32_t most, uint32_t *out,
                              uint32_t *crc, bool *sound, hr_error *err)
{
    uint8_t piece[4 * PIECE];
    for (uint32_t at = 0; at < n; at += PIECE) {
        const uint32_t m = n - at < PIECE ? n - at : PIECE;
        TRY(saved_read(f, piece, 4 * (size_t)m, err));
        *crc = crc32c(*crc, piece, 4 * (size_t)m);
        for (uint32_t i = 0; i < m; i++) {
            const uint32_t v = get32(piece + 4 * i);
            if (v > most) *sound = false;
            if (out != NULL) out[at + i] = v;
        }
    }
    return HR_OK;
}

static hr_status read_counts(const struct container *c, struct saved_file *f, uint64_t bytes,
                             uint32_t *tokens, uint32_t *count, hr_error *err)
{
    uint8_t header[HEADER], trailer[TRAILER];
    uint32_t crc = 0;
    bool sound = true;
    if (bytes < HEADER) return fail(err, HR_ERR_FORMAT, "%s: not a file of use counts", f->path);
    TRY(saved_read(f, header, HEADER, err));
    TRY(usage_check(c, header, bytes, f->path, err));
    for (uint32_t i = 0; i < c->bank_count; i++) {
        uint32_t seen;
        TRY(read_numbers(f, 1, TOKENS_MOST, &seen, &crc, &sound, err));
        TRY(read_numbers(f, c->banks[i].experts, seen, count, &crc, &sound, err));
        if (tokens != NULL) tokens[i] = seen;
        if (count != NULL) count += c->banks[i].experts;
    }
    TRY(saved_read(f, trailer, TRAILER, err));
    if (get32(trailer) != crc)
        return fail(err, HR_ERR_FORMAT, "%s: checksum mismatch; the file is damaged: delete it", f->path);
    if (!sound)
        return fail(err, HR_ERR_FORMAT, "%s: counts more uses than tokens: delete it", f->path);
    return HR_OK;
}

static hr_status load(const struct container *c, const char *path, uint32_t *tokens,
                      uint32_t *count, hr_error *err)
{
    struct saved_file f;
    uint64_t bytes;
    TRY(saved_open(path, &f, &bytes, err));
    const hr_status s = read_counts(c, &f, bytes, tokens, count, err);
    saved_close(&f);
    return s;
}

hr_status cache_usage_check(const struct container *c, const char *path, hr_error *err)
{
    return load(c, path, NULL, NULL, err);
}

hr_status cache_usage_load(struct expert_cache *x, const char *path, hr_error *err)
{
    const struct container *c = x->container;
    TRY(load(c, path, x->usage.tokens, x->usage.count, err));
    for (uint32_t bank = 0; bank < c->bank_count; bank++)
        for (uint32_t i = x->first[bank]; i < x->first[bank + 1]; i++)
            if (x->usage.count[i] > 0)
                cache_policy_seed(&x->policy, i, x->usage.count[i] / (double)x->usage.tokens[bank]);
    return HR_OK;
}

struct counting {
    struct expert_cache *cache;
    uint32_t crc;
};

static hr_status write_counts(struct counting *w, struct saved_file *f, const uint8_t *piece,
                             uint32_t n, hr_error *err)
{
    w->crc = crc32c(w->crc, piece, 4 * (size_t)n);
    return saved_write(f, piece, 4 * (size_t)n, err);
}

/* Requests that come between two pieces must not leave more uses than tokens. */
static hr_status write_bank(struct counting *w, struct saved_file *f, uint32_t bank, hr_error *err)
{
    struct expert_cache *x = w->cache;
    uint8_t piece[4 * PIECE];
    pthread_mutex_lock(&x->lock);
    const uint32_t seen = x->usage.tokens[bank];
    pthread_mutex_unlock(&x->lock);
    put32(piece, seen);
    TRY(write_counts(w, f, piece, 1, err));
    for (uint32_t at = x->first[bank]; at < x->first[bank + 1]; at += PIECE) {
        const uint32_t left = x->first[bank + 1] - at, n = left < PIECE ? left : PIECE;
        pthread_mutex_lock(&x->lock);
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t uses = x->usage.count[at + i];
            put32(piece + 4 * i, uses < seen ? uses : seen);
        }
        pthread_mutex_unlock(&x->lock);
        TRY(write_counts(w, f, piece, n, err));
    }
    return HR_OK;
}

static hr_status write_usage(void *user, struct saved_file *f, hr_error *err)
{
    struct counting *w = user;
    const struct container *c = w->cache->container;
    uint8_t header[HEADER], trailer[TRAILER];
    usage_header(c, header);
    TRY(saved_write(f, header, HEADER, err));
    for (uint32_t i = 0; i < c->bank_count; i++) TRY(write_bank(w, f, i, err));
    put32(trailer, w->crc);
    return saved_write(f, trailer, TRAILER, err);
}

hr_status cache_usage_save(struct expert_cache *x, const char *path, hr_error *err)
{
    struct counting w = {x, 0};
    return saved_replace(path, x->budget, write_usage, &w, err);
}
