/* libFuzzer target: session files, and files of use counts. A file that the container at hand accepts is built with hostile
 * fields and hostile state, and every checksum is right; then the session goes on from it.
 * Input: which container; mode; fields of the header; edits of the state. Mode bit 0: the bytes
 * behind it are the file as it is; bit 1: bytes of the finished file are changed once more; bit 2: a file
 * of use counts instead, one that the model wrote, with bytes changed and (but for bit 1) checksums right. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "model/session.h"
#include "work_container.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { CTX = 24, HEADER = 128, FILE_MAX = 4 << 20 };

static uint8_t file[FILE_MAX];

static struct {
    unsigned long inputs, loaded, continued, counted;
} counts;

static void report(void)
{
    fprintf(stderr, "session: %lu inputs, %lu loaded, %lu went on, %lu opened with counts\n", counts.inputs,
            counts.loaded, counts.continued, counts.counted);
}

static void promise(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "broken promise: %s\n", what);
    abort();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    bases_open(*argc, *argv);
    atexit(report);
    return 0;
}

/* NULL where the use counts are refused. */
static hr_session *open_session(const struct base *b, const char *usage, hr_model **model)
{
    hr_model_params params;
    hr_session *session;
    hr_error err = {0};
    hr_model_params_init(&params);
    params.ram = 48 << 20;
    params.threads = 1;
    params.io_threads = 1;
    params.ctx = CTX;
    params.usage = usage;
    const hr_status st = hr_model_open(b->dir, &params, model, &err);
    promise(st == HR_OK || (usage && err.code == (int32_t)st && strstr(err.detail, usage)),
            "a sound container opens");
    if (st != HR_OK) return NULL;
    promise(hr_session_create(*model, &session, &err) == HR_OK, "a session can be made");
    return session;
}

struct script {
    const uint8_t *at;
    size_t left;
};

static uint32_t take(struct script *s, unsigned bytes)
{
    uint32_t v = 0;
    for (unsigned i = 0; i < bytes && s->left > 0; i++, s->left--) v |= (uint32_t)*s->at++ << (8 * i);
    return v;
}

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (8 * i));
}

/* Writes the pieces one after the other, edited by the script. */
struct build {
    size_t used;
    struct script *s;
    uint32_t edits, piece;
};

static const uint32_t floats[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0xff7fffff, 0x00000001,
                                  0x80000000, 0x4f000000, 0xcf000000, 0x5f000000, 0x47c35000, 0xbf800000,
                                  0x3f000000, 0x4b800000, 0x00000000, 0x41200000};

static hr_status add_piece(void *user, float *data, size_t floats_n, hr_error *err)
{
    struct build *b = user;
    const size_t n = floats_n * sizeof(float);
    (void)err;
    (void)data;
    if (b->used + n + 8 > FILE_MAX) return HR_ERR_MEMORY;
    uint8_t *p = file + b->used;
    for (size_t i = 0; i < floats_n; i++) put32(p + 4 * i, 0x3c000000u | (uint32_t)(i * 2654435761u >> 9));
    /* The script says which of the next pieces it changes. */
    while (b->edits > 0 && b->s->left > 0 && b->piece == b->s->at[0] % 64) {
        take(b->s, 1);
        b->edits--;
        const uint32_t how = take(b->s, 1);
        size_t at = take(b->s, 2);
        const uint32_t value = how & 1 ? take(b->s, 4) : floats[(how >> 4) % 16];
        for (at = floats_n ? at % floats_n : 0; at < floats_n; at += how & 2 ? 1 : floats_n)
            put32(p + 4 * at, value);
    }
    put32(p + n, crc32c(0, p, n));
    put32(p + n + 4, 0);
    b->used += n + 8;
    b->piece = (b->piece + 1) % 64;
    return HR_OK;
}

static bool build(struct base *base, struct session *s, struct script *script, bool late)
{
    const struct architecture *a = &s->model->arch;
    const uint32_t fields = take(script, 1);
    struct build b = {HEADER, script, take(script, 1) % 32, 0};
    uint32_t position = fields & 1 ? take(script, 1) % (CTX + 2) : 6;
    const uint32_t pending = fields & 2 ? take(script, 4) : UINT32_MAX;
    const uint32_t has_logits = fields & 4 ? take(script, 1) % 3 : 1;
    if (position > CTX) position = CTX;
    if (has_logits) add_piece(&b, NULL, a->vocab_size, NULL);
    if (state_pieces(a, &s->state, position, add_piece, &b, NULL) != HR_OK) return false;
    memset(file, 0, HEADER);
    memcpy(file, "HRSESS01", 8);
    put32(file + 8, 1);
    put32(file + 12, a->layers);
    for (int i = 0; i < 32; i++) {
        unsigned v;
        sscanf(s->model->c->sha256 + 2 * i, "%2x", &v);
        file[16 + i] = (uint8_t)v;
    }
    put32(file + 48, a->vocab_size);
    put32(file + 52, fields & 8 ? take(script, 4) : position);
    put32(file + 56, pending);
    put32(file + 60, has_logits);
    put32(file + 64, (uint32_t)b.used);
    if (fields & 16) file[take(script, 1) % HEADER] = (uint8_t)take(script, 1);
    put32(file + 124, 0);
    put32(file + 124, crc32c(0, file, HEADER));
    if (late && script->left > 0) file[take(script, 4) % b.used] ^= (uint8_t)(1 + take(script, 1) % 255);
    work_store(base, "hostile.session", file, b.used);
    return true;
}

