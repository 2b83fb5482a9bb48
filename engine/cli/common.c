#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli.h"

/* Used by the signal handler, which may run in any thread. */
static hr_session *_Atomic watched;
static atomic_bool stop_asked;

static void on_interrupt(int signal_number)
{
    (void)signal_number;
    stop_asked = true;
    hr_session *session = watched;
    if (session != NULL) hr_cancel(session);
}

void interrupt_install(void)
{
#if defined(_WIN32)
    /* As below: the handler is gone once it was called. */
    signal(SIGINT, on_interrupt);
#else
    struct sigaction action = {0};
    action.sa_handler = on_interrupt;
    action.sa_flags = (int)SA_RESETHAND;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
#endif
}

void interrupt_watch(hr_session *session) { watched = session; }

bool interrupted(void) { return stop_asked; }

int exit_code(hr_status status)
{
    switch (status) {
    case HR_OK: return EXIT_OK;
    case HR_ERR_USAGE:
    case HR_ERR_CONTEXT: return EXIT_USAGE;
    case HR_ERR_FORMAT:
    case HR_ERR_NUMERIC:
    case HR_ERR_UNSUPPORTED: return EXIT_BAD_FILE;
    case HR_ERR_MEMORY: return EXIT_MEMORY;
    case HR_ERR_CANCELLED: return EXIT_INTERRUPTED;
    default: return EXIT_IO;
    }
}

int report_error(hr_status status, const hr_error *err, bool json)
{
    fprintf(stderr, "headrace: %s\n", err->detail);
    if (json) {
        struct json_out j;
        json_out_init(&j, stdout);
        out_open(&j, NULL, '{');
        out_open(&j, "error", '{');
        out_string(&j, "code", hr_status_name((int32_t)status));
        out_string(&j, "detail", err->detail);
        out_close(&j, '}');
        out_close(&j, '}');
        json_out_end(&j);
    }
    return exit_code(status);
}

int report_failure(hr_status status, bool json, const char *fmt, ...)
{
    hr_error err = {.code = (int32_t)status};
    va_list args;
    va_start(args, fmt);
    vsnprintf(err.detail, sizeof err.detail, fmt, args);
    va_end(args);
    return report_error(status, &err, json);
}

int finish_output(int code)
{
    const bool earlier = ferror(stdout) != 0;
    if (fflush(stdout) == 0 && !earlier) return code;
    if (code == EXIT_OK)
        fprintf(stderr, "headrace: standard output: %s\n",
                earlier ? "not everything could be written" : strerror(errno));
    return code == EXIT_OK ? EXIT_IO : code;
}

int read_input(const char *path, bool json, char **bytes, size_t *n)
{
    const bool standard = strcmp(path, "-") == 0;
    const int fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && interrupted()) return EXIT_INTERRUPTED;
    if (fd < 0) return report_failure(HR_ERR_IO, json, "%s: %s", path, strerror(errno));
    size_t capacity = 1 << 16, length = 0;
    char *data = malloc(capacity);
    int code = EXIT_OK;
    while (data != NULL) {
        if (length == capacity) {
            char *grown = capacity <= SIZE_MAX / 2 ? realloc(data, capacity * 2) : NULL;
            if (grown == NULL) {
                free(data);
                data = NULL;
                break;
            }
            data = grown;
            capacity *= 2;
        }
        const ssize_t got = read(fd, data + length, capacity - length);
        if (got > 0) length += (size_t)got;
        else if (got == 0) break;
        else if (interrupted()) code = EXIT_INTERRUPTED;
        else if (errno != EINTR)
            code = report_failure(HR_ERR_IO, json, "%s: %s", standard ? "standard input" : path,
                                  strerror(errno));
        if (code != EXIT_OK) break;
    }
    if (!standard) close(fd);
    if (data == NULL) return report_failure(HR_ERR_MEMORY, json, "%s: no memory to read it", path);
    if (code != EXIT_OK) {
        free(data);
        return code;
    }
    *bytes = data;
    *n = length;
    return EXIT_OK;
}

int parse_ids(const char *text, size_t n, const char *what, bool json, int32_t **ids, size_t *count)
{
    static const char separators[] = " \t\r\n,";
    int32_t *list = malloc((n / 2 + 1) * sizeof *list);
    if (list == NULL) return report_failure(HR_ERR_MEMORY, json, "%s: no memory", what);
    size_t found = 0;
    for (size_t at = 0; at < n;) {
        if (text[at] != '\0' && strchr(separators, text[at]) != NULL) {
            at++;
            continue;
        }
        char word[16];
        size_t length = 0;
        const size_t start = at;
        while (at < n && (text[at] == '\0' || strchr(separators, text[at]) == NULL)) {
            if (length < sizeof word - 1) word[length++] = text[at];
            at++;
        }
        word[length] = '\0';
        uint64_t id;
        if (at - start != length || strlen(word) != length || !parse_u64(word, INT32_MAX, &id)) {
            free(list);
            return report_failure(HR_ERR_USAGE, json,
                                  "%s: '%s' at byte %zu is not a token id (0 to 2147483647)", what,
                                  word, start);
        }
        list[found++] = (int32_t)id;
    }
    *ids = list;
    *count = found;
    return EXIT_OK;
}

