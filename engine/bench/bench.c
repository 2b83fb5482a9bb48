#include "bench/bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "bench/operations.h"

static const uint32_t token_counts[] = {1, 4, 16, 64};

enum {
    TOKEN_COUNTS = sizeof token_counts / sizeof token_counts[0],
    POOL_CACHES = 4,
    POOL_DEFAULT = 256 << 20
};

static const struct {
    const char *name;
    void (*describe)(struct bench_operands *o, struct bench_work *out);
} operations[] = {
    {"attention", bench_attention},
    {"delta", bench_delta},
    {"quantize", bench_quantize},
    {"quantize15", bench_quantize15},
    {"quantize22", bench_quantize22},
};

enum { OPERATIONS = sizeof operations / sizeof operations[0] };

struct run {
    const struct bench_setup *setup;
    hr_bench_fn callback;
    void *user;
    struct meter meter;
    struct bench_operands operands;
    struct bench_weights weights;
    float *source;    /* [rows * cols] */
    double each;      /* seconds for one row */
    hr_bench_row row; /* what all rows share */
};

uint64_t bench_pool_default(uint64_t cache)
{
    if (cache > UINT64_MAX / POOL_CACHES) return UINT64_MAX;
    return POOL_CACHES * cache > POOL_DEFAULT ? POOL_CACHES * cache : POOL_DEFAULT;
}

/* Codecs are numbered without gaps; f64 holds no weights that are multiplied. */
static enum codec next_codec(enum codec c)
{
    do c = (enum codec)(c + 1);
    while (c == CODEC_F64);
    return strcmp(codec_name(c), codec_name(CODEC_NONE)) == 0 ? CODEC_NONE : c;
}

static hr_status report_row(struct run *r, hr_bench_row *row, hr_error *err)
{
    if (r->callback && r->callback(r->user, row) != 0)
        return fail(err, HR_ERR_CANCELLED, "the callback stopped the benchmark");
    return HR_OK;
}

static hr_status measure_row(struct run *r, const char *name, int32_t kind, uint32_t tokens,
                             const struct bench_work *work, hr_error *err)
{
    struct bench_rates rates;
    hr_bench_row row = r->row;
    measure(&r->meter, work, r->each, &rates);
    snprintf(row.name, sizeof row.name, "%s", name);
    row.kind = kind;
    row.tokens = tokens;
    row.weights_per_second = rates.steps.median * work->weights;
    row.bytes_per_second = rates.steps.median * work->bytes;
    row.macs_per_second = rates.steps.median * work->macs;
    row.spread = rates.steps.spread;
    row.read_ratio = rates.read_ratio.median;
    row.read_spread = rates.read_ratio.spread;
    row.peak_ratio = rates.peak_ratio.median;
    row.peak_spread = rates.peak_ratio.spread;
    row.seconds = rates.seconds;
    return report_row(r, &row, err);
}

static void fill(struct run *r, enum codec c)
{
    const struct bench_setup *s = r->setup;
    bench_weights_fill(&r->weights, c, s->rows, s->cols, r->source, r->meter.pool, r->meter.bytes);
    r->meter.cursor = 0;
}

static hr_status measure_products(struct run *r, const char *name, hr_error *err)
{
    struct bench_work work;
    for (size_t i = 0; i < TOKEN_COUNTS; i++) {
        bench_product(&r->operands, &r->weights, token_counts[i], &work);
        TRY(measure_row(r, name, HR_BENCH_CODEC, token_counts[i], &work, err));
    }
    return HR_OK;
}

static hr_status measure_codecs(struct run *r, hr_error *err)
{
    for (enum codec c = next_codec(CODEC_NONE); c != CODEC_NONE; c = next_codec(c)) {
        fill(r, c);
        TRY(measure_products(r, codec_name(c), err));
        if (c != CODEC_MXFP4) continue;
        r->weights.fine = true;
        TRY(measure_products(r, "mxfp4-22", err));
        r->weights.fine = false;
    }
    return HR_OK;
}

static hr_status measure_others(struct run *r, hr_error *err)
{
    struct bench_work work;
    fill(r, CODEC_INT8);
    for (size_t i = 0; i < TOKEN_COUNTS; i++) {
        bench_head(&r->operands, &r->weights, token_counts[i], &work);
        TRY(measure_row(r, "head", HR_BENCH_OPERATION, token_counts[i], &work, err));
    }
    fill(r, CODEC_F32);
    for (size_t i = 0; i < OPERATIONS; i++) {
        operations[i].describe(&r->operands, &work);
        TRY(measure_row(r, operations[i].name, HR_BENCH_OPERATION, 1, &work, err));
    }
    return HR_OK;
}

