#ifndef TESTS_FAULTS_SLOW_DRIVE_H
#define TESTS_FAULTS_SLOW_DRIVE_H

#include "life.h"

/* Every read takes 200 ms: prefill is cancelled at several moments and must return within one read. */
void slow_drive_campaign(const struct life_place *place);

#endif
