/* A session file, or one of use counts, is written over an older one, and read, while each call in turn
 * goes wrong. */
#include "session_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "life.h"
#include "plan.h"

struct content {
    uint8_t *bytes;
    size_t n;
};

static bool read_content(const char *path, struct content *out)
{
    struct stat st;
    const int fd = open(path, O_RDONLY);
    *out = (struct content){NULL, 0};
    if (fd < 0 || fstat(fd, &st) != 0) return false;
    out->n = (size_t)st.st_size;
    out->bytes = malloc(out->n + 1);
    const bool ok = read(fd, out->bytes, out->n) == (ssize_t)out->n;
    close(fd);
    return ok;
}

static bool holds(const char *path, const struct content *want)
{
    struct content have;
    const bool same = read_content(path, &have) && have.n == want->n &&
                      memcmp(have.bytes, want->bytes, have.n) == 0;
    free(have.bytes);
    return same;
}

static void put(const char *path, const struct content *c)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, c->bytes, c->n) != (ssize_t)c->n) abort();
    close(fd);
}

struct bench {
    hr_model *model;
    hr_session *session, *other;
    struct content old, young, own; /* own: the state of `other` */
    bool usage;
    const struct life_place *place;
    char path[512], partial[520], scrap[512];
};

static const int32_t ids[] = {3, 7, 11, 5, 2, 9};

static void must(hr_status status, const hr_error *err)
{
    if (status == HR_OK) return;
    fprintf(stderr, "%s\n", err->detail);
    exit(3);
}

static hr_status save(const struct bench *b, const hr_session *s, const char *path, hr_error *err)
{
    return b->usage ? hr_model_save_usage(b->model, path, err) : hr_session_save(s, path, err);
}

static void save_as(const struct bench *b, const hr_session *s, const char *path, struct content *out)
{
    hr_error err;
    must(save(b, s, path, &err), &err);
    if (!read_content(path, out)) exit(3);
}

static void set_up(struct bench *b, const struct life_place *place, bool usage)
{
    hr_error err;
    b->place = place;
    b->usage = usage;
    snprintf(b->path, sizeof b->path, "%s", place->saved);
    snprintf(b->partial, sizeof b->partial, "%s.partial", place->saved);
    snprintf(b->scrap, sizeof b->scrap, "%s-scrap", place->saved);
    must(hr_model_open(place->container, &place->params, &b->model, &err), &err);
    must(hr_session_create(b->model, &b->session, &err), &err);
    must(hr_session_create(b->model, &b->other, &err), &err);
    must(hr_eval(b->session, ids, 3, HR_LOGITS_LAST, NULL, &err), &err);
    save_as(b, b->session, b->scrap, &b->old);
    must(hr_eval(b->session, ids + 3, 2, HR_LOGITS_LAST, NULL, &err), &err);
    save_as(b, b->session, b->scrap, &b->young);
    if (usage) return;
    must(hr_eval(b->other, ids + 1, 4, HR_LOGITS_LAST, NULL, &err), &err);
    save_as(b, b->other, b->scrap, &b->own);
}

static void take_down(struct bench *b)
{
    hr_session_free(b->session);
    hr_session_free(b->other);
    hr_model_close(b->model);
    free(b->old.bytes);
    free(b->young.bytes);
    free(b->own.bytes);
}

static bool names(const hr_error *err, const struct bench *b, int code)
{
    return strstr(err->detail, b->path) && (code == 0 || strstr(err->detail, strerror(code)));
}

/* A save in a child that the plan may kill; false when nothing struck. */
static bool save_and_die(const struct bench *b, const char *plan, uint64_t nth, struct report *r)
{
    int status = 0;
    const pid_t pid = fork();
    if (pid == 0) {
        fault_arm(plan);
        (void)save(b, b->session, b->path, NULL);
        _exit(fault_fired() ? 1 : 0);
    }
    if (waitpid(pid, &status, 0) != pid || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) return false;
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
        report_problem(r, nth, "the child was not killed");
    return true;
}

