#include "encode/rvq_fit.h"

#include <math.h>
#include <string.h>

#include "encode/rvq_tables.h"

enum { KMEANS_ROUNDS = 12, TASK_VECTORS = 512, TRIAL_VECTORS = 8192 };

struct fit {
    const struct rvq_fit *f;
    size_t n, codes; /* codes: entries of all stages */
    const float *x;
    float *residual; /* [n][8] */
    uint8_t *code;   /* [n][stages] */
    float *books;    /* [stages][entries][8] */
    float *tables;
    double *matrix;  /* [codes][codes], upper triangle */
    double *right;   /* [8][codes] */
    float *rounded;  /* as books */
    uint64_t random;
    float unit;      /* integers to 1; 0 until it is chosen */
};

static uint64_t next_random(struct fit *w) /* splitmix64 */
{
    uint64_t z = w->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

struct assign_ctx {
    const struct kernels *k;
    const struct rvq_search *search;
    const float *x;
    uint8_t *code;
    size_t n;
};

static void assign_task(void *p, uint32_t task, uint32_t worker)
{
    const struct assign_ctx *c = p;
    const size_t first = (size_t)task * TASK_VECTORS;
    const size_t count = c->n - first < TASK_VECTORS ? c->n - first : TASK_VECTORS;
    (void)worker;
    c->k->rvq_search(c->search, c->x + first * RVQ_DIM, count,
                     c->code + first * c->search->stages);
}

static void assign(struct fit *w, uint32_t stages, const float *books, uint32_t beam,
                   const float *x, size_t n)
{
    struct rvq_search search = {.beam = beam};
    struct assign_ctx c = {w->f->k, &search, x, w->code, n};
    rvq_tables_make(&search, stages, w->f->shape->entries, books, NULL, w->tables);
    pool_run(w->f->pool, (uint32_t)((n + TASK_VECTORS - 1) / TASK_VECTORS), assign_task, &c);
}

/* Lloyd's algorithm on the residual of the stages before; sums run in sample order. */
static void kmeans_stage(struct fit *w, float *books)
{
    const size_t entries = w->f->shape->entries;
    double *sum = w->right; /* [entries][8] */
    uint32_t count[RVQ_MAX_ENTRIES];
    for (size_t c = 0; c < entries; c++)
        memcpy(books + c * RVQ_DIM, w->residual + next_random(w) % w->n * RVQ_DIM,
               RVQ_DIM * sizeof *books);
    for (int round = 0; round < KMEANS_ROUNDS; round++) {
        assign(w, 1, books, 1, w->residual, w->n);
        memset(sum, 0, entries * RVQ_DIM * sizeof *sum);
        memset(count, 0, sizeof count);
        for (size_t i = 0; i < w->n; i++) {
            count[w->code[i]]++;
            for (size_t d = 0; d < RVQ_DIM; d++)
                sum[w->code[i] * RVQ_DIM + d] += (double)w->residual[i * RVQ_DIM + d];
        }
        for (size_t c = 0; c < entries; c++) {
            const float *fresh = w->residual + next_random(w) % w->n * RVQ_DIM;
            for (size_t d = 0; d < RVQ_DIM; d++)
                books[c * RVQ_DIM + d] =
                    count[c] ? (float)(sum[c * RVQ_DIM + d] / count[c]) : fresh[d];
        }
    }
    assign(w, 1, books, 1, w->residual, w->n);
    for (size_t i = 0; i < w->n; i++)
        for (size_t d = 0; d < RVQ_DIM; d++)
            w->residual[i * RVQ_DIM + d] -= books[w->code[i] * RVQ_DIM + d];
}

/* Counts of codes that occur together, and the sums of what remains at each code. */
static void normal_equations(struct fit *w)
{
    const size_t stages = w->f->shape->stages, entries = w->f->shape->entries, codes = w->codes;
    memset(w->matrix, 0, codes * codes * sizeof *w->matrix);
    memset(w->right, 0, codes * RVQ_DIM * sizeof *w->right);
    for (size_t i = 0; i < w->n; i++) {
        size_t at[RVQ_MAX_STAGES];
        float left[RVQ_DIM];
        memcpy(left, w->x + i * RVQ_DIM, sizeof left);
        for (size_t s = 0; s < stages; s++) {
            at[s] = s * entries + w->code[i * stages + s];
            for (size_t d = 0; d < RVQ_DIM; d++) left[d] -= w->books[at[s] * RVQ_DIM + d];
        }
        for (size_t s = 0; s < stages; s++) {
            for (size_t t = s; t < stages; t++) w->matrix[at[s] * codes + at[t]] += 1;
            for (size_t d = 0; d < RVQ_DIM; d++) w->right[d * codes + at[s]] += (double)left[d];
        }
    }
}

/* Adds the least-squares correction to the books: U'U = counts + I, U U' solved for 8 right sides.
 * The ridge keeps codes that no sample uses, and the constant that stages can trade, in place. */
static void solve(struct fit *w)
{
    const size_t n = w->codes;
    for (size_t k = 0; k < n; k++) {
        double *row = w->matrix + k * n;
        row[k] += 1;
    }
    for (size_t k = 0; k < n; k++) {
        double *row = w->matrix + k * n;
        const double root = sqrt(row[k]);
        for (size_t j = k; j < n; j++) row[j] /= root;
        for (size_t i = k + 1; i < n; i++) {
            const double factor = row[i];
            double *below = w->matrix + i * n;
            if (factor != 0)
                for (size_t j = i; j < n; j++) below[j] -= factor * row[j];
        }
    }
    for (size_t d = 0; d < RVQ_DIM; d++) {
        double *y = w->right + d * n;
        for (size_t k = 0; k < n; k++) {
            const double *row = w->matrix + k * n;
            y[k] /= row[k];
            for (size_t j = k + 1; j < n; j++) y[j] -= row[j] * y[k];
        }
        for (size_t k = n; k-- > 0;) {
            const double *row = w->matrix + k * n;
            double sum = y[k];
            for (size_t j = k + 1; j < n; j++) sum -= row[j] * y[j];
            y[k] = sum / row[k];
            w->books[k * RVQ_DIM + d] += (float)y[k];
        }
    }
}

static float to_integer(float c, float unit, float limit)
{
    return fminf(fmaxf(rintf(c * unit), -limit), limit);
}

/* Squared error of n trial vectors in w->residual with the books as integers of `unit`. */
static double trial_error(struct fit *w, float unit, size_t n)
{
    const uint32_t stages = w->f->shape->stages, entries = w->f->shape->entries;
    const float limit = (float)w->f->shape->limit;
    float *books = w->rounded;
    double sum = 0;
    for (size_t i = 0; i < w->codes * RVQ_DIM; i++)
        books[i] = to_integer(w->books[i], unit, limit) / unit;
    assign(w, stages, books, w->f->beam, w->residual, n);
    for (size_t i = 0; i < n; i++) {
        float left[RVQ_DIM];
        memcpy(left, w->residual + i * RVQ_DIM, sizeof left);
        for (size_t s = 0; s < stages; s++)
            for (size_t d = 0; d < RVQ_DIM; d++)
                left[d] -= books[(s * entries + w->code[i * stages + s]) * RVQ_DIM + d];
        for (size_t d = 0; d < RVQ_DIM; d++) sum += (double)left[d] * (double)left[d];
    }
    return sum;
}

/* A fine unit clips the outermost entries, a coarse one rounds all of them: heavy tails want some
 * clipping, which later rounds spread over the stages. */
static void choose_unit(struct fit *w)
{
    static const float parts[] = {1, 0.8f, 0.65f, 0.5f, 0.4f, 0.3f, 0.2f};
    const float limit = (float)w->f->shape->limit;
    const size_t n = w->n < TRIAL_VECTORS ? w->n : TRIAL_VECTORS, step = w->n / n;
    float largest = 0;
    double least = INFINITY;
    for (size_t i = 0; i < w->codes * RVQ_DIM; i++) largest = fmaxf(largest, fabsf(w->books[i]));
    w->unit = 1;
    if (!(largest > 0)) return;
    for (size_t i = 0; i < n; i++)
        memcpy(w->residual + i * RVQ_DIM, w->x + i * step * RVQ_DIM, RVQ_DIM * sizeof(float));
    for (size_t p = 0; p < sizeof parts / sizeof parts[0]; p++) {
        const float unit = limit / (largest * parts[p]);
        const double error = trial_error(w, unit, n);
        if (error < least) {
            least = error;
            w->unit = unit;
        }
    }
}

static void clip(struct fit *w)
{
    const float most = (float)w->f->shape->limit / w->unit;
    for (size_t i = 0; i < w->codes * RVQ_DIM; i++)
        w->books[i] = fminf(fmaxf(w->books[i], -most), most);
}

static void fit_all(struct fit *w)
{
    const struct rvq_shape *shape = w->f->shape;
    memcpy(w->residual, w->x, w->n * RVQ_DIM * sizeof(float));
    for (size_t s = 0; s < shape->stages; s++)
        kmeans_stage(w, w->books + s * shape->entries * RVQ_DIM);
    for (uint32_t round = 0; round < w->f->rounds; round++) {
        assign(w, shape->stages, w->books, w->f->beam, w->x, w->n);
        normal_equations(w);
        solve(w);
        if (round + 1 == (w->f->rounds + 1) / 2) choose_unit(w);
        if (w->unit > 0) clip(w);
    }
    if (w->f->rounds == 0) choose_unit(w);
}

hr_status rvq_fit(const struct rvq_fit *f, const float *x, size_t n, int8_t *entries, float *unit,
                  hr_error *err)
{
    const struct rvq_shape *shape = f->shape;
    const size_t codes = (size_t)shape->stages * shape->entries;
    const size_t bytes[] = {
        n * RVQ_DIM * sizeof(float), n * shape->stages, codes * RVQ_DIM * sizeof(float),
        rvq_tables_floats(shape->stages, shape->entries) * sizeof(float),
        codes * codes * sizeof(double), codes * RVQ_DIM * sizeof(double),
        codes * RVQ_DIM * sizeof(float)};
    enum { PARTS = sizeof bytes / sizeof bytes[0] };
    void *part[PARTS];
    bool whole = true;
    for (size_t i = 0; i < PARTS; i++) {
        part[i] = mem_alloc(f->mem, bytes[i]);
        whole = whole && part[i];
    }
    if (whole) {
        struct fit w = {.f = f, .n = n, .codes = codes, .x = x, .residual = part[0],
                        .code = part[1], .books = part[2], .tables = part[3], .matrix = part[4],
                        .right = part[5], .rounded = part[6], .random = f->seed};
        fit_all(&w);
        for (size_t i = 0; i < codes * RVQ_DIM; i++)
            entries[i] = (int8_t)to_integer(w.books[i], w.unit, (float)shape->limit);
        *unit = w.unit;
    }
    for (size_t i = 0; i < PARTS; i++) mem_free(f->mem, part[i], bytes[i]);
    return whole ? HR_OK : fail(err, HR_ERR_MEMORY, "no memory to fit codebooks to %zu vectors", n);
}
