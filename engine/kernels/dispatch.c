#include <stdio.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/tables.h"

enum { TABLES_MAX = 3 };

/* The tables that can run here, best first; NULL behind. */
static void runnable(const struct kernels *found[TABLES_MAX + 1])
{
    const struct cpu_features *cpu = cpu_features();
    size_t n = 0;
#if defined(__x86_64__)
    if (cpu->avx512)
        found[n++] = &kernels_table_avx512;
    if (cpu->avx2)
        found[n++] = &kernels_table_avx2;
#elif defined(__aarch64__)
    if (cpu->neon && cpu->dotprod)
        found[n++] = &kernels_table_neon_dotprod;
    if (cpu->neon)
        found[n++] = &kernels_table_neon;
#else
    (void)cpu;
#endif
    found[n++] = &kernels_table_reference;
    found[n] = NULL;
}

const struct kernels *kernels_reference(void)
{
    return &kernels_table_reference;
}

const struct kernels *kernels_find(const char *isa)
{
    const struct kernels *found[TABLES_MAX + 1];
    runnable(found);
    if (strcmp(isa, "auto") == 0)
        return found[0];
    for (size_t i = 0; found[i]; i++)
        if (strcmp(isa, found[i]->isa) == 0)
            return found[i];
    return NULL;
}

hr_status kernels_choose(const char *isa, const struct kernels **out, hr_error *err)
{
    char list[128] = "";
    *out = kernels_find(isa);
    if (*out) return HR_OK;
    for (const char *const *k = kernels_available(); *k; k++) {
        const size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, " %s", *k);
    }
    return fail(err, HR_ERR_USAGE, "isa \"%s\" is unknown or cannot run on this machine; available:%s",
                isa, list);
}

const char *const *kernels_available(void)
{
    /* Every subset of the tables, so that nothing needs to be written at run time. */
#if defined(__x86_64__)
    static const char *const names[] = { "avx512", "avx2", "reference", NULL };
    static const char *const names_avx512[] = { "avx512", "reference", NULL };
    const struct cpu_features *cpu = cpu_features();
    if (cpu->avx512)
        return cpu->avx2 ? names : names_avx512;
    return cpu->avx2 ? names + 1 : names + 2;
#elif defined(__aarch64__)
    static const char *const names[] = { "neon-dotprod", "neon", "reference", NULL };
    const struct cpu_features *cpu = cpu_features();
    return !cpu->neon ? names + 2 : cpu->dotprod ? names : names + 1;
#else
    static const char *const names[] = { "reference", NULL };
    return names;
#endif
}
