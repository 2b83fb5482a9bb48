/* Reads every byte of a container and names every fault in it. */
#include "store/container.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/sha256.h"
#include "quant/finite.h"
#include "store/digests.h"
#include "store/manifest.h"
#include "store/record.h"
#include "store/direct_io.h"
#include "store/regular_file.h"
#include "store/row_table.h"

enum { BLOCK = TRUNK_CHUNK };

struct verify {
    hr_verify_fn report;
    void *user;
    struct drive_dir drives[DRIVES_MOST]; /* the container's own directory first */
    uint32_t drive_count, drive;          /* drive: whose file is being checked */
    struct container *c; /* NULL when the manifest cannot be understood */
    struct digest_list list;
    uint8_t *block;
    uint64_t done, total, faults;
    bool stopped;
    char first[1000];
    hr_error cause; /* first time that the drive or the memory failed, which is no fault of a file */
};

/* A file being read: its checks see every block once, in order. */
struct stream {
    struct verify *v;
    const char *name;
    int fd;
    uint64_t at, bytes;
    hr_sha256 hash;
    bool broken; /* a block could not be read */
};

static void tell(struct verify *v, int32_t fault, const char *text)
{
    if (v->report != NULL && !v->stopped &&
        v->report(v->user, fault, text, v->done, v->total) != 0)
        v->stopped = true;
}

static void fault(struct verify *v, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void fault(struct verify *v, const char *fmt, ...)
{
    char text[1000];
    size_t n = 0;
    va_list args;
    if (v->drive > 0) /* half at most: the fault itself must be seen */
        n = (size_t)snprintf(text, sizeof text, "%.500s/", v->drives[v->drive].path);
    va_start(args, fmt);
    vsnprintf(text + n, sizeof text - n, fmt, args);
    va_end(args);
    if (v->faults++ == 0) snprintf(v->first, sizeof v->first, "%s", text);
    tell(v, 1, text);
}

/* A drive that fails is told like a fault, for the file is not proven; without memory nothing is. */
static void failed(struct verify *v, const hr_error *err)
{
    const bool memory = err->code == HR_ERR_MEMORY;
    if ((memory || err->code == HR_ERR_IO) && v->cause.code != HR_ERR_MEMORY &&
        (memory || v->cause.code == HR_OK))
        v->cause = *err;
    if (memory)
        v->stopped = true;
    else
        fault(v, "%s", err->detail);
}

/* The next n bytes (at most BLOCK) into v->block; false at a fault or when asked to stop. */
static bool next_block(struct stream *s, size_t n)
{
    struct verify *v = s->v;
    hr_error err = {0};
    if (s->broken || v->stopped) return false;
    if (file_read_exact(s->fd, s->name, s->at, v->block, n, &err) != HR_OK) {
        failed(v, &err);
        s->broken = true;
        return false;
    }
#if defined(POSIX_FADV_DONTNEED)
    (void)posix_fadvise(s->fd, (off_t)s->at, (off_t)n, POSIX_FADV_DONTNEED);
#endif
    hr_sha256_update(&s->hash, v->block, n);
    s->at += n;
    v->done += n;
    tell(v, 0, s->name);
    return true;
}

static size_t at_most(uint64_t n)
{
    return n < BLOCK ? (size_t)n : BLOCK;
}

/* Offset of the first byte that is not zero in [from, to) of a block that begins at `start`. */
static bool find_nonzero(const uint8_t *block, uint64_t start, size_t n, uint64_t from, uint64_t to,
                         uint64_t *where)
{
    const uint64_t low = from > start ? from : start, end = start + n;
    for (uint64_t i = low; i < to && i < end; i++) {
        if (block[i - start] == 0) continue;
        *where = i;
        return true;
    }
    return false;
}

static void tensors_in(const struct container *c, uint64_t from, uint64_t to, char *text, size_t n)
{
    size_t used = 0, more = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < c->tensor_count; i++) {
        const struct tensor_entry *t = &c->tensors[i];
        if (t->offset >= to || t->offset + t->bytes <= from) continue;
        const size_t need = strlen(t->name) + 2;
        if (used + need + 24 > n) {
            more++;
            continue;
        }
        used += (size_t)snprintf(text + used, n - used, "%s%s", used ? ", " : "", t->name);
    }
    if (more > 0) snprintf(text + used, n - used, " and %zu more", more);
    if (used == 0) snprintf(text, n, "no tensor, only padding");
}

static bool in_tensor(const struct container *c, uint64_t at)
{
    for (uint32_t i = 0; i < c->tensor_count; i++)
        if (at - c->tensors[i].offset < c->tensors[i].bytes) return true;
    return false;
}

