/* Where the expert cache reads from: the bank files of one or several drives. */
#include "base/clock.h"
#include "store/cache_state.h"
#include "store/disk_probe.h"
#include "store/record.h"
#include "store/regular_file.h"

/* A drive whose reads failed so often in a row is asked only for what no other has. */
enum { ERRORS_IN_A_ROW = 4, LEAST_DEPTH = 2 };
/* A drive as fast as the one chosen is asked at the latest after so many requests, a slower one later. */
enum { PATIENCE = 32 };
/* Seconds: of measuring at creation, in all; of what a drive's rate is taken from. */
#define CALIBRATION 0.25
#define RATE_WINDOW 2.0

static bool holds(const struct cache_drive *d, uint32_t bank)
{
    return d->files[bank].fd >= 0;
}

static hr_status open_bank(struct expert_cache *x, uint32_t drive, uint32_t bank, bool direct,
                           hr_error *err)
{
    const struct drive_dir *dir = &x->container->drives[drive];
    const struct bank_entry *k = &x->container->banks[bank];
    struct direct_file *f = &x->drive[drive].files[bank];
    const uint64_t want = (uint64_t)k->experts * k->record.bytes;
    if (x->container->drive_count > 1 && file_missing_beneath(dir->fd, k->file)) return HR_OK;
    hr_status s = direct_file_open(dir->fd, k->file, direct, f, err);
    if (s == HR_OK && f->bytes != want)
        s = fail(err, HR_ERR_FORMAT, "%s: has %llu bytes, %llu are expected: it changed since "
                 "the container was opened", k->file, (unsigned long long)f->bytes,
                 (unsigned long long)want);
    if (s != HR_OK) return drive == 0 ? s : fail_prefix(err, s, "%s", dir->path);
    x->drive[drive].stats.banks++;
    return HR_OK;
}

hr_status cache_open_drives(struct expert_cache *x, bool direct, hr_error *err)
{
    const struct container *c = x->container;
    for (uint32_t bank = 0; bank < c->bank_count; bank++) {
        uint32_t copies = 0;
        for (uint32_t i = 0; i < c->drive_count; i++) {
            TRY(open_bank(x, i, bank, direct, err));
            copies += holds(&x->drive[i], bank);
        }
        if (copies == 0)
            return fail(err, HR_ERR_FORMAT, "%s: was removed since the container was opened",
                        c->banks[bank].file);
    }
    return HR_OK;
}

void cache_close_drives(struct expert_cache *x)
{
    for (uint32_t i = 0; i < x->container->drive_count; i++)
        for (uint32_t bank = 0; bank < x->container->bank_count; bank++)
            direct_file_close(&x->drive[i].files[bank]);
}

/* What the drive does at several depths, with the buffers as the place to read to. A drive that cannot
 * be measured keeps all its threads: the reads that follow say what is wrong with it. */
static void calibrate(struct expert_cache *x, uint32_t drive, struct disk_region *regions,
                      const struct disk_probe_options *o)
{
    struct cache_drive *d = &x->drive[drive];
    struct disk_probe probe;
    hr_error ignored;
    uint32_t count = 0;
    for (uint32_t bank = 0; bank < x->container->bank_count; bank++) {
        const struct bank_entry *k = &x->container->banks[bank];
        if (holds(d, bank))
            regions[count++] = (struct disk_region){&d->files[bank], 0, k->experts, k->record.bytes};
    }
    if (count == 0 || disk_probe_run(regions, count, o, x->budget, &probe, &ignored) != HR_OK) return;
    if (!probe.direct || probe.best == 0) return;
    d->stats.depth = probe.best < LEAST_DEPTH ? LEAST_DEPTH : probe.best;
    reader_set_depth(x->reader, drive, d->stats.depth);
    for (uint32_t i = 0; i < probe.rates; i++)
        if (probe.rate[i].depth <= d->stats.depth && probe.rate[i].bytes_per_second > d->stats.probed)
            d->stats.probed = probe.rate[i].bytes_per_second;
    d->rate_seconds = RATE_WINDOW / 4;
    d->rate_bytes = d->stats.probed * d->rate_seconds;
}

