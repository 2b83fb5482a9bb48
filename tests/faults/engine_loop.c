/* The engine meets one fault at a time, at the first, second, ... call until none is left to strike.
 *
 * usage: engine_loop CONTAINER DIRECTORY [CAMPAIGN]...; prints one JSON object for each campaign.
 * Every point: the right tokens or a named error, nothing leaked, the model still works, and what
 * is opened next works. Container files are direct_io's, allocations those of the whole process. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "life.h"
#include "plan.h"
#include "report.h"
#include "session_file.h"
#include "slow_drive.h"

#define MEMORY_CALLS "malloc,mmap,mprotect,thread"
#define READ_CALLS "pread,read,open,stat"
#define SAVE_CALLS "write,truncate,fsync,rename,create,open,close"

struct campaign {
    const char *name, *calls, *action;
    unsigned times, period;
    hr_status status;  /* that a failure must have */
    int code;          /* whose text its detail must hold */
    /* SUCCEEDS: no call may fail; MEMORY: allocations, not files; CHECKS: plan and verify only;
     * QUANTISE: no model; STORM: the first points strike every call already; MIRROR: files of the second drive. */
    unsigned kind;
};

enum { SUCCEEDS = 1, MEMORY = 2, CHECKS = 4, STORM = 8, MIRROR = 16, QUANTISE = 32, MIRROR_POINTS = 30 };

static const struct campaign campaigns[] = {
    {"one allocation fails", MEMORY_CALLS, "errno:12", 1, 0, HR_ERR_MEMORY, 0, MEMORY},
    {"no allocation from then on", MEMORY_CALLS, "errno:12", 0, 0, HR_ERR_MEMORY, 0, MEMORY},
    {"EIO once", READ_CALLS, "errno:5", 1, 0, HR_ERR_IO, EIO, 0},
    {"EIO once, reads", "pread,read", "errno:5", 1, 0, HR_ERR_IO, EIO, SUCCEEDS},
    {"EIO for good", READ_CALLS, "errno:5", 0, 0, HR_ERR_IO, EIO, 0},
    {"device gone", READ_CALLS, "errno:19", 0, 0, HR_ERR_IO, ENODEV, 0},
    {"short reads", "pread,read", "short", 0, 0, HR_ERR_IO, 0, SUCCEEDS | STORM},
    {"nothing read, once", "pread,read", "zero", 1, 0, HR_ERR_IO, 0, SUCCEEDS},
    {"nothing read, ever", "pread,read", "zero", 0, 0, HR_ERR_IO, 0, 0},
    {"EINTR storm", "pread,read,open", "errno:4", 9, 10, HR_ERR_IO, EINTR, SUCCEEDS | STORM},
    {"plan, verify: one allocation fails", MEMORY_CALLS, "errno:12", 1, 0, HR_ERR_MEMORY, 0, MEMORY | CHECKS},
    {"plan, verify: EIO once", READ_CALLS, "errno:5", 1, 0, HR_ERR_IO, EIO, CHECKS},
    {"plan, verify: device gone", READ_CALLS, "errno:19", 0, 0, HR_ERR_IO, ENODEV, CHECKS},
    {"plan, verify: short reads", "pread,read", "short", 0, 0, HR_ERR_IO, 0, SUCCEEDS | CHECKS | STORM},
    {"quantise: one allocation fails", MEMORY_CALLS, "errno:12", 1, 0, HR_ERR_MEMORY, 0, MEMORY | QUANTISE},
    {"mirror: EIO once", "pread,open,stat", "errno:5", 1, 0, HR_ERR_IO, EIO, MIRROR},
    {"mirror: gone", "pread", "errno:19", 0, 0, HR_ERR_IO, ENODEV, SUCCEEDS | MIRROR},
    {"reads overtake each other", "pread", "jitter:2", 0, 0, HR_ERR_IO, 0, SUCCEEDS | STORM},
};

