#include "cli/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/cold.h"

enum { DEFAULT_PREFILL = 128, DEFAULT_DECODE = 32, DEFAULT_REPEATS = 5, DEFAULT_CTX = 4096 };

struct bench_options {
    struct model_options model;
    const char *path, *ids_file;
    uint32_t prefill, decode, repeats;
    bool cold;
};
enum { OWN_OPTIONS = 5 };

struct tokens {
    int32_t *ids;
    size_t count;
    int32_t *window; /* what one repeat evaluates */
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Evenly spread over the vocabulary and the same on every machine. */
static int32_t pseudo_random(uint64_t *state, uint32_t vocab)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((*state >> 33) % vocab);
}

/* Repeat `number` takes its own ids, in order, around the end of the list; a cold one always the
 * first, so that repeats differ by the machine alone. */
static void choose_window(const struct bench_options *o, struct tokens *t, uint32_t number,
                          uint32_t vocab)
{
    const size_t n = (size_t)o->prefill + o->decode;
    const size_t first = o->cold ? 0 : (size_t)number * n;
    uint64_t state = first;
    for (size_t i = 0; i < n; i++)
        t->window[i] = t->count > 0 ? t->ids[(first + i) % t->count] : pseudo_random(&state, vocab);
}

static hr_status read_stats(const hr_model *model, hr_stats *stats, hr_error *err)
{
    memset(stats, 0, sizeof *stats);
    stats->size = sizeof *stats;
    return hr_get_stats(model, stats, err);
}

struct drive_marks {
    uint64_t bytes[BENCH_DRIVES_MAX];
    double seconds[BENCH_DRIVES_MAX];
};

static void mark_drives(const hr_model *model, struct drive_marks *marks)
{
    hr_drive_info d = {.size = sizeof d};
    *marks = (struct drive_marks){0};
    for (uint32_t i = 0; i < BENCH_DRIVES_MAX && hr_get_drive(model, i, &d, NULL) == HR_OK; i++) {
        marks->bytes[i] = d.bytes_read;
        marks->seconds[i] = d.seconds_reading;
    }
}

static double rate_between(const struct drive_marks *a, const struct drive_marks *b)
{
    double rate = 0;
    for (uint32_t i = 0; i < BENCH_DRIVES_MAX; i++)
        if (b->seconds[i] > a->seconds[i])
            rate += (double)(b->bytes[i] - a->bytes[i]) / (b->seconds[i] - a->seconds[i]);
    return rate;
}

/* Evaluates n ids, `step` at a time, and enters what it took. */
static hr_status measure(const hr_model *model, hr_session *session, const int32_t *ids, size_t n,
                         size_t step, struct bench_phase *phase, hr_error *err)
{
    hr_stats before, after;
    struct drive_marks from, to;
    hr_status st = read_stats(model, &before, err);
    mark_drives(model, &from);
    const double start = now();
    for (size_t at = 0; at < n && st == HR_OK; at += step)
        st = hr_eval(session, ids + at, step, HR_LOGITS_LAST, NULL, err);
    phase->seconds = now() - start;
    if (st == HR_OK) st = read_stats(model, &after, err);
    if (st != HR_OK) return st;
    phase->compute = after.seconds_compute - before.seconds_compute;
    phase->waiting = after.seconds_waiting - before.seconds_waiting;
    phase->other = after.seconds_other - before.seconds_other;
    phase->hits = after.hits - before.hits;
    phase->misses = after.misses - before.misses;
    phase->bytes_read = after.bytes_read - before.bytes_read;
    mark_drives(model, &to);
    phase->read_rate = rate_between(&from, &to);
    return HR_OK;
}

static hr_status measure_both(const struct bench_options *o, const hr_model *model,
                              hr_session *session, const int32_t *ids, struct bench_phase *prefill,
                              struct bench_phase *decode, hr_error *err)
{
    hr_session_reset(session);
    hr_status st = HR_OK;
    if (o->prefill > 0)
        st = measure(model, session, ids, o->prefill, o->prefill, prefill, err);
    if (st == HR_OK && o->decode > 0)
        st = measure(model, session, ids + o->prefill, o->decode, 1, decode, err);
    return st;
}

/* Opens the model, runs repeats first..last of it and closes it. Repeat 0 is not measured. */
static hr_status run_repeats(const struct bench_options *o, struct tokens *t, uint32_t first,
                             uint32_t last, struct bench_run *run, hr_error *err)
{
    hr_model *model = NULL;
    hr_session *session = NULL;
    hr_status st = hr_model_open(o->path, &o->model.params, &model, err);
    if (st != HR_OK) return st;
    run->info.size = sizeof run->info;
    st = hr_model_get_info(model, &run->info, err);
    if (st == HR_OK && run->info.ctx < o->prefill + o->decode) {
        snprintf(err->detail, sizeof err->detail, "bench: this model knows positions up to %u, "
                 "--prefill and --decode ask for %u", run->info.ctx, o->prefill + o->decode);
        st = HR_ERR_USAGE;
    }
    if (st == HR_OK) st = hr_session_create(model, &session, err);
    if (st == HR_OK) interrupt_watch(session);
    for (uint32_t i = first; i <= last && st == HR_OK; i++) {
        struct bench_phase unused[2];
        struct bench_phase *prefill = i > 0 ? &run->prefilled[i - 1] : &unused[0];
        struct bench_phase *decode = i > 0 ? &run->decoded[i - 1] : &unused[1];
        if (interrupted()) break;
        choose_window(o, t, i, run->info.vocab_size);
        st = measure_both(o, model, session, t->window, prefill, decode, err);
    }
    if (st == HR_OK) st = read_stats(model, &run->stats, err);
    interrupt_watch(NULL);
    hr_session_free(session);
    hr_model_close(model);
    return st;
}

