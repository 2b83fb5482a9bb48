/* Errors are values: every fallible function returns hr_status and takes hr_error * last. */
#ifndef BASE_STATUS_H
#define BASE_STATUS_H

#include "headrace.h"

#if defined(__MINGW32__)
#define PRINTF_LIKE(f, a) __attribute__((format(gnu_printf, f, a))) /* %zu and %llu, as built */
#elif defined(__GNUC__)
#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a)))
#else
#define PRINTF_LIKE(f, a)
#endif

/* Fills *err (if any) and returns `code`, so that callers write: return fail(err, ...). */
hr_status fail(hr_error *err, hr_status code, const char *fmt, ...) PRINTF_LIKE(3, 4);

/* Puts "prefix: " in front of a detail already there; returns err->code. */
hr_status fail_prefix(hr_error *err, hr_status code, const char *fmt, ...) PRINTF_LIKE(3, 4);

#define TRY(expr)                         \
    do {                                  \
        const hr_status try_s_ = (expr);  \
        if (try_s_ != HR_OK) return try_s_; \
    } while (0)

#endif
