/* The public quantisation functions: argument checks around the codecs and the encoder. */
#include "headrace.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/cpu.h"
#include "encode/rvq_encode.h"
#include "encode/rvq_feedback.h"
#include "encode/rvq_fit.h"
#include "quant/codebooks.h"

enum { THREADS_MOST = 1024, ROUNDS_DEFAULT = 8, ROUNDS_HIGH = 16 };

struct job {
    enum codec codec;
    const struct rvq_shape *shape; /* NULL: a codec without codebooks */
    const struct kernels *k;
    uint32_t beam, rounds, threads;
    uint64_t seed;
};

void hr_quant_params_init(hr_quant_params *params)
{
    memset(params, 0, sizeof *params);
    params->size = sizeof *params;
    params->effort = HR_EFFORT_DEFAULT;
    snprintf(params->codec, sizeof params->codec, "rvq4x64");
    snprintf(params->isa, sizeof params->isa, "auto");
}

static hr_status take(const hr_quant_params *given, struct job *job, hr_error *err)
{
    hr_quant_params p;
    hr_quant_params_init(&p);
    if (given) {
        if (given->size < sizeof(size_t) || given->size > 4096)
            return fail(err, HR_ERR_USAGE,
                        "hr_quant_params.size is %zu; call hr_quant_params_init first", given->size);
        memcpy(&p, given, given->size < sizeof p ? given->size : sizeof p);
    }
    p.codec[sizeof p.codec - 1] = p.isa[sizeof p.isa - 1] = 0;
    job->codec = codec_from_name(p.codec);
    job->shape = rvq_shape_of(job->codec);
    if (job->codec == CODEC_NONE)
        return fail(err, HR_ERR_USAGE, "there is no codec \"%s\"", p.codec);
    TRY(kernels_choose(p.isa, &job->k, err));
    if (p.effort < HR_EFFORT_GREEDY || p.effort > HR_EFFORT_HIGH)
        return fail(err, HR_ERR_USAGE, "effort is %d, not HR_EFFORT_GREEDY, _DEFAULT or _HIGH",
                    p.effort);
    if (p.beam > RVQ_MAX_BEAM || p.threads > THREADS_MOST)
        return fail(err, HR_ERR_USAGE, "beam is %u and threads %u; at most %d and %d", p.beam,
                    p.threads, RVQ_MAX_BEAM, THREADS_MOST);
    const uint32_t usual = job->codec == CODEC_RVQ4X64 ? 10 : 8; /* about the same speed */
    const uint32_t beams[] = {1, usual, 16};
    static const uint32_t rounds[] = {0, ROUNDS_DEFAULT, ROUNDS_HIGH};
    job->beam = p.beam ? p.beam : beams[p.effort];
    job->rounds = rounds[p.effort];
    job->threads = p.threads ? p.threads : cpu_physical_cores();
    job->seed = p.seed;
    return HR_OK;
}

static hr_status sizes(const struct job *job, uint32_t rows, uint32_t cols, size_t *blob,
                       hr_error *err)
{
    if (!codec_matrix_bytes(job->codec, rows, cols, blob))
        return fail(err, HR_ERR_USAGE, "a matrix [%u, %u] has no %s form", rows, cols,
                    codec_name(job->codec));
    return HR_OK;
}

static hr_status need_finite(const float *w, uint32_t rows, uint32_t cols, hr_error *err)
{
    uint64_t bad = 0, first = 0;
    const uint64_t count = (uint64_t)rows * cols;
    for (uint64_t i = 0; i < count; i++)
        if (!isfinite(w[i]) && bad++ == 0) first = i;
    if (bad == 0) return HR_OK;
    return fail(err, HR_ERR_NUMERIC,
                "%llu of %llu weights are NaN or infinite, the first at row %llu, column %llu",
                (unsigned long long)bad, (unsigned long long)count,
                (unsigned long long)(first / cols), (unsigned long long)(first % cols));
}