static hr_status run_cold(const struct bench_options *o, struct tokens *t, struct bench_run *run,
                          hr_error *err)
{
    hr_status st = HR_OK;
    run->physical_known = true;
    for (uint32_t i = 1; i <= o->repeats && st == HR_OK && !interrupted(); i++) {
        uint64_t before = 0, after = 0;
        cold_drop(o->path);
        run->physical_known &= cold_physical_bytes(&before);
        st = run_repeats(o, t, i, i, run, err);
        run->physical_known &= cold_physical_bytes(&after);
        run->physical_bytes += after - before;
        run->library_bytes += run->stats.bytes_read + run->stats.trunk_bytes_read;
    }
    return st;
}

static int parse(int argc, char **argv, struct bench_options *o)
{
    struct cli_option options[MODEL_OPTION_COUNT + OWN_OPTIONS] = {
        {"--prefill", OPTION_U32, &o->prefill, NULL, NULL},
        {"--decode", OPTION_U32, &o->decode, NULL, NULL},
        {"--repeats", OPTION_U32, &o->repeats, NULL, NULL},
        {"--ids", OPTION_PATH, &o->ids_file, NULL, NULL},
        {"--cold", OPTION_FLAG, &o->cold, NULL, NULL},
    };
    model_options_init(&o->model);
    model_options_describe(&o->model, options + OWN_OPTIONS);
    size_t count;
    char message[256];
    const bool parsed = args_parse(argc, argv, options, MODEL_OPTION_COUNT + OWN_OPTIONS, &o->path, 1,
                                   &count, message);
    const bool json = o->model.json;
    if (!parsed) return report_failure(HR_ERR_USAGE, json, "bench: %s (see headrace help)", message);
    model_options_finish(&o->model);
    if (count != 1)
        return report_failure(HR_ERR_USAGE, json, "bench: give one MODEL, or --kernels");
    if (o->repeats == 0 || o->repeats > BENCH_REPEATS_MAX)
        return report_failure(HR_ERR_USAGE, json, "bench: --repeats must be 1 to %d", BENCH_REPEATS_MAX);
    const uint64_t tokens = (uint64_t)o->prefill + o->decode;
    if (o->prefill == 1 || tokens == 0)
        return report_failure(HR_ERR_USAGE, json, "bench: give --prefill of 2 or more tokens, or 0, "
                              "and then --decode of 1 or more");
    /* Otherwise that of other commands: a shorter one would leave more memory to the cache. */
    if (o->model.params.ctx == 0 && tokens > DEFAULT_CTX)
        o->model.params.ctx = tokens < UINT32_MAX ? (uint32_t)tokens : UINT32_MAX;
    if (o->model.params.ctx > 0 && o->model.params.ctx < tokens)
        return report_failure(HR_ERR_USAGE, json, "bench: --ctx %u does not hold --prefill %u and "
                              "--decode %u", o->model.params.ctx, o->prefill, o->decode);
    return EXIT_OK;
}

static int bench_model(int argc, char **argv)
{
    struct bench_options o = {.prefill = DEFAULT_PREFILL, .decode = DEFAULT_DECODE,
                              .repeats = DEFAULT_REPEATS};
    struct tokens t = {0};
    int code = parse(argc, argv, &o);
    const bool json = o.model.json;
    if (code != EXIT_OK) return code;
    if (o.ids_file != NULL) {
        char *text;
        size_t n;
        code = read_input(o.ids_file, json, &text, &n);
        if (code != EXIT_OK) return code;
        code = parse_ids(text, n, o.ids_file, json, &t.ids, &t.count);
        free(text);
        if (code != EXIT_OK) return code;
        if (t.count == 0)
            code = report_failure(HR_ERR_USAGE, json, "%s: holds no token ids", o.ids_file);
    }
    struct bench_run *run = calloc(1, sizeof *run);
    t.window = malloc(((size_t)o.prefill + o.decode) * sizeof *t.window);
    hr_error err = {0};
    if (code == EXIT_OK && (run == NULL || t.window == NULL))
        code = report_failure(HR_ERR_MEMORY, json, "bench: no memory for the results");
    if (code == EXIT_OK) {
        run->prefill = o.prefill;
        run->decode = o.decode;
        run->repeats = o.repeats;
        run->ids = o.ids_file;
        run->cold = o.cold;
        const hr_status status = o.cold ? run_cold(&o, &t, run, &err)
                                        : run_repeats(&o, &t, 0, o.repeats, run, &err);
        if (interrupted()) code = report_failure(HR_ERR_CANCELLED, json, "interrupted");
        else if (status != HR_OK) code = report_error(status, &err, json);
        else if (json) bench_json(run);
        else bench_print(run);
    }
    free(run);
    free(t.window);
    free(t.ids);
    return finish_output(code);
}

int command_bench(int argc, char **argv)
{
    for (int i = 0; i < argc; i++)
        if (strcmp(argv[i], "--kernels") == 0) return bench_kernels(argc, argv);
    return bench_model(argc, argv);
}
