#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bench.h"

static const char *const KINDS[] = {"codec", "operation", "read", "peak"};

struct table {
    struct json_out *json; /* NULL: lines of text as they come */
    hr_bench_row *rows;    /* kept for JSON: an error must be the only object */
    size_t count, capacity;
    bool no_memory;
};

static void print_head(const hr_bench_row *row)
{
    char pool[32], cache[32], memory[32];
    printf("kernels %s, one thread; matrices [%u, %u], pool %s (largest cache %s), memory %s\n",
           row->isa, row->rows, row->cols, format_bytes(row->pool, pool),
           format_bytes(row->cache, cache), format_bytes(row->memory, memory));
    printf("per second of the thread's own time; medians of %u; spread: (highest - lowest) / median\n\n",
           row->repeats);
    printf("%-10s %6s %9s %8s %8s %7s %8s %7s %7s %7s\n", "kernel", "tokens", "Gweight/s", "GB/s",
           "GMAC/s", "spread", "of read", "spread", "of peak", "spread");
}

static void number(double value, int width, int digits, double scale, const char *unit)
{
    if (value > 0)
        printf(" %*.*f%s", width - (int)strlen(unit), digits, value * scale, unit);
    else
        printf(" %*s", width, "-");
}

static void print_row(const hr_bench_row *row)
{
    printf("%-10s", row->name);
    number(row->tokens, 6, 0, 1, "");
    number(row->weights_per_second, 9, 2, 1e-9, "");
    number(row->bytes_per_second, 8, 2, 1e-9, "");
    number(row->macs_per_second, 8, 1, 1e-9, "");
    number(row->spread, 7, 0, 100, "%");
    number(row->read_ratio, 8, 2, 1, "");
    number(row->read_spread, 7, 0, 100, "%");
    number(row->peak_ratio, 7, 1, 100, "%");
    number(row->peak_spread, 7, 0, 100, "%");
    printf("\n");
    fflush(stdout);
}

static int32_t keep(struct table *t, const hr_bench_row *row)
{
    if (t->count == t->capacity) {
        const size_t capacity = t->capacity ? 2 * t->capacity : 64;
        hr_bench_row *grown = realloc(t->rows, capacity * sizeof *grown);
        if (grown == NULL) {
            t->no_memory = true;
            return 1;
        }
        t->rows = grown;
        t->capacity = capacity;
    }
    t->rows[t->count++] = *row;
    return 0;
}

static int32_t on_row(void *user, const hr_bench_row *row)
{
    struct table *t = user;
    if (interrupted()) return 1;
    if (t->json != NULL) return keep(t, row);
    if (t->count++ == 0) print_head(row);
    print_row(row);
    return 0;
}

static void out_row(struct json_out *j, const hr_bench_row *row)
{
    out_open(j, NULL, '{');
    out_string(j, "name", row->name);
    out_string(j, "kind", KINDS[row->kind]);
    out_u64(j, "tokens", row->tokens);
    out_u64(j, "repeats", row->repeats);
    out_f64(j, "weights_per_second", row->weights_per_second);
    out_f64(j, "bytes_per_second", row->bytes_per_second);
    out_f64(j, "macs_per_second", row->macs_per_second);
    out_f64(j, "spread", row->spread);
    out_f64(j, "read_ratio", row->read_ratio);
    out_f64(j, "read_spread", row->read_spread);
    out_f64(j, "peak_ratio", row->peak_ratio);
    out_f64(j, "peak_spread", row->peak_spread);
    out_f64(j, "seconds", row->seconds);
    out_close(j, '}');
}

static void out_table(struct json_out *j, const struct table *t)
{
    const hr_bench_row *first = t->rows;
    json_out_init(j, stdout);
    out_open(j, NULL, '{');
    out_string(j, "version", hr_version());
    out_string(j, "isa", first->isa);
    out_u64(j, "rows", first->rows);
    out_u64(j, "cols", first->cols);
    out_u64(j, "cache_bytes", first->cache);
    out_u64(j, "pool_bytes", first->pool);
    out_u64(j, "memory_bytes", first->memory);
    out_open(j, "kernels", '[');
    for (size_t i = 0; i < t->count; i++) out_row(j, t->rows + i);
    out_close(j, ']');
    out_close(j, '}');
    json_out_end(j);
}

int bench_kernels(int argc, char **argv)
{
    hr_bench_params params;
    hr_bench_params_init(&params);
    const char *isa = params.isa;
    bool kernels = false, json = false, timed = false;
    float seconds = 0;
    const struct cli_option options[] = {
        {"--kernels", OPTION_FLAG, &kernels, NULL, NULL},
        {"--isa", OPTION_TEXT, &isa, NULL, NULL},
        {"--seconds", OPTION_REAL, &seconds, NULL, &timed},
        {"--rows", OPTION_U32, &params.rows, NULL, NULL},
        {"--cols", OPTION_U32, &params.cols, NULL, NULL},
        {"--pool", OPTION_SIZE, &params.pool, NULL, NULL},
        {"--json", OPTION_FLAG, &json, NULL, NULL},
    };
    size_t count;
    char message[256];
    if (!args_parse(argc, argv, options, sizeof options / sizeof *options, NULL, 0, &count, message))
        return report_failure(HR_ERR_USAGE, json, "bench: %s (see headrace help)", message);
    if (timed && !(seconds > 0))
        return report_failure(HR_ERR_USAGE, json, "--seconds: give a number above 0");
    if (strlen(isa) >= sizeof params.isa)
        return report_failure(HR_ERR_USAGE, json, "--isa: there are no kernels '%.40s'", isa);
    if (isa != params.isa) memcpy(params.isa, isa, strlen(isa) + 1);
    params.seconds = (double)seconds;
    struct json_out j;
    struct table table = {.json = json ? &j : NULL};
    hr_error err = {0};
    const hr_status status = hr_bench_kernels(&params, on_row, &table, &err);
    int code = EXIT_OK;
    if (table.no_memory)
        code = report_failure(HR_ERR_MEMORY, json, "bench: no memory for the results");
    else if (status == HR_ERR_CANCELLED)
        code = report_failure(HR_ERR_CANCELLED, json, "interrupted");
    else if (status != HR_OK)
        code = report_error(status, &err, json);
    else if (json)
        out_table(&j, &table);
    free(table.rows);
    return finish_output(code);
}
