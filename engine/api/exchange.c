#include "api/exchange.h"

#include <stdio.h>
#include <string.h>

hr_status take_struct(const char *name, const void *given, size_t given_size, void *out,
                      size_t out_size, hr_error *err)
{
    if (given_size < sizeof(size_t) || given_size > 4096)
        return fail(err, HR_ERR_USAGE, "%s.size is %zu; call %s_init first", name, given_size, name);
    memcpy(out, given, given_size < out_size ? given_size : out_size);
    memcpy(out, &out_size, sizeof out_size);
    return HR_OK;
}

void hr_model_params_init(hr_model_params *params)
{
    memset(params, 0, sizeof *params);
    params->size = sizeof *params;
    params->direct = 1;
    params->read_ahead = -1;
    snprintf(params->isa, sizeof params->isa, "auto");
}

hr_status take_params(const hr_model_params *given, hr_model_params *out, hr_error *err)
{
    hr_model_params_init(out);
    if (!given) return HR_OK;
    return take_struct("hr_model_params", given, given->size, out, sizeof *out, err);
}

hr_status give(void *to, size_t to_size, const void *from, size_t from_size, hr_error *err)
{
    if (to_size < sizeof(size_t) || to_size > 65536)
        return fail(err, HR_ERR_USAGE, "the size field of the result is %zu; set it to sizeof", to_size);
    const size_t n = to_size < from_size ? to_size : from_size;
    if (n > sizeof(size_t))
        memcpy((char *)to + sizeof(size_t), (const char *)from + sizeof(size_t), n - sizeof(size_t));
    return HR_OK;
}
