#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"

enum { DEFAULT_TOKENS = 256, OWN_OPTIONS = 14 };

struct run_options {
    struct model_options model;
    hr_generate_params generate;
    struct text_list stop;
    const char *prompt, *file, *ids;
    bool special;
};

/* What the callback gathers. */
struct output {
    bool stream, as_ids, write_failed;
    char *text;
    size_t text_length, text_capacity;
    int32_t *ids;
    float *logprobs;
    size_t count, capacity;
};

static bool keep_text(struct output *o, const char *text, size_t n)
{
    if (o->text_capacity - o->text_length < n) {
        const size_t capacity = 2 * (o->text_capacity + n) + 256;
        char *grown = realloc(o->text, capacity);
        if (grown == NULL) return false;
        o->text = grown;
        o->text_capacity = capacity;
    }
    if (n > 0) memcpy(o->text + o->text_length, text, n);
    o->text_length += n;
    return true;
}

static bool keep_id(struct output *o, int32_t id, float logprob)
{
    if (o->count == o->capacity) {
        const size_t capacity = 2 * o->capacity + 64;
        int32_t *ids = realloc(o->ids, capacity * sizeof *ids);
        if (ids != NULL) o->ids = ids;
        float *logprobs = realloc(o->logprobs, capacity * sizeof *logprobs);
        if (logprobs != NULL) o->logprobs = logprobs;
        if (ids == NULL || logprobs == NULL) return false;
        o->capacity = capacity;
    }
    o->ids[o->count] = id;
    o->logprobs[o->count++] = logprob;
    return true;
}

static int32_t on_token(void *user, const hr_token *token)
{
    struct output *o = user;
    if (o->stream) {
        if (o->as_ids && token->id >= 0)
            printf("%s%d", token->index > 0 ? " " : "", token->id);
        fwrite(token->text, 1, token->text_len, stdout);
        if (fflush(stdout) != 0 || ferror(stdout)) {
            o->write_failed = true;
            return 1;
        }
    } else {
        if (!keep_text(o, token->text, token->text_len)) return 1;
        if (token->id >= 0 && !keep_id(o, token->id, token->logprob)) return 1;
    }
    return interrupted() ? 1 : 0;
}

static const char *finish_name(int32_t finish)
{
    static const char *const names[] = {"stop", "length", "context", "cancelled", "error"};
    return finish >= 0 && finish < 5 ? names[finish] : "error";
}

static void print_json(const hr_model *model, const hr_generation *g, const struct output *o,
                       size_t prompt_tokens)
{
    hr_model_info info = {.size = sizeof info};
    struct json_out j;
    json_out_init(&j, stdout);
    out_open(&j, NULL, '{');
    out_text(&j, "text", o->text != NULL ? o->text : "", o->text_length);
    out_open(&j, "ids", '[');
    for (size_t i = 0; i < o->count; i++) out_i64(&j, NULL, o->ids[i]);
    out_close(&j, ']');
    out_open(&j, "logprobs", '[');
    for (size_t i = 0; i < o->count; i++) out_f64(&j, NULL, (double)o->logprobs[i]);
    out_close(&j, ']');
    out_u64(&j, "prompt_tokens", prompt_tokens);
    out_u64(&j, "tokens", g->tokens);
    out_string(&j, "finish", finish_name(g->finish));
    out_i64(&j, "stop_id", g->stop_id);
    out_i64(&j, "stop_string", g->stop_string);
    out_stats(&j, &g->stats);
    if (hr_model_get_info(model, &info, NULL) == HR_OK) out_model(&j, &info);
    out_drives(&j, model);
    out_close(&j, '}');
    json_out_end(&j);
}

static int generate_and_print(hr_model *model, const struct run_options *options,
                              const int32_t *ids, size_t n)
{
    const bool json = options->model.json;
    hr_error err = {0};
    hr_model_info info = {.size = sizeof info};
    hr_session *session;
    hr_status status = hr_model_get_info(model, &info, &err);
    if (status == HR_OK) status = hr_session_create(model, &session, &err);
    if (status != HR_OK) return report_error(status, &err, json);

    struct output o = {.stream = !json, .as_ids = !info.has_tokenizer};
    hr_generation g = {.size = sizeof g};
    int code = EXIT_INTERRUPTED;
    interrupt_watch(session);
    if (!interrupted()) {
        status = hr_generate(session, ids, n, &options->generate, on_token, &o, &g, &err);
        if (!json && g.tokens > 0 && !o.write_failed && (o.as_ids || isatty(STDOUT_FILENO)))
            putchar('\n');
        if (status != HR_OK) {
            code = report_error(status, &err, json);
        } else {
            if (json) print_json(model, &g, &o, n);
            /* The text may end in the same stream without a line's end. */
            fprintf(stderr, "%sfinish   %s after %u tokens\n", isatty(STDOUT_FILENO) ? "" : "\n",
                    finish_name(g.finish), g.tokens);
            code = EXIT_OK;
            if (interrupted()) code = EXIT_INTERRUPTED;
            else if (g.finish == HR_FINISH_CANCELLED && !o.write_failed)
                code = report_failure(HR_ERR_MEMORY, false, "no memory to collect the text");
        }
        if (g.tokens > 0 || status == HR_OK) {
            print_stats(&g.stats);
            if (info.drives > 1) print_drives(model, stderr);
        }
    }
    interrupt_watch(NULL);
    hr_session_free(session);
    free(o.text);
    free(o.ids);
    free(o.logprobs);
    return code;
}

