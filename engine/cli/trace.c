#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/out_file.h"
#include "cli/trace_file.h"

enum { OWN_OPTIONS = 5, AT_ONCE = 512, LAYERS_MOST = 1024 };

struct trace_options {
    struct model_options model;
    const char *file, *ids, *out;
    bool no_special;
    uint32_t tokens; /* 0 = all */
    uint32_t ahead;  /* ranks of guesses; 0 = none */
};

/* Routes of one chunk, gathered layer by layer and written when the last layer has come. */
struct recorder {
    struct json_out json;
    hr_model_info info;
    int32_t *ids; /* [moe_layers][chunk][top_k] */
    uint32_t width[LAYERS_MOST]; /* experts of a token, for each MoE layer */
    uint32_t ahead;              /* ranks of guesses that are kept */
    int32_t *guesses;            /* [moe_layers][chunk][ahead] */
    uint32_t guess_width[LAYERS_MOST]; /* the same as width; 0 for the first layer, never guessed */
    uint32_t at;  /* MoE layers of this chunk so far */
    uint64_t tokens;
    bool failed;
};

static void write_lists(struct recorder *r, const char *key, const int32_t *ids, uint32_t stride,
                        const uint32_t *width, uint32_t t)
{
    struct json_out *j = &r->json;
    out_open(j, key, '[');
    for (uint32_t l = 0; l < r->info.moe_layers; l++) {
        const int32_t *list = ids + ((size_t)l * r->info.chunk + t) * stride;
        out_open(j, NULL, '[');
        for (uint32_t k = 0; k < width[l]; k++) out_i64(j, NULL, list[k]);
        out_close(j, ']');
    }
    out_close(j, ']');
}

static void write_chunk(struct recorder *r, uint32_t n)
{
    struct json_out *j = &r->json;
    for (uint32_t t = 0; t < n; t++) {
        out_open(j, NULL, '{');
        out_u64(j, "tok", r->tokens++);
        write_lists(r, "layers", r->ids, r->info.top_k, r->width, t);
        if (r->ahead > 0) write_lists(r, "ahead", r->guesses, r->ahead, r->guess_width, t);
        out_close(j, '}');
        json_out_end(j);
    }
}

static void on_layer(void *user, uint32_t layer, uint32_t n, uint32_t width, uint32_t top_k,
                     const float *inputs, const int32_t *ids, const float *weights)
{
    struct recorder *r = user;
    (void)layer, (void)width, (void)inputs, (void)weights;
    if (n > r->info.chunk || top_k > r->info.top_k || r->at >= r->info.moe_layers) {
        r->failed = true;
        return;
    }
    r->width[r->at] = top_k;
    for (uint32_t t = 0; t < n; t++)
        memcpy(r->ids + ((size_t)r->at * r->info.chunk + t) * r->info.top_k,
               ids + (size_t)t * top_k, top_k * sizeof *ids);
    if (++r->at < r->info.moe_layers) return;
    r->at = 0;
    write_chunk(r, n);
}

/* Comes before on_layer of the MoE layer in front of the one that is guessed. */
static void on_guess(void *user, uint32_t layer, uint32_t n, uint32_t top_k, const int32_t *ids)
{
    struct recorder *r = user;
    const uint32_t next = r->at + 1, kept = top_k < r->ahead ? top_k : r->ahead;
    (void)layer;
    if (n > r->info.chunk || next >= r->info.moe_layers) {
        r->failed = true;
        return;
    }
    r->guess_width[next] = kept;
    for (uint32_t t = 0; t < n; t++)
        memcpy(r->guesses + ((size_t)next * r->info.chunk + t) * r->ahead, ids + (size_t)t * top_k,
               kept * sizeof *ids);
}

