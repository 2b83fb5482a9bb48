#include "plan.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const char *const call_names[CALL_COUNT] = {
    "read", "pread", "write", "pwrite", "truncate", "fsync", "rename", "mkdir", "unlink", "open", "create",
    "close", "stat", "malloc", "mmap", "mprotect", "thread",
};

static const struct {
    const char *name;
    enum fault_action action;
} actions[] = {
    {"errno:", ACT_ERRNO}, {"short", ACT_SHORT}, {"zero", ACT_ZERO}, {"full", ACT_FULL},
    {"sleep:", ACT_SLEEP}, {"jitter:", ACT_JITTER}, {"kill", ACT_KILL}, {"torn", ACT_TORN},
    {"power", ACT_POWER},
};

static struct {
    uint32_t calls;
    char path[1024];
    uint64_t nth, times, period;
    enum fault_action action;
    int value;
} plan;

static _Atomic bool armed;
static _Atomic uint64_t seen, fired;

static bool read_calls(const char *text)
{
    while (*text) {
        const size_t n = strcspn(text, ",");
        bool known = false;
        for (int i = 0; i < CALL_COUNT; i++) {
            const bool all = n == 3 && memcmp(text, "all", 3) == 0;
            if (!all && (strlen(call_names[i]) != n || memcmp(text, call_names[i], n) != 0)) continue;
            plan.calls |= 1u << i;
            known = true;
        }
        if (!known) return false;
        text += n;
        if (*text == ',') text++;
    }
    return plan.calls != 0;
}

static bool read_action(const char *text)
{
    for (size_t i = 0; i < sizeof actions / sizeof actions[0]; i++) {
        const size_t n = strlen(actions[i].name);
        if (strncmp(text, actions[i].name, n) != 0) continue;
        plan.action = actions[i].action;
        plan.value = actions[i].name[n - 1] == ':' ? atoi(text + n) : 0;
        return actions[i].name[n - 1] == ':' || text[n] == '\0';
    }
    return false;
}

static bool read_word(const char *word)
{
    if (strncmp(word, "calls=", 6) == 0) return read_calls(word + 6);
    if (strncmp(word, "action=", 7) == 0) return read_action(word + 7);
    if (strncmp(word, "path=", 5) == 0) {
        if (strlen(word + 5) >= sizeof plan.path) return false;
        strcpy(plan.path, word + 5);
        return true;
    }
    uint64_t *number = strncmp(word, "nth=", 4) == 0       ? &plan.nth
                       : strncmp(word, "times=", 6) == 0   ? &plan.times
                       : strncmp(word, "period=", 7) == 0  ? &plan.period
                                                           : NULL;
    if (!number) return false;
    *number = strtoull(strchr(word, '=') + 1, NULL, 10);
    return true;
}

int fault_arm(const char *text)
{
    atomic_store(&armed, false);
    memset(&plan, 0, sizeof plan);
    plan.nth = plan.times = 1;
    if (!text || !*text) return 0;
    while (*text) {
        char word[sizeof plan.path];
        const size_t n = strcspn(text, " ");
        if (n >= sizeof word) return -1;
        memcpy(word, text, n);
        word[n] = '\0';
        if (n > 0 && !read_word(word)) return -1;
        text += n;
        while (*text == ' ') text++;
    }
    if (plan.calls == 0 || plan.action == ACT_NONE) return -1;
    atomic_store(&seen, 0);
    atomic_store(&fired, 0);
    atomic_store(&armed, true);
    return 0;
}

uint64_t fault_seen(void)
{
    return atomic_load(&seen);
}

uint64_t fault_fired(void)
{
    return atomic_load(&fired);
}

bool fault_wanted(enum fault_call call)
{
    return atomic_load(&armed) && (plan.calls >> call & 1) != 0;
}

bool fault_path_matches(const char *path)
{
    return strncmp(path, plan.path, strlen(plan.path)) == 0;
}

void fault_pause(int milliseconds)
{
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

/* As a crash would: nothing of the process runs afterwards. */
void fault_die(void)
{
    for (;;) (void)syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
}

struct fault fault_next(enum fault_call call)
{
    (void)call;
    const uint64_t number = atomic_fetch_add(&seen, 1) + 1;
    if (number < plan.nth) return (struct fault){ACT_NONE, 0, false};
    const uint64_t past = number - plan.nth, step = plan.period ? past % plan.period : past;
    if (plan.times != 0 && step >= plan.times) return (struct fault){ACT_NONE, 0, false};
    atomic_fetch_add(&fired, 1);
    int value = plan.value;
    if (plan.action == ACT_JITTER)
        value = (int)((number * 2654435761u >> 8) % (uint64_t)(plan.value + 1));
    return (struct fault){plan.action, value, past == 0};
}

__attribute__((constructor)) static void arm_from_environment(void)
{
    const char *text = getenv("HEADRACE_TEST_FAULT");
    if (text && fault_arm(text) != 0) {
        static const char words[] = "HEADRACE_TEST_FAULT is not a plan\n";
        (void)!write(2, words, sizeof words - 1);
        _exit(99);
    }
}
