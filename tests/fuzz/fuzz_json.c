/* libFuzzer target: any text as a manifest, through the parser, the index and the check against the
 * model. No file is touched: this one is for speed. */
#include <stdlib.h>
#include <string.h>

#include "model/model.h"
#include "store/manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct architecture arch;
    struct container *c;
    struct mem_budget budget;
    hr_error err = {0};
    mem_budget_init(&budget, (uint64_t)64 << 20);
    const hr_status s = manifest_parse((const char *)data, size, "work", &budget, &c, &err);
    if (s == HR_OK) {
        (void)model_check(c, &arch, &err);
        container_close(c);
    } else if (!err.detail[0] || err.code != (int32_t)s) {
        abort();
    }
    if (budget.used != 0) abort();
    return 0;
}

/* Numbers are where a manifest lies: half of the mutations replace one by an awkward value. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    static const char *const awkward[] = {"0",          "1",          "-1",    "2",
                                          "255",        "65536",      "4096",  "1048576",
                                          "2147483647", "4294967295", "1e300", "9223372036854775807",
                                          "3",          "4095",       "\"0x1p-1074\"", "null"};
    if (size < 2 || seed % 2 == 0) return LLVMFuzzerMutate(data, size, max);
    size_t starts[4096], count = 0;
    for (size_t i = 1; i < size && count < 4096; i++)
        if (data[i] >= '0' && data[i] <= '9' && !(data[i - 1] >= '0' && data[i - 1] <= '9'))
            starts[count++] = i;
    if (count == 0) return LLVMFuzzerMutate(data, size, max);
    const size_t at = starts[(seed >> 1) % count];
    size_t end = at;
    while (end < size && data[end] >= '0' && data[end] <= '9') end++;
    const char *with = awkward[(seed >> 13) % (sizeof awkward / sizeof *awkward)];
    const size_t n = strlen(with);
    if (size - (end - at) + n > max) return LLVMFuzzerMutate(data, size, max);
    memmove(data + at + n, data + end, size - end);
    memcpy(data + at, with, n);
    return size - (end - at) + n;
}
