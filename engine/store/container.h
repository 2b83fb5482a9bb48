/* An opened container directory: manifest, files, tensor and expert index. Knows no arithmetic. */
#ifndef STORE_CONTAINER_H
#define STORE_CONTAINER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/status.h"
#include "quant/codec.h"

struct tensor_entry { /* one resident tensor of trunk.bin */
    const char *name;
    enum codec codec;
    uint32_t count;      /* matrices in a stack, normally 1 */
    uint32_t rows, cols; /* a vector is [1, n] */
    uint64_t offset, bytes;
};

struct bank_entry { /* one MoE layer's routed experts */
    uint32_t layer;
    const char *file;
    enum codec codec;
    uint32_t experts, hidden, inner;
    bool bias;                   /* records hold biases */
    bool fine;                   /* products take 22-bit activations, not 8-bit ones */
    struct record_layout record; /* derived, never believed */
    const uint32_t *crc;         /* [experts] expected CRC32C of every record */
    struct rvq_books *books;     /* rvq: [3], of gate, up, down; read when the container opens */
};

struct ngram_entry { /* the rows of ngram.bin; rows is 0 without */
    uint64_t rows;
    uint32_t dim, row_bytes;
    uint64_t bytes; /* length of the file */
};

/* A directory with further copies of bank files, or with some that the container's own lacks. */
enum { DRIVES_MOST = 8 };
struct drive_dir {
    const char *path;
    int fd;
};

struct container {
    char *path;
    int dir_fd;
    uint32_t drive_count;          /* the container's own directory is drive 0 */
    struct drive_dir drives[DRIVES_MOST];
    struct json_doc *manifest;
    const struct json *model;      /* the "model" object: parsed by model/ */
    uint32_t tensor_count, bank_count;
    struct tensor_entry *tensors;  /* sorted by name */
    struct bank_entry *banks;      /* ascending layer */
    uint64_t trunk_bytes;          /* length of trunk.bin */
    const uint32_t *trunk_crc;     /* per chunk of 1 MiB (the last may be shorter) */
    uint32_t trunk_chunks;
    struct ngram_entry ngram;
    uint64_t codebooks_bytes;      /* length of codebooks.bin; 0 without */
    uint32_t codebooks_crc;
    bool has_tokenizer;
    uint64_t tokenizer_bytes;
    int32_t stop_ids[16];
    uint32_t stop_count;
    uint64_t parameters;           /* weights in trunk and experts, as the manifest says */
    uint64_t total_bytes;          /* of all files */
    char sha256[65];               /* of manifest.json */
    struct mem_budget *mem;
    uint64_t mem_bytes;            /* what this structure itself holds */
};

enum { TRUNK_CHUNK = 1 << 20 };

/* Opens the directory, checks manifest.json (<= 16 MiB) against manifest.sha256, validates every
 * offset, size and name against the files as they are. Reads the codebooks, but no tensor. */
hr_status container_open(const char *path, struct mem_budget *b, struct container **out,
                         hr_error *err);
/* The same, with bank files also looked for in `drives`: at least one copy of each must be there, and
 * each copy must have the right length. Those directories need not hold anything else. */
hr_status container_open_drives(const char *path, const char *const *drives, uint32_t count,
                                struct mem_budget *b, struct container **out, hr_error *err);
/* Bytes that container_open_drives allocates for these paths: plans use it. */
uint64_t container_drives_cost(const struct container *c);
void container_close(struct container *c);
const struct tensor_entry *container_tensor(const struct container *c, const char *name);
/* A file of the container: opened beneath the directory, regular, no symlink. */
hr_status container_file(const struct container *c, const char *name, int *fd, uint64_t *bytes,
                         hr_error *err);
/* Reads a whole small file (tokenizer.bin); *data is mem_alloc'ed from b. */
hr_status container_read(const struct container *c, const char *name, struct mem_budget *b,
                         void **data, size_t *bytes, hr_error *err);
/* Opens further directories behind the *count that `out` has; those stay the caller's to close on
 * errors too. Paths are copied from b. */
hr_status drive_dirs_open(const char *const *paths, uint32_t n, struct mem_budget *b,
                          struct drive_dir *out, uint32_t *count, hr_error *err);
/* All but the first. */
void drive_dirs_close(struct drive_dir *dirs, uint32_t count, struct mem_budget *b);
/* Every byte of every file (the body of hr_verify_drives). */
hr_status container_verify(const char *path, const char *const *drives, uint32_t count,
                           hr_verify_fn report, void *user, hr_error *err);

#endif