/* Bytes between tensors must be zero. Walks from gap to gap: tensors are sorted by name, so the
 * next boundary is searched. */
static void check_trunk_gaps(struct verify *v, uint64_t start, size_t n)
{
    const struct container *c = v->c;
    uint64_t at = start, where;
    while (at < start + n) {
        uint64_t until = start + n;
        const bool inside = in_tensor(c, at);
        for (uint32_t i = 0; i < c->tensor_count; i++) {
            const struct tensor_entry *t = &c->tensors[i];
            const uint64_t edge = inside ? t->offset + t->bytes : t->offset;
            if (edge > at && edge < until) until = edge;
        }
        if (!inside && find_nonzero(v->block, start, n, at, until, &where))
            fault(v, TRUNK_NAME ": byte %llu lies between tensors and is not zero",
                  (unsigned long long)where);
        at = until;
    }
}

/* Adds the numbers of one tensor that are not finite, in a block that begins at `start`. */
static void scan_tensor(const struct verify *v, const struct tensor_entry *t, uint64_t start, size_t n,
                        struct unfit *found)
{
    const uint64_t stride = t->bytes / t->count;
    for (uint64_t i = 0; i < t->count; i++) {
        const uint64_t at = t->offset + i * stride, before = found->count;
        const uint64_t from = at > start ? at : start;
        const uint64_t to = at + stride < start + n ? at + stride : start + n;
        if (from >= to) continue;
        finite_scan(t->codec, t->rows, t->cols, from - at, v->block + (from - start),
                    (size_t)(to - from), found);
        if (before == 0 && found->count > 0) found->first += i * stride;
    }
}

static void scan_trunk(const struct verify *v, uint64_t start, size_t n, struct unfit *found)
{
    const struct container *c = v->c;
    for (uint32_t i = 0; i < c->tensor_count; i++) {
        const struct tensor_entry *t = &c->tensors[i];
        if (t->offset < start + n && t->offset + t->bytes > start)
            scan_tensor(v, t, start, n, &found[i]);
    }
}

static void tell_unfit(struct verify *v, const struct unfit *found)
{
    for (uint32_t i = 0; i < v->c->tensor_count; i++) {
        const struct tensor_entry *t = &v->c->tensors[i];
        if (found[i].count == 0) continue;
        fault(v, TRUNK_NAME ": tensor \"%s\": %llu numbers that must be finite are not, the first is a "
              "%s at byte %llu of the file", t->name, (unsigned long long)found[i].count,
              finite_noun(t->codec), (unsigned long long)(t->offset + found[i].first));
    }
}

static void check_trunk(struct stream *s, struct unfit *unfit)
{
    struct verify *v = s->v;
    const struct container *c = v->c;
    char names[500];
    for (uint32_t i = 0; i < c->trunk_chunks; i++) {
        const uint64_t start = s->at;
        const size_t n = at_most(c->trunk_bytes - start);
        if (start + n > s->bytes || !next_block(s, n)) break;
        const uint32_t crc = crc32c(0, v->block, n);
        if (crc != c->trunk_crc[i]) {
            tensors_in(c, start, start + n, names, sizeof names);
            fault(v, TRUNK_NAME ": chunk %u (bytes %llu to %llu): its CRC32C is 0x%08x, the "
                  "manifest says 0x%08x; it holds %s", i, (unsigned long long)start,
                  (unsigned long long)(start + n), crc, c->trunk_crc[i], names);
        }
        check_trunk_gaps(v, start, n);
        if (crc == c->trunk_crc[i]) scan_trunk(v, start, n, unfit); /* else it is damaged anyway */
    }
    tell_unfit(v, unfit);
}

static void check_trunk_file(struct stream *s)
{
    const size_t bytes = s->v->c->tensor_count * sizeof(struct unfit);
    struct unfit *unfit = bytes > 0 ? mem_alloc(NULL, bytes) : NULL;
    hr_error err = {0};
    if (bytes > 0 && unfit == NULL) {
        fail(&err, HR_ERR_MEMORY, "no memory to verify");
        failed(s->v, &err);
        return;
    }
    if (bytes > 0) memset(unfit, 0, bytes);
    check_trunk(s, unfit);
    mem_free(NULL, unfit, bytes);
}

struct record_check {
    uint32_t crc;
    bool padded; /* a fault in the padding was reported */
    struct unfit part[RECORD_PARTS];
};

