#include "store/disk_probe.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "store/regular_file.h"

enum { ROUNDS = 3, SCRATCH_MOST = 256 << 20, SCRATCH_LEAST = 16 };

/* One slice of time at one depth. */
struct slice {
    const struct disk_region *regions;
    uint64_t records;   /* in all regions */
    uint64_t step, start; /* record i of the order is (start + i * step) mod records */
    uint64_t end;       /* of the order, for this slice */
    double until;
    _Atomic uint64_t next; /* of the order */
    _Atomic bool go, stop;
};

struct probe_thread {
    struct slice *slice;
    pthread_t thread;
    uint8_t *buffer;
    uint64_t bytes, physical;
    uint32_t reads;
    double seconds, ended; /* inside reads; when the last was done */
    bool accounted;
    hr_status status;
    hr_error error;
};

/* Bytes that this thread read from devices. */
static bool physical_bytes(uint64_t *out)
{
#if defined(__linux__)
    char text[512];
    const int fd = open("/proc/thread-self/io", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = '\0';
    const char *at = strstr(text, "\nread_bytes:");
    unsigned long long value;
    if (at == NULL || sscanf(at, "\nread_bytes: %20llu", &value) != 1) return false;
    *out = value;
    return true;
#else
    (void)out;
    return false;
#endif
}

static const struct disk_region *region_of(const struct slice *s, uint64_t *record)
{
    const struct disk_region *r = s->regions;
    while (*record >= r->records) *record -= r++->records;
    return r;
}

static hr_status read_one(struct probe_thread *t, uint64_t order)
{
    const struct slice *s = t->slice;
    uint64_t record = (s->start + order % s->records * s->step) % s->records, retries = 0;
    const struct disk_region *r = region_of(s, &record);
    const uint64_t offset = r->first + record * r->record_bytes;
#if defined(POSIX_FADV_DONTNEED)
    if (!r->file->direct)
        (void)posix_fadvise(r->file->fd, (off_t)offset, (off_t)r->record_bytes, POSIX_FADV_DONTNEED);
#endif
    const double begin = clock_seconds();
    TRY(direct_read(r->file, offset, t->buffer, r->record_bytes, &retries, &t->error));
    t->ended = clock_seconds();
    t->seconds += t->ended - begin;
    t->bytes += r->record_bytes;
    t->reads++;
    return HR_OK;
}

static void *probe_main(void *arg)
{
    struct probe_thread *t = arg;
    struct slice *s = t->slice;
    uint64_t before = 0, after = 0;
    t->accounted = physical_bytes(&before);
    while (!atomic_load(&s->go)) sched_yield();
    /* At least one read: a slow drive must not measure as nothing. */
    do {
        const uint64_t order = atomic_fetch_add(&s->next, 1);
        if (order >= s->end) break;
        t->status = read_one(t, order);
        if (t->status != HR_OK) atomic_store(&s->stop, true);
    } while (!atomic_load(&s->stop) && clock_seconds() < s->until);
    t->accounted = t->accounted && physical_bytes(&after);
    t->physical = after - before;
    return NULL;
}

/* Small stacks: eight of the default size would show in the address space of a bounded process. */
static bool start(struct probe_thread *t)
{
    pthread_attr_t attr;
    if (pthread_attr_init(&attr) != 0) return false;
    (void)pthread_attr_setstacksize(&attr, (size_t)512 << 10);
    const bool ok = pthread_create(&t->thread, &attr, probe_main, t) == 0;
    (void)pthread_attr_destroy(&attr);
    return ok;
}

static hr_status run_slice(struct slice *s, uint32_t depth, double seconds, uint8_t *arena,
                           size_t stride, struct disk_rate *rate, struct disk_probe *out,
                           hr_error *err)
{
    struct probe_thread t[DISK_DEPTH_MOST];
    uint32_t started = 0;
    hr_status status = HR_OK;
    uint64_t bytes = 0;
    double inside = 0, ended = 0;
    atomic_store(&s->stop, false);
    atomic_store(&s->go, false);
    for (; started < depth; started++) {
        t[started] = (struct probe_thread){.slice = s, .buffer = arena + started * stride};
        if (!start(&t[started])) break;
    }
    if (started < depth) {
        atomic_store(&s->stop, true);
        status = fail(err, HR_ERR_MEMORY, "disk probe: cannot start thread %u of %u", started + 1,
                      depth);
    }
    const double begin = clock_seconds();
    s->until = begin + seconds;
    atomic_store(&s->go, true);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(t[i].thread, NULL);
        if (t[i].status != HR_OK && status == HR_OK) {
            status = t[i].status;
            if (err != NULL) *err = t[i].error;
        }
        bytes += t[i].bytes;
        inside += t[i].seconds;
        if (t[i].ended > ended) ended = t[i].ended;
        rate->reads += t[i].reads;
        out->physical += t[i].physical;
        out->accounted = out->accounted && t[i].accounted;
    }
    if (status != HR_OK || bytes == 0) return status;
    const double took = ended - begin, now = (double)bytes / took;
    /* Until the caller divides: sums of time. */
    rate->bytes_per_second += took;
    rate->seconds_per_read += inside;
    if (rate->bytes == 0 || now < rate->lowest) rate->lowest = now;
    if (now > rate->highest) rate->highest = now;
    rate->bytes += bytes;
    out->asked += bytes;
    return HR_OK;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b != 0) {
        const uint64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Steps through all records before any comes again, far from one to the next. */
static void choose_order(struct slice *s, uint64_t seed)
{
    s->start = mix(seed) % s->records;
    s->step = 1;
    if (s->records < 4) return;
    const uint64_t third = s->records / 3;
    s->step = third + mix(seed + 1) % (third > 0 ? third : 1);
    while (common_divisor(s->step, s->records) != 1) s->step++;
}

static void finish(struct disk_probe *out)
{
    double highest = 0;
    for (uint32_t i = 0; i < out->rates; i++) {
        struct disk_rate *r = &out->rate[i];
        if (r->reads == 0) continue;
        r->bytes_per_second = (double)r->bytes / r->bytes_per_second;
        r->seconds_per_read /= r->reads;
        if (r->bytes_per_second > highest) highest = r->bytes_per_second;
    }
    for (uint32_t i = out->rates; i-- > 0;)
        if (out->rate[i].reads > 0 && out->rate[i].bytes_per_second >= 0.95 * highest)
            out->best = out->rate[i].depth;
    out->cold = out->accounted && out->asked > 0 && out->physical >= out->asked / 100 * 98;
    if (!out->accounted) out->physical = 0;
}

/* A record a second time might come from the drive's own memory: each slice gets a share of what there
 * is, more for a deeper queue, and where there is little each depth has one slice. */
static hr_status run_slices(struct slice *s, double seconds, uint8_t *arena, size_t stride,
                            struct disk_probe *out, hr_error *err)
{
    uint64_t weight = 0;
    for (uint32_t i = 0; i < out->rates; i++) weight += out->rate[i].depth;
    const uint64_t affordable = s->records / (2 * weight);
    const uint32_t rounds = affordable < 1 ? 1 : affordable < ROUNDS ? (uint32_t)affordable : ROUNDS;
    const uint32_t slices = rounds * out->rates;
    weight *= rounds;
    for (uint32_t i = 0; i < slices; i++) {
        struct disk_rate *rate = &out->rate[i % out->rates];
        const uint64_t done = atomic_load(&s->next), left = s->records - done;
        const uint64_t share = left * rate->depth / weight;
        weight -= rate->depth;
        if (left == 0) break;
        s->end = done + (share > 0 ? share : 1);
        if (rate->depth > s->end - done) continue; /* too few to keep so many in flight */
        TRY(run_slice(s, rate->depth, seconds / slices, arena, stride, rate, out, err));
        if (atomic_load(&s->next) > s->end) atomic_store(&s->next, s->end);
    }
    return HR_OK;
}

hr_status disk_probe_run(const struct disk_region *regions, uint32_t count,
                         const struct disk_probe_options *o, struct mem_budget *b,
                         struct disk_probe *out, hr_error *err)
{
    struct slice s = {.regions = regions};
    const uint32_t most = o->depth_most == 0 || o->depth_most > DISK_DEPTH_MOST ? DISK_DEPTH_MOST
                                                                               : o->depth_most;
    size_t stride = 0;
    *out = (struct disk_probe){.direct = count > 0, .accounted = true};
    for (uint32_t depth = 1; depth <= most; depth *= 2) out->rate[out->rates++].depth = depth;
    for (uint32_t i = 0; i < count; i++) {
        s.records += regions[i].records;
        if (regions[i].record_bytes > stride) stride = regions[i].record_bytes;
        out->direct = out->direct && regions[i].file->direct;
    }
    if (s.records == 0) return fail(err, HR_ERR_USAGE, "disk probe: there is no record to read");
    choose_order(&s, o->seed ? o->seed : (uint64_t)(clock_seconds() * 1e9));

    uint8_t *arena = o->arena;
    size_t bytes;
    stride = round_up(stride, IO_ALIGN);
    /* mem_alloc aligns to a page from 64 KiB on. A cache has huge pages, into which some drives read
     * several times as fast. */
    if (!size_mul(stride, most, &bytes)) bytes = SIZE_MAX;
    const size_t least = bytes < (size_t)64 << 10 ? (size_t)64 << 10 : bytes;
    if (bytes < MEM_HUGE_PAGES) bytes = MEM_HUGE_PAGES;
    if (arena == NULL) arena = mem_alloc(b, bytes);
    if (arena == NULL) arena = mem_alloc(b, bytes = least);
    if (arena == NULL)
        return fail(err, HR_ERR_MEMORY, "disk probe: no memory for %u records of %zu bytes", most, stride);
    const hr_status status = run_slices(&s, o->seconds, arena, stride, out, err);
    if (o->arena == NULL) mem_free(b, arena, bytes);
    if (status == HR_OK) finish(out);
    return status;
}

hr_status disk_probe_container(const struct container *c, bool direct,
                               const struct disk_probe_options *o, struct mem_budget *b,
                               struct disk_probe *out, hr_error *err)
{
    const size_t one = sizeof(struct disk_region) + sizeof(struct direct_file);
    const size_t bytes = (size_t)c->bank_count * one;
    struct disk_region *regions = mem_alloc(b, bytes);
    if (regions == NULL) return fail(err, HR_ERR_MEMORY, "disk probe: no memory for %zu bytes", bytes);
    struct direct_file *files = (struct direct_file *)(void *)(regions + c->bank_count);
    uint32_t opened = 0;
    hr_status status = HR_OK;
    for (; opened < c->bank_count; opened++) {
        const struct bank_entry *k = &c->banks[opened];
        status = direct_file_open(c->dir_fd, k->file, direct, &files[opened], err);
        if (status != HR_OK) break;
        regions[opened] = (struct disk_region){&files[opened], 0, k->experts, k->record.bytes};
    }
    if (status == HR_OK) status = disk_probe_run(regions, c->bank_count, o, b, out, err);
    while (opened-- > 0) direct_file_close(&files[opened]);
    mem_free(b, regions, bytes);
    return status;
}

hr_status disk_probe_file(int dir_fd, const char *name, size_t record_bytes, bool direct,
                          const struct disk_probe_options *o, struct mem_budget *b,
                          struct disk_probe *out, hr_error *err)
{
    struct direct_file file;
    TRY(direct_file_open(dir_fd, name, direct, &file, err));
    const struct disk_region region = {&file, 0, file.bytes / record_bytes, record_bytes};
    const hr_status status = disk_probe_run(&region, 1, o, b, out, err);
    direct_file_close(&file);
    return status;
}

/* Opened and unnamed at once: nothing is left behind, whatever happens. */
static hr_status scratch_open(int dir_fd, int *fd, hr_error *err)
{
    char name[64], text[128];
    *fd = -1;
    for (unsigned i = 0; i < 100 && *fd < 0; i++) {
        snprintf(name, sizeof name, "headrace-probe-%ld-%u.tmp", (long)getpid(), i);
        *fd = openat(dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (*fd < 0 && errno != EEXIST && errno != EINTR) break;
    }
    if (*fd < 0)
        return fail(err, HR_ERR_IO, "disk probe: cannot create a scratch file: %s",
                    system_error(errno, text));
    (void)unlinkat(dir_fd, name, 0);
    return HR_OK;
}

static hr_status write_record(int fd, const uint8_t *buffer, size_t bytes, uint64_t offset,
                              hr_error *err)
{
    char text[128];
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = pwrite(fd, buffer + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return fail(err, HR_ERR_IO, "disk probe: writing a scratch file: %s",
                        n < 0 ? system_error(errno, text) : "nothing was written");
        done += (size_t)n;
    }
    return HR_OK;
}

/* Random bytes, so that no drive and no file system can compress them away. */
static void fill(uint8_t *buffer, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        const uint64_t word = mix(seed + i);
        memcpy(buffer + i, &word, 8);
    }
}

static uint64_t scratch_records(int fd, size_t record_bytes)
{
    struct statvfs fs;
    uint64_t room = SCRATCH_MOST;
    if (fstatvfs(fd, &fs) == 0 && (uint64_t)fs.f_bavail * fs.f_frsize / 8 < room)
        room = (uint64_t)fs.f_bavail * fs.f_frsize / 8;
    const uint64_t n = room / record_bytes;
    return n > SCRATCH_LEAST ? n : SCRATCH_LEAST;
}

static hr_status scratch_write(struct direct_file *file, size_t record_bytes, double seconds,
                               struct mem_budget *b, uint64_t *records, hr_error *err)
{
    const uint64_t most = scratch_records(file->fd, record_bytes);
    const size_t bytes = record_bytes < ((size_t)64 << 10) ? (size_t)64 << 10 : record_bytes;
    const double until = clock_seconds() + seconds;
    uint8_t *buffer = mem_alloc(b, bytes);
    hr_status status = HR_OK;
    if (buffer == NULL) return fail(err, HR_ERR_MEMORY, "disk probe: no memory for %zu bytes", bytes);
    for (*records = 0; *records < most && status == HR_OK; ++*records) {
        if (*records >= SCRATCH_LEAST && clock_seconds() > until) break;
        fill(buffer, record_bytes, mix(*records) | 1);
        status = write_record(file->fd, buffer, record_bytes, *records * record_bytes, err);
    }
    mem_free(b, buffer, bytes);
    if (status == HR_OK && fsync(file->fd) != 0) {
        char text[128];
        status = fail(err, HR_ERR_IO, "disk probe: scratch file: %s", system_error(errno, text));
    }
    return status;
}

hr_status disk_probe_scratch(int dir_fd, size_t record_bytes, bool direct,
                             const struct disk_probe_options *o, struct mem_budget *b,
                             struct disk_probe *out, hr_error *err)
{
    int fd;
    uint64_t records = 0;
    struct direct_file file;
    TRY(scratch_open(dir_fd, &fd, err));
    hr_status status = write_record(fd, (const uint8_t[IO_ALIGN]){0}, IO_ALIGN, 0, err);
    if (status != HR_OK) {
        close(fd);
        return status;
    }
    direct_file_adopt(fd, IO_ALIGN, "scratch file", direct, &file);
    status = scratch_write(&file, record_bytes, o->seconds, b, &records, err);
    if (status == HR_OK) {
        const struct disk_region region = {&file, 0, records, record_bytes};
        status = disk_probe_run(&region, 1, o, b, out, err);
        out->fresh = true;
    }
    direct_file_close(&file);
    return status;
}
