/* manifest.sha256: one SHA-256 for every file of a container. */
#ifndef STORE_DIGESTS_H
#define STORE_DIGESTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

struct digest {
    const char *name;
    uint8_t sha256[32];
};

struct digest_list {
    struct digest *entries; /* ascending name */
    size_t count;
    char *text; /* holds the names */
    size_t text_bytes;
    struct mem_budget *mem;
};

hr_status digest_list_read(int dir_fd, struct mem_budget *b, struct digest_list *out,
                           hr_error *err);
void digest_list_free(struct digest_list *list);
const struct digest *digest_find(const struct digest_list *list, const char *name);

#endif
