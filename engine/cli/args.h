/* Command line: options described by a table, every value checked, nothing unknown accepted. */
#ifndef CLI_ARGS_H
#define CLI_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum option_kind {
    OPTION_FLAG,   /* bool */
    OPTION_TEXT,   /* const char * */
    OPTION_PATH,   /* const char *, not empty */
    OPTION_LIST,   /* struct text_list: may be given several times */
    OPTION_U32,    /* uint32_t */
    OPTION_U64,    /* uint64_t */
    OPTION_SIZE,   /* uint64_t bytes: 4096, 512MiB, 1.5GiB */
    OPTION_REAL,   /* float */
    OPTION_CHOICE, /* int32_t: index into `choices` */
    OPTION_ISA,    /* char[16]: "auto" or what hr_isa_name gives */
    OPTION_AHEAD   /* int32_t: "auto" is -1, "off" is 0, or a number */
};

enum { TEXT_LIST_MAX = 16 };
struct text_list {
    const char *item[TEXT_LIST_MAX];
    size_t count;
};

struct cli_option {
    const char *name; /* with its dashes */
    enum option_kind kind;
    void *value;
    const char *choices; /* "lru|lfu" */
    bool *given;         /* set when the option was there; may be NULL */
};

/* Parses "--name value", "--name=value", "-p value" and positional arguments ("-" is one; after
 * "--" everything is). On false a message is in message[256]. */
bool args_parse(int argc, char **argv, const struct cli_option *options, size_t option_count,
                const char **positional, size_t capacity, size_t *count, char message[256]);

bool parse_size(const char *text, uint64_t *out);
bool parse_u64(const char *text, uint64_t max, uint64_t *out); /* decimal digits only */
bool parse_real(const char *text, float *out);                 /* finite */

#endif