static void write_head(struct recorder *r)
{
    struct json_out *j = &r->json;
    out_open(j, NULL, '{');
    out_open(j, "headrace", '{');
    out_u64(j, "format", TRACE_FORMAT);
    out_string(j, "version", hr_version());
    out_string(j, "name", r->info.name);
    out_string(j, "container_sha256", r->info.container_sha256);
    out_u64(j, "moe_layers", r->info.moe_layers);
    out_u64(j, "experts", r->info.experts);
    out_u64(j, "top_k", r->info.top_k);
    out_u64(j, "record_bytes", r->info.record_bytes);
    if (r->ahead > 0) out_u64(j, "read_ahead", r->ahead);
    out_close(j, '}');
    out_close(j, '}');
    json_out_end(j);
}

/* A text longer than the context is evaluated in pieces, each from a fresh state. */
static hr_status record_all(hr_session *session, struct recorder *r, const int32_t *ids, size_t n,
                            hr_error *err)
{
    const bool terminal = isatty(STDERR_FILENO);
    for (size_t at = 0; at < n;) {
        const uint32_t room = r->info.ctx - hr_session_position(session);
        if (room == 0) {
            hr_session_reset(session);
            continue;
        }
        size_t step = n - at < AT_ONCE ? n - at : AT_ONCE;
        if (step > room) step = room;
        if (interrupted()) return HR_ERR_CANCELLED;
        const hr_status status = hr_eval(session, ids + at, step, HR_LOGITS_NONE, NULL, err);
        if (status != HR_OK) return status;
        at += step;
        if (terminal) fprintf(stderr, "\r%zu of %zu tokens", at, n);
        if (ferror(r->json.file)) break;
    }
    if (terminal) fputc('\n', stderr);
    return HR_OK;
}

static int record_to(FILE *file, hr_model *model, const struct trace_options *o, const int32_t *ids,
                     size_t n, struct recorder *r)
{
    const bool json = o->model.json;
    hr_error err = {0};
    hr_session *session;
    hr_status status = hr_model_get_info(model, &r->info, &err);
    if (status != HR_OK) return report_error(status, &err, json);
    if (r->info.moe_layers == 0 || r->info.moe_layers > LAYERS_MOST)
        return report_failure(HR_ERR_FORMAT, json, "this model has no layer with routed experts");
    r->ahead = o->ahead < r->info.top_k ? o->ahead : r->info.top_k;
    const size_t lists = (size_t)r->info.moe_layers * r->info.chunk;
    r->ids = malloc(lists * (r->info.top_k + r->ahead) * sizeof *r->ids);
    if (r->ids == NULL) return report_failure(HR_ERR_MEMORY, json, "no memory for the routes");
    r->guesses = r->ids + lists * r->info.top_k;
    status = hr_session_create(model, &session, &err);
    if (status == HR_OK) {
        json_out_init(&r->json, file);
        write_head(r);
        interrupt_watch(session);
        status = hr_session_tap(session, on_layer, r, &err);
        if (status == HR_OK && r->ahead > 0)
            status = hr_session_tap_guesses(session, on_guess, r, &err);
        if (status == HR_OK) status = record_all(session, r, ids, n, &err);
        interrupt_watch(NULL);
        hr_session_free(session);
    }
    free(r->ids);
    if (status == HR_ERR_CANCELLED)
        return report_failure(status, json, "interrupted after %llu of %zu tokens",
                              (unsigned long long)r->tokens, n);
    if (status != HR_OK) return report_error(status, &err, json);
    if (r->failed || r->tokens != n)
        return report_failure(HR_ERR_FORMAT, json, "the routes do not fit the model's description");
    return EXIT_OK;
}