void cache_calibrate(struct expert_cache *x, uint32_t threads)
{
    const uint32_t drives = x->container->drive_count;
    const size_t bytes = x->container->bank_count * sizeof(struct disk_region);
    const struct disk_probe_options o = {
        .seconds = CALIBRATION / drives,
        .arena = x->arena,
        .depth_most = threads < x->buffers ? threads : x->buffers,
    };
    struct disk_region *regions = mem_alloc(x->budget, bytes);
    if (regions == NULL) return;
    for (uint32_t i = 0; i < drives; i++) calibrate(x, i, regions, &o);
    mem_free(x->budget, regions, bytes);
}

/* Bytes per second that a drive gives when it is asked; unknown drives count as alike and fast. */
static double rate_of(const struct cache_drive *d)
{
    return d->rate_seconds > 0.002 ? d->rate_bytes / d->rate_seconds : 1e10;
}

static double cost_of(const struct cache_drive *d, size_t bytes)
{
    return (double)(d->queued + bytes) / rate_of(d);
}

/* The drive that will have the record first, going by what it has to read already. One that was passed
 * over long enough is asked all the same, lest one bad moment shut it out for good. */
static uint32_t choose(struct expert_cache *x, uint32_t bank, size_t bytes)
{
    const uint32_t drives = x->container->drive_count;
    struct cache_drive *best = NULL;
    for (uint32_t i = 0; i < drives; i++) {
        struct cache_drive *d = &x->drive[i];
        if (!holds(d, bank)) continue;
        const bool better = best == NULL || (best->stats.left_out && !d->stats.left_out) ||
                            (best->stats.left_out == d->stats.left_out &&
                             cost_of(d, bytes) < cost_of(best, bytes));
        if (better) best = d;
    }
    if (best == NULL) return 0;
    const double least = cost_of(best, bytes);
    for (uint32_t i = 0; i < drives; i++) {
        struct cache_drive *d = &x->drive[i];
        if (d == best || !holds(d, bank) || d->stats.left_out) continue;
        if (++d->passed_over > PATIENCE * cost_of(d, bytes) / least) best = d;
    }
    best->passed_over = 0;
    return (uint32_t)(best - x->drive);
}

static void account_begin(struct cache_drive *d, size_t bytes)
{
    if (d->pending++ == 0) d->since = clock_seconds();
    d->queued += bytes;
}

static void account_end(struct cache_drive *d, size_t bytes, bool arrived)
{
    d->queued -= bytes;
    d->pending--;
    const double now = clock_seconds(), spent = now - d->since;
    d->since = now;
    if (!arrived) return;
    d->stats.seconds += spent;
    d->stats.reads++;
    d->stats.bytes += bytes;
    d->rate_seconds += spent;
    d->rate_bytes += (double)bytes;
    if (d->rate_seconds > RATE_WINDOW) {
        d->rate_seconds /= 2;
        d->rate_bytes /= 2;
    }
}

void cache_start_read(struct expert_cache *x, uint32_t b, uint32_t bank, uint32_t expert, bool low)
{
    struct cache_buffer *f = &x->buffer[b];
    const uint32_t record = x->first[bank] + expert;
    const size_t bytes = x->container->banks[bank].record.bytes;
    f->bank = bank;
    f->expert = expert;
    f->state = BUFFER_READING;
    f->drive = (uint8_t)choose(x, bank, bytes);
    struct cache_drive *d = &x->drive[f->drive];
    f->check = x->verify == HR_VERIFY_ALWAYS ||
               (x->verify == HR_VERIFY_FIRST && !(d->verified[record / 8] >> (record % 8) & 1));
    x->buffer_of[record] = b;
    if (f->kind == BUFFER_SLOT) x->stats.used++;
    if (x->reader == NULL) { /* dry */
        f->state = BUFFER_READY;
        return;
    }
    account_begin(d, bytes);
    reader_submit(x->reader, f->drive, b, low);
}

