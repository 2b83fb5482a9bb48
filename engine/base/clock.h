#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H
double clock_seconds(void); /* monotonic */
#endif