static int trace_ids(hr_model *model, const struct trace_options *o, const int32_t *ids, size_t n)
{
    const bool json = o->model.json, standard = strcmp(o->out, "-") == 0;
    struct recorder r = {.info = {.size = sizeof r.info}};
    struct out_file file;
    if (!out_file_open(&file, o->out))
        return report_failure(HR_ERR_IO, json, "%s: %s", o->out, strerror(errno));
    int code = record_to(file.file, model, o, ids, n, &r);
    if (standard) return code;
    if (!out_file_close(&file, code == EXIT_OK) && code == EXIT_OK)
        code = report_failure(HR_ERR_IO, json, "%s: not everything could be written: %s", o->out,
                              errno ? strerror(errno) : "no reason given");
    if (code == EXIT_OK && json) {
        struct json_out j;
        json_out_init(&j, stdout);
        out_open(&j, NULL, '{');
        out_string(&j, "trace", o->out);
        out_u64(&j, "tokens", r.tokens);
        out_model(&j, &r.info);
        out_close(&j, '}');
        json_out_end(&j);
    } else if (code == EXIT_OK) {
        fprintf(stderr, "%s: %llu tokens, %u layers, %u of %u experts each\n", o->out,
                (unsigned long long)r.tokens, r.info.moe_layers, r.info.top_k, r.info.experts);
    }
    return code;
}

static int read_tokens(const hr_model *model, const struct trace_options *o, int32_t **ids,
                       size_t *count)
{
    const bool json = o->model.json;
    const char *path = o->file ? o->file : o->ids;
    char *text;
    size_t n;
    int code = read_input(path, json, &text, &n);
    if (code != EXIT_OK) return code;
    code = o->ids ? parse_ids(text, n, path, json, ids, count)
                  : tokenize_all(model, text, n, !o->no_special, json, ids, count);
    free(text);
    if (code == EXIT_USAGE && o->ids) code = EXIT_BAD_FILE;
    if (code != EXIT_OK) return code;
    if (o->tokens != 0 && *count > o->tokens) *count = o->tokens;
    if (*count > 0) return EXIT_OK;
    free(*ids);
    return report_failure(HR_ERR_FORMAT, json, "%s: there is no token in it", path);
}

int command_trace(int argc, char **argv)
{
    struct trace_options o = {.out = "-"};
    model_options_init(&o.model);
    struct cli_option options[MODEL_OPTION_COUNT + OWN_OPTIONS] = {
        {"-f", OPTION_PATH, &o.file, NULL, NULL},
        {"--ids", OPTION_PATH, &o.ids, NULL, NULL},
        {"-o", OPTION_PATH, &o.out, NULL, NULL},
        {"--tokens", OPTION_U32, &o.tokens, NULL, NULL},
        {"--no-special", OPTION_FLAG, &o.no_special, NULL, NULL},
    };
    model_options_describe(&o.model, options + OWN_OPTIONS);
    const char *path;
    size_t count;
    char message[256];
    const bool parsed =
        args_parse(argc, argv, options, MODEL_OPTION_COUNT + OWN_OPTIONS, &path, 1, &count, message);
    const bool json = o.model.json;
    if (!parsed) return report_failure(HR_ERR_USAGE, json, "trace: %s (see headrace help)", message);
    model_options_finish(&o.model);
    usage_may_be_missing(&o.model);
    /* What is asked for here is to be written down, not done. */
    o.ahead = o.model.params.read_ahead > 0 ? (uint32_t)o.model.params.read_ahead : 0;
    o.model.params.read_ahead = 0;
    if (count != 1 || (o.file == NULL) == (o.ids == NULL))
        return report_failure(HR_ERR_USAGE, json, "trace: give one MODEL and -f FILE or --ids FILE");
    if (json && strcmp(o.out, "-") == 0)
        return report_failure(HR_ERR_USAGE, json, "trace: --json needs -o FILE");
    hr_error err = {0};
    hr_model *model = NULL;
    const hr_status status = hr_model_open(path, &o.model.params, &model, &err);
    if (status != HR_OK) return report_error(status, &err, json);
    int32_t *ids;
    int code = interrupted() ? EXIT_INTERRUPTED : read_tokens(model, &o, &ids, &count);
    if (code == EXIT_OK) {
        code = save_usage(model, &o.model, trace_ids(model, &o, ids, count));
        free(ids);
    }
    hr_model_close(model);
    return finish_output(code);
}
