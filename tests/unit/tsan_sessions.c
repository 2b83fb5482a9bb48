/* Several sessions on one model at once: each must give the bits that it gives alone, while one of
 * them is cancelled at random moments, sessions are saved, loaded, freed and made anew, and the
 * budget goes up and down and use counts are written.
 * Meant for -fsanitize=thread; checks itself in any build.
 * usage: tsan_sessions CONTAINER DIRECTORY [CANCELS [SEED]]; exit 0 when all went well. */
#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "headrace.h"

enum { SESSIONS = 4, PROMPT = 9, TOKENS = 6 };

/* What a generation gave: ids and the bits of their log-probabilities. */
struct answer {
    int32_t ids[TOKENS];
    float logprobs[TOKENS];
    uint32_t n;
};

static hr_model *model;
static uint32_t vocab, seed = 1;
static struct answer alone[SESSIONS];
static char directory[512];
static _Atomic uint32_t wrong, generations;
static _Atomic bool over;
static _Atomic(hr_session *) victim; /* NULL while it has none */
static pthread_mutex_t victim_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint32_t cancelled;
static _Atomic int64_t usual_ns; /* that the victim takes when nobody cancels it */

static uint32_t roll(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void complain(const char *what, uint32_t who, const hr_error *err)
{
    fprintf(stderr, "session %u: %s %s\n", who, what, err ? err->detail : "");
    atomic_fetch_add(&wrong, 1);
}

static int32_t take(void *user, const hr_token *token)
{
    struct answer *a = user;
    if (token->id >= 0 && a->n < TOKENS) {
        a->ids[a->n] = token->id;
        a->logprobs[a->n++] = token->logprob;
    }
    return 0;
}

/* Session `who`'s own prompt and sampling, from position 0. */
static hr_status answer(hr_session *s, uint32_t who, struct answer *out, hr_generation *result,
                        hr_error *err)
{
    int32_t ids[PROMPT];
    hr_generate_params p;
    for (uint32_t i = 0; i < PROMPT; i++) ids[i] = (int32_t)((3 + 7 * i + 11 * who) % vocab);
    hr_generate_params_init(&p);
    p.max_tokens = TOKENS;
    p.ignore_stop_ids = 1;
    p.temperature = 0.2f * (float)who;
    p.top_k = 30;
    p.seed = 17 + who;
    memset(out, 0, sizeof *out);
    *result = (hr_generation){.size = sizeof *result};
    hr_session_reset(s);
    return hr_generate(s, ids, PROMPT, &p, take, out, result, err);
}

static bool same(const struct answer *a, const struct answer *b)
{
    return a->n == b->n && memcmp(a->ids, b->ids, sizeof a->ids) == 0 &&
           memcmp(a->logprobs, b->logprobs, sizeof a->logprobs) == 0;
}

static void answer_like_alone(hr_session *s, uint32_t who)
{
    struct answer got;
    hr_generation result;
    hr_error err = {0};
    if (answer(s, who, &got, &result, &err) != HR_OK)
        complain("failed:", who, &err);
    else if (result.finish != HR_FINISH_CANCELLED && !same(&got, &alone[who]))
        complain("gave other bits than alone", who, NULL);
    atomic_fetch_add(&generations, 1);
}

static hr_session *make(uint32_t who)
{
    hr_session *s = NULL;
    hr_error err = {0};
    if (hr_session_create(model, &s, &err) != HR_OK) complain("cannot be made:", who, &err);
    return s;
}

/* Leaves `s` at a state that went through a file. */
static void travel(hr_session *s, uint32_t who)
{
    char path[600];
    hr_error err = {0};
    snprintf(path, sizeof path, "%s/session-%u", directory, who);
    if (hr_session_save(s, path, &err) != HR_OK || hr_session_load(s, path, &err) != HR_OK)
        complain("could not be saved and loaded:", who, &err);
}

static void *neighbour(void *arg)
{
    const uint32_t who = *(const uint32_t *)arg;
    uint32_t random = seed * 977u + who;
    hr_session *s = make(who);
    while (s && !atomic_load(&over)) {
        answer_like_alone(s, who);
        switch (roll(&random) % 8) {
        case 0: travel(s, who); break;
        case 1:
            hr_session_free(s);
            s = make(who);
            break;
        default: break;
        }
    }
    hr_session_free(s);
    return NULL;
}

/* Is cancelled, and must then give its own bits; now and then it ends and begins again. */
static void *victim_main(void *arg)
{
    uint32_t random = seed * 31u;
    hr_session *s = make(0);
    (void)arg;
    atomic_store(&victim, s);
    while (s && !atomic_load(&over)) {
        struct answer got;
        hr_generation result;
        hr_error err = {0};
        const int64_t begun = now_ns();
        if (answer(s, 0, &got, &result, &err) != HR_OK)
            complain("failed:", 0, &err);
        else if (result.finish == HR_FINISH_CANCELLED) {
            atomic_fetch_add(&cancelled, 1);
            /* What came before the cancel is the beginning of the right answer. */
            if (memcmp(got.ids, alone[0].ids, got.n * sizeof *got.ids) != 0)
                complain("gave other tokens before it was cancelled", 0, NULL);
        } else {
            atomic_store(&usual_ns, now_ns() - begun);
            if (!same(&got, &alone[0])) complain("gave other bits than alone", 0, NULL);
        }
        if (roll(&random) % 16 == 0) {
            pthread_mutex_lock(&victim_lock);
            atomic_store(&victim, NULL);
            hr_session_free(s);
            s = make(0);
            atomic_store(&victim, s);
            pthread_mutex_unlock(&victim_lock);
        }
    }
    pthread_mutex_lock(&victim_lock);
    atomic_store(&victim, NULL);
    pthread_mutex_unlock(&victim_lock);
    hr_session_free(s);
    return NULL;
}

static const char *usage_path(void)
{
    static char path[600];
    snprintf(path, sizeof path, "%s/usage", directory);
    return path;
}

/* The budget goes anywhere between hardly a slot and what the model was opened with. */
static void *mover(void *arg)
{
    const uint64_t *bounds = arg;
    uint32_t random = seed * 7u;
    while (!atomic_load(&over)) {
        const struct timespec pause = {0, (long)(roll(&random) % 3000) * 1000};
        hr_error err = {0};
        hr_stats s = {.size = sizeof s};
        const uint64_t ram = bounds[0] + roll(&random) % (bounds[1] - bounds[0] + 1);
        if (hr_model_set_ram(model, ram, &err) != HR_OK) complain("ram cannot be set:", 99, &err);
        hr_get_stats(model, &s, NULL);
        if (s.cache_used > s.cache_slots) complain("more slots are used than there are", 99, NULL);
        if (roll(&random) % 8 == 0 && hr_model_save_usage(model, usage_path(), &err) != HR_OK)
            complain("use counts cannot be written:", 99, &err);
        nanosleep(&pause, NULL);
    }
    return NULL;
}

/* Until so many were cancelled and the others, which get what time is left, answered a third as often. */
static void cancel_at_random(uint32_t cancels)
{
    uint32_t random = seed;
    while ((atomic_load(&cancelled) < cancels || atomic_load(&generations) < cancels / 3) &&
           atomic_load(&wrong) == 0) {
        const int64_t wait = atomic_load(&usual_ns) * (roll(&random) % 1500) / 1000;
        const struct timespec pause = {wait / 1000000000, wait % 1000000000};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&victim_lock);
        hr_cancel(atomic_load(&victim));
        pthread_mutex_unlock(&victim_lock);
    }
}