/* The prompt's ids from whichever source was named. */
static int prompt_ids(const hr_model *model, const struct run_options *o, const char *text,
                      size_t n, int32_t **ids, size_t *count)
{
    const bool json = o->model.json;
    const int code = o->ids != NULL
                         ? parse_ids(o->ids, strlen(o->ids), "--ids", json, ids, count)
                         : tokenize_all(model, text, n, o->special, json, ids, count);
    if (code == EXIT_OK && *count == 0) {
        free(*ids);
        return report_failure(HR_ERR_USAGE, json,
                              "the prompt is empty: give text with -p, -f or -, or ids with --ids");
    }
    return code;
}

int command_run(int argc, char **argv)
{
    struct run_options o = {0};
    model_options_init(&o.model);
    hr_generate_params_init(&o.generate);
    o.generate.max_tokens = DEFAULT_TOKENS;
    hr_generate_params *g = &o.generate;
    struct cli_option options[MODEL_OPTION_COUNT + OWN_OPTIONS] = {
        {"-p", OPTION_TEXT, &o.prompt, NULL, NULL},
        {"-f", OPTION_PATH, &o.file, NULL, NULL},
        {"--ids", OPTION_TEXT, &o.ids, NULL, NULL},
        {"-n", OPTION_U32, &g->max_tokens, NULL, NULL},
        {"--max-tokens", OPTION_U32, &g->max_tokens, NULL, NULL},
        {"--temp", OPTION_REAL, &g->temperature, NULL, NULL},
        {"--temperature", OPTION_REAL, &g->temperature, NULL, NULL},
        {"--top-k", OPTION_U32, &g->top_k, NULL, NULL},
        {"--top-p", OPTION_REAL, &g->top_p, NULL, NULL},
        {"--min-p", OPTION_REAL, &g->min_p, NULL, NULL},
        {"--repeat-penalty", OPTION_REAL, &g->repetition_penalty, NULL, NULL},
        {"--seed", OPTION_U64, &g->seed, NULL, NULL},
        {"--stop", OPTION_LIST, &o.stop, NULL, NULL},
        {"--special", OPTION_FLAG, &o.special, NULL, NULL},
    };
    model_options_describe(&o.model, options + OWN_OPTIONS);
    const char *positional[2];
    size_t count;
    char message[256];
    if (!args_parse(argc, argv, options, MODEL_OPTION_COUNT + OWN_OPTIONS, positional, 2, &count, message))
        return report_failure(HR_ERR_USAGE, o.model.json, "run: %s (see headrace help)", message);
    model_options_finish(&o.model);
    usage_may_be_missing(&o.model);
    g->stop = o.stop.item;
    g->stop_count = o.stop.count;
    const bool json = o.model.json;
    const bool standard = count == 2 && strcmp(positional[1], "-") == 0;
    if (count == 0 || (count == 2 && !standard))
        return report_failure(HR_ERR_USAGE, json, "run: give one MODEL (see headrace help)");
    if ((o.prompt != NULL) + (o.file != NULL) + (o.ids != NULL) + standard != 1)
        return report_failure(HR_ERR_USAGE, json,
                              "run: give the prompt once, as -p TEXT, -f FILE, --ids IDS or -");

    char *owned = NULL;
    const char *text = o.prompt;
    size_t n = text != NULL ? strlen(text) : 0;
    int code = EXIT_OK;
    if (standard || o.file != NULL) {
        code = read_input(standard ? "-" : o.file, json, &owned, &n);
        text = owned;
    }
    if (code != EXIT_OK) return code;
    hr_error err = {0};
    hr_model *model = NULL;
    const hr_status status = hr_model_open(positional[0], &o.model.params, &model, &err);
    if (status != HR_OK) {
        free(owned);
        return report_error(status, &err, json);
    }
    int32_t *ids = NULL;
    size_t id_count = 0;
    code = interrupted() ? EXIT_INTERRUPTED : prompt_ids(model, &o, text, n, &ids, &id_count);
    free(owned);
    if (code == EXIT_OK) {
        code = save_usage(model, &o.model, generate_and_print(model, &o, ids, id_count));
        free(ids);
    }
    hr_model_close(model);
    return finish_output(code);
}
