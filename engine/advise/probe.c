#include "advise/probe.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/machine.h"
#include "base/memory.h"
#include "bench/bench.h"
#include "bench/cache_size.h"
#include "bench/throughput.h"
#include "bench/weights.h"
#include "store/disk_probe.h"
#include "store/manifest.h"
#include "store/regular_file.h"

static bool holds_container(int dir_fd)
{
    struct stat st;
    return fstatat(dir_fd, MANIFEST_NAME, &st, AT_SYMLINK_NOFOLLOW) == 0;
}

/* A link to the file is followed: its owner named it, not a stranger's manifest. */
static hr_status probe_file(const char *path, const hr_probe_params *p,
                            const struct disk_probe_options *o, struct disk_probe *out,
                            hr_error *err)
{
    char text[128];
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || fstat(fd, &st) != 0) {
        const int code = errno;
        if (fd >= 0) close(fd);
        return fail(err, HR_ERR_IO, "%s: %s", path, system_error(code, text));
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return fail(err, HR_ERR_USAGE, "%s: is neither a directory nor a regular file", path);
    }
    struct direct_file file;
    direct_file_adopt(fd, (uint64_t)st.st_size, "probed file", p->direct != 0, &file);
    const struct disk_region region = {&file, 0, file.bytes / p->record_bytes,
                                       (size_t)p->record_bytes};
    const hr_status status = disk_probe_run(&region, 1, o, NULL, out, err);
    direct_file_close(&file);
    return status == HR_OK ? HR_OK : fail_prefix(err, status, "%s", path);
}

static hr_status probe_directory(const char *path, const hr_probe_params *p,
                                 const struct disk_probe_options *o, struct disk_probe *out,
                                 hr_error *err)
{
    char text[128];
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail(err, HR_ERR_IO, "%s: %s", path, system_error(errno, text));
    hr_status status;
    if (holds_container(fd)) {
        struct container *c;
        status = container_open(path, NULL, &c, err);
        if (status == HR_OK) {
            status = c->bank_count ? disk_probe_container(c, p->direct != 0, o, NULL, out, err) : HR_OK;
            container_close(c);
        }
    } else {
        status = disk_probe_scratch(fd, (size_t)p->record_bytes, p->direct != 0, o, NULL, out, err);
        if (status != HR_OK) (void)fail_prefix(err, status, "%s", path);
    }
    close(fd);
    return status;
}

static hr_status probe_disk(const char *path, const hr_probe_params *p, hr_probe_result *r,
                            hr_error *err)
{
    const struct disk_probe_options o = {.seconds = p->disk_seconds, .seed = p->seed};
    struct disk_probe d = {0};
    struct drive_facts facts;
    struct stat st;
    char text[128];
    if (stat(path, &st) != 0) return fail(err, HR_ERR_IO, "%s: %s", path, system_error(errno, text));
    TRY(S_ISDIR(st.st_mode) ? probe_directory(path, p, &o, &d, err)
                            : probe_file(path, p, &o, &d, err));
    for (uint32_t i = 0; i < d.rates; i++)
        r->disk[i] = (hr_disk_rate){d.rate[i].depth, d.rate[i].reads, d.rate[i].bytes_per_second,
                                    d.rate[i].lowest, d.rate[i].highest, d.rate[i].seconds_per_read};
    r->disk_rates = d.best ? d.rates : 0;
    r->best_depth = d.best;
    r->asked = d.asked;
    r->physical = d.physical;
    r->accounted = d.accounted;
    r->cold = d.cold;
    r->direct = d.direct;
    r->fresh = d.fresh;
    (void)drive_facts_read(path, &facts);
    r->rotational = facts.rotational;
    r->usb = facts.usb;
    r->network = facts.network;
    r->memory = facts.memory;
    memcpy(r->filesystem, facts.filesystem, sizeof r->filesystem);
    memcpy(r->device, facts.device, sizeof r->device);
    return HR_OK;
}