static void check_record_block(struct verify *v, const struct bank_entry *k, uint32_t expert,
                               uint64_t start, size_t n, struct record_check *r)
{
    size_t gate, down, skip = 0;
    uint64_t where;
    if (start == 0) {
        hr_error err = {0};
        if (record_check_identity(k, expert, v->block, &err) != HR_OK) failed(v, &err);
        r->crc = record_crc_start(v->block);
        skip = RECORD_HEADER;
    }
    r->crc = crc32c(r->crc, v->block + skip, n - skip);
    record_scan(k, start, v->block, n, r->part);
    if (r->padded || !codec_matrix_bytes(k->codec, k->inner, k->hidden, &gate) ||
        !codec_matrix_bytes(k->codec, k->hidden, k->inner, &down))
        return;
    const uint64_t inner = (uint64_t)k->inner * sizeof(float), hidden = (uint64_t)k->hidden * sizeof(float);
    const uint64_t end = k->record.bias ? k->record.bias : k->record.bytes;
    const uint64_t up_bias = k->record.bias + round_up(inner, 64), down_bias = up_bias + round_up(inner, 64);
    const uint64_t gaps[7][2] = {
        {RECORD_HEADER, k->record.gate},
        {k->record.gate + gate, k->record.up},
        {k->record.up + gate, k->record.down},
        {k->record.down + down, end},
        {k->record.bias + inner, up_bias},
        {up_bias + inner, down_bias},
        {down_bias + hidden, k->record.bytes},
    };
    for (int g = 0; g < (k->record.bias ? 7 : 4) && !r->padded; g++) {
        if (!find_nonzero(v->block, start, n, gaps[g][0], gaps[g][1], &where)) continue;
        fault(v, "%s: layer %u expert %u: byte %llu of the file is padding and not zero", k->file,
              k->layer, expert, (unsigned long long)((uint64_t)expert * k->record.bytes + where));
        r->padded = true;
    }
}

static void check_bank(struct stream *s, const struct bank_entry *k)
{
    struct verify *v = s->v;
    const uint64_t length = k->record.bytes;
    for (uint32_t e = 0; e < k->experts; e++) {
        struct record_check r = {0};
        if (s->bytes - s->at < length) {
            fault(v, "%s: layer %u expert %u (record at byte %llu) is cut or missing, and all "
                  "behind it", k->file, k->layer, e, (unsigned long long)(e * length));
            return;
        }
        for (uint64_t at = 0; at < length;) {
            const size_t n = at_most(length - at);
            if (!next_block(s, n)) return;
            check_record_block(v, k, e, at, n, &r);
            at += n;
        }
        hr_error err = {0};
        if (record_check_crc(k, e, r.crc, &err) != HR_OK || /* damaged: what it holds says nothing */
            record_check_finite(k, e, r.part, &err) != HR_OK)
            failed(v, &err);
    }
}

/* A page of rows that begins at byte `offset`; what lies between the rows and its number is zero. */
static void check_page(struct verify *v, const uint8_t *page, uint64_t offset)
{
    const struct ngram_entry *n = &v->c->ngram;
    const uint64_t per_page = ROW_PAGE_PAYLOAD / n->row_bytes;
    const uint64_t number = offset / ROW_PAGE, first = number * per_page;
    const uint64_t rows = n->rows - first < per_page ? n->rows - first : per_page;
    const uint64_t used = rows * n->row_bytes;
    struct unfit unfit = {0, 0};
    uint64_t where;
    if (!row_page_valid(page, number)) {
        fault(v, NGRAM_NAME ": page %llu (byte %llu, rows %llu to %llu) is damaged or out of place",
              (unsigned long long)number, (unsigned long long)offset, (unsigned long long)first,
              (unsigned long long)(first + rows));
        return;
    }
    if (find_nonzero(page, 0, ROW_PAGE, used, ROW_PAGE_PAYLOAD, &where))
        fault(v, NGRAM_NAME ": byte %llu is padding and not zero",
              (unsigned long long)(offset + where));
    finite_scan(n->row_bytes == 2 * n->dim ? CODEC_BF16 : CODEC_F32, rows, n->dim, 0, page,
                (size_t)used, &unfit);
    if (unfit.count > 0)
        fault(v, NGRAM_NAME ": page %llu: %llu numbers that must be finite are not, the first is a "
              "weight at byte %llu of the file", (unsigned long long)number,
              (unsigned long long)unfit.count, (unsigned long long)(offset + unfit.first));
}

