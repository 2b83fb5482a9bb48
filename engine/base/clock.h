#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H
double clock_seconds(void); /* monotonic */

/* Tests give another clock; NULL: the system's again. */
typedef double (*clock_fn)(void);
void clock_set(clock_fn fn);
#endif
