/* The public benchmark function: argument checks. */
#include "headrace.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/cpu.h"
#include "bench/bench.h"
#include "bench/cache_size.h"

enum { SECONDS_DEFAULT = 20, ROWS_DEFAULT = 1024, COLS_DEFAULT = 2048 };

void hr_bench_params_init(hr_bench_params *params)
{
    memset(params, 0, sizeof *params);
    params->size = sizeof *params;
    snprintf(params->isa, sizeof params->isa, "auto");
}

hr_status hr_bench_kernels(const hr_bench_params *params, hr_bench_fn callback, void *user,
                           hr_error *err)
{
    hr_bench_params p;
    hr_bench_params_init(&p);
    if (params) {
        if (params->size < sizeof(size_t) || params->size > 4096)
            return fail(err, HR_ERR_USAGE,
                        "hr_bench_params.size is %zu; call hr_bench_params_init first", params->size);
        memcpy(&p, params, params->size < sizeof p ? params->size : sizeof p);
    }
    p.isa[sizeof p.isa - 1] = 0;
    const uint64_t cache = cache_size_largest("");
    struct bench_setup setup = {
        .seconds = p.seconds != 0 ? p.seconds : SECONDS_DEFAULT,
        .rows = p.rows ? p.rows : ROWS_DEFAULT,
        .cols = p.cols ? p.cols : COLS_DEFAULT,
        .cache = cache,
        .pool = p.pool ? p.pool : bench_pool_default(cache),
    };
    TRY(kernels_choose(p.isa, &setup.k, err));
    if (!(setup.seconds > 0 && setup.seconds <= BENCH_SECONDS_MOST))
        return fail(err, HR_ERR_USAGE, "seconds is %g; more than 0 and at most %d", setup.seconds,
                    BENCH_SECONDS_MOST);
    if (setup.rows > BENCH_SIZE_MOST || setup.cols > BENCH_SIZE_MOST)
        return fail(err, HR_ERR_USAGE, "a matrix [%u, %u] is too large; at most %d each", setup.rows,
                    setup.cols, BENCH_SIZE_MOST);
    if (setup.pool < BENCH_POOL_LEAST || setup.pool > SIZE_MAX / 2)
        return fail(err, HR_ERR_USAGE, "a pool of %" PRIu64 " bytes; at least %d", setup.pool,
                    BENCH_POOL_LEAST);
    const uint64_t mode = float_mode_enter();
    const hr_status st = bench_run(&setup, callback, user, err);
    float_mode_leave(mode);
    return st;
}
