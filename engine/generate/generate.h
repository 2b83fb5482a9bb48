/* The loop behind hr_generate: prompt, then sample, report and evaluate one token after another. */
#ifndef GENERATE_GENERATE_H
#define GENERATE_GENERATE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct session;

/* The contract of hr_generate_params_init. */
void generate_params_init(hr_generate_params *p);
/* The contract of hr_generate. */
hr_status generate(struct session *s, const int32_t *ids, size_t n, const hr_generate_params *p,
                   hr_token_fn callback, void *user, hr_generation *out, hr_error *err);

#endif
