#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"

/* Logits of at most this many tokens are held at once. */
enum { ROWS = 64, DEFAULT_WINDOW = 512, OWN_OPTIONS = 7 };

struct score_options {
    struct model_options model;
    const char *file, *end;
    uint32_t window;
    bool hash, ids, special, no_special;
};

struct score {
    uint64_t tokens, predictions;
    double nll; /* sum over the predictions, in order */
    hr_sha256 hash;
    bool with_hash;
};

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* -log softmax(logits)[target]: sum of exp(logit - max) in double, in id order. */
static double loss(const float *logits, uint32_t vocab, int32_t target)
{
    float max = logits[0];
    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > max) max = logits[i];
    double sum = 0;
    for (uint32_t i = 0; i < vocab; i++) sum += exp((double)logits[i] - (double)max);
    return log(sum) - ((double)logits[target] - (double)max);
}

static void hash_floats(hr_sha256 *hash, const float *values, size_t n)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        const uint8_t bytes[4] = {(uint8_t)bits, (uint8_t)(bits >> 8), (uint8_t)(bits >> 16),
                                  (uint8_t)(bits >> 24)};
        hr_sha256_update(hash, bytes, sizeof bytes);
    }
#else
    hr_sha256_update(hash, values, n * sizeof *values);
#endif
}

/* Inputs ids[0..n) from a fresh state; position i predicts ids[i + 1]. */
static hr_status score_window(hr_session *session, const int32_t *ids, size_t n, uint32_t vocab,
                              float *logits, struct score *s, hr_error *err)
{
    hr_session_reset(session);
    for (size_t at = 0; at < n; at += ROWS) {
        const size_t rows = n - at < ROWS ? n - at : ROWS;
        if (interrupted()) return HR_ERR_CANCELLED;
        const hr_status status = hr_eval(session, ids + at, rows, HR_LOGITS_ALL, logits, err);
        if (status != HR_OK) return status;
        if (s->with_hash) hash_floats(&s->hash, logits, rows * vocab);
        for (size_t r = 0; r < rows; r++) s->nll += loss(logits + r * vocab, vocab, ids[at + r + 1]);
        s->predictions += rows;
    }
    return HR_OK;
}

static hr_status score_all(hr_session *session, const int32_t *ids, size_t n, uint32_t window,
                           uint32_t vocab, float *logits, struct score *s, hr_error *err)
{
    const bool terminal = isatty(STDERR_FILENO);
    double shown = seconds_now();
    for (size_t at = 0; at + 1 < n; at += window) {
        const size_t inputs = n - 1 - at < window ? n - 1 - at : window;
        const hr_status status = score_window(session, ids + at, inputs, vocab, logits, s, err);
        if (status != HR_OK) return status;
        if (terminal && seconds_now() - shown > 0.5) {
            shown = seconds_now();
            fprintf(stderr, "\r%llu of %zu tokens, perplexity so far %.4f ",
                    (unsigned long long)s->predictions, n - 1,
                    exp(s->nll / (double)s->predictions));
        }
    }
    if (terminal) fputc('\r', stderr);
    return HR_OK;
}