static hr_status summary(struct run *r, hr_error *err)
{
    const struct sample read = sample_of(r->meter.read, r->meter.count),
                        peak = sample_of(r->meter.peak, r->meter.count);
    hr_bench_row row = r->row;
    row.repeats = (uint32_t)r->meter.count;
    row.kind = HR_BENCH_READ;
    snprintf(row.name, sizeof row.name, "read");
    row.bytes_per_second = read.median;
    row.spread = read.spread;
    row.read_ratio = 1;
    TRY(report_row(r, &row, err));
    row.kind = HR_BENCH_PEAK;
    snprintf(row.name, sizeof row.name, "dot peak");
    row.bytes_per_second = row.read_ratio = 0;
    row.macs_per_second = peak.median;
    row.spread = peak.spread;
    row.peak_ratio = 1;
    return report_row(r, &row, err);
}

static uint32_t row_count(void)
{
    uint32_t codecs = 0;
    for (enum codec c = next_codec(CODEC_NONE); c != CODEC_NONE; c = next_codec(c)) codecs++;
    return (codecs + 2) * TOKEN_COUNTS + OPERATIONS; /* mxfp4 twice, the head */
}

/* The pool and the one block that holds everything else. */
static hr_status with_memory(struct run *r, struct mem_budget *mem, hr_error *err)
{
    const struct bench_setup *s = r->setup;
    const size_t source = (size_t)s->rows * s->cols * sizeof(float);
    struct carve carve = {NULL, 0};
    carve_take(&carve, source);
    bench_operands_carve(&carve, s->rows, s->cols, &r->operands);
    const size_t block_bytes = carve.used, pool_bytes = (size_t)s->pool;
    r->row.memory = mem_cost(pool_bytes) + mem_cost(block_bytes);
    struct memory_probe probe;
    memory_probe_read("", &probe);
    if (r->row.memory > probe.usable)
        return fail(err, HR_ERR_MEMORY,
                    "the benchmark needs %" PRIu64 " bytes and %" PRIu64
                    " are available; give it a smaller pool (then caches are measured too)",
                    r->row.memory, probe.usable);
    mem_budget_init(mem, r->row.memory);
    uint8_t *pool = mem_alloc(mem, pool_bytes), *block = mem_alloc(mem, block_bytes);
    hr_status st = HR_OK;
    if (pool && block) {
        carve = (struct carve){block, 0};
        r->source = carve_take(&carve, source);
        bench_operands_carve(&carve, s->rows, s->cols, &r->operands);
        bench_operands_init(&r->operands, s->k, s->rows, s->cols, pool, pool_bytes);
        r->meter.k = s->k;
        r->meter.pool = pool;
        r->meter.bytes = pool_bytes;
        st = measure_codecs(r, err);
        if (st == HR_OK) st = measure_others(r, err);
        if (st == HR_OK) st = summary(r, err);
    } else {
        st = fail(err, HR_ERR_MEMORY, "the system refused %" PRIu64 " bytes", r->row.memory);
    }
    mem_free(mem, block, block_bytes);
    mem_free(mem, pool, pool_bytes);
    return st;
}

hr_status bench_run(const struct bench_setup *s, hr_bench_fn callback, void *user, hr_error *err)
{
    struct run r = {.setup = s, .callback = callback, .user = user,
                    .each = s->seconds / row_count()};
    struct mem_budget mem;
    for (enum codec c = next_codec(CODEC_NONE); c != CODEC_NONE; c = next_codec(c)) {
        const size_t stride = bench_weights_stride(c, s->rows, s->cols);
        if (stride == 0 || stride > s->pool)
            return fail(err, HR_ERR_USAGE,
                        "a matrix [%u, %u] of %s takes %zu bytes, the pool has %" PRIu64
                        "; give a larger pool or smaller matrices",
                        s->rows, s->cols, codec_name(c), stride, s->pool);
    }
    r.row.size = sizeof r.row;
    r.row.rows = s->rows;
    r.row.cols = s->cols;
    r.row.repeats = MEASURE_REPEATS;
    r.row.cache = s->cache;
    r.row.pool = s->pool;
    snprintf(r.row.isa, sizeof r.row.isa, "%s", s->k->isa);
    return with_memory(&r, &mem, err);
}
