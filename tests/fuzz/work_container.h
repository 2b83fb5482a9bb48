/* Base containers of a fuzzer in memory, a working directory that is changed for every input, and
 * what is done with it: open, evaluate, generate, save; with checks that hold whatever the input. */
#ifndef FUZZ_WORK_CONTAINER_H
#define FUZZ_WORK_CONTAINER_H

#include "headrace.h"
#include "json_edit.h"

enum { MAX_BASES = 16, MAX_FILES = 48, EVAL_TOKENS = 6 };

struct file {
    char name[64];
    uint8_t *data;
    size_t size;
};

struct base {
    char name[64];
    struct file files[MAX_FILES];
    size_t file_count;
    struct node *manifest; /* without provenance */
    char dir[320];         /* its working directory */
    bool dirty[MAX_FILES]; /* changed in the working directory */
};

extern struct base bases[MAX_BASES];
extern size_t base_count;
extern struct arena forever, scratch; /* scratch is emptied before every input */

/* Reads every container beneath --containers=DIR into a working directory beneath --work=DIR (default
 * /dev/shm). Exits when there is none. */
void bases_open(int argc, char **argv);
/* The input's container; gives the files that earlier inputs changed their content back. */
struct base *base_choose(uint8_t which);
const struct file *base_file(const struct base *b, const char *name);

/* Writes a file into the working directory. */
void work_store(struct base *b, const char *name, const void *data, size_t size);
/* Writes manifest.json from a tree and manifest.sha256 to match; false when it is too long. */
bool work_manifest(struct base *b, const struct node *root);

/* How the container is used. Every combination must give the same results. */
struct way {
    const char *isa;
    uint32_t chunk, io_shuffle;
    int32_t verify;
    bool generate, verify_files;
};
void way_of(uint8_t bits, struct way *way);

struct outcome {
    hr_status open, eval;
    uint32_t vocab, chunk;
    float logits[1 << 12]; /* of the last token; only those of small vocabularies */
};
/* Aborts when a promise of headrace.h does not hold. */
void work_run(struct base *b, const struct way *way, struct outcome *out);
/* Aborts unless both are the same, NaN being equal to NaN; with other chunks a fault may be another. */
void outcomes_equal(const struct outcome *a, const struct outcome *b);

#endif