static hr_status need_importance(const float *importance, uint32_t cols, hr_error *err)
{
    for (uint32_t i = 0; importance && i < cols; i++)
        if (!(importance[i] >= 0 && importance[i] < INFINITY))
            return fail(err, HR_ERR_USAGE, "importance[%u] is %g; it must be finite and not negative",
                        i, (double)importance[i]);
    return HR_OK;
}

/* The codebooks of a job that has some, else nothing. */
static hr_status read_books(const struct job *job, const void *set, struct rvq_books *books,
                            float *unit, hr_error *err)
{
    if (!job->shape) return HR_OK;
    if (!set)
        return fail(err, HR_ERR_USAGE, "codec %s needs codebooks", codec_name(job->codec));
    return codebooks_read(job->codec, set, books, unit, err);
}

hr_status hr_quant_bytes(const hr_quant_params *params, uint32_t rows, uint32_t cols, uint64_t *blob,
                         uint64_t *books, hr_error *err)
{
    struct job job = {0};
    size_t bytes;
    if (!blob || !books) return fail(err, HR_ERR_USAGE, "blob or books is NULL");
    TRY(take(params, &job, err));
    TRY(sizes(&job, rows, cols, &bytes, err));
    *blob = bytes;
    *books = codebooks_bytes(job.codec);
    return HR_OK;
}

/* The sub-vectors of all rows that are not zero, each row scaled to a root mean square of 1. */
static size_t normalise(const float *w, uint32_t rows, uint32_t cols, float *x)
{
    const size_t per_row = cols / RVQ_DIM;
    size_t n = 0;
    for (uint32_t r = 0; r < rows; r++, w += cols) {
        double sum = 0;
        for (uint32_t i = 0; i < cols; i++) sum += (double)w[i] * (double)w[i];
        const double rms = sqrt(sum / cols);
        if (!(rms > 0)) continue;
        for (size_t i = 0; i < per_row * RVQ_DIM; i++)
            x[n * RVQ_DIM + i] = (float)((double)w[i] / rms);
        n += per_row;
    }
    return n;
}

static hr_status fit(const struct job *job, struct pool *pool, struct mem_budget *mem,
                     const float *w, uint32_t rows, uint32_t cols, void *books, hr_error *err)
{
    const size_t bytes = (size_t)rows * cols * sizeof(float);
    const struct rvq_fit f = {.k = job->k, .pool = pool, .mem = mem, .shape = job->shape,
                              .beam = job->beam, .rounds = job->rounds, .seed = job->seed};
    int8_t entries[RVQ_MAX_CODES * RVQ_DIM];
    float unit = 1;
    float *x = mem_alloc(mem, bytes);
    if (!x) return fail(err, HR_ERR_MEMORY, "no memory for %zu bytes of samples", bytes);
    const size_t n = normalise(w, rows, cols, x);
    hr_status st = n > 0 ? rvq_fit(&f, x, n, entries, &unit, err)
                         : fail(err, HR_ERR_USAGE, "all rows are zero, or shorter than %d: there is "
                                "nothing to fit codebooks to", RVQ_DIM);
    if (st == HR_OK) codebooks_write(job->codec, entries, unit, books);
    mem_free(mem, x, bytes);
    return st;
}

hr_status hr_quant_fit(const hr_quant_params *params, const float *w, uint32_t rows, uint32_t cols,
                       void *books, hr_error *err)
{
    struct job job = {0};
    struct mem_budget mem;
    struct pool *pool = NULL;
    size_t bytes;
    if (!w || !books) return fail(err, HR_ERR_USAGE, "w or books is NULL");
    TRY(take(params, &job, err));
    if (!job.shape)
        return fail(err, HR_ERR_USAGE, "codec %s has no codebooks to fit", codec_name(job.codec));
    TRY(sizes(&job, rows, cols, &bytes, err));
    TRY(need_finite(w, rows, cols, err));
    mem_budget_init(&mem, 0);
    TRY(pool_create(job.threads, &mem, &pool, err));
    const uint64_t mode = float_mode_enter();
    const hr_status st = fit(&job, pool, &mem, w, rows, cols, books, err);
    float_mode_leave(mode);
    pool_free(pool);
    return st;
}

