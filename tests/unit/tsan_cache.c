/* Lanes hammer one expert cache while reads are slow, short, interrupted and sometimes fail.
 * Meant for -fsanitize=thread; also checks every record and the accounts.
 * usage: tsan_cache CONTAINER [BATCHES [SEED]]; exit 0 when all went well. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "store/direct_io.h"
#include "store/expert_cache.h"
#include "store/record.h"

enum { LANES = 4, BATCH_MAX = 64, HELD_MAX = 3 };

static struct container *container;
static struct expert_cache *cache;
static uint32_t slots; /* of the cache */
static uint32_t batches = 200, seed = 1;
static _Atomic uint32_t broken; /* record number whose reads fail for good, 0 = none */
static _Atomic uint32_t dice_state = 12345;
static _Atomic uint32_t failures, wrong;

static uint32_t roll(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static int64_t bad_drive(int fd, void *buffer, size_t bytes, int64_t offset)
{
    uint32_t state = atomic_fetch_add(&dice_state, 7919u);
    const uint32_t dice = roll(&state) % 100;
    if (dice < 30) {
        const struct timespec pause = {.tv_nsec = (long)(roll(&state) % 400000)};
        nanosleep(&pause, NULL);
    }
    if (dice % 10 == 3) {
        errno = EINTR;
        return -1;
    }
    const uint32_t bad = atomic_load(&broken);
    if (bad != 0 && (uint64_t)offset / container->banks[0].record.bytes == bad) {
        errno = EIO;
        return -1;
    }
    const int64_t got = (int64_t)pread(fd, buffer, bytes, (off_t)offset);
    if (dice % 10 == 5 && got > IO_ALIGN) return IO_ALIGN + roll(&state) % (got - IO_ALIGN);
    return got;
}

static void check(const struct cache_lease *lease)
{
    hr_error err = {0};
    const struct bank_entry *bank = &container->banks[lease->bank];
    if (record_check(bank, lease->expert, lease->record, true, &err) == HR_OK) return;
    fprintf(stderr, "%s\n", err.detail);
    atomic_fetch_add(&wrong, 1);
}

static void one_batch(uint32_t lane, uint32_t *random)
{
    uint32_t experts[BATCH_MAX], n = 0, held = 0;
    struct cache_lease leases[HELD_MAX];
    const uint32_t bank = roll(random) % container->bank_count;
    const uint32_t all = container->banks[bank].experts, most = 1 + roll(random) % 12;
    for (uint32_t e = roll(random) % 3; e < all && n < most; e += 1 + roll(random) % 3)
        experts[n++] = e;

    cache_begin(cache, lane, bank, experts, n, NULL);
    if (roll(random) % 2) {
        const uint32_t guesses[] = {roll(random) % all, roll(random) % all, roll(random) % all};
        cache_read_ahead(cache, lane, roll(random) % container->bank_count, guesses, 3);
    }
    for (uint32_t taken = 0;; taken++) {
        bool got;
        double waited = 0;
        hr_error err = {0};
        struct cache_lease lease;
        const bool poll = roll(random) % 2;
        hr_status s = poll ? cache_next(cache, lane, false, &lease, &got, &waited, &err) : HR_OK;
        if (s == HR_OK && (!poll || !got)) {
            while (held > 0) cache_release(cache, lane, &leases[--held]);
            s = cache_next(cache, lane, true, &lease, &got, &waited, &err);
        }
        if (s != HR_OK) {
            if (s != HR_ERR_IO) {
                fprintf(stderr, "lane %u: %s\n", lane, err.detail);
                atomic_fetch_add(&wrong, 1);
            }
            atomic_fetch_add(&failures, 1);
            cache_abort(cache, lane);
            break;
        }
        if (!got) {
            if (taken != n) atomic_fetch_add(&wrong, 1);
            break;
        }
        check(&lease);
        if (held == HELD_MAX) cache_release(cache, lane, &leases[--held]);
        leases[held++] = lease;
        if (roll(random) % 40 == 0) {
            cache_abort(cache, lane);
            break;
        }
    }
    for (uint32_t i = 0; i < held; i++) check(&leases[i]);
    while (held > 0) cache_release(cache, lane, &leases[--held]);
}

static void *run_lane(void *arg)
{
    const uint32_t lane = *(const uint32_t *)arg;
    uint32_t random = seed * 977u + lane;
    for (uint32_t i = 0; i < batches; i++) {
        struct cache_stats stats;
        if (lane == 0) atomic_store(&broken, i % 8 == 5 ? 2 : 0);
        one_batch(lane, &random);
        if (lane == 1 && i % 16 == 7) expert_cache_resize(cache, roll(&random) % (slots + 1), roll(&random) % 2);
        expert_cache_stats(cache, &stats);
        if (stats.used > stats.slots) atomic_fetch_add(&wrong, 1);
    }
    return NULL;
}

static int round_of(int32_t policy, int32_t verify, uint32_t shuffle)
{
    hr_error err = {0};
    struct mem_budget budget;
    struct cache_stats stats;
    pthread_t threads[LANES];
    uint32_t numbers[LANES];
    const struct cache_options options = {
        .slots = slots, .lanes = LANES, .transient = 2, .ahead = 4, .io_threads = 3, .working_set = 16,
        .policy = policy, .verify = verify, .direct = true, .shuffle_seed = shuffle,
    };
    mem_budget_init(&budget, expert_cache_cost(container, &options));
    if (expert_cache_create(container, &options, &budget, &cache, &err) != HR_OK) {
        fprintf(stderr, "%s\n", err.detail);
        return 1;
    }
    for (uint32_t i = 0; i < LANES; i++) {
        numbers[i] = i;
        if (pthread_create(&threads[i], NULL, run_lane, &numbers[i]) != 0) return 1;
    }
    for (uint32_t i = 0; i < LANES; i++) pthread_join(threads[i], NULL);
    expert_cache_stats(cache, &stats);
    printf("slots %u policy %d: %llu hits, %llu reads, %llu retries, %llu evictions, %u failures\n",
           slots, policy, (unsigned long long)stats.hits, (unsigned long long)stats.reads,
           (unsigned long long)stats.retries, (unsigned long long)stats.evictions,
           atomic_load(&failures));
    expert_cache_free(cache);
    return stats.leases != 0 || atomic_load(&budget.used) != 0;
}

int main(int argc, char **argv)
{
    static const uint32_t sizes[] = {0, 1, 5, 17, 1000};
    hr_error err = {0};
    int bad = 0;

    if (argc < 2) return 2;
    if (argc > 2) batches = (uint32_t)strtoul(argv[2], NULL, 10);
    if (argc > 3) seed = (uint32_t)strtoul(argv[3], NULL, 10);
    if (container_open(argv[1], NULL, &container, &err) != HR_OK || container->bank_count == 0) {
        fprintf(stderr, "%s\n", err.detail);
        return 1;
    }
    direct_io_set_pread(bad_drive);
    for (uint32_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        slots = sizes[i];
        bad |= round_of(HR_CACHE_LFU, HR_VERIFY_ALWAYS, 0);
        bad |= round_of(HR_CACHE_LRU, HR_VERIFY_FIRST, seed + i);
    }
    direct_io_set_pread(NULL);
    container_close(container);
    return bad || atomic_load(&wrong) != 0 || atomic_load(&failures) == 0;
}