/* The session's state as a file; the file's checksum stands for it. */
static uint32_t fingerprint(hr_session *session, const char *path)
{
    static uint8_t saved[FILE_MAX];
    hr_error err;
    promise(hr_session_save(session, path, &err) == HR_OK, "a sound session is saved");
    FILE *f = fopen(path, "rb");
    promise(f != NULL, "a saved file is there");
    const size_t n = fread(saved, 1, sizeof saved, f);
    fclose(f);
    return crc32c(0, saved, n);
}

static void go_on(hr_session *session, uint32_t vocab)
{
    hr_generate_params p;
    hr_generation result = {.size = sizeof result};
    hr_error err = {0};
    int32_t ids[] = {0, (int32_t)vocab - 1, 1 % (int32_t)vocab};
    hr_generate_params_init(&p);
    p.max_tokens = 2;
    p.temperature = 1;
    (void)hr_generate(session, NULL, 0, &p, NULL, NULL, &result, &err);
    const hr_status s = hr_eval(session, ids, 3, HR_LOGITS_LAST, NULL, &err);
    promise(s == HR_OK || err.detail[0], "an error has a text");
    counts.continued += s == HR_OK;
}

/* Loads the file, or leaves the session as it was. */
static void try_file(const struct base *b, hr_session *session, uint32_t vocab)
{
    char hostile[400], saved[400];
    hr_error err = {0};
    const int32_t ids[] = {1, 2, 3};
    snprintf(hostile, sizeof hostile, "%s/hostile.session", b->dir);
    snprintf(saved, sizeof saved, "%s/before.session", b->dir);
    promise(hr_eval(session, ids, 3, HR_LOGITS_LAST, NULL, &err) == HR_OK, "a fresh session evaluates");
    const uint32_t before = fingerprint(session, saved);
    const hr_status st = hr_session_load(session, hostile, &err);
    if (st != HR_OK) {
        promise(err.code == (int32_t)st && err.detail[0], "an error has a text");
        promise(fingerprint(session, saved) == before, "a failed load changes nothing");
        return;
    }
    counts.loaded++;
    promise(hr_session_position(session) <= CTX, "no position beyond the context");
    go_on(session, vocab);
}

static void repair_usage(size_t n)
{
    if (n < 68) return;
    put32(file + 60, 0);
    put32(file + 60, crc32c(0, file, 64));
    put32(file + n - 4, crc32c(0, file + 64, n - 68));
}

/* Script: bytes to cut off or add, then place and value of each byte that changes. */
static void try_usage(struct base *b, hr_model *model, hr_session *session, struct script *s, bool repair)
{
    char path[400];
    hr_model *other;
    hr_error err = {0};
    const int32_t ids[] = {1, 2, 3};
    snprintf(path, sizeof path, "%s/hostile.usage", b->dir);
    promise(hr_eval(session, ids, 3, HR_LOGITS_NONE, NULL, &err) == HR_OK, "a fresh session evaluates");
    promise(hr_model_save_usage(model, path, &err) == HR_OK, "use counts are saved");
    FILE *f = fopen(path, "rb");
    promise(f != NULL, "a saved file is there");
    size_t n = fread(file, 1, FILE_MAX / 2, f);
    fclose(f);
    const int32_t more = (int32_t)take(s, 1) - 128;
    n = more < 0 && (size_t)-more > n ? 0 : n + (size_t)more;
    while (s->left > 0 && n > 0) {
        const size_t at = take(s, 2) % n;
        file[at] = (uint8_t)take(s, 1);
    }
    if (repair) repair_usage(n);
    work_store(b, "hostile.usage", file, n);
    hr_session *second = open_session(b, path, &other);
    if (!second) return;
    counts.counted++;
    promise(hr_eval(second, ids, 3, HR_LOGITS_LAST, NULL, &err) == HR_OK, "counts change no result");
    promise(hr_model_save_usage(other, path, &err) == HR_OK, "use counts are saved again");
    hr_session_free(second);
    hr_model_close(other);
    second = open_session(b, path, &other);
    promise(second != NULL, "what was saved opens");
    hr_session_free(second);
    hr_model_close(other);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    hr_model *model;
    if (size < 4) return 0;
    struct base *b = base_choose(data[0]);
    struct script script = {data + 2, size - 2};
    hr_session *session = open_session(b, NULL, &model);
    struct session *inside = (struct session *)(uintptr_t)session;
    bool made = true;
    counts.inputs++;
    if (data[1] & 4) {
        try_usage(b, model, session, &script, !(data[1] & 2));
        made = false;
    } else if (data[1] & 1)
        work_store(b, "hostile.session", script.at, script.left);
    else
        made = build(b, inside, &script, (data[1] & 2) != 0);
    if (made) try_file(b, session, inside->model->arch.vocab_size);
    hr_session_free(session);
    hr_model_close(model);
    return 0;
}
