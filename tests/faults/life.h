/* Everything a program does with a model, once: open, evaluate, generate, fork, save, load, close;
 * or, without opening it, plan and verify; or fit, encode and decode a matrix. */
#ifndef TESTS_FAULTS_LIFE_H
#define TESTS_FAULTS_LIFE_H

#include <stdbool.h>
#include <stdint.h>

#include "allocations.h"
#include "headrace.h"

enum { LIFE_TOKENS = 4, LIFE_GENERATIONS = 4 };

struct life {
    hr_status status;  /* of the first call that failed */
    const char *step;  /* which */
    hr_error err;
    int32_t tokens[LIFE_GENERATIONS][LIFE_TOKENS]; /* first, forked, loaded session; with less ram */
    uint64_t leases;      /* when all sessions are gone */
    bool account_differs; /* memory_used is not what it was when the model was open */
    bool again_fails;     /* after a failed call the model no longer gives the right tokens */
    hr_status again_status;
    struct alive alive;   /* after closing, less before opening */
    int descriptors;      /* likewise */
};

struct life_place {
    const char *container, *saved; /* saved: a path to write a session to */
    hr_model_params params;
    uint64_t least; /* ram without a cache */
    const struct life *clean; /* what a life without faults gave; NULL: this is the one */
    enum { LIFE_USE, LIFE_CHECK, LIFE_QUANTISE } what;
};

/* The plan (NULL: none) holds from before the first call until one fails or all are done. */
void life_live(const struct life_place *place, const char *plan, struct life *out, uint64_t *fired);
int life_descriptors(void);
bool life_same_tokens(const struct life *a, const struct life *b);

#endif
