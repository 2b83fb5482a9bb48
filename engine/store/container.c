#include "store/container.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/sha256.h"
#include "store/digests.h"
#include "store/manifest.h"
#include "store/direct_io.h"
#include "store/regular_file.h"

hr_status container_dir_open(const char *path, int *fd, hr_error *err)
{
    char text[128];
    struct stat st;

    do *fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (*fd < 0 && errno == EINTR);
    if (*fd < 0) {
        const int code = errno;
        if (code == ENOTDIR)
            return fail(err, HR_ERR_FORMAT, "not a directory; a container is a directory: %s",
                        path);
        return fail(err, HR_ERR_IO, "cannot open the container: %s: %s", system_error(code, text),
                    path);
    }
    const bool unfinished = fstatat(*fd, UNFINISHED_NAME, &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (unfinished || errno != ENOENT) {
        const int code = errno;
        close(*fd);
        *fd = -1;
        if (!unfinished)
            return fail(err, HR_ERR_IO, "%s/" UNFINISHED_NAME ": %s", path, system_error(code, text));
        return fail(err, HR_ERR_FORMAT, UNFINISHED_NAME ": the conversion of this container is not "
                    "finished; run the converter again to resume it: %s", path);
    }
    return HR_OK;
}

static hr_status check_digest(int dir_fd, struct mem_budget *b, const uint8_t digest[32],
                              uint64_t *list_bytes, hr_error *err)
{
    struct digest_list list;
    TRY(digest_list_read(dir_fd, b, &list, err));
    const struct digest *d = digest_find(&list, MANIFEST_NAME);
    const bool listed = d != NULL, same = listed && memcmp(d->sha256, digest, 32) == 0;
    *list_bytes = list.text_bytes;
    digest_list_free(&list);
    if (!listed)
        return fail(err, HR_ERR_FORMAT, MANIFEST_LIST_NAME ": does not list " MANIFEST_NAME);
    if (!same)
        return fail(err, HR_ERR_FORMAT, MANIFEST_NAME ": its SHA-256 is not the one in "
                    MANIFEST_LIST_NAME ": the manifest was changed or damaged");
    return HR_OK;
}

static hr_status check_file_in(int dir_fd, const char *name, uint64_t bytes, hr_error *err)
{
    int fd;
    uint64_t present;
    TRY(file_open_beneath(dir_fd, name, &fd, &present, err));
    close(fd);
    if (present != bytes)
        return fail(err, HR_ERR_FORMAT, "%s: has %llu bytes, " MANIFEST_NAME " says %llu; copy or "
                    "convert the container again", name, (unsigned long long)present,
                    (unsigned long long)bytes);
    return HR_OK;
}

static hr_status check_file(const struct container *c, const char *name, uint64_t bytes,
                            hr_error *err)
{
    return check_file_in(c->dir_fd, name, bytes, err);
}

/* A copy may be missing as long as there is one. */
static hr_status check_bank(const struct container *c, const struct bank_entry *bank, hr_error *err)
{
    uint32_t copies = 0;
    for (uint32_t i = 0; i < c->drive_count; i++) {
        if (file_missing_beneath(c->drives[i].fd, bank->file)) continue;
        const hr_status s = check_file_in(c->drives[i].fd, bank->file, bank_bytes(bank), err);
        if (s != HR_OK) return i == 0 ? s : fail_prefix(err, s, "%s", c->drives[i].path);
        copies++;
    }
    if (copies > 0) return HR_OK;
    if (c->drive_count == 1) return check_file(c, bank->file, bank_bytes(bank), err);
    return fail(err, HR_ERR_FORMAT, "%s: missing from the container and from the %u other drives given",
                bank->file, c->drive_count - 1);
}

static hr_status check_files(const struct container *c, hr_error *err)
{
    TRY(check_file(c, TRUNK_NAME, c->trunk_bytes, err));
    for (uint32_t i = 0; i < c->bank_count; i++)
        TRY(check_bank(c, &c->banks[i], err));
    if (c->has_tokenizer) TRY(check_file(c, TOKENIZER_NAME, c->tokenizer_bytes, err));
    if (c->ngram.rows > 0) TRY(check_file(c, NGRAM_NAME, c->ngram.bytes, err));
    if (c->codebooks_bytes > 0) TRY(check_file(c, CODEBOOKS_NAME, c->codebooks_bytes, err));
    return HR_OK;
}

/* The digest is checked before a byte of the text is believed. */
static hr_status read_manifest(int dir_fd, const char *path, struct mem_budget *b,
                               struct container **out, hr_error *err)
{
    void *text;
    size_t bytes;
    uint64_t list_bytes;
    uint8_t digest[32];
    hr_sha256 hash;

    TRY(file_read_whole(dir_fd, MANIFEST_NAME, MANIFEST_MAX, b, &text, &bytes, err));
    hr_sha256_init(&hash);
    hr_sha256_update(&hash, text, bytes);
    hr_sha256_final(&hash, digest);
    hr_status s = check_digest(dir_fd, b, digest, &list_bytes, err);
    if (s == HR_OK) s = manifest_parse(text, bytes, path, b, out, err);
    mem_free(b, text, bytes);
    if (s != HR_OK) return s;
    sha256_hex(digest, (*out)->sha256);
    (*out)->total_bytes += list_bytes;
    return HR_OK;
}

hr_status drive_dirs_open(const char *const *paths, uint32_t n, struct mem_budget *b,
                          struct drive_dir *out, uint32_t *count, hr_error *err)
{
    char text[128];
    if (n >= DRIVES_MOST)
        return fail(err, HR_ERR_USAGE, "%u further drives are too many; at most %d are allowed", n,
                    DRIVES_MOST - 1);
    for (uint32_t i = 0; i < n; i++) {
        struct drive_dir *d = &out[*count];
        if (paths == NULL || paths[i] == NULL)
            return fail(err, HR_ERR_USAGE, "the path of drive %u is NULL", i);
        char *name = mem_alloc(b, strlen(paths[i]) + 1);
        if (name == NULL) return fail(err, HR_ERR_MEMORY, "no memory for the path of a drive");
        strcpy(name, paths[i]);
        d->path = name;
        (*count)++;
        do d->fd = open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        while (d->fd < 0 && errno == EINTR);
        if (d->fd < 0) {
            const int code = errno;
            return fail(err, HR_ERR_IO, "cannot open the drive's directory: %s: %s",
                        system_error(code, text), paths[i]);
        }
    }
    return HR_OK;
}

void drive_dirs_close(struct drive_dir *dirs, uint32_t count, struct mem_budget *b)
{
    for (uint32_t i = 1; i < count; i++) {
        if (dirs[i].fd >= 0) close(dirs[i].fd);
        mem_free(b, (char *)(uintptr_t)dirs[i].path, strlen(dirs[i].path) + 1);
    }
}

uint64_t container_drives_cost(const struct container *c)
{
    uint64_t n = 0;
    for (uint32_t i = 1; i < c->drive_count; i++) n += mem_cost(strlen(c->drives[i].path) + 1);
    return n;
}

hr_status container_open(const char *path, struct mem_budget *b, struct container **out,
                         hr_error *err)
{
    return container_open_drives(path, NULL, 0, b, out, err);
}

hr_status container_open_drives(const char *path, const char *const *drives, uint32_t count,
                                struct mem_budget *b, struct container **out, hr_error *err)
{
    int fd;
    struct container *c;

    *out = NULL;
    TRY(container_dir_open(path, &fd, err));
    hr_status s = read_manifest(fd, path, b, &c, err);
    if (s != HR_OK) {
        close(fd);
        return s;
    }
    c->dir_fd = fd;
    c->drives[0] = (struct drive_dir){c->path, fd};
    c->drive_count = 1;
    s = drive_dirs_open(drives, count, b, c->drives, &c->drive_count, err);
    if (s == HR_OK) s = check_files(c, err);
    if (s == HR_OK) s = codebooks_load(fd, c, err);
    if (s != HR_OK) {
        container_close(c);
        return s;
    }
    *out = c;
    return HR_OK;
}

void container_close(struct container *c)
{
    if (c == NULL) return;
    drive_dirs_close(c->drives, c->drive_count, c->mem);
    if (c->dir_fd >= 0) close(c->dir_fd);
    json_free(c->manifest);
    mem_free(c->mem, c, (size_t)c->mem_bytes);
}

const struct tensor_entry *container_tensor(const struct container *c, const char *name)
{
    uint32_t low = 0, high = c->tensor_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const int order = strcmp(c->tensors[middle].name, name);
        if (order == 0) return &c->tensors[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

hr_status container_file(const struct container *c, const char *name, int *fd, uint64_t *bytes,
                         hr_error *err)
{
    return file_open_beneath(c->dir_fd, name, fd, bytes, err);
}

hr_status container_read(const struct container *c, const char *name, struct mem_budget *b,
                         void **data, size_t *bytes, hr_error *err)
{
    const bool tokenizer = strcmp(name, TOKENIZER_NAME) == 0;
    if (tokenizer && !c->has_tokenizer)
        return fail(err, HR_ERR_UNSUPPORTED, "the container has no " TOKENIZER_NAME
                    ": it takes and gives token ids only");
    TRY(file_read_whole(c->dir_fd, name, tokenizer ? c->tokenizer_bytes : INT64_MAX, b, data, bytes,
                        err));
    if (tokenizer && *bytes != c->tokenizer_bytes) {
        mem_free(b, *data, *bytes);
        *data = NULL;
        return fail(err, HR_ERR_FORMAT, TOKENIZER_NAME ": its length changed since the container "
                    "was opened");
    }
    return HR_OK;
}