static hr_status encode_rvq(const struct job *job, const void *set, const float *w, uint32_t rows,
                            uint32_t cols, const float *importance, void *blob, hr_error *err)
{
    struct rvq_books books;
    struct rvq_encode e = {.k = job->k, .codec = job->codec, .books = &books, .beam = job->beam};
    struct mem_budget mem;
    TRY(read_books(job, set, &books, &e.unit, err));
    mem_budget_init(&mem, 0);
    e.mem = &mem;
    TRY(pool_create(job->threads, &mem, &e.pool, err));
    const hr_status st = rvq_encode(&e, w, rows, cols, importance, blob, err);
    pool_free(e.pool);
    return st;
}

/* Panels of 4-bit blobs lie one after the other and know nothing of each other. */
struct panels {
    enum codec codec;
    const float *w;
    uint32_t rows, cols;
    size_t stride;
    uint8_t *blob;
};

static void panel_task(void *p, uint32_t panel, uint32_t worker)
{
    const struct panels *c = p;
    const uint32_t first = panel * 64, left = c->rows - first;
    (void)worker;
    matrix_encode(c->codec, c->w + (size_t)first * c->cols, left < 64 ? left : 64, c->cols,
                  c->blob + panel * c->stride);
}

static hr_status encode_panels(const struct job *job, const float *w, uint32_t rows, uint32_t cols,
                               void *blob, hr_error *err)
{
    struct panels c = {job->codec, w, rows, cols, 0, blob};
    struct mem_budget mem;
    struct pool *pool = NULL;
    const uint32_t panels = (rows - 1) / 64 + 1;
    const uint32_t threads = job->threads < panels ? job->threads : panels;
    TRY(sizes(job, 64, cols, &c.stride, err));
    mem_budget_init(&mem, 0);
    TRY(pool_create(threads, &mem, &pool, err));
    pool_run(pool, panels, panel_task, &c);
    pool_free(pool);
    return HR_OK;
}

hr_status hr_quant_encode(const hr_quant_params *params, const void *books, const float *w,
                          uint32_t rows, uint32_t cols, const float *importance, void *blob,
                          hr_error *err)
{
    struct job job = {0};
    size_t bytes;
    if (!w || !blob) return fail(err, HR_ERR_USAGE, "w or blob is NULL");
    TRY(take(params, &job, err));
    TRY(sizes(&job, rows, cols, &bytes, err));
    TRY(need_finite(w, rows, cols, err));
    TRY(need_importance(importance, cols, err));
    hr_status st = HR_OK;
    const uint64_t mode = float_mode_enter();
    if (job.shape)
        st = encode_rvq(&job, books, w, rows, cols, importance, blob, err);
    else if (codec_is_4bit(job.codec))
        st = encode_panels(&job, w, rows, cols, blob, err);
    else
        matrix_encode(job.codec, w, rows, cols, blob);
    float_mode_leave(mode);
    return st;
}

uint64_t hr_quant_moments_bytes(uint32_t cols)
{
    return (uint64_t)moments_floats(cols) * sizeof(float);
}

hr_status hr_quant_moments(const hr_quant_params *params, const float *x, uint32_t n, uint32_t cols,
                           double damping, void *moments, hr_error *err)
{
    struct job job = {0};
    struct mem_budget mem;
    struct pool *pool = NULL;
    size_t bytes;
    if ((!x && n) || !moments) return fail(err, HR_ERR_USAGE, "x or moments is NULL");
    if (!(damping > 0 && damping < INFINITY))
        return fail(err, HR_ERR_USAGE, "damping is %g; it must be finite and positive", damping);
    TRY(take(params, &job, err));
    TRY(sizes(&job, 1, cols, &bytes, err));
    TRY(need_finite(x, n, cols, err));
    mem_budget_init(&mem, 0);
    TRY(pool_create(job.threads, &mem, &pool, err));
    const uint64_t mode = float_mode_enter();
    const hr_status st = moments_factor(pool, &mem, x, n, cols, damping, moments, err);
    float_mode_leave(mode);
    pool_free(pool);
    return st;
}