static uint64_t used(uint64_t *leases)
{
    hr_stats s = {.size = sizeof s};
    hr_get_stats(model, &s, NULL);
    *leases = s.leases;
    return s.memory_used;
}

static int descriptors(void)
{
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

/* Counts that were written while they changed are sound. */
static bool open_model(const char *path, const char *usage, uint64_t bounds[2])
{
    hr_plan_result plan = {.size = sizeof plan};
    hr_model_info info = {.size = sizeof info};
    hr_model_params params;
    hr_error err = {0};
    hr_model_params_init(&params);
    params.ctx = 64;
    params.threads = 2;
    params.io_threads = 3;
    params.chunk = 4;
    params.max_sessions = SESSIONS;
    params.shuffle_reads = seed;
    params.usage = usage;
    if (hr_plan(path, &params, &plan, &err) == HR_OK) {
        bounds[0] = plan.floor + plan.record_bytes; /* the index of the slots stays */
        bounds[1] = params.ram = plan.floor + 6 * plan.record_bytes; /* they fight over every slot */
        if (hr_model_open(path, &params, &model, &err) == HR_OK &&
            hr_model_get_info(model, &info, &err) == HR_OK) {
            vocab = info.vocab_size;
            return true;
        }
    }
    fprintf(stderr, "%s\n", err.detail);
    return false;
}

int main(int argc, char **argv)
{
    static uint32_t numbers[SESSIONS];
    pthread_t threads[SESSIONS], moving;
    static uint64_t bounds[2];
    hr_generation result;
    hr_error err = {0};
    uint64_t leases;

    if (argc < 3) return 2;
    const uint32_t cancels = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 200;
    if (argc > 4) seed = (uint32_t)strtoul(argv[4], NULL, 10);
    snprintf(directory, sizeof directory, "%s", argv[2]);
    if (!open_model(argv[1], NULL, bounds)) return 1;
    const uint64_t before = used(&leases);
    const int open_before = descriptors();
    const int64_t begun = now_ns();
    for (uint32_t i = 0; i < SESSIONS; i++) {
        hr_session *s = make(i);
        if (!s || answer(s, i, &alone[i], &result, &err) != HR_OK) complain("alone:", i, &err);
        hr_session_free(s);
    }

    atomic_store(&usual_ns, now_ns() - begun);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        numbers[i] = i;
        if (pthread_create(&threads[i], NULL, i == 0 ? victim_main : neighbour, &numbers[i]) != 0)
            return 1;
    }
    if (pthread_create(&moving, NULL, mover, bounds) != 0) return 1;
    cancel_at_random(cancels);
    atomic_store(&over, true);
    pthread_join(moving, NULL);
    for (uint32_t i = 0; i < SESSIONS; i++) pthread_join(threads[i], NULL);

    if (hr_model_set_ram(model, bounds[1], &err) != HR_OK) complain("ram cannot be set:", 99, &err);
    if (used(&leases) != before) complain("memory is left over", 0, NULL);
    if (leases != 0) complain("leases are left", 0, NULL);
    if (descriptors() != open_before) complain("descriptors are left", 0, NULL);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        hr_session *s = make(i);
        if (s) answer_like_alone(s, i);
        hr_session_free(s);
    }
    hr_model_close(model);
    if (access(usage_path(), F_OK) == 0) {
        if (!open_model(argv[1], usage_path(), bounds)) return 1;
        hr_model_close(model);
    }
    printf("%u cancelled, %u other generations, %u wrong\n", atomic_load(&cancelled),
           atomic_load(&generations), atomic_load(&wrong));
    return atomic_load(&wrong) != 0;
}
