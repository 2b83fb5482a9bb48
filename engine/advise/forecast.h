/* Tokens per second from numbers alone. */
#ifndef ADVISE_FORECAST_H
#define ADVISE_FORECAST_H

#include <stdbool.h>

#include "base/status.h"

/* What one estimate rests on; the levers are other estimates. */
struct estimate_input {
    uint32_t layers, moe_layers, experts, top_k, in_flight;
    uint64_t slots;
    double record;   /* bytes of an expert */
    double trunk, shared, state; /* bytes per token; trunk without the shared experts */
    double expert_rate, trunk_rate, memory_rate, dispatch;
    double bandwidth[4]; /* at 1, 2, 4, 8 reads in flight; 0: unknown */
    double hit_rate;
    const double *misses; /* [miss_count], or NULL: by chance from hit_rate */
    uint32_t miss_count;
    double miss_scale;    /* of each number of `misses` */
};

struct estimate {
    double seconds; /* of a token */
    double disk, compute; /* each as if alone */
    double bytes;   /* read from disk */
};

void estimate(const struct estimate_input *in, struct estimate *out);

/* The contract of hr_forecast; fills everything but the verdict. */
hr_status forecast_run(const hr_forecast_params *p, hr_forecast_result *out, hr_error *err);

/* verdict.c: verdict and reasons. */
void verdict_give(const hr_forecast_params *p, hr_forecast_result *r);

#endif