hr_status hr_quant_encode_feedback(const hr_quant_params *params, const void *books, const float *w,
                                   uint32_t rows, uint32_t cols, const void *moments, void *blob,
                                   hr_error *err)
{
    struct job job = {0};
    struct rvq_books own;
    struct mem_budget mem;
    size_t bytes;
    if (!w || !blob || !moments) return fail(err, HR_ERR_USAGE, "w, moments or blob is NULL");
    TRY(take(params, &job, err));
    if (!job.shape)
        return fail(err, HR_ERR_USAGE, "codec %s is not encoded with feedback",
                    codec_name(job.codec));
    struct rvq_encode e = {.k = job.k, .codec = job.codec, .books = &own, .beam = job.beam,
                           .mem = &mem};
    TRY(sizes(&job, rows, cols, &bytes, err));
    TRY(need_finite(w, rows, cols, err));
    TRY(read_books(&job, books, &own, &e.unit, err));
    mem_budget_init(&mem, 0);
    TRY(pool_create(job.threads, &mem, &e.pool, err));
    const uint64_t mode = float_mode_enter();
    const hr_status st = rvq_encode_feedback(&e, w, rows, cols, moments, blob, err);
    float_mode_leave(mode);
    pool_free(e.pool);
    return st;
}

static hr_status bind(const hr_quant_params *params, const void *set, const void *blob,
                      uint32_t rows, uint32_t cols, struct rvq_books *books, struct matrix *m,
                      hr_error *err)
{
    struct job job = {0};
    size_t bytes;
    float unit;
    TRY(take(params, &job, err));
    TRY(sizes(&job, rows, cols, &bytes, err));
    TRY(read_books(&job, set, books, &unit, err));
    matrix_bind(m, job.codec, rows, cols, blob);
    m->books = books;
    return HR_OK;
}

hr_status hr_quant_decode(const hr_quant_params *params, const void *books, const void *blob,
                          uint32_t rows, uint32_t cols, float *w, hr_error *err)
{
    struct rvq_books own;
    struct matrix m;
    if (!w || !blob) return fail(err, HR_ERR_USAGE, "w or blob is NULL");
    TRY(bind(params, books, blob, rows, cols, &own, &m, err));
    for (uint32_t r = 0; r < rows; r++) matrix_row(&m, r, w + (size_t)r * cols);
    return HR_OK;
}

hr_status hr_quant_error(const hr_quant_params *params, const void *books, const void *blob,
                         const float *w, uint32_t rows, uint32_t cols, const float *importance,
                         double *signal, double *noise, hr_error *err)
{
    struct rvq_books own;
    struct matrix m;
    struct mem_budget mem;
    const size_t bytes = cols * sizeof(float);
    if (!w || !blob || !signal || !noise)
        return fail(err, HR_ERR_USAGE, "w, blob, signal or noise is NULL");
    TRY(bind(params, books, blob, rows, cols, &own, &m, err));
    TRY(need_importance(importance, cols, err));
    mem_budget_init(&mem, 0);
    float *row = mem_alloc(&mem, bytes);
    if (!row) return fail(err, HR_ERR_MEMORY, "no memory for a row of %u weights", cols);
    *signal = *noise = 0;
    for (uint32_t r = 0; r < rows; r++, w += cols) {
        matrix_row(&m, r, row);
        for (uint32_t i = 0; i < cols; i++) {
            const double weight = importance ? (double)importance[i] : 1.0;
            const double d = (double)w[i] - (double)row[i];
            *signal += weight * (double)w[i] * (double)w[i];
            *noise += weight * d * d;
        }
    }
    mem_free(&mem, row, bytes);
    return HR_OK;
}
