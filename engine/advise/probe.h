/* The machine measured: hr_probe with its arguments checked. */
#ifndef ADVISE_PROBE_H
#define ADVISE_PROBE_H

#include "base/status.h"

/* `p` has no zero that stands for a default but seed. */
hr_status probe_run(const char *path, const hr_probe_params *p, hr_probe_result *out, hr_error *err);

#endif
