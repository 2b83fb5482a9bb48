/* libFuzzer target: a whole container whose manifest, records, trunk or session file is hostile,
 * opened, evaluated for a few tokens and saved again. Checksums are fixed up, so that mutations
 * get past them. Run: fuzz_container CORPUS --container=DIR [--work=DIR]. */
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/sha256.h"
#include "headrace.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed);

struct file {
    char name[128];
    uint8_t *data;
    size_t size;
};

static struct file files[64];
static size_t file_count;
static char work[256];
static struct file *manifest;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void store(const char *name, const void *data, size_t size)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", work, name);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size) die(path);
    close(fd);
}

static void store_sums(const uint8_t *text, size_t size)
{
    hr_sha256 h;
    uint8_t digest[32];
    char hex[65], line[128];
    hr_sha256_init(&h);
    hr_sha256_update(&h, text, size);
    hr_sha256_final(&h, digest);
    sha256_hex(digest, hex);
    const int n = snprintf(line, sizeof line, "%s  manifest.json\n", hex);
    store("manifest.sha256", line, (size_t)n);
}

static void read_files(const char *dir)
{
    DIR *d = opendir(dir);
    if (!d) die(dir);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char path[512];
        struct stat info;
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (stat(path, &info) != 0 || !S_ISREG(info.st_mode) || file_count == 64) continue;
        struct file *f = &files[file_count++];
        snprintf(f->name, sizeof f->name, "%s", e->d_name);
        f->size = (size_t)info.st_size;
        f->data = malloc(f->size + 1);
        const int fd = open(path, O_RDONLY);
        if (fd < 0 || read(fd, f->data, f->size) != (ssize_t)f->size) die(path);
        close(fd);
        f->data[f->size] = 0;
        if (strcmp(f->name, "manifest.json") == 0) manifest = f;
    }
    closedir(d);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const char *dir = NULL, *base = "/dev/shm";
    for (int i = 1; i < *argc; i++) {
        if (strncmp((*argv)[i], "--container=", 12) == 0) dir = (*argv)[i] + 12;
        if (strncmp((*argv)[i], "--work=", 7) == 0) base = (*argv)[i] + 7;
    }
    if (!dir) {
        fprintf(stderr, "--container=DIR is needed\n");
        exit(1);
    }
    snprintf(work, sizeof work, "%s/headrace-fuzz-%d", base, (int)getpid());
    if (mkdir(work, 0700) != 0) die(work);
    read_files(dir);
    if (!manifest) die("manifest.json");
    for (size_t i = 0; i < file_count; i++) store(files[i].name, files[i].data, files[i].size);
    return 0;
}

static const struct file *find(const char *prefix)
{
    for (size_t i = 0; i < file_count; i++)
        if (strncmp(files[i].name, prefix, strlen(prefix)) == 0) return &files[i];
    return NULL;
}

/* Replaces the decimal number `from` in the manifest by `to` of any length. */
static void replace_number(uint32_t from, uint32_t to, uint8_t **text, size_t *size)
{
    char a[16], b[16];
    const size_t na = (size_t)snprintf(a, sizeof a, "%u", from);
    const size_t nb = (size_t)snprintf(b, sizeof b, "%u", to);
    for (size_t i = 0; i + na < *size; i++) {
        const uint8_t *p = *text + i;
        if (memcmp(p, a, na) != 0 || (p[na] >= '0' && p[na] <= '9')) continue;
        if (i > 0 && p[-1] >= '0' && p[-1] <= '9') continue;
        uint8_t *out = malloc(*size + nb + 1);
        memcpy(out, *text, i);
        memcpy(out + i, b, nb);
        memcpy(out + i + nb, p + na, *size - i - na);
        free(*text);
        *text = out;
        *size = *size - na + nb;
        return;
    }
}

/* Overwrites pieces of a file: (offset u16, length u8, bytes)... */
static uint8_t *patched(const struct file *f, size_t limit, const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(f->size);
    memcpy(copy, f->data, f->size);
    while (size >= 4) {
        const size_t at = (size_t)(data[0] | data[1] << 8) % limit;
        size_t n = (size_t)data[2] % 16 + 1;
        data += 3;
        size -= 3;
        if (n > size) n = size;
        if (n > limit - at) n = limit - at;
        memcpy(copy + at, data, n);
        data += n;
        size -= n;
    }
    return copy;
}

