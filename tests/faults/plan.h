/* When an injected fault strikes: shared by the shim of file calls and the one of allocations.
 *
 * A plan is a text of words, for example
 *     calls=write,fsync path=/tmp/t/ nth=3 times=1 action=errno:28
 * calls   which functions count (names of fault_call_names; "all": every one)
 * path    only files whose absolute path begins with this (file calls)
 * nth     the first counted call that is struck, from 1
 * times   how many from there on; 0: all
 * period  strikes again `period` counted calls after each first one
 * action  errno:N  the call fails with N
 *         short    a transfer brings half of what it could, at least one byte
 *         zero     a transfer brings nothing
 *         full     a write brings half, every later counted call fails with ENOSPC
 *         sleep:N  the call is made N milliseconds later
 *         jitter:N the call is made 0 to N milliseconds later
 *         kill     the process dies by SIGKILL before the call
 *         torn     half of a write, then SIGKILL
 *         power    SIGKILL; files under `path` lose half of what was written since they were
 *                  synchronised, as after a power cut (calls must hold "write") */
#ifndef TESTS_FAULTS_PLAN_H
#define TESTS_FAULTS_PLAN_H

#include <stdbool.h>
#include <stdint.h>

enum fault_call {
    CALL_READ, CALL_PREAD, CALL_WRITE, CALL_PWRITE, CALL_TRUNCATE, CALL_FSYNC, CALL_RENAME, CALL_MKDIR,
    CALL_UNLINK, CALL_OPEN, CALL_CREATE, CALL_CLOSE, CALL_STAT,
    CALL_MALLOC, CALL_MMAP, CALL_MPROTECT, CALL_THREAD,
    CALL_COUNT
};

enum fault_action {
    ACT_NONE, ACT_ERRNO, ACT_SHORT, ACT_ZERO, ACT_FULL, ACT_SLEEP, ACT_JITTER, ACT_KILL, ACT_TORN, ACT_POWER
};

struct fault {
    enum fault_action action;
    int value;  /* errno or milliseconds */
    bool first; /* the first call that is struck */
};

#define FAULT_EXPORT __attribute__((visibility("default")))

/* Starts a plan and the counts; NULL or "" ends it. 0, or -1 when the text is not understood. */
FAULT_EXPORT int fault_arm(const char *plan);
/* Calls counted and calls struck since. */
FAULT_EXPORT uint64_t fault_seen(void);
FAULT_EXPORT uint64_t fault_fired(void);

/* For the shims. */
bool fault_wanted(enum fault_call call);
bool fault_path_matches(const char *path);
struct fault fault_next(enum fault_call call);
void fault_pause(int milliseconds);
_Noreturn void fault_die(void);

#endif
