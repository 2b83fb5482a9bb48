#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"

/* Faults are kept for --json up to this many; all are counted. */
enum { KEPT_FAULTS = 1000 };

struct verification {
    bool json, terminal;
    char *kept[KEPT_FAULTS];
    uint64_t faults, done, total;
    uint64_t percent_shown;
};

static int32_t on_report(void *user, int32_t fault, const char *text, uint64_t done, uint64_t total)
{
    struct verification *v = user;
    if (fault) {
        if (v->terminal) fputs("\r\033[K", stderr);
        if (v->json && v->faults < KEPT_FAULTS) v->kept[v->faults] = strdup(text);
        if (!v->json) printf("%s\n", text);
        v->faults++;
        return interrupted() || ferror(stdout) ? 1 : 0;
    }
    v->done = done;
    v->total = total;
    const uint64_t percent = total > 0 ? (uint64_t)(100.0 * (double)done / (double)total) : 100;
    if (v->terminal && percent != v->percent_shown) {
        char a[32], b[32];
        fprintf(stderr, "\r\033[K%3llu %%  %s of %s", (unsigned long long)percent,
                format_bytes(done, a), format_bytes(total, b));
        v->percent_shown = percent;
    }
    return interrupted() ? 1 : 0;
}

static void print_json(const struct verification *v, const char *path, hr_status status,
                       const hr_error *err)
{
    struct json_out j;
    json_out_init(&j, stdout);
    out_open(&j, NULL, '{');
    out_string(&j, "path", path);
    out_bool(&j, "ok", status == HR_OK);
    out_u64(&j, "bytes", v->done);
    out_u64(&j, "fault_count", v->faults);
    out_open(&j, "faults", '[');
    for (uint64_t i = 0; i < v->faults && i < KEPT_FAULTS; i++)
        if (v->kept[i] != NULL) out_string(&j, NULL, v->kept[i]);
    out_close(&j, ']');
    if (status != HR_OK) {
        out_open(&j, "error", '{');
        out_string(&j, "code", hr_status_name((int32_t)status));
        out_string(&j, "detail", err->detail);
        out_close(&j, '}');
    }
    out_close(&j, '}');
    json_out_end(&j);
}

int command_verify(int argc, char **argv)
{
    bool json = false;
    struct text_list drives = {.count = 0};
    const struct cli_option options[] = {{"--json", OPTION_FLAG, &json, NULL, NULL},
                                         {"--drive", OPTION_LIST, &drives, NULL, NULL}};
    const char *path;
    size_t count;
    char message[256];
    if (!args_parse(argc, argv, options, 2, &path, 1, &count, message))
        return report_failure(HR_ERR_USAGE, json, "verify: %s (see headrace help)", message);
    if (count != 1) return report_failure(HR_ERR_USAGE, json, "verify: give one MODEL");

    struct verification *v = calloc(1, sizeof *v);
    if (v == NULL) return report_failure(HR_ERR_MEMORY, json, "verify: no memory");
    v->json = json;
    v->terminal = isatty(STDERR_FILENO);
    hr_error err = {0};
    const hr_status status = hr_verify_drives(path, drives.item, (uint32_t)drives.count, on_report, v, &err);
    if (v->terminal) fputs("\r\033[K", stderr);
    int code = exit_code(status);
    if (interrupted()) code = EXIT_INTERRUPTED;
    if (json) print_json(v, path, status, &err);
    if (status != HR_OK) {
        fprintf(stderr, "headrace: %s\n", err.detail);
    } else if (!json) {
        char bytes[32];
        printf("ok: %s, %s checked\n", path, format_bytes(v->done, bytes));
    }
    for (size_t i = 0; i < KEPT_FAULTS; i++) free(v->kept[i]);
    free(v);
    return finish_output(code);
}