static void print_score(const hr_model *model, const struct score_options *o, struct score *s,
                        size_t bytes, double seconds)
{
    const double mean = s->nll / (double)s->predictions;
    const double bits = s->nll / log(2.0) / (double)bytes;
    char hex[65] = "";
    if (s->with_hash) {
        uint8_t digest[32];
        hr_sha256_final(&s->hash, digest);
        for (size_t i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
    hr_stats stats = {.size = sizeof stats};
    hr_model_info info = {.size = sizeof info};
    const bool has_stats = hr_get_stats(model, &stats, NULL) == HR_OK;
    if (!o->model.json) {
        printf("tokens           %llu\npredictions      %llu\nwindow           %u\n",
               (unsigned long long)s->tokens, (unsigned long long)s->predictions, o->window);
        printf("mean nll         %.6f\nperplexity       %.6f\n", mean, exp(mean));
        if (!o->ids) printf("bits per byte    %.6f\n", bits);
        if (s->with_hash) printf("logits sha256    %s\n", hex);
        if (has_stats) print_stats(&stats);
        return;
    }
    struct json_out j;
    json_out_init(&j, stdout);
    out_open(&j, NULL, '{');
    out_u64(&j, "tokens", s->tokens);
    out_u64(&j, "predictions", s->predictions);
    out_u64(&j, "window", o->window);
    out_f64(&j, "mean_nll", mean);
    out_f64(&j, "perplexity", exp(mean));
    if (o->ids) out_null(&j, "bits_per_byte");
    else out_f64(&j, "bits_per_byte", bits);
    if (s->with_hash) out_string(&j, "logits_sha256", hex);
    else out_null(&j, "logits_sha256");
    out_f64(&j, "seconds", seconds);
    if (has_stats) out_stats(&j, &stats);
    if (hr_model_get_info(model, &info, NULL) == HR_OK) out_model(&j, &info);
    out_close(&j, '}');
    json_out_end(&j);
}

static int score_ids(hr_model *model, const struct score_options *o, const int32_t *ids, size_t n,
                     size_t bytes)
{
    const bool json = o->model.json;
    hr_error err = {0};
    if (n < 2)
        return report_failure(HR_ERR_FORMAT, json,
                              "%s: %zu token(s): scoring needs at least 2", o->file, n);
    hr_model_info info = {.size = sizeof info};
    hr_status status = hr_model_get_info(model, &info, &err);
    if (status != HR_OK) return report_error(status, &err, json);
    /* A file of ids can be wrong anywhere, and the last one is only ever a target. */
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= info.vocab_size)
            return report_failure(HR_ERR_FORMAT, json,
                                  "%s: id %d at index %zu is outside the vocabulary of %u tokens",
                                  o->file, ids[i], i, info.vocab_size);
    float *logits = malloc((size_t)ROWS * info.vocab_size * sizeof *logits);
    if (logits == NULL)
        return report_failure(HR_ERR_MEMORY, json, "no memory for %d rows of logits", ROWS);
    hr_session *session;
    status = hr_session_create(model, &session, &err);
    if (status != HR_OK) {
        free(logits);
        return report_error(status, &err, json);
    }
    struct score s = {.tokens = n, .with_hash = o->hash};
    hr_sha256_init(&s.hash);
    const double start = seconds_now();
    interrupt_watch(session);
    status = score_all(session, ids, n, o->window, info.vocab_size, logits, &s, &err);
    interrupt_watch(NULL);
    hr_session_free(session);
    free(logits);
    if (status == HR_OK && !isfinite(s.nll))
        return report_failure(HR_ERR_NUMERIC, json,
                              "the logits are not finite: the model file may be damaged; run verify");
    if (status == HR_OK) {
        print_score(model, o, &s, bytes, seconds_now() - start);
        return EXIT_OK;
    }
    if (status == HR_ERR_CANCELLED)
        return report_failure(status, json, "interrupted after %llu of %zu predictions",
                              (unsigned long long)s.predictions, n - 1);
    return report_error(status, &err, json);
}

/* The ids of the file, followed by those of --end. */
static int file_ids(const hr_model *model, const struct score_options *o, const char *text,
                    size_t n, int32_t **ids, size_t *count)
{
    const bool json = o->model.json;
    int code = o->ids ? parse_ids(text, n, o->file, json, ids, count)
                      : tokenize_all(model, text, n, !o->no_special, json, ids, count);
    if (code == EXIT_USAGE && o->ids) code = EXIT_BAD_FILE;
    if (code != EXIT_OK || o->end == NULL) return code;
    int32_t *end, *all = NULL;
    size_t end_count;
    code = tokenize_all(model, o->end, strlen(o->end), true, json, &end, &end_count);
    if (code == EXIT_OK) {
        all = realloc(*ids, (*count + end_count + 1) * sizeof *all);
        if (all == NULL) {
            code = report_failure(HR_ERR_MEMORY, json, "no memory for the ids");
        } else {
            memcpy(all + *count, end, end_count * sizeof *end);
            *ids = all;
            *count += end_count;
        }
        free(end);
    }
    if (code != EXIT_OK) free(*ids);
    return code;
}

int command_score(int argc, char **argv)
{
    struct score_options o = {.window = DEFAULT_WINDOW};
    model_options_init(&o.model);
    struct cli_option options[MODEL_OPTION_COUNT + OWN_OPTIONS] = {
        {"-f", OPTION_PATH, &o.file, NULL, NULL},
        {"--window", OPTION_U32, &o.window, NULL, NULL},
        {"--hash", OPTION_FLAG, &o.hash, NULL, NULL},
        {"--ids", OPTION_FLAG, &o.ids, NULL, NULL},
        {"--no-special", OPTION_FLAG, &o.no_special, NULL, NULL},
        {"--end", OPTION_TEXT, &o.end, NULL, NULL},
        {"--special", OPTION_FLAG, &o.special, NULL, NULL},
    };
    model_options_describe(&o.model, options + OWN_OPTIONS);
    const char *path;
    size_t count, n;
    char message[256], *text;
    const bool parsed =
        args_parse(argc, argv, options, MODEL_OPTION_COUNT + OWN_OPTIONS, &path, 1, &count, message);
    const bool json = o.model.json;
    if (!parsed) return report_failure(HR_ERR_USAGE, json, "score: %s (see headrace help)", message);
    model_options_finish(&o.model);
    usage_may_be_missing(&o.model);
    if (count != 1 || o.file == NULL)
        return report_failure(HR_ERR_USAGE, json, "score: give one MODEL and -f FILE");
    if (o.special && o.no_special)
        return report_failure(HR_ERR_USAGE, json, "score: --special and --no-special exclude each other");
    if (o.window == 0) return report_failure(HR_ERR_USAGE, json, "score: --window must be above 0");
    if (o.model.params.ctx == 0) o.model.params.ctx = o.window;
    if (o.model.params.ctx < o.window)
        return report_failure(HR_ERR_USAGE, json, "score: --ctx %u does not hold --window %u",
                              o.model.params.ctx, o.window);
    int code = read_input(o.file, json, &text, &n);
    if (code != EXIT_OK) return code;
    hr_error err = {0};
    hr_model *model = NULL;
    const hr_status status = hr_model_open(path, &o.model.params, &model, &err);
    if (status != HR_OK) {
        free(text);
        return report_error(status, &err, json);
    }
    int32_t *ids;
    code = interrupted() ? EXIT_INTERRUPTED : file_ids(model, &o, text, n, &ids, &count);
    free(text);
    if (code == EXIT_OK) {
        code = save_usage(model, &o.model, score_ids(model, &o, ids, count, n));
        free(ids);
    }
    hr_model_close(model);
    return finish_output(code);
}