int tokenize_all(const hr_model *model, const char *text, size_t n, bool special, bool json,
                 int32_t **ids, size_t *count)
{
    hr_error err = {0};
    hr_status status = HR_OK;
    int32_t *list = NULL;
    /* A token covers at least one byte except after a rare growing normalisation: at most twice. */
    for (size_t capacity = n + 16, tries = 0; tries < 2; tries++) {
        free(list);
        list = capacity <= SIZE_MAX / sizeof *list ? malloc(capacity * sizeof *list) : NULL;
        if (list == NULL)
            return report_failure(HR_ERR_MEMORY, json, "no memory for the ids of %zu bytes", n);
        *count = 0;
        status = hr_tokenize(model, text, n, special, list, capacity, count, &err);
        if (status != HR_ERR_USAGE || *count <= capacity) break;
        capacity = *count;
    }
    if (status != HR_OK) {
        free(list);
        return report_error(status, &err, json);
    }
    *ids = list;
    return EXIT_OK;
}

void model_options_init(struct model_options *o)
{
    memset(o, 0, sizeof *o);
    hr_model_params_init(&o->params);
}

static const char CACHE_NAMES[] = "auto|lru|lfu", VERIFY_NAMES[] = "first|always|off";
static const char LOCK_NAMES[] = "auto|on|off";

void model_options_describe(struct model_options *o, struct cli_option *out)
{
    hr_model_params *p = &o->params;
    const struct cli_option options[MODEL_OPTION_COUNT] = {
        {"--ram", OPTION_SIZE, &p->ram, NULL, NULL},
        {"--threads", OPTION_U32, &p->threads, NULL, NULL},
        {"--io-threads", OPTION_U32, &p->io_threads, NULL, NULL},
        {"--ctx", OPTION_U32, &p->ctx, NULL, NULL},
        {"--chunk", OPTION_U32, &p->chunk, NULL, NULL},
        {"--isa", OPTION_ISA, p->isa, NULL, NULL},
        {"--cache", OPTION_CHOICE, &p->cache_policy, CACHE_NAMES, NULL},
        {"--verify", OPTION_CHOICE, &p->verify, VERIFY_NAMES, NULL},
        {"--drive", OPTION_LIST, &o->drives, NULL, NULL},
        {"--read-ahead", OPTION_AHEAD, &p->read_ahead, NULL, NULL},
        {"--usage", OPTION_PATH, &o->usage, NULL, NULL},
        {"--lock", OPTION_CHOICE, &p->lock, LOCK_NAMES, NULL},
        {"--no-direct", OPTION_FLAG, &o->no_direct, NULL, NULL},
        {"--json", OPTION_FLAG, &o->json, NULL, NULL},
    };
    memcpy(out, options, sizeof options);
}

void model_options_finish(struct model_options *o)
{
    if (o->no_direct) o->params.direct = 0;
    o->params.drives = o->drives.item;
    o->params.drive_count = (uint32_t)o->drives.count;
    o->params.usage = o->usage;
}

void usage_may_be_missing(struct model_options *o)
{
    struct stat st;
    if (o->usage != NULL && stat(o->usage, &st) != 0 && errno == ENOENT) o->params.usage = NULL;
}

int save_usage(hr_model *model, const struct model_options *o, int code)
{
    hr_error err = {0};
    if (o->usage == NULL || (code != EXIT_OK && code != EXIT_INTERRUPTED)) return code;
    const hr_status status = hr_model_save_usage(model, o->usage, &err);
    /* Standard output has its JSON already. */
    return status == HR_OK ? code : report_error(status, &err, false);
}

int model_command_parse(int argc, char **argv, const char *command, bool may_lack_model,
                        struct model_options *o, const char **path)
{
    struct cli_option options[MODEL_OPTION_COUNT];
    size_t count;
    char message[256];
    *path = NULL;
    model_options_init(o);
    model_options_describe(o, options);
    if (!args_parse(argc, argv, options, MODEL_OPTION_COUNT, path, 1, &count, message))
        return report_failure(HR_ERR_USAGE, o->json, "%s: %s (see headrace help)", command, message);
    model_options_finish(o);
    if (count == 1) return EXIT_OK;
    *path = NULL;
    if (may_lack_model) return EXIT_OK;
    return report_failure(HR_ERR_USAGE, o->json, "%s: give one MODEL", command);
}
