#include "life.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "plan.h"

static const int32_t prompt[] = {3, 7, 11, 5, 2, 9};

struct scene {
    const struct life_place *place;
    struct life *out;
    hr_model *model;
    hr_session *first, *second;
    uint64_t used; /* by the model alone */
};

int life_descriptors(void)
{
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

bool life_same_tokens(const struct life *a, const struct life *b)
{
    return memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0;
}

static bool ok(struct scene *s, const char *step, hr_status status)
{
    if (status == HR_OK) return true;
    s->out->status = status;
    s->out->step = step;
    return false;
}

struct taken {
    int32_t *tokens;
    uint32_t n;
};

static int32_t take(void *user, const hr_token *token)
{
    struct taken *t = user;
    if (token->id >= 0 && t->n < LIFE_TOKENS) t->tokens[t->n++] = token->id;
    return 0;
}

static hr_status generate(hr_session *session, const int32_t *ids, size_t n, int32_t *tokens,
                          hr_error *err)
{
    hr_generate_params p;
    struct taken taken = {tokens, 0};
    hr_generate_params_init(&p);
    p.max_tokens = LIFE_TOKENS;
    p.ignore_stop_ids = 1;
    p.temperature = 0.7f;
    p.top_k = 20;
    p.top_p = 0.9f;
    p.repetition_penalty = 1.1f;
    p.seed = 5;
    return hr_generate(session, ids, n, &p, take, &taken, NULL, err);
}

static uint64_t stats(const hr_model *model, uint64_t *leases)
{
    hr_stats s = {.size = sizeof s};
    hr_get_stats(model, &s, NULL);
    *leases = s.leases;
    return s.memory_used;
}

static bool tokenise(struct scene *s)
{
    static const char text[] = "The captain stood upon the deck, and looked at the sea.";
    hr_model_info info = {.size = sizeof info};
    int32_t ids[128];
    size_t n;
    if (!ok(s, "info", hr_model_get_info(s->model, &info, &s->out->err))) return false;
    return !info.has_tokenizer || ok(s, "tokenize", hr_tokenize(s->model, text, sizeof text - 1, 0, ids,
                                                                128, &n, &s->out->err));
}

static bool act(struct scene *s)
{
    struct life *o = s->out;
    char usage[1100];
    const struct life_place *p = s->place;
    const size_t n = sizeof prompt / sizeof *prompt;
    uint64_t leases;
    if (!ok(s, "open", hr_model_open(p->container, &p->params, &s->model, &o->err))) return false;
    s->used = stats(s->model, &leases);
    snprintf(usage, sizeof usage, "%s.usage", p->saved);
    return tokenise(s) && ok(s, "create", hr_session_create(s->model, &s->first, &o->err)) &&
           ok(s, "routes", hr_session_record_routes(s->first, (uint32_t)n, &o->err)) &&
           ok(s, "generate", generate(s->first, prompt, n, o->tokens[0], &o->err)) &&
           ok(s, "save", hr_session_save(s->first, p->saved, &o->err)) &&
           ok(s, "save usage", hr_model_save_usage(s->model, usage, &o->err)) &&
           ok(s, "fork", hr_session_fork(s->first, &s->second, &o->err)) &&
           ok(s, "generate", generate(s->second, prompt, n, o->tokens[1], &o->err)) &&
           ok(s, "lower ram", hr_model_set_ram(s->model, p->least, &o->err)) &&
           ok(s, "generate", generate(s->first, prompt, 2, o->tokens[3], &o->err)) &&
           ok(s, "raise ram", hr_model_set_ram(s->model, p->params.ram, &o->err)) &&
           ok(s, "load", hr_session_load(s->second, p->saved, &o->err)) &&
           ok(s, "generate", generate(s->second, prompt, n, o->tokens[2], &o->err));
}

static bool check(struct scene *s)
{
    hr_plan_result plan = {.size = sizeof plan};
    const struct life_place *p = s->place;
    return ok(s, "plan", hr_plan(p->container, &p->params, &plan, &s->out->err)) &&
           ok(s, "verify", hr_verify(p->container, NULL, NULL, &s->out->err));
}

enum { ROWS = 70, COLS = 64 };

static bool quantise(struct scene *s)
{
    static float w[ROWS * COLS], back[ROWS * COLS];
    static uint8_t books[1 << 16], blob[1 << 16];
    hr_error *err = &s->out->err;
    hr_quant_params p;
    uint64_t blob_bytes, books_bytes;
    double signal, noise;
    hr_quant_params_init(&p);
    snprintf(p.codec, sizeof p.codec, "rvq2x256");
    p.effort = HR_EFFORT_GREEDY;
    p.threads = 2;
    for (uint32_t i = 0; i < ROWS * COLS; i++) w[i] = (float)((i * 2654435761u >> 16) % 199) / 99.0f - 1.0f;
    return ok(s, "quant bytes", hr_quant_bytes(&p, ROWS, COLS, &blob_bytes, &books_bytes, err)) &&
           ok(s, "fit", hr_quant_fit(&p, w, ROWS, COLS, books, err)) &&
           ok(s, "encode", hr_quant_encode(&p, books, w, ROWS, COLS, NULL, blob, err)) &&
           ok(s, "decode", hr_quant_decode(&p, books, blob, ROWS, COLS, back, err)) &&
           ok(s, "error", hr_quant_error(&p, books, blob, w, ROWS, COLS, NULL, &signal, &noise, err));
}

static bool go(struct scene *s)
{
    switch (s->place->what) {
    case LIFE_CHECK: return check(s);
    case LIFE_QUANTISE: return quantise(s);
    default: return act(s);
    }
}

/* A model that is open after a failure must work as if nothing had happened. */
static void again(struct scene *s)
{
    struct life *o = s->out;
    int32_t tokens[LIFE_TOKENS] = {0};
    hr_error err;
    (void)hr_model_set_ram(s->model, s->place->params.ram, &err);
    if (s->first) hr_session_reset(s->first);
    else o->again_status = hr_session_create(s->model, &s->first, &err);
    if (o->again_status == HR_OK)
        o->again_status =
            generate(s->first, prompt, sizeof prompt / sizeof *prompt, tokens, &err);
    o->again_fails = o->again_status != HR_OK ||
                     memcmp(tokens, s->place->clean->tokens[0], sizeof tokens) != 0;
}

void life_live(const struct life_place *place, const char *plan, struct life *out, uint64_t *fired)
{
    struct scene s = {.place = place, .out = out};
    memset(out, 0, sizeof *out);
    unlink(place->saved);
    const int descriptors = life_descriptors();
    const struct alive before = allocations_alive();
    fault_arm(plan);
    const bool done = go(&s);
    if (fired) *fired = fault_fired();
    fault_arm(NULL);
    if (s.model && !done && place->clean) again(&s);
    hr_session_free(s.first);
    hr_session_free(s.second);
    if (s.model) out->account_differs = stats(s.model, &out->leases) != s.used;
    hr_model_close(s.model);
    const struct alive after = allocations_alive();
    out->alive = (struct alive){after.blocks - before.blocks, after.mapped - before.mapped};
    out->descriptors = life_descriptors() - descriptors;
}
