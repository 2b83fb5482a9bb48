/* A session saved over an earlier file, read back, and continued: through the public interface.
 *     session_trip MODEL FILE
 * Prints "same" when both sessions give the same logits. */
#include <headrace.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 24, MORE = 4 };

static hr_error err;

static void must(hr_status status)
{
    if (status == HR_OK) return;
    fprintf(stderr, "%s\n", err.detail);
    exit(1);
}

int main(int argc, char **argv)
{
    int32_t ids[TOKENS + MORE];
    hr_model *model;
    hr_session *first, *second;
    hr_model_params params;
    hr_model_info info = {.size = sizeof info};
    if (argc != 3) return 2;
    for (int i = 0; i < TOKENS + MORE; i++) ids[i] = 3 + i * 7 % 60;
    hr_model_params_init(&params);
    params.ctx = 64;
    params.max_sessions = 2;
    params.threads = 2;
    params.ram = (uint64_t)64 << 20;
    must(hr_model_open(argv[1], &params, &model, &err));
    must(hr_model_get_info(model, &info, &err));
    float *one = calloc(info.vocab_size, sizeof *one), *two = calloc(info.vocab_size, sizeof *two);
    if (one == NULL || two == NULL) return 1;

    must(hr_session_create(model, &first, &err));
    must(hr_session_create(model, &second, &err));
    must(hr_session_save(first, argv[2], &err)); /* nothing yet: to be replaced */
    must(hr_eval(first, ids, TOKENS, HR_LOGITS_LAST, one, &err));
    must(hr_session_save(first, argv[2], &err));
    must(hr_session_load(second, argv[2], &err));
    must(hr_eval(first, ids + TOKENS, MORE, HR_LOGITS_LAST, one, &err));
    must(hr_eval(second, ids + TOKENS, MORE, HR_LOGITS_LAST, two, &err));
    const int same = memcmp(one, two, info.vocab_size * sizeof *one) == 0;
    hr_session_free(second);
    hr_session_free(first);
    hr_model_close(model);
    puts(same ? "same" : "different");
    return !same;
}