static enum codec codec_named(const char *name)
{
    return name[0] == '\0' ? CODEC_NONE : codec_from_name(name);
}

/* The least pool that holds the matrices; more when asked, but no more than reaches memory, and half
 * of what the machine has free. */
static uint64_t choose_pool(const hr_probe_params *p, const struct throughput_setup *s)
{
    const uint64_t enough = bench_pool_default(cache_size_largest(""));
    uint64_t least = THROUGHPUT_POOL_LEAST;
    const size_t strides[] = {
        s->expert_codec ? bench_weights_stride(s->expert_codec, s->inner, s->width) : 0,
        s->expert_codec ? bench_weights_stride(s->expert_codec, s->width, s->inner) : 0,
        s->trunk_codec ? bench_weights_stride(s->trunk_codec, s->rows, s->cols) / 3 + 1 : 0};
    struct memory_probe memory;
    memory_probe_read("", &memory);
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        if (3 * ((uint64_t)strides[i] + 64) > least) least = 3 * ((uint64_t)strides[i] + 64);
    uint64_t pool = p->pool && p->pool < enough ? p->pool : enough;
    if (pool > memory.usable / 2) pool = memory.usable / 2;
    return pool > least ? pool : least;
}

static hr_status probe_compute(const hr_probe_params *p, hr_probe_result *r, hr_error *err)
{
    struct throughput t;
    struct throughput_setup s = {.threads = p->threads,
                                 .seconds = p->compute_seconds,
                                 .expert_codec = codec_named(p->expert_codec),
                                 .fine = p->expert_activations == 22,
                                 .width = p->expert_width, .inner = p->expert_inner,
                                 .experts = p->top_k, .trunk_codec = codec_named(p->trunk_codec),
                                 .rows = p->trunk_rows, .cols = p->trunk_cols};
    const enum codec other = codec_named(p->other_codec);
    TRY(kernels_choose(p->isa, &s.k, err));
    if (s.experts > THROUGHPUT_EXPERTS_MOST) s.experts = THROUGHPUT_EXPERTS_MOST;
    if (other != CODEC_NONE) s.seconds *= 0.7;
    s.pool = choose_pool(p, &s);
    const uint64_t mode = float_mode_enter();
    hr_status status = throughput_measure(&s, NULL, &t, err);
    if (status == HR_OK) {
        r->memory_rate = t.memory;
        r->expert_rate = t.experts;
        r->expert_activations = codec_activations(s.expert_codec, s.fine);
        r->trunk_rate = t.trunk;
        r->dispatch_seconds = t.dispatch;
    }
    if (status == HR_OK && other != CODEC_NONE && s.expert_codec != CODEC_NONE) {
        s.trunk_codec = CODEC_NONE;
        s.expert_codec = other;
        s.fine = false;
        s.seconds = 0.3 * p->compute_seconds;
        s.pool = choose_pool(p, &s);
        status = throughput_measure(&s, NULL, &t, err);
        r->other_rate = t.experts;
    }
    float_mode_leave(mode);
    return status;
}

static void look_at_machine(hr_probe_result *r)
{
    struct memory_probe memory;
    struct machine_limits limits;
    memory_probe_read("", &memory);
    machine_limits_read("", &limits);
    r->physical_memory = memory.physical;
    r->available = memory.usable;
    r->cgroup_room = memory.cgroup;
    r->memlock = limits.memlock;
    r->swap_used = limits.swap_used;
    memcpy(r->huge_pages, limits.huge_pages, sizeof r->huge_pages);
}

hr_status probe_run(const char *path, const hr_probe_params *p, hr_probe_result *r, hr_error *err)
{
    look_at_machine(r);
    r->threads = p->threads;
    if (p->disk_seconds > 0) TRY(probe_disk(path, p, r, err));
    if (p->compute_seconds > 0) TRY(probe_compute(p, r, err));
    return HR_OK;
}