static void check_ngram(struct stream *s)
{
    struct verify *v = s->v;
    const uint64_t bytes = v->c->ngram.bytes;
    while (s->at < bytes && s->at < s->bytes) {
        const uint64_t start = s->at, end = bytes < s->bytes ? bytes : s->bytes;
        const size_t count = at_most(end - start);
        if (!next_block(s, count)) return;
        for (size_t at = 0; at + ROW_PAGE <= count; at += ROW_PAGE)
            check_page(v, v->block + at, start + at);
    }
}

static const struct bank_entry *bank_of(const struct container *c, const char *name)
{
    for (uint32_t i = 0; i < c->bank_count; i++)
        if (strcmp(c->banks[i].file, name) == 0) return &c->banks[i];
    return NULL;
}

/* The length the manifest gives a file; false when it does not know the name. */
static bool expected_bytes(const struct container *c, const char *name, uint64_t *bytes)
{
    const struct bank_entry *k = bank_of(c, name);
    if (k != NULL)
        *bytes = bank_bytes(k);
    else if (strcmp(name, TRUNK_NAME) == 0)
        *bytes = c->trunk_bytes;
    else if (c->has_tokenizer && strcmp(name, TOKENIZER_NAME) == 0)
        *bytes = c->tokenizer_bytes;
    else if (c->ngram.rows > 0 && strcmp(name, NGRAM_NAME) == 0)
        *bytes = c->ngram.bytes;
    else if (c->codebooks_bytes > 0 && strcmp(name, CODEBOOKS_NAME) == 0)
        *bytes = c->codebooks_bytes;
    else
        return false;
    return true;
}

/* Only banks may lie on other drives. Without a manifest the name tells. */
static bool is_bank(const struct verify *v, const char *name)
{
    return v->c != NULL ? bank_of(v->c, name) != NULL : strncmp(name, "experts-", 8) == 0;
}

/* Not in the container's own directory, which is no fault when another drive has it. */
static bool lies_elsewhere(const struct verify *v, const char *name)
{
    if (v->drive > 0 || !is_bank(v, name) || !file_missing_beneath(v->drives[0].fd, name)) return false;
    for (uint32_t i = 1; i < v->drive_count; i++)
        if (!file_missing_beneath(v->drives[i].fd, name)) return true;
    return false;
}

static void check_file(struct verify *v, const char *name)
{
    struct stream s = {.v = v, .name = name};
    const struct digest *d = digest_find(&v->list, name);
    hr_error err = {0};
    uint8_t digest[32];
    uint64_t expected;

    if (v->stopped || lies_elsewhere(v, name)) return;
    if (file_open_beneath(v->drives[v->drive].fd, name, &s.fd, &s.bytes, &err) != HR_OK) {
        failed(v, &err);
        return;
    }
    hr_sha256_init(&s.hash);
    if (v->c != NULL && expected_bytes(v->c, name, &expected)) {
        const struct bank_entry *k = bank_of(v->c, name);
        if (s.bytes != expected)
            fault(v, "%s: has %llu bytes, " MANIFEST_NAME " says %llu", name,
                  (unsigned long long)s.bytes, (unsigned long long)expected);
        if (k != NULL)
            check_bank(&s, k);
        else if (strcmp(name, TRUNK_NAME) == 0)
            check_trunk_file(&s);
        else if (strcmp(name, NGRAM_NAME) == 0)
            check_ngram(&s);
        else if (strcmp(name, CODEBOOKS_NAME) == 0 && codebooks_load(v->drives[0].fd, v->c, &err) != HR_OK)
            failed(v, &err);
    }
    while (s.at < s.bytes && next_block(&s, at_most(s.bytes - s.at))) {
    }
    close(s.fd);
    if (s.broken || v->stopped) return;
    hr_sha256_final(&s.hash, digest);
    if (d != NULL && memcmp(digest, d->sha256, sizeof digest) != 0) {
        char found[65], listed[65];
        sha256_hex(digest, found);
        sha256_hex(d->sha256, listed);
        fault(v, "%s: its SHA-256 is %s, " MANIFEST_LIST_NAME " says %s", name, found, listed);
    }
}

/* A file that the manifest needs and the list does not have is checked all the same. */
static void check_unlisted(struct verify *v, const char *name)
{
    if (digest_find(&v->list, name) != NULL) return;
    fault(v, MANIFEST_LIST_NAME ": does not list %s", name);
    check_file(v, name);
}

/* A bank of the drive at hand; false when that has none of the name. */
static bool check_copy(struct verify *v, const char *name)
{
    if (!is_bank(v, name) || file_missing_beneath(v->drives[v->drive].fd, name)) return false;
    check_file(v, name);
    return true;
}

