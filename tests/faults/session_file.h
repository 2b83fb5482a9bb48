#ifndef TESTS_FAULTS_SESSION_FILE_H
#define TESTS_FAULTS_SESSION_FILE_H

#include <stdbool.h>

#include "life.h"
#include "report.h"

struct file_campaign {
    const char *name, *calls, *action; /* as in plan.h */
    unsigned times, period;
    int code; /* whose text an error must hold */
    bool loads, kills, succeeds;
    bool usage; /* the file of use counts, which is read while a model opens */
};

/* place->saved must lie in a directory of its own. */
void session_file_campaign(const struct life_place *place, const struct file_campaign *c);

#endif
