/* How structs that begin with their size cross the border between versions of the header. */
#ifndef API_EXCHANGE_H
#define API_EXCHANGE_H

#include "base/status.h"

/* The caller's parameters, or defaults when NULL. */
hr_status take_params(const hr_model_params *given, hr_model_params *out, hr_error *err);
/* Copies a parameter struct that may be shorter or longer over the defaults in `out`. */
hr_status take_struct(const char *name, const void *given, size_t given_size, void *out,
                      size_t out_size, hr_error *err);
/* Copies as much of an output struct as the caller's size takes, leaving its size field alone. */
hr_status give(void *to, size_t to_size, const void *from, size_t from_size, hr_error *err);

#endif
