#include "work_container.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/sha256.h"

enum { TEXT_MAX = 1 << 20 };

struct base bases[MAX_BASES];
size_t base_count;
struct arena forever, scratch;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void write_file(const char *dir, const char *name, const void *data, size_t size)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size) die(path);
    close(fd);
}

static void read_file(struct base *b, const char *dir, const char *name)
{
    char path[512];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) return;
    if (b->file_count == MAX_FILES || strlen(name) >= sizeof b->files[0].name) die(path);
    struct file *f = &b->files[b->file_count++];
    snprintf(f->name, sizeof f->name, "%s", name);
    f->size = (size_t)info.st_size;
    f->data = malloc(f->size + 1);
    const int fd = open(path, O_RDONLY);
    if (fd < 0 || read(fd, f->data, f->size) != (ssize_t)f->size) die(path);
    close(fd);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct file *)a)->name, ((const struct file *)b)->name);
}

static void read_manifest(struct base *b)
{
    const struct file *text = base_file(b, "manifest.json");
    struct json_doc *doc;
    hr_error err;
    if (!text || json_parse((const char *)text->data, text->size, b->name, &doc, &err) != HR_OK) {
        fprintf(stderr, "%s: no manifest\n", b->name);
        exit(1);
    }
    b->manifest = tree_read(&forever, json_root(doc), NULL);
    json_free(doc);
    struct node *provenance = node_get(b->manifest, "provenance");
    if (provenance) provenance->child = NULL;
    words_add(b->manifest);
}

static void read_base(const char *dir, const char *name, const char *work)
{
    char path[320];
    struct base *b = &bases[base_count];
    if (base_count == MAX_BASES) die("too many containers");
    snprintf(path, sizeof path, "%s/%s", dir, name);
    DIR *d = opendir(path);
    if (!d) return;
    snprintf(b->name, sizeof b->name, "%s", name);
    snprintf(b->dir, sizeof b->dir, "%s/%s", work, name);
    for (struct dirent *e; (e = readdir(d)) != NULL;) read_file(b, path, e->d_name);
    closedir(d);
    if (b->file_count == 0) return;
    base_count++;
    qsort(b->files, b->file_count, sizeof *b->files, by_name);
    read_manifest(b);
    if (mkdir(b->dir, 0700) != 0) die(b->dir);
    for (size_t i = 0; i < b->file_count; i++)
        write_file(b->dir, b->files[i].name, b->files[i].data, b->files[i].size);
}

static char work_dir[256];

static void remove_work(void)
{
    for (size_t i = 0; i < base_count; i++) {
        char path[512];
        DIR *d = opendir(bases[i].dir);
        if (!d) continue;
        for (struct dirent *e; (e = readdir(d)) != NULL;) {
            snprintf(path, sizeof path, "%.300s/%.200s", bases[i].dir, e->d_name);
            (void)unlink(path);
        }
        closedir(d);
        (void)rmdir(bases[i].dir);
    }
    (void)rmdir(work_dir);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

void bases_open(int argc, char **argv)
{
    const char *dir = NULL, *work = "/dev/shm";
    char *names[MAX_BASES];
    size_t count = 0;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--containers=", 13) == 0) dir = argv[i] + 13;
        if (strncmp(argv[i], "--work=", 7) == 0) work = argv[i] + 7;
    }
    arena_init(&forever, (size_t)32 << 20);
    arena_init(&scratch, (size_t)64 << 20);
    snprintf(work_dir, sizeof work_dir, "%s/headrace-fuzz-%d", work, (int)getpid());
    if (mkdir(work_dir, 0700) != 0) die(work_dir);
    atexit(remove_work);
    DIR *d = dir ? opendir(dir) : NULL;
    if (!d) {
        fprintf(stderr, "--containers=DIR is needed: a directory of containers\n");
        exit(1);
    }
    for (struct dirent *e; (e = readdir(d)) != NULL;)
        if (e->d_name[0] != '.' && count < MAX_BASES) names[count++] = strdup(e->d_name);
    closedir(d);
    qsort(names, count, sizeof *names, by_text); /* an input's first byte means the same everywhere */
    for (size_t i = 0; i < count; i++) {
        read_base(dir, names[i], work_dir);
        free(names[i]);
    }
    if (base_count == 0) die(dir);
}

