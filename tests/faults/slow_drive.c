#include "slow_drive.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "plan.h"
#include "report.h"

/* A layer needs twice as many reads as may be done after a cancel; how long they take is not looked at. */
enum { READ_MS = 200, PROMPT = 32, LIMIT = 30 };

struct run {
    hr_session *session;
    int32_t ids[PROMPT];
    hr_generation result;
    hr_status status;
    _Atomic bool done;
};

static void *generate(void *arg)
{
    struct run *r = arg;
    r->result = (hr_generation){.size = sizeof r->result};
    r->status = hr_generate(r->session, r->ids, PROMPT, NULL, NULL, NULL, &r->result, NULL);
    atomic_store(&r->done, true);
    return NULL;
}

static uint64_t reads(const hr_model *model, uint64_t *leases)
{
    hr_stats s = {.size = sizeof s};
    hr_get_stats(model, &s, NULL);
    *leases = s.leases;
    return s.reads;
}

void slow_drive_campaign(const struct life_place *place)
{
    struct report report;
    hr_model *model;
    hr_error err;
    uint64_t leases;
    static struct run r;
    char plan[1024];
    hr_plan_result needed = {.size = sizeof needed};
    hr_model_params params = place->params;
    params.chunk = PROMPT; /* all in one pass: a layer then needs dozens of reads */
    report_begin(&report, "slow drive");
    if (hr_plan(place->container, &params, &needed, &err) != HR_OK) exit(3);
    params.ram = needed.floor + 3 * needed.record_bytes;
    if (hr_model_open(place->container, &params, &model, &err) != HR_OK ||
        hr_session_create(model, &r.session, &err) != HR_OK) {
        fprintf(stderr, "%s\n", err.detail);
        exit(3);
    }
    for (int i = 0; i < PROMPT; i++) r.ids[i] = 3 + 5 * i % 60;
    snprintf(plan, sizeof plan, "calls=pread path=%s times=0 action=sleep:%d", place->container, READ_MS);
    for (uint64_t nth = 1; nth <= 4; nth++) {
        pthread_t thread;
        const uint64_t before = reads(model, &leases);
        hr_session_reset(r.session);
        atomic_store(&r.done, false);
        fault_arm(plan);
        if (pthread_create(&thread, NULL, generate, &r) != 0) exit(3);
        /* Progress can be seen while it is slow. */
        for (int i = 0; reads(model, &leases) == before && i < 100000; i++) fault_pause(5);
        if (reads(model, &leases) == before) report_problem(&report, nth, "no progress is counted");
        fault_pause((int)(nth * 70));
        if (atomic_load(&r.done)) report_problem(&report, nth, "it was over before it was cancelled");
        const uint64_t asked = reads(model, &leases);
        hr_cancel(r.session);
        pthread_join(thread, NULL);
        const uint64_t more = reads(model, &leases) - asked;
        report.fired += fault_fired();
        fault_arm(NULL);
        if (more > LIMIT)
            report_problem(&report, nth, "%llu reads after it was cancelled", (unsigned long long)more);
        if (r.status != HR_OK || r.result.finish != HR_FINISH_CANCELLED)
            report_problem(&report, nth, "status %d, finish %d", r.status, r.result.finish);
        if (leases) report_problem(&report, nth, "%llu leases are left", (unsigned long long)leases);
        report.points++;
    }
    hr_session_free(r.session);
    hr_model_close(model);
    report_end(&report);
}