static const struct file_campaign file_campaigns[] = {
    {"save: EIO once", SAVE_CALLS, "errno:5", 1, 0, EIO, false, false, false, false},
    {"save: EIO for good", SAVE_CALLS, "errno:5", 0, 0, EIO, false, false, false, false},
    {"save: disk full", "write,fsync,rename,create", "full", 0, 0, ENOSPC, false, false, false, false},
    {"save: short writes", "write", "short", 0, 0, 0, false, false, true, false},
    {"save: EINTR storm", "write,truncate,fsync,create,open,close", "errno:4", 9, 10, 0, false, false, true, false},
    {"save: kill", SAVE_CALLS, "kill", 1, 0, 0, false, true, false, false},
    {"save: torn write, then kill", "write", "torn", 1, 0, 0, false, true, false, false},
    {"save: power cut", SAVE_CALLS, "power", 1, 0, 0, false, true, false, false},
    {"load: EIO once", READ_CALLS, "errno:5", 1, 0, EIO, true, false, false, false},
    {"load: EIO once, reads", "pread", "errno:5", 1, 0, EIO, true, false, true, false},
    {"load: EIO for good", READ_CALLS, "errno:5", 0, 0, EIO, true, false, false, false},
    {"load: short reads", "pread", "short", 0, 0, 0, true, false, true, false},
    {"load: nothing read, once", "pread", "zero", 1, 0, 0, true, false, true, false},
    {"load: nothing read, ever", "pread", "zero", 0, 0, 0, true, false, false, false},
    {"load: EINTR storm", "pread,open", "errno:4", 9, 10, 0, true, false, true, false},
    {"usage: EIO once", SAVE_CALLS, "errno:5", 1, 0, EIO, false, false, false, true},
    {"usage: EIO for good", SAVE_CALLS, "errno:5", 0, 0, EIO, false, false, false, true},
    {"usage: disk full", "write,fsync,rename,create", "full", 0, 0, ENOSPC, false, false, false, true},
    {"usage: short writes", "write", "short", 0, 0, 0, false, false, true, true},
    {"usage: EINTR storm", "write,truncate,fsync,create,open,close", "errno:4", 9, 10, 0, false, false, true, true},
    {"usage: kill", SAVE_CALLS, "kill", 1, 0, 0, false, true, false, true},
    {"usage: torn write, then kill", "write", "torn", 1, 0, 0, false, true, false, true},
    {"usage: power cut", SAVE_CALLS, "power", 1, 0, 0, false, true, false, true},
    {"open with usage: EIO once", READ_CALLS, "errno:5", 1, 0, EIO, true, false, false, true},
    {"open with usage: EIO for good", READ_CALLS, "errno:5", 0, 0, EIO, true, false, false, true},
    {"open with usage: short reads", "pread", "short", 0, 0, 0, true, false, true, true},
    {"open with usage: nothing read, ever", "pread", "zero", 0, 0, 0, true, false, false, true},
};

static char mirror[1024]; /* DIRECTORY/mirror: copies of the banks, for the campaigns that need them */
static const char *const drives[] = {mirror};

static bool is_named(const struct campaign *c, const struct life *l, const struct life_place *place)
{
    const char *text = l->err.detail;
    if (text[0] == '\0') return false;
    if (c->kind & MEMORY) return true;
    const bool file = strstr(text, ".bin") || strstr(text, ".json") || strstr(text, ".sha256") ||
                      strstr(text, place->container) || strstr(text, mirror);
    return file && (c->code == 0 || strstr(text, strerror(c->code)));
}

static void judge(const struct campaign *c, const struct life_place *place, const struct life *l,
                  uint64_t nth, struct report *r)
{
    if (l->status == HR_OK) {
        if (place->what == LIFE_USE && !life_same_tokens(l, place->clean)) report_problem(r, nth, "other tokens");
        if (c->kind & MEMORY) report_problem(r, nth, "an allocation failed and no call said so");
    } else {
        if (c->kind & SUCCEEDS) report_problem(r, nth, "%s failed: %s", l->step, l->err.detail);
        if (l->status != c->status || l->err.code != (int32_t)l->status || !is_named(c, l, place))
            report_problem(r, nth, "%s: status %d, '%s'", l->step, l->status, l->err.detail);
    }
    if (l->again_fails)
        report_problem(r, nth, "after %s failed, the model does not work (%d)", l->step, l->again_status);
    if (l->leases) report_problem(r, nth, "%llu leases are left", (unsigned long long)l->leases);
    if (l->account_differs) report_problem(r, nth, "memory_used is not what it was");
    if (l->alive.blocks || l->alive.mapped)
        report_problem(r, nth, "%s: %lld blocks and %lld mapped bytes leaked", l->step ? l->step : "close",
                       (long long)l->alive.blocks, (long long)l->alive.mapped);
    if (l->descriptors) report_problem(r, nth, "%d descriptors leaked", l->descriptors);
}

