/* What the commands share: options, exit codes, input, interruption, messages. The program is a
 * client of headrace.h and of nothing below it. */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cli/args.h"
#include "cli/json_out.h"
#include "headrace.h"

#if defined(__MINGW32__)
#define CLI_PRINTF(f, a) __attribute__((format(gnu_printf, f, a)))
#else
#define CLI_PRINTF(f, a) __attribute__((format(printf, f, a)))
#endif

enum {
    EXIT_OK = 0,
    EXIT_USAGE = 2,
    EXIT_BAD_FILE = 3,
    EXIT_MEMORY = 4,
    EXIT_IO = 5,
    EXIT_INTERRUPTED = 130
};

/* Options of every command that opens a model. */
struct model_options {
    hr_model_params params;
    bool no_direct, json;
    struct text_list drives;
    const char *usage;
};
enum { MODEL_OPTION_COUNT = 14 };
void model_options_init(struct model_options *o);
/* Writes MODEL_OPTION_COUNT descriptions that point into *o. */
void model_options_describe(struct model_options *o, struct cli_option *out);
/* Carries over what is not a plain field; call after parsing. */
void model_options_finish(struct model_options *o);
/* --usage of a command that writes the file: none is needed before the model is opened, and it is
 * written unless `code`, which is returned, says that the command failed. */
void usage_may_be_missing(struct model_options *o);
int save_usage(hr_model *model, const struct model_options *o, int code);
/* The whole command line of a command that takes a MODEL and model options only. EXIT_OK, or the
 * exit code after reporting; *path is NULL where the model may be left out and was. */
int model_command_parse(int argc, char **argv, const char *command, bool may_lack_model,
                        struct model_options *o, const char **path);

/* Each takes the arguments after the command's name and returns the exit code. */
int command_run(int argc, char **argv);
int command_score(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_verify(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_info(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_trace(int argc, char **argv);
int command_doctor(int argc, char **argv);

int exit_code(hr_status status);
/* Prints "headrace: ..." on stderr; with `json` also {"error": ...} on stdout. Returns the exit
 * code of the status. */
int report_error(hr_status status, const hr_error *err, bool json);
int report_failure(hr_status status, bool json, const char *fmt, ...)
    CLI_PRINTF(3, 4);
/* Flushes stdout; `code`, or EXIT_IO with a message when anything written to it was lost. */
int finish_output(int code);

#if defined(_WIN32)
/* The real arguments as UTF-8, for the life of the process; streams that carry bytes. False when
 * memory is short. */
bool console_prepare(int *argc, char ***argv);
#endif

/* SIGINT: the first asks the session (if any) to stop, the second ends the process. */
void interrupt_install(void);
void interrupt_watch(hr_session *session); /* NULL before the session is freed */
bool interrupted(void);

/* A file's bytes, or standard input's for "-". Returns an exit code; *bytes is malloc'ed. */
int read_input(const char *path, bool json, char **bytes, size_t *n);
/* Ids separated by white space or commas. Returns an exit code; *ids is malloc'ed. */
int parse_ids(const char *text, size_t n, const char *what, bool json, int32_t **ids,
              size_t *count);
/* The ids of a text; *ids is malloc'ed. Returns an exit code. */
int tokenize_all(const hr_model *model, const char *text, size_t n, bool special, bool json,
                 int32_t **ids, size_t *count);

/* "1.50 GiB" into out[32]; returns out. */
const char *format_bytes(uint64_t bytes, char out[32]);
/* A codec, with what its products take where that is not the usual. */
const char *format_codec(const char *codec, uint32_t activations, char out[64]);
void print_stats(const hr_stats *s); /* on stderr */
void out_plan(struct json_out *j, const char *key, const hr_plan_result *p);
void out_stats(struct json_out *j, const hr_stats *s);
void out_model(struct json_out *j, const hr_model_info *info);
void out_drives(struct json_out *j, const hr_model *model);
void print_drives(const hr_model *model, FILE *to);

#endif
