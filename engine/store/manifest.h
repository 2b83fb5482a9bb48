/* manifest.json turned into a struct container; knows nothing of the files themselves. */
#ifndef STORE_MANIFEST_H
#define STORE_MANIFEST_H

#include "store/container.h"

#define MANIFEST_NAME "manifest.json"
#define MANIFEST_LIST_NAME "manifest.sha256"
#define TRUNK_NAME "trunk.bin"
#define TOKENIZER_NAME "tokenizer.bin"
#define NGRAM_NAME "ngram.bin"
#define CODEBOOKS_NAME "codebooks.bin"
#define UNFINISHED_NAME "conversion.log"

enum { MANIFEST_MAX = 16 << 20 };

/* Checks everything that the text alone can prove; the text may be freed afterwards. dir_fd is -1
 * and sha256 is empty: the caller fills them in. */
hr_status manifest_parse(const char *text, size_t bytes, const char *path, struct mem_budget *b,
                         struct container **out, hr_error *err);
/* Length that the bank's file must have. */
uint64_t bank_bytes(const struct bank_entry *bank);
/* Reads codebooks.bin and fills every bank's books; nothing when there is none (codebook_file.c). */
hr_status codebooks_load(int dir_fd, const struct container *c, hr_error *err);
/* Opens a directory; refuses one whose conversion is unfinished (container.c). */
hr_status container_dir_open(const char *path, int *fd, hr_error *err);

#endif