/* So little that reads never end. */
static bool give_ram(struct life_place *place)
{
    hr_plan_result plan = {.size = sizeof plan};
    hr_error err;
    place->params.ram = 0;
    if (hr_plan(place->container, &place->params, &plan, &err) != HR_OK) {
        fprintf(stderr, "%s\n", err.detail);
        return false;
    }
    place->params.ram = plan.floor + 3 * plan.record_bytes;
    place->least = plan.floor + plan.record_bytes; /* the index of the slots stays */
    return true;
}

static void run_campaign(const struct campaign *c, const struct life_place *given)
{
    struct life_place here = *given;
    const struct life_place *place = &here;
    const char *files = (c->kind & MEMORY) ? "" : (c->kind & MIRROR) ? mirror : here.container;
    struct report r;
    struct life life;
    char plan[1024];
    here.what = (c->kind & CHECKS) ? LIFE_CHECK : (c->kind & QUANTISE) ? LIFE_QUANTISE : LIFE_USE;
    if (c->kind & MIRROR) {
        here.params.drives = drives;
        here.params.drive_count = 1;
        if (!give_ram(&here)) exit(3);
    }
    report_begin(&r, c->name);
    for (uint64_t nth = 1;; nth++) {
        uint64_t fired;
        snprintf(plan, sizeof plan, "calls=%s path=%s nth=%llu times=%u period=%u action=%s", c->calls,
                 files, (unsigned long long)nth, c->times, c->period, c->action);
        life_live(place, plan, &life, &fired);
        r.fired += fired;
        /* Which drive reads a record is decided by how fast both are just then. */
        if (fired == 0 && (!(c->kind & MIRROR) || nth > MIRROR_POINTS)) break;
        if (fired == 0) continue;
        r.points++;
        judge(c, place, &life, nth, &r);
        life_live(place, NULL, &life, NULL);
        if (life.status != HR_OK || (here.what == LIFE_USE && !life_same_tokens(&life, place->clean)))
            report_problem(&r, nth, "the next life: %s", life.err.detail);
        if ((c->kind & STORM) && nth == (c->period ? c->period : 2)) break;
    }
    report_end(&r);
}

static bool chosen(const char *name, int argc, char **argv)
{
    for (int i = 3; i < argc; i++)
        if (strcmp(argv[i], name) == 0) return true;
    return argc <= 3;
}

int main(int argc, char **argv)
{
    static struct life clean;
    static char saved[1024];
    struct life_place place = {.saved = saved};
    if (argc < 3) return 2;
    place.container = argv[1];
    snprintf(saved, sizeof saved, "%s/session", argv[2]);
    hr_model_params_init(&place.params);
    place.params.ctx = 64;
    place.params.threads = 2;
    place.params.io_threads = 2;
    place.params.max_sessions = 2;
    place.params.verify = HR_VERIFY_ALWAYS;
    if (!give_ram(&place)) return 3;
    snprintf(mirror, sizeof mirror, "%s/mirror", argv[2]);
    for (int i = 0; i < 2; i++) life_live(&place, NULL, &clean, NULL); /* the first loads what stays */
    if (clean.status != HR_OK || clean.alive.blocks || clean.alive.mapped || clean.descriptors) {
        fprintf(stderr, "without faults: %s %s, %lld blocks, %lld bytes, %d descriptors\n",
                clean.step ? clean.step : "leaks", clean.err.detail, (long long)clean.alive.blocks,
                (long long)clean.alive.mapped, clean.descriptors);
        return 3;
    }
    place.clean = &clean;
    for (size_t i = 0; i < sizeof campaigns / sizeof *campaigns; i++)
        if (chosen(campaigns[i].name, argc, argv)) run_campaign(&campaigns[i], &place);
    for (size_t i = 0; i < sizeof file_campaigns / sizeof *file_campaigns; i++)
        if (chosen(file_campaigns[i].name, argc, argv)) session_file_campaign(&place, &file_campaigns[i]);
    if (chosen("slow drive", argc, argv)) slow_drive_campaign(&place);
    return 0;
}
