/* Generates text with Headrace. Usage: generate MODEL "a prompt" [tokens] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <headrace.h>

static int32_t print_token(void *user, const hr_token *token)
{
    FILE *out = user;
    fwrite(token->text, 1, token->text_len, out);
    return fflush(out) == 0 ? 0 : 1; /* anything but 0 stops the generation */
}

static int failed(const char *what, const hr_error *err)
{
    fprintf(stderr, "%s: %s\n", what, err->detail);
    return 1;
}

static int generate(hr_model *model, const char *prompt, uint32_t max_tokens)
{
    hr_error err;
    size_t count = 0, capacity = 2 * strlen(prompt) + 16;
    int32_t *ids = malloc(capacity * sizeof *ids);
    if (ids == NULL) return 1;
    hr_session *session = NULL;
    int result = 0;
    if (hr_tokenize(model, prompt, strlen(prompt), 0, ids, capacity, &count, &err) != HR_OK) {
        result = failed("tokenize", &err);
    } else if (hr_session_create(model, &session, &err) != HR_OK) {
        result = failed("session", &err);
    } else {
        hr_generate_params params;
        hr_generate_params_init(&params);
        params.max_tokens = max_tokens;
        params.temperature = 0.8f;
        params.top_k = 40;
        params.top_p = 0.95f;
        params.seed = 1;
        hr_generation done = {.size = sizeof done};
        if (hr_generate(session, ids, count, &params, print_token, stdout, &done, &err) != HR_OK) {
            result = failed("generate", &err);
        } else {
            const double seconds = done.stats.seconds_decode;
            const double rate = seconds > 0 ? (double)done.stats.tokens_decoded / seconds : 0;
            printf("\n");
            fprintf(stderr, "%u tokens, %.1f tokens/s, %.1f MB of experts read\n", done.tokens,
                    rate, (double)done.stats.bytes_read / 1e6);
        }
    }
    hr_session_free(session);
    free(ids);
    return result;
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: %s MODEL PROMPT [TOKENS]\n", argv[0]);
        return 2;
    }
    hr_error err;
    hr_model_params params;
    hr_model_params_init(&params);
    params.ctx = 2048; /* 0 fields mean: choose by the machine (ram, threads, ...) */
    hr_model *model;
    if (hr_model_open(argv[1], &params, &model, &err) != HR_OK) return failed("open", &err);
    const int result = generate(model, argv[2], argc == 4 ? (uint32_t)atoi(argv[3]) : 100);
    hr_model_close(model);
    return result;
}
