/* Files that the engine writes itself and reads again: sessions, use counts. Little-endian. */
#ifndef STORE_SAVED_FILE_H
#define STORE_SAVED_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

struct saved_file {
    int fd;
    const char *path; /* for messages */
    uint64_t at;
};

/* Writes what follows what was written before. */
hr_status saved_write(struct saved_file *f, const void *data, size_t n, hr_error *err);
hr_status saved_read(struct saved_file *f, void *data, size_t n, hr_error *err);

/* Replaces `path` by what `body` writes, or leaves it as it was: NAME.partial, synced, renamed, the
 * directory synced; mode 0600. Others that replace it meanwhile wait. b pays for the name. */
typedef hr_status (*saved_body_fn)(void *user, struct saved_file *f, hr_error *err);
hr_status saved_replace(const char *path, struct mem_budget *b, saved_body_fn body, void *user,
                        hr_error *err);

/* Opens a regular file for reading. */
hr_status saved_open(const char *path, struct saved_file *out, uint64_t *bytes, hr_error *err);
void saved_close(struct saved_file *f);

/* The bytes of a SHA-256 in hexadecimal, such as a container's. */
void saved_digest(const char *hex, uint8_t out[32]);

static inline void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (8 * i));
}

static inline void put64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> (8 * i));
}

static inline uint32_t get32(const uint8_t *p)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) v |= (uint32_t)p[i] << (8 * i);
    return v;
}

static inline uint64_t get64(const uint8_t *p)
{
    return get32(p) | (uint64_t)get32(p + 4) << 32;
}

#endif
