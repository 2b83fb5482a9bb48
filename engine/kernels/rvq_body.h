/* RVQ products around functions of the ISA, which defines before, after its panel_block:
 *
 *   RVQ_NATURAL(books)  1: decoded blocks are panels as int8 has them; 0: they are [2][8][64][4],
 *                       the four columns of a word 8 apart, and rvq_reorder makes activations follow:
 *                       out[32 h + 4 d + i] = q[32 h + 8 i + d]
 *   rvq_decode(books, codes, out)     64 rows x 64 columns of w + 128
 *   RVQ_FUSED(books)    optional: tokens up to which
 *   rvq_fused_block(count, books, codes, q, planes, b, total)    decodes and multiplies in registers
 *   rvq_panel_block(count, w, planes, total)    panel_block of one block, when PANEL_PLANES is not defined
 *
 * A block is decoded once into the first-level cache and meets all tokens there. */
#ifndef KERNELS_RVQ_BODY_H
#define KERNELS_RVQ_BODY_H

#include "kernels/panels_body.h"
#include "quant/rvq.h"

enum { RVQ_BLOCK_BYTES = ACT_BLOCK * INT8_PANEL_ROWS };

struct rvq_run {
    const struct rvq_books *books;
    size_t count, blocks;
    struct plane planes[TOKENS_PLANNED];
    size_t slot[TOKENS_PLANNED];
    int64_t sums[TOKENS_PLANNED][INT8_PANEL_ROWS];
    _Alignas(64) int32_t total[TOKENS_PLANNED][INT8_PANEL_ROWS];
    _Alignas(64) int8_t q[TOKENS_PLANNED][ACT_BLOCK];
    _Alignas(64) uint8_t w[RVQ_BLOCK_BYTES];
};

#ifdef PANEL_PLANES
static inline void rvq_panel_block(size_t count, const uint8_t *w, const struct plane *planes,
                                   int32_t (*total)[INT8_PANEL_ROWS])
{
    if (count == 1)
        panel_block(1, w, planes, 0, total);
    else if (count == 2)
        panel_block(2, w, planes, 0, total);
#if PANEL_PLANES > 2
    else if (count == 3)
        panel_block(3, w, planes, 0, total);
    else
        panel_block(4, w, planes, 0, total);
#endif
}
#endif

static inline void rvq_block_products(struct rvq_run *run, const uint8_t *codes, size_t b)
{
    const size_t count = run->count;
    const int8_t *q[TOKENS_PLANNED];
    for (size_t i = 0; i < count; i++) {
        q[i] = run->planes[i].q + b * ACT_BLOCK;
        if (!RVQ_NATURAL(run->books)) {
            rvq_reorder(q[i], run->q[i]);
            q[i] = run->q[i];
        }
    }
#ifdef RVQ_FUSED
    if (count <= RVQ_FUSED(run->books)) {
        rvq_fused_block(count, run->books, codes, q, run->planes, b, run->total);
        return;
    }
#endif
    rvq_decode(run->books, codes, run->w);
    for (size_t i = 0; i < count; i += PLANES_MAX) {
        struct plane part[PLANES_MAX];
        const size_t tokens = count - i < PLANES_MAX ? count - i : PLANES_MAX;
        for (size_t j = 0; j < tokens; j++)
            part[j] = (struct plane){ .q = q[i + j], .shift = run->planes[i + j].shift + b,
                                      .low = run->planes[i + j].low };
        rvq_panel_block(tokens, run->w, part, run->total + i);
    }
}

static void rvq_flush(struct rvq_run *run)
{
    for (size_t i = 0; i < run->count; i++)
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
            run->sums[i][r] += run->total[i][r];
    memset(run->total, 0, run->count * sizeof *run->total);
}

static void rvq_panel(struct rvq_run *run, const uint8_t *codes, size_t flush)
{
    const size_t block_bytes = (size_t)run->books->planes * (2 * 4 * 64);
    memset(run->total, 0, run->count * sizeof *run->total);
    memset(run->sums, 0, run->count * sizeof *run->sums);
    for (size_t b = 0; b < run->blocks;) {
        const size_t end = run->blocks - b < flush ? run->blocks : b + flush;
        for (; b < end; b++)
            rvq_block_products(run, codes + b * block_bytes, b);
        rvq_flush(run);
    }
}

static void rvq_panels(const struct rvq_books *books, const uint8_t *codes,
                       const uint16_t *row_scale, size_t rows, size_t p0, size_t p1,
                       const struct qbatch *x, const uint32_t *index, size_t n, float *y, size_t ldy)
{
    struct rvq_run run;
    const size_t blocks = x->k_pad / ACT_BLOCK;
    const size_t panel_bytes = blocks * books->planes * (2 * 4 * 64);
    run.books = books;
    run.blocks = blocks;
    for (size_t first = 0; first < n; first += TOKENS_PLANNED) {
        size_t flush = blocks;
        run.count = n - first < TOKENS_PLANNED ? n - first : TOKENS_PLANNED;
        for (size_t i = 0; i < run.count; i++) {
            const size_t s = index ? index[first + i] : first + i;
            run.slot[i] = s;
            run.planes[i] = plan_plane(x->q + s * x->k_pad, x->shift + s * blocks, blocks);
            flush = run.planes[i].flush < flush ? run.planes[i].flush : flush;
        }
        for (size_t p = p0; p < p1 && p * INT8_PANEL_ROWS < rows; p++) {
            float scale[INT8_PANEL_ROWS];
            for (size_t r = 0; r < INT8_PANEL_ROWS; r++) {
                const uint32_t bits = (uint32_t)row_scale[p * INT8_PANEL_ROWS + r] << 16;
                memcpy(scale + r, &bits, sizeof bits);
            }
            rvq_panel(&run, codes + p * panel_bytes, flush);
            for (size_t i = 0; i < run.count; i++) {
                const int64_t factor = (int64_t)1 << run.planes[i].low;
                const int64_t offset = PANEL_OFFSET * (x->sum[run.slot[i]] / factor);
                finish_rows(run.sums[i], offset, (float)factor, scale, x->scale[run.slot[i]],
                            rows_in_panel(rows, p), y + (first + i) * ldy + p * INT8_PANEL_ROWS);
            }
        }
    }
}

#endif