bool cache_cancel_read(struct expert_cache *x, uint32_t b)
{
    const struct cache_buffer *f = &x->buffer[b];
    if (!reader_cancel(x->reader, f->drive, b)) return false;
    account_end(&x->drive[f->drive], x->container->banks[f->bank].record.bytes, false);
    return true;
}

/* One drive's try; how it went goes into the drive's account. */
static hr_status read_from(struct expert_cache *x, uint32_t b, uint32_t drive, bool check,
                           uint64_t *retries, hr_error *err)
{
    const struct cache_buffer *f = &x->buffer[b];
    const struct bank_entry *bank = &x->container->banks[f->bank];
    struct cache_drive *d = &x->drive[drive];
    uint8_t *record = cache_bytes_of(x, b);
    hr_status s = direct_read(&d->files[f->bank], (uint64_t)f->expert * bank->record.bytes, record,
                              bank->record.bytes, retries, err);
    const bool arrived = s == HR_OK;
    if (arrived) s = record_check(bank, f->expert, record, check, err);
    if (s != HR_OK && drive > 0) s = fail_prefix(err, s, "%s", x->container->drives[drive].path);

    pthread_mutex_lock(&x->lock);
    account_end(d, bank->record.bytes, arrived);
    if (arrived) {
        x->stats.reads++;
        x->stats.bytes_read += bank->record.bytes;
        if (f->guess) x->stats.ahead_bytes += bank->record.bytes;
    }
    if (s == HR_OK && check) {
        const uint32_t r = cache_record_of(x, f);
        d->verified[r / 8] |= (uint8_t)(1u << (r % 8));
        x->stats.verified++;
    }
    d->stats.failures += s != HR_OK;
    d->errors = arrived ? 0 : d->errors + 1;
    if (d->errors >= ERRORS_IN_A_ROW) d->stats.left_out = true;
    pthread_mutex_unlock(&x->lock);
    return s;
}

hr_status cache_fill(struct expert_cache *x, uint32_t b, uint32_t drive, hr_error *err)
{
    struct cache_buffer *f = &x->buffer[b];
    const uint32_t bank = f->bank, drives = x->container->drive_count;
    uint64_t retries = 0;
    hr_error other = {0};
    hr_status s = read_from(x, b, drive, f->check, &retries, err);
    const bool failed = s != HR_OK;
    for (uint32_t i = 0; i < drives && s != HR_OK; i++) {
        if (i == drive || !holds(&x->drive[i], bank)) continue;
        pthread_mutex_lock(&x->lock);
        account_begin(&x->drive[i], x->container->banks[bank].record.bytes);
        pthread_mutex_unlock(&x->lock);
        if (read_from(x, b, i, x->verify != HR_VERIFY_OFF, &retries, &other) == HR_OK) s = HR_OK;
    }
    pthread_mutex_lock(&x->lock);
    x->stats.retries += retries;
    x->stats.fallbacks += failed && s == HR_OK;
    pthread_mutex_unlock(&x->lock);
    return s;
}

static const char *mode_of(const struct expert_cache *x, uint32_t first, uint32_t count)
{
    uint32_t files = 0, direct = 0;
    for (uint32_t i = first; i < first + count; i++) {
        for (uint32_t bank = 0; bank < x->container->bank_count; bank++) {
            files += holds(&x->drive[i], bank);
            direct += x->drive[i].files[bank].direct;
        }
    }
    if (files == 0) return "absent";
    if (direct == 0) return "buffered";
    return direct == files ? "direct" : "mixed";
}

const char *expert_cache_io_mode(const struct expert_cache *x)
{
    return x->container->bank_count == 0 ? "buffered" : mode_of(x, 0, x->container->drive_count);
}

void expert_cache_drive(const struct expert_cache *x, uint32_t drive, struct cache_drive_stats *out)
{
    pthread_mutex_t *lock = &((struct expert_cache *)(uintptr_t)x)->lock;
    pthread_mutex_lock(lock);
    *out = x->drive[drive].stats;
    pthread_mutex_unlock(lock);
    out->path = x->container->drives[drive].path;
    out->mode = mode_of(x, drive, 1);
}
