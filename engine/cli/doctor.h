/* What doctor finds out, and how it is shown. */
#ifndef CLI_DOCTOR_H
#define CLI_DOCTOR_H

#include "cli/cli.h"

struct doctor {
    hr_plan_result plan;
    hr_probe_result probe;
    hr_forecast_result forecast;
    bool traced; /* hits are those of a recorded text, not of a table */
};

void doctor_print(const struct doctor *d);
void doctor_print_json(const struct doctor *d);

#endif