const struct file *base_file(const struct base *b, const char *name)
{
    for (size_t i = 0; i < b->file_count; i++)
        if (strcmp(b->files[i].name, name) == 0) return &b->files[i];
    return NULL;
}

struct base *base_choose(uint8_t which)
{
    struct base *b = &bases[which % base_count];
    scratch.used = 0;
    for (size_t i = 0; i < b->file_count; i++) {
        if (!b->dirty[i]) continue;
        write_file(b->dir, b->files[i].name, b->files[i].data, b->files[i].size);
        b->dirty[i] = false;
    }
    return b;
}

void work_store(struct base *b, const char *name, const void *data, size_t size)
{
    for (size_t i = 0; i < b->file_count; i++)
        if (strcmp(b->files[i].name, name) == 0) b->dirty[i] = true;
    write_file(b->dir, name, data, size);
}

bool work_manifest(struct base *b, const struct node *root)
{
    static char text[TEXT_MAX];
    const size_t n = tree_write(root, text, sizeof text);
    hr_sha256 h;
    uint8_t digest[32];
    char hex[65], line[128];
    if (n == 0) return false;
    hr_sha256_init(&h);
    hr_sha256_update(&h, text, n);
    hr_sha256_final(&h, digest);
    sha256_hex(digest, hex);
    work_store(b, "manifest.json", text, n);
    const int bytes = snprintf(line, sizeof line, "%s  manifest.json\n", hex);
    work_store(b, "manifest.sha256", line, (size_t)bytes);
    return true;
}

/* ---- use ---- */

void way_of(uint8_t bits, struct way *way)
{
    uint32_t kinds = 0;
    while (hr_isa_name(kinds)) kinds++;
    *way = (struct way){.isa = hr_isa_name((bits & 3u) % kinds),
                        .chunk = bits & 4 ? 1 : 0,
                        .io_shuffle = bits & 8 ? 7 : 0,
                        .verify = bits >> 4 & 1 ? HR_VERIFY_ALWAYS : HR_VERIFY_FIRST,
                        .generate = (bits >> 5 & 1) != 0,
                        .verify_files = (bits >> 6 & 1) != 0};
}

static void promise(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "broken promise: %s\n", what);
    abort();
}

static hr_status checked(hr_status s, const hr_error *err)
{
    if (s == HR_OK) return s;
    promise(err->code == (int32_t)s, "the error's code is the status");
    promise(s >= HR_ERR_USAGE && s <= HR_ERR_UNSUPPORTED, "a known status");
    promise(memchr(err->detail, 0, sizeof err->detail) && err->detail[0], "an error has a text");
    for (const char *p = err->detail; *p; p++)
        promise((unsigned char)*p >= 0x20 && *p != 0x7f, "an error is one line of printable text");
    return s;
}

static int32_t go_on(void *user, const hr_token *token)
{
    uint32_t *tokens = user;
    promise(token->index < 8, "max_tokens bounds a generation");
    ++*tokens;
    return 0;
}

