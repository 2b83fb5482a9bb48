/* What the library takes from the system once a model and its sessions are there: nothing.
 *
 * usage: steady CONTAINER DIRECTORY; prints one JSON object for each way of opening the container. Counted
 * are allocations, mappings and threads of the whole process, whatever thread asks for them, call by
 * call. "exceptions" shows by the calls that may allocate that the counter sees them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "headrace.h"
#include "life.h"
#include "plan.h"
#include "report.h"

enum { CTX = 36, PROMPT = 12, TOKENS = 5, VOCABULARY_MOST = 1 << 18 };

struct setting {
    const char *name;
    uint32_t chunk, slots; /* slots: the cache holds so many records; 0: all */
    int32_t read_ahead, direct;
    bool routes;
};

static const struct setting settings[] = {
    {"one token at a time, three records", 1, 3, 0, 1, false},
    {"chunks of seven, five records, reading ahead", 7, 5, 2, 1, true},
    {"one chunk, buffered, everything cached", 64, 0, 0, 0, true},
};

/* How a generation ends. */
enum { TO_THE_END, STOP_IN_DECODE, CANCEL_IN_DECODE, CANCEL_IN_PREFILL };

struct house {
    const char *saved;
    hr_model *model;
    hr_session *session, *fork;
    hr_model_info info;
    uint64_t ram, least;
    struct report r;
    int32_t prompt[PROMPT];
    int32_t ending;
    hr_session *running; /* that `ending` is about */
    int32_t *ids;        /* routes */
    float *weights, *logits;
    char text[1 << 16];
};

/* Only counts: no process makes so many calls. */
static void count_begin(void)
{
    if (fault_arm("calls=malloc,mmap,mprotect,thread nth=1000000000000 times=1 action=errno:12") != 0) exit(3);
}

static uint64_t count_end(void)
{
    const uint64_t seen = fault_seen();
    fault_arm(NULL);
    return seen;
}

static void steady(struct house *h, const char *what, uint64_t taken, hr_status status,
                   hr_status expected, const hr_error *err)
{
    h->r.points++;
    if (taken) report_problem(&h->r, h->r.points, "%s: %llu allocations", what, (unsigned long long)taken);
    if (status != expected)
        report_problem(&h->r, h->r.points, "%s: status %d, %s", what, status, err->detail);
}