static void use(const char *session_file)
{
    hr_model_params params;
    hr_model *model = NULL;
    hr_session *session = NULL;
    hr_error err = {0};
    hr_plan_result plan = {.size = sizeof plan};
    const int32_t ids[] = {1, 2, 3, 4, 5};
    char path[512];
    hr_model_params_init(&params);
    params.ram = 64 << 20;
    params.threads = 1;
    params.io_threads = 1;
    params.ctx = 8;
    hr_plan(work, &params, &plan, &err);
    if (hr_model_open(work, &params, &model, &err) != HR_OK) {
        if (!memchr(err.detail, 0, sizeof err.detail) || !err.detail[0]) abort();
        return;
    }
    if (hr_session_create(model, &session, &err) == HR_OK) {
        if (session_file) {
            snprintf(path, sizeof path, "%s/%s", work, session_file);
            hr_session_load(session, path, &err);
        }
        hr_eval(session, ids, 5, HR_LOGITS_LAST, NULL, &err);
        snprintf(path, sizeof path, "%s/saved.session", work);
        hr_session_save(session, path, &err);
    }
    hr_stats stats = {.size = sizeof stats};
    if (hr_get_stats(model, &stats, &err) == HR_OK && stats.leases != 0) abort();
    hr_session_free(session);
    hr_model_close(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    const uint8_t mode = data[0];
    data++;
    size--;
    if (mode == 'r' || mode == 't') {
        /* One record or the first trunk chunk, with its checksums made to agree. */
        const struct file *f = find(mode == 'r' ? "experts-" : "trunk.bin");
        const size_t unit = mode == 'r' ? 4096 : f->size < 1 << 20 ? f->size : 1 << 20;
        uint8_t *copy = patched(f, unit < 65536 ? unit : 65536, data, size);
        uint8_t *text = malloc(manifest->size + 1);
        size_t text_size = manifest->size;
        memcpy(text, manifest->data, text_size + 1);
        if (mode == 't') {
            replace_number(crc32c(0, f->data, unit), crc32c(0, copy, unit), &text, &text_size);
        } else {
            uint64_t record = 0;
            memcpy(&record, f->data + 24, 8);
            uint32_t old = 0, zero = 0;
            memcpy(&old, f->data + 60, 4);
            memcpy(copy + 60, &zero, 4);
            const uint32_t crc = crc32c(0, copy, (size_t)record);
            memcpy(copy + 60, &crc, 4);
            replace_number(old, crc, &text, &text_size);
        }
        store(f->name, copy, f->size);
        store("manifest.json", text, text_size);
        store_sums(text, text_size);
        use(NULL);
        store(f->name, f->data, f->size);
        free(copy);
        free(text);
    } else if (mode == 's') {
        uint8_t *copy = malloc(size + 128);
        memcpy(copy, data, size);
        if (size >= 128) {
            memset(copy + 124, 0, 4);
            const uint32_t crc = crc32c(0, copy, 128);
            memcpy(copy + 124, &crc, 4);
        }
        store("manifest.json", manifest->data, manifest->size);
        store_sums(manifest->data, manifest->size);
        store("hostile.session", copy, size);
        use("hostile.session");
        free(copy);
    } else {
        store("manifest.json", data, size);
        store_sums(data, size);
        use(NULL);
    }
    return 0;
}

/* Numbers are where a manifest lies: half of the mutations replace one by an awkward value. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    static const char *const awkward[] = {"0",          "1",          "-1",    "2",
                                          "255",        "65536",      "4096",  "1048576",
                                          "2147483647", "4294967295", "1e300", "9223372036854775807",
                                          "3",          "4095",       "\"0x1p-1074\"", "null"};
    if (size < 2 || data[0] != 'm' || seed % 2 == 0) return LLVMFuzzerMutate(data, size, max);
    size_t starts[4096], count = 0;
    for (size_t i = 1; i < size && count < 4096; i++)
        if (data[i] >= '0' && data[i] <= '9' && !(data[i - 1] >= '0' && data[i - 1] <= '9'))
            starts[count++] = i;
    if (count == 0) return LLVMFuzzerMutate(data, size, max);
    const size_t at = starts[(seed >> 1) % count];
    size_t end = at;
    while (end < size && data[end] >= '0' && data[end] <= '9') end++;
    const char *with = awkward[(seed >> 13) % (sizeof awkward / sizeof *awkward)];
    const size_t n = strlen(with);
    if (size - (end - at) + n > max) return LLVMFuzzerMutate(data, size, max);
    memmove(data + at + n, data + end, size - end);
    memcpy(data + at, with, n);
    return size - (end - at) + n;
}
