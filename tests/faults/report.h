/* Findings of a campaign, printed as one line of JSON. */
#ifndef TESTS_FAULTS_REPORT_H
#define TESTS_FAULTS_REPORT_H

#include <stdint.h>

struct report {
    const char *name;
    uint64_t points, fired, poisoned;
    unsigned problems;
    char text[16384];
};

void report_begin(struct report *r, const char *name);
void report_problem(struct report *r, uint64_t nth, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void report_end(const struct report *r);

#endif