static hr_status use_session(hr_session *session, const struct base *b, const struct way *way,
                             struct outcome *out)
{
    int32_t ids[EVAL_TOKENS];
    hr_error err = {0};
    char path[400];
    float *logits = out->vocab <= sizeof out->logits / sizeof *out->logits ? out->logits : NULL;
    for (int32_t i = 0; i < EVAL_TOKENS; i++) ids[i] = (i * 5 + 1) % (int32_t)out->vocab;
    hr_status s = checked(hr_eval(session, ids, EVAL_TOKENS, HR_LOGITS_LAST, logits, &err), &err);
    if (s != HR_OK) {
        promise(hr_eval(session, ids, 1, HR_LOGITS_NONE, NULL, &err) == HR_ERR_USAGE,
                "a failed session refuses to go on");
        hr_session_reset(session);
        promise(hr_eval(session, ids, EVAL_TOKENS, HR_LOGITS_LAST, logits, &err) == s,
                "the same fault again after a reset");
        return s;
    }
    promise(hr_session_position(session) == EVAL_TOKENS, "the position counts tokens");
    snprintf(path, sizeof path, "%s/saved.session", b->dir);
    s = checked(hr_session_save(session, path, &err), &err);
    promise(s == HR_OK, "a sound session is saved");
    if (!way->generate) return HR_OK;
    hr_generate_params p;
    hr_generation result = {.size = sizeof result};
    uint32_t tokens = 0;
    hr_generate_params_init(&p);
    p.max_tokens = 3;
    p.temperature = 0.7f;
    p.ignore_stop_ids = 1;
    s = checked(hr_generate(session, NULL, 0, &p, go_on, &tokens, &result, &err), &err);
    if (s == HR_OK) {
        s = checked(hr_session_load(session, path, &err), &err);
        promise(s == HR_OK, "a saved session is loaded");
        promise(hr_session_position(session) == EVAL_TOKENS, "a loaded session has its position");
    }
    return HR_OK;
}

void work_run(struct base *b, const struct way *way, struct outcome *out)
{
    hr_model_params params;
    hr_model *model = NULL;
    hr_session *session = NULL;
    hr_error err = {0};
    hr_plan_result plan = {.size = sizeof plan};
    hr_model_info info = {.size = sizeof info};
    hr_stats stats = {.size = sizeof stats};
    out->eval = HR_ERR_USAGE;
    out->vocab = 0;
    out->chunk = way->chunk;
    hr_model_params_init(&params);
    params.ram = 48 << 20;
    params.threads = 1;
    params.io_threads = 1;
    params.ctx = 16;
    params.chunk = way->chunk;
    params.verify = way->verify;
    params.shuffle_reads = way->io_shuffle;
    snprintf(params.isa, sizeof params.isa, "%s", way->isa);
    const hr_status planned = checked(hr_plan(b->dir, &params, &plan, &err), &err);
    if (way->verify_files) checked(hr_verify(b->dir, NULL, NULL, &err), &err);
    out->open = checked(hr_model_open(b->dir, &params, &model, &err), &err);
    if (out->open != HR_OK) {
        promise(model == NULL, "no model when it was not opened");
        return;
    }
    promise(planned == HR_OK && plan.fits && plan.total <= plan.ram, "what opens was planned to fit");
    promise(hr_model_get_info(model, &info, &err) == HR_OK, "an open model has facts");
    out->vocab = info.vocab_size;
    if (checked(hr_session_create(model, &session, &err), &err) == HR_OK)
        out->eval = use_session(session, b, way, out);
    promise(session != NULL, "one session was planned for");
    promise(hr_get_stats(model, &stats, &err) == HR_OK, "an open model has statistics");
    promise(stats.leases == 0, "no record stays leased");
    promise(stats.memory_peak <= plan.ram, "the budget holds");
    promise(stats.memory_peak <= plan.total, "the plan holds");
    hr_session_free(session);
    hr_model_close(model);
}

void outcomes_equal(const struct outcome *a, const struct outcome *b)
{
    promise(a->open == b->open && (a->eval == HR_OK) == (b->eval == HR_OK) && a->vocab == b->vocab,
            "the same result however it is computed");
    /* Of several faults, other chunks may meet another one first. */
    promise(a->eval == b->eval || a->chunk != b->chunk, "the same fault in the same order");
    if (a->eval != HR_OK || a->vocab > sizeof a->logits / sizeof *a->logits) return;
    for (uint32_t i = 0; i < a->vocab; i++)
        promise(memcmp(&a->logits[i], &b->logits[i], sizeof(float)) == 0 ||
                    (isnan(a->logits[i]) && isnan(b->logits[i])),
                "the same bits however it is computed");
}