/* The banks that lie on the other drives, each a whole copy. Who names a drive without any has most
 * likely named another directory. */
static void check_copies(struct verify *v)
{
    const struct container *c = v->c;
    for (v->drive = 1; v->drive < v->drive_count; v->drive++) {
        uint32_t copies = 0;
        for (size_t i = 0; i < v->list.count; i++) copies += check_copy(v, v->list.entries[i].name);
        for (uint32_t i = 0; c != NULL && i < c->bank_count; i++)
            if (digest_find(&v->list, c->banks[i].file) == NULL) copies += check_copy(v, c->banks[i].file);
        if (copies == 0 && c != NULL && c->bank_count > 0) fault(v, "experts-*.bin: none lies there");
    }
    v->drive = 0;
}

static void check_all(struct verify *v)
{
    const struct container *c = v->c;
    for (size_t i = 0; i < v->list.count; i++) {
        const char *name = v->list.entries[i].name;
        uint64_t bytes;
        if (c != NULL && strcmp(name, MANIFEST_NAME) != 0 && !expected_bytes(c, name, &bytes))
            fault(v, MANIFEST_LIST_NAME ": lists %s, which is no part of the container", name);
        check_file(v, name);
    }
    check_unlisted(v, MANIFEST_NAME);
    if (c == NULL) return;
    check_unlisted(v, TRUNK_NAME);
    for (uint32_t i = 0; i < c->bank_count; i++) check_unlisted(v, c->banks[i].file);
    if (c->has_tokenizer) check_unlisted(v, TOKENIZER_NAME);
    if (c->ngram.rows > 0) check_unlisted(v, NGRAM_NAME);
    if (c->codebooks_bytes > 0) check_unlisted(v, CODEBOOKS_NAME);
}

static void read_manifest(struct verify *v, const char *path)
{
    void *text;
    size_t bytes;
    hr_error err = {0};
    if (file_read_whole(v->drives[0].fd, MANIFEST_NAME, MANIFEST_MAX, NULL, &text, &bytes, &err) !=
        HR_OK) {
        failed(v, &err);
        return;
    }
    if (manifest_parse(text, bytes, path, NULL, &v->c, &err) != HR_OK) failed(v, &err);
    mem_free(NULL, text, bytes);
}

/* Of all copies. */
static uint64_t present_bytes(const struct verify *v, const char *name)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < (is_bank(v, name) ? v->drive_count : 1); i++) {
        int fd;
        uint64_t n;
        if (file_open_beneath(v->drives[i].fd, name, &fd, &n, NULL) != HR_OK) continue;
        close(fd);
        sum += n;
    }
    return sum;
}

static void check_container(struct verify *v, const char *path)
{
    hr_error e = {0};
    if (digest_list_read(v->drives[0].fd, NULL, &v->list, &e) != HR_OK) failed(v, &e);
    read_manifest(v, path);
    v->done = v->total = v->list.text_bytes;
    for (size_t i = 0; i < v->list.count; i++) v->total += present_bytes(v, v->list.entries[i].name);
    check_all(v);
    check_copies(v);
    container_close(v->c);
    digest_list_free(&v->list);
}

hr_status container_verify(const char *path, const char *const *drives, uint32_t count,
                           hr_verify_fn report, void *user, hr_error *err)
{
    struct verify v = {.report = report, .user = user, .drive_count = 1};
    TRY(container_dir_open(path, &v.drives[0].fd, err));
    hr_status st = drive_dirs_open(drives, count, NULL, v.drives, &v.drive_count, err);
    if (st == HR_OK && (v.block = mem_alloc(NULL, BLOCK)) == NULL)
        st = fail(err, HR_ERR_MEMORY, "no memory to verify");
    if (st == HR_OK) check_container(&v, path);
    mem_free(NULL, v.block, BLOCK);
    drive_dirs_close(v.drives, v.drive_count, NULL);
    close(v.drives[0].fd);
    if (st != HR_OK) return st;
    if (v.cause.code == HR_ERR_MEMORY) return fail(err, HR_ERR_MEMORY, "%s", v.cause.detail);
    if (v.stopped) return fail(err, HR_ERR_CANCELLED, "verification was stopped");
    if (v.cause.code == HR_ERR_IO)
        return fail(err, HR_ERR_IO, "not everything could be read: %s", v.cause.detail);
    if (v.faults == 0) return HR_OK;
    return fail(err, HR_ERR_FORMAT, "%llu fault%s found, the first: %s",
                (unsigned long long)v.faults, v.faults == 1 ? "" : "s", v.first);
}
