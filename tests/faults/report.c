#include "report.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void report_begin(struct report *r, const char *name)
{
    memset(r, 0, sizeof *r);
    r->name = name;
}

void report_problem(struct report *r, uint64_t nth, const char *fmt, ...)
{
    char one[1200];
    va_list args;
    int n = snprintf(one, sizeof one, "%llu: ", (unsigned long long)nth);
    va_start(args, fmt);
    n += vsnprintf(one + n, sizeof one - (size_t)n, fmt, args);
    va_end(args);
    for (char *c = one; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < 0x20) *c = '\'';
    const size_t used = strlen(r->text);
    (void)snprintf(r->text + used, sizeof r->text - used, "%s\"%s\"", r->problems ? ", " : "", one);
    /* What does not fit is dropped, and counted all the same. */
    if (strlen(r->text) + 1 >= sizeof r->text) r->text[used] = '\0';
    r->problems++;
}

void report_end(const struct report *r)
{
    printf("{\"name\": \"%s\", \"points\": %llu, \"faults\": %llu, \"count\": %u, \"problems\": [%s]}\n",
           r->name, (unsigned long long)r->points, (unsigned long long)r->fired, r->problems, r->text);
    fflush(stdout);
}