static bool save_point(struct bench *b, const struct file_campaign *c, const char *plan, uint64_t nth,
                       struct report *r)
{
    hr_error err = {0};
    put(b->path, &b->old);
    if (c->kills) {
        if (!save_and_die(b, plan, nth, r)) return false;
        if (!holds(b->path, &b->old) && !holds(b->path, &b->young))
            report_problem(r, nth, "the file is neither the old state nor the new one");
    } else {
        const int open_before = life_descriptors();
        fault_arm(plan);
        const hr_status status = save(b, b->session, b->path, &err);
        const uint64_t fired = fault_fired();
        fault_arm(NULL);
        r->fired += fired;
        if (fired == 0) return false;
        const bool young = holds(b->path, &b->young);
        if (status == HR_OK ? !young : !young && !holds(b->path, &b->old))
            report_problem(r, nth, "status %d, and the file is not what that says", status);
        if (status != HR_OK && (status != HR_ERR_IO || !names(&err, b, c->code)))
            report_problem(r, nth, "status %d: %s", status, err.detail);
        if (status != HR_OK && c->succeeds) report_problem(r, nth, "failed: %s", err.detail);
        if (access(b->partial, F_OK) == 0 && c->times == 1) report_problem(r, nth, "left a partial file");
        if (life_descriptors() != open_before) report_problem(r, nth, "left a descriptor open");
    }
    if (save(b, b->session, b->path, &err) != HR_OK || !holds(b->path, &b->young))
        report_problem(r, nth, "the next save: %s", err.detail);
    return true;
}

static bool load_point(struct bench *b, const struct file_campaign *c, const char *plan, uint64_t nth,
                       struct report *r)
{
    hr_error err = {0};
    put(b->path, &b->young);
    const int open_before = life_descriptors();
    fault_arm(plan);
    const hr_status status = hr_session_load(b->other, b->path, &err);
    const uint64_t fired = fault_fired();
    fault_arm(NULL);
    r->fired += fired;
    if (life_descriptors() != open_before) report_problem(r, nth, "left a descriptor open");
    if (status != HR_OK && c->succeeds) report_problem(r, nth, "failed: %s", err.detail);
    if (status != HR_OK && !names(&err, b, status == HR_ERR_IO ? c->code : 0))
        report_problem(r, nth, "status %d: %s", status, err.detail);
    /* The drive may fail only when the state, found sound, is read the second time. */
    const hr_status saved = hr_session_save(b->other, b->scrap, &err);
    if (saved == HR_ERR_USAGE && status == HR_ERR_IO && c->times == 0)
        r->poisoned++;
    else if (saved != HR_OK || !holds(b->scrap, status == HR_OK ? &b->young : &b->own))
        report_problem(r, nth, "status %d, and the session is not what that says", status);
    put(b->path, &b->own);
    must(hr_session_load(b->other, b->path, &err), &err);
    return fired > 0;
}

/* A model opens with the file, or says why not; whole or not at all, it has its counts. */
static bool open_point(struct bench *b, const struct file_campaign *c, const char *plan, uint64_t nth,
                       struct report *r)
{
    hr_error err = {0};
    hr_model *model = NULL;
    hr_model_params params = b->place->params;
    params.usage = b->path;
    put(b->path, &b->young);
    const int open_before = life_descriptors();
    fault_arm(plan);
    const hr_status status = hr_model_open(b->place->container, &params, &model, &err);
    const uint64_t fired = fault_fired();
    fault_arm(NULL);
    r->fired += fired;
    if (status != HR_OK && c->succeeds) report_problem(r, nth, "failed: %s", err.detail);
    if (status != HR_OK && (model || !names(&err, b, status == HR_ERR_IO ? c->code : 0)))
        report_problem(r, nth, "status %d: %s", status, err.detail);
    if (status != HR_OK) must(hr_model_open(b->place->container, &params, &model, &err), &err);
    if (hr_model_save_usage(model, b->scrap, &err) != HR_OK || !holds(b->scrap, &b->young))
        report_problem(r, nth, "status %d, and then other counts", status);
    hr_model_close(model);
    if (life_descriptors() != open_before) report_problem(r, nth, "left a descriptor open");
    return fired > 0;
}

void session_file_campaign(const struct life_place *place, const struct file_campaign *c)
{
    struct bench b = {0};
    struct report r;
    char plan[1024];
    report_begin(&r, c->name);
    set_up(&b, place, c->usage);
    for (uint64_t nth = 1;; nth++) {
        /* The directory is opened and synchronised too: its path has no slash behind it. */
        const int directory = (int)(strrchr(b.path, '/') - b.path);
        snprintf(plan, sizeof plan, "calls=%s path=%.*s nth=%llu times=%u period=%u action=%s", c->calls,
                 directory, b.path, (unsigned long long)nth, c->times, c->period, c->action);
        if (!(!c->loads ? save_point : c->usage ? open_point : load_point)(&b, c, plan, nth, &r)) break;
        r.points++;
        if (c->succeeds && c->times != 1 && nth == 2) break; /* every call was struck */
    }
    take_down(&b);
    report_end(&r);
}
