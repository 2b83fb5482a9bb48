/* A JSON document as a tree that can be changed and written again, and an interpreter of edit
 * scripts: the structure-aware half of the fuzzers. Scripts are arbitrary bytes. */
#ifndef FUZZ_JSON_EDIT_H
#define FUZZ_JSON_EDIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json.h"

struct node {
    enum json_kind kind;
    const char *key;  /* of a member of an object, else NULL */
    const char *text; /* literal of a number, bool or null; content of a string */
    struct node *child, *next;
};

/* Memory for trees: given back all at once. */
struct arena {
    uint8_t *base;
    size_t used, size;
};
void arena_init(struct arena *a, size_t size);
void *arena_take(struct arena *a, size_t bytes); /* exits when it is full: scripts are short */
const char *arena_copy(struct arena *a, const char *text, size_t n);

struct node *tree_read(struct arena *a, const struct json *v, const char *key);
struct node *tree_copy(struct arena *a, const struct node *from);
/* Writes the tree; returns the bytes, or 0 when they exceed max. */
size_t tree_write(const struct node *root, char *out, size_t max);

struct node *node_get(struct node *object, const char *key);
struct node *node_at(struct node *array, size_t i);
size_t node_len(const struct node *v);
struct node *node_new(struct arena *a, enum json_kind kind, const char *key, const char *text);
/* Member `key` becomes the integer; it is added when it is missing. */
void node_set_int(struct arena *a, struct node *object, const char *key, uint64_t value);
void node_append(struct node *parent, struct node *child);
void node_remove(struct node *parent, const struct node *child);
bool node_int(const struct node *v, uint64_t *out);

/* Words that a script may put into keys and strings: those of the documents seen. */
void words_add(const struct node *root);

/* Carries out edits until the script ends or asks for `stop`; returns the bytes it took. */
enum { EDIT_STOP = 15 };
size_t tree_edit(struct arena *a, struct node *root, const uint8_t *script, size_t n);

#endif