#define STEADY(h, expected, call)                                      \
    do {                                                               \
        hr_error err = {0};                                            \
        count_begin();                                                 \
        const hr_status got = (call);                                  \
        steady((h), #call, count_end(), got, (expected), &err);        \
    } while (0)

static void must(hr_status status, const hr_error *err)
{
    if (status == HR_OK) return;
    fprintf(stderr, "%s\n", err->detail);
    exit(3);
}

static int32_t on_token(void *user, const hr_token *token)
{
    const struct house *h = user;
    if (token->index < 3) return 0;
    if (h->ending == CANCEL_IN_DECODE) hr_cancel(h->running);
    return h->ending == STOP_IN_DECODE;
}

static void on_layer(void *user, uint32_t layer, uint32_t n, uint32_t width, uint32_t top_k,
                     const float *inputs, const int32_t *ids, const float *weights)
{
    const struct house *h = user;
    (void)layer, (void)n, (void)width, (void)top_k, (void)inputs, (void)ids, (void)weights;
    if (h->ending == CANCEL_IN_PREFILL) hr_cancel(h->running);
}

static void on_guess(void *user, uint32_t layer, uint32_t n, uint32_t top_k, const int32_t *ids)
{
    (void)user, (void)layer, (void)n, (void)top_k, (void)ids;
}

static hr_status reset(hr_session *session)
{
    hr_session_reset(session);
    return HR_OK;
}

static void sample(struct house *h, hr_session *session, const hr_generate_params *p, int32_t ending,
                   int32_t finish)
{
    hr_generation g = {.size = sizeof g};
    h->ending = ending;
    h->running = session;
    STEADY(h, HR_OK, reset(session));
    STEADY(h, HR_OK, hr_session_tap(session, on_layer, h, &err));
    STEADY(h, HR_OK, hr_generate(session, h->prompt, PROMPT, p, on_token, h, &g, &err));
    if (finish >= 0 && g.finish != finish) report_problem(&h->r, h->r.points, "ended with %d", g.finish);
    if (g.finish == HR_FINISH_LENGTH)
        STEADY(h, HR_OK, hr_generate(session, h->prompt, 2, p, NULL, NULL, &g, &err));
    h->ending = TO_THE_END;
    STEADY(h, HR_OK, hr_session_tap(session, NULL, NULL, &err));
}

static void generations(struct house *h, hr_session *session)
{
    static const char *const stop[] = {"never in this text", "the end", "\xc3\xa9"};
    hr_generate_params p;
    hr_generate_params_init(&p);
    p.max_tokens = TOKENS;
    p.ignore_stop_ids = 1;
    sample(h, session, &p, TO_THE_END, HR_FINISH_LENGTH);
    p.temperature = 1.3f;
    p.seed = 7;
    sample(h, session, &p, TO_THE_END, HR_FINISH_LENGTH);
    p.top_p = 0.95f;
    sample(h, session, &p, TO_THE_END, HR_FINISH_LENGTH);
    p.top_k = 40;
    p.min_p = 0.02f;
    p.repetition_penalty = 1.2f;
    p.stop_ids = h->prompt;
    p.stop_id_count = 2;
    sample(h, session, &p, TO_THE_END, -1);
    p.stop_id_count = 0;
    if (h->info.has_tokenizer) {
        p.stop = stop;
        p.stop_count = 3;
        sample(h, session, &p, TO_THE_END, -1);
    }
    sample(h, session, &p, STOP_IN_DECODE, HR_FINISH_CANCELLED);
    sample(h, session, &p, CANCEL_IN_DECODE, HR_FINISH_CANCELLED);
    if (h->info.chunk < PROMPT) sample(h, session, &p, CANCEL_IN_PREFILL, HR_FINISH_CANCELLED);
    p.max_tokens = 0; /* until the context is full */
    p.stop_count = 0;
    sample(h, session, &p, TO_THE_END, HR_FINISH_CONTEXT);
    p.top_p = 2;
    STEADY(h, HR_ERR_USAGE, hr_generate(session, h->prompt, 1, &p, NULL, NULL, NULL, &err));
    STEADY(h, HR_OK, reset(session));
}

static void evaluations(struct house *h, hr_session *session, bool routes)
{
    const int32_t outside = -5;
    STEADY(h, HR_OK, reset(session));
    STEADY(h, HR_OK, hr_eval(session, h->prompt, PROMPT, HR_LOGITS_LAST, h->logits, &err));
    if (routes) STEADY(h, HR_OK, hr_session_routes(session, PROMPT, h->ids, h->weights, &err));
    STEADY(h, HR_OK, hr_eval(session, h->prompt, 9, HR_LOGITS_ALL, h->logits, &err));
    if (routes) STEADY(h, HR_OK, hr_session_routes(session, 9, h->ids, h->weights, &err));
    STEADY(h, HR_OK, hr_eval(session, h->prompt, 1, HR_LOGITS_NONE, NULL, &err));
    STEADY(h, HR_ERR_USAGE, hr_eval(session, &outside, 1, HR_LOGITS_NONE, NULL, &err));
    if (routes)
        STEADY(h, HR_ERR_USAGE, hr_eval(session, h->prompt, PROMPT + 1, HR_LOGITS_NONE, NULL, &err));
    STEADY(h, HR_ERR_CONTEXT, hr_eval(session, h->prompt, CTX, HR_LOGITS_NONE, NULL, &err));
}

static void others(struct house *h)
{
    hr_stats stats = {.size = sizeof stats};
    hr_drive_info drive = {.size = sizeof drive};
    size_t n;
    STEADY(h, HR_OK, hr_get_stats(h->model, &stats, &err));
    STEADY(h, HR_OK, hr_get_drive(h->model, 0, &drive, &err));
    STEADY(h, HR_OK, hr_model_get_info(h->model, &h->info, &err));
    if (h->info.has_tokenizer)
        STEADY(h, HR_OK, hr_detokenize(h->model, h->prompt, PROMPT, h->text, sizeof h->text, &n, &err));
    STEADY(h, HR_OK, hr_session_load(h->fork, h->saved, &err));
    STEADY(h, HR_OK, hr_model_set_ram(h->model, h->least, &err));
    STEADY(h, HR_OK, hr_generate(h->fork, h->prompt, 3, NULL, on_token, h, NULL, &err));
    STEADY(h, HR_OK, hr_model_set_ram(h->model, h->ram, &err));
    if (stats.leases) report_problem(&h->r, 0, "%llu leases are left", (unsigned long long)stats.leases);
}

static void open_house(struct house *h, const char *path, const struct setting *s)
{
    hr_plan_result plan = {.size = sizeof plan};
    hr_model_params params;
    hr_error err;
    hr_model_params_init(&params);
    params.ctx = CTX;
    params.threads = params.io_threads = params.max_sessions = 2;
    params.chunk = s->chunk;
    params.read_ahead = s->read_ahead;
    params.direct = s->direct;
    must(hr_plan(path, &params, &plan, &err), &err);
    params.ram = plan.floor + (s->slots ? s->slots : plan.total_experts + 1) * plan.record_bytes;
    must(hr_model_open(path, &params, &h->model, &err), &err);
    h->ram = params.ram;
    h->least = plan.floor + plan.record_bytes;
    h->info = (hr_model_info){.size = sizeof h->info};
    must(hr_model_get_info(h->model, &h->info, &err), &err);
    if (h->info.vocab_size > VOCABULARY_MOST) exit(3);
    const size_t routes = (size_t)h->info.moe_layers * PROMPT * h->info.top_k;
    h->ids = malloc(routes * sizeof *h->ids);
    h->weights = malloc(routes * sizeof *h->weights);
    h->logits = malloc((size_t)PROMPT * h->info.vocab_size * sizeof *h->logits);
    for (int32_t i = 0; i < PROMPT; i++) h->prompt[i] = (3 + 7 * i) % (int32_t)h->info.vocab_size;
    must(hr_session_create(h->model, &h->session, &err), &err);
    must(hr_session_record_routes(h->session, s->routes ? PROMPT : 0, &err), &err);
    if (s->routes) must(hr_session_tap_guesses(h->session, on_guess, h, &err), &err);
    must(hr_eval(h->session, h->prompt, 5, HR_LOGITS_LAST, NULL, &err), &err);
    must(hr_session_save(h->session, h->saved, &err), &err);
    must(hr_session_fork(h->session, &h->fork, &err), &err);
}

static void close_house(struct house *h)
{
    hr_session_free(h->session);
    hr_session_free(h->fork);
    hr_model_close(h->model);
    free(h->ids);
    free(h->weights);
    free(h->logits);
}

static void check_setting(const char *path, const char *saved, const struct setting *s)
{
    static struct house h;
    memset(&h, 0, sizeof h);
    h.saved = saved;
    report_begin(&h.r, s->name);
    open_house(&h, path, s);
    generations(&h, h.session);
    evaluations(&h, h.session, s->routes);
    others(&h);
    evaluations(&h, h.fork, false);
    close_house(&h);
    report_end(&h.r);
}

static void sees(struct report *r, const char *what, uint64_t least)
{
    const uint64_t seen = count_end();
    r->points++;
    r->fired += seen;
    if (seen < least) report_problem(r, r->points, "%s: %llu seen", what, (unsigned long long)seen);
}

/* The counter sees one block, one mapping, and those of each call that the header excepts. */
static void check_exceptions(const char *path, const char *saved)
{
    static struct house h;
    struct report r;
    hr_session *more;
    hr_error err;
    report_begin(&r, "exceptions");
    void *volatile block;
    count_begin();
    block = malloc(1);
    sees(&r, "malloc", 1);
    free(block);
    count_begin();
    block = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    sees(&r, "mmap", 1);
    munmap(block, 4096);
    memset(&h, 0, sizeof h);
    h.saved = saved;
    count_begin();
    open_house(&h, path, &settings[0]);
    sees(&r, "hr_model_open", 10);
    hr_session_free(h.fork);
    count_begin();
    must(hr_session_create(h.model, &more, &err), &err);
    sees(&r, "hr_session_create", 1);
    hr_session_free(more);
    count_begin();
    must(hr_session_fork(h.session, &h.fork, &err), &err);
    sees(&r, "hr_session_fork", 1);
    count_begin();
    must(hr_session_record_routes(h.session, 9, &err), &err);
    sees(&r, "hr_session_record_routes", 1);
    count_begin();
    must(hr_session_tap_guesses(h.session, on_guess, &h, &err), &err);
    sees(&r, "hr_session_tap_guesses", 1);
    count_begin();
    must(hr_session_save(h.session, saved, &err), &err);
    sees(&r, "hr_session_save", 1);
    if (h.info.has_tokenizer) {
        static int32_t ids[64];
        size_t n;
        count_begin();
        must(hr_tokenize(h.model, "once upon a time", 16, 0, ids, 64, &n, &err), &err);
        sees(&r, "hr_tokenize", 1);
    }
    close_house(&h);
    report_end(&r);
}

int main(int argc, char **argv)
{
    static char saved[1024];
    if (argc != 3) return 2;
    snprintf(saved, sizeof saved, "%s/steady", argv[2]);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        check_setting(argv[1], saved, &settings[i]);
    check_exceptions(argv[1], saved);
    return 0;
}
