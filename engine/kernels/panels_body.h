/* int8 panel products around one ISA-specific function. Included after vector_body.h and
 *
 *   static void panel_sums(const uint8_t *panel, size_t blocks, const struct plane *planes,
 *                          size_t count, struct panel_ahead ahead, int64_t (*sums)[INT8_PANEL_ROWS]);
 *
 * which sets sums[i][r] = sum_b 2^(shift[b] - low) * sum_k byte(r, k) * q[k] for 1 to PLANES_MAX
 * planes, byte being w + PANEL_OFFSET: 128 when the kernel multiplies the stored bytes as they
 * are, 0 when it removes the offset itself. */
#ifndef KERNELS_PANELS_BODY_H
#define KERNELS_PANELS_BODY_H

#include "kernels/plane.h"

/* Memory needed soon: this many lines are asked for with every block. */
struct panel_ahead {
    const uint8_t *at;
    size_t lines;
};

static void panel_sums(const uint8_t *panel, size_t blocks, const struct plane *planes,
                       size_t count, struct panel_ahead ahead, int64_t (*sums)[INT8_PANEL_ROWS]);

enum { TOKENS_PLANNED = 64 };

/* int32 lanes hold 1036 blocks of 64 * 255 * 127 at shift 0 (docs/determinism.md); the signed form
 * is smaller. Blocks between flushes to int64 follow from the shifts of one token. */
enum { LANE_BLOCKS = 1036, LANE_BLOCKS_SHIFT_7 = 8 };

static struct plane plan_plane(const int8_t *q, const uint8_t *shift, size_t blocks)
{
    struct plane p = { .q = q, .shift = shift, .low = 7, .flush = LANE_BLOCKS_SHIFT_7 };
    for (size_t b = 0; b < blocks; b++)
        p.low = shift[b] < p.low ? shift[b] : p.low;
    size_t weight = 0;
    for (size_t b = 0; b < blocks; b++)
        weight += (size_t)1 << (shift[b] - p.low);
    if (weight <= LANE_BLOCKS)
        p.flush = blocks;
    return p;
}

/* factor is a power of two: multiplying after the rounding changes nothing. */
static inline void finish_rows(const int64_t *sum, int64_t offset, float factor,
                               const float *row_scale, float token_scale, size_t rows, float *y)
{
    if (rows == INT8_PANEL_ROWS) /* a constant count, for the vectoriser */
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
            y[r] = (float)(sum[r] - offset) * factor * row_scale[r] * token_scale;
    else
        for (size_t r = 0; r < rows; r++)
            y[r] = (float)(sum[r] - offset) * factor * row_scale[r] * token_scale;
}

static inline size_t rows_in_panel(size_t rows, size_t p)
{
    size_t first = p * INT8_PANEL_ROWS;
    return rows - first < INT8_PANEL_ROWS ? rows - first : INT8_PANEL_ROWS;
}

/* While all planes but a few at a time meet this panel, the next one comes from memory. One group of
 * planes reads memory in order, which the hardware foresees. */
static struct panel_ahead panel_ahead(const uint8_t *panel, size_t panel_bytes, size_t planes)
{
    const size_t groups = (planes + PLANES_MAX - 1) / PLANES_MAX, lines = INT8_PANEL_ROWS * ACT_BLOCK / 64;
    return (struct panel_ahead){panel + panel_bytes, groups > 1 ? (lines + groups - 1) / groups : 0};
}

static void int8_panels(const uint8_t *panels, const float *row_scale, size_t rows, size_t p0,
                        size_t p1, const struct qbatch *x, const uint32_t *index, size_t n,
                        float *y, size_t ldy)
{
    size_t blocks = x->k_pad / ACT_BLOCK, panel_bytes = x->k_pad * INT8_PANEL_ROWS;
    for (size_t first = 0; first < n; first += TOKENS_PLANNED) {
        struct plane planes[TOKENS_PLANNED];
        size_t slot[TOKENS_PLANNED], count = n - first < TOKENS_PLANNED ? n - first : TOKENS_PLANNED;
        for (size_t i = 0; i < count; i++) {
            slot[i] = index ? index[first + i] : first + i;
            planes[i] = plan_plane(x->q + slot[i] * x->k_pad, x->shift + slot[i] * blocks, blocks);
        }
        for (size_t p = p0; p < p1 && p * INT8_PANEL_ROWS < rows; p++) {
            const uint8_t *panel = panels + p * panel_bytes;
            const float *scale = row_scale + p * INT8_PANEL_ROWS;
            struct panel_ahead ahead = panel_ahead(panel, panel_bytes, count);
            for (size_t i = 0; i < count; i += PLANES_MAX) {
                int64_t sums[PLANES_MAX][INT8_PANEL_ROWS];
                size_t tokens = count - i < PLANES_MAX ? count - i : PLANES_MAX;
                panel_sums(panel, blocks, planes + i, tokens, ahead, sums);
                ahead.at += blocks * ahead.lines * 64;
                for (size_t j = 0; j < tokens; j++) {
                    size_t s = slot[i + j];
                    int64_t factor = (int64_t)1 << planes[i + j].low;
                    /* x->sum counts full shifts: exact division by the common factor */
                    int64_t offset = PANEL_OFFSET * (x->sum[s] / factor);
                    finish_rows(sums[j], offset, (float)factor, scale, x->scale[s],
                                rows_in_panel(rows, p),
                                y + (first + i + j) * ldy + p * INT8_PANEL_ROWS);
                }
            }
        }
    }
}

static void int8_panels15(const uint8_t *panels, const float *row_scale, size_t rows, size_t p0,
                          size_t p1, const struct qbatch15 *x, const uint32_t *index, size_t n,
                          float *y, size_t ldy)
{
    enum { TOKENS = PLANES_MAX / 2 };
    size_t blocks = x->k_pad / ACT_BLOCK, panel_bytes = x->k_pad * INT8_PANEL_ROWS;
    for (size_t p = p0; p < p1 && p * INT8_PANEL_ROWS < rows; p++) {
        const uint8_t *panel = panels + p * panel_bytes;
        struct panel_ahead ahead = panel_ahead(panel, panel_bytes, 2 * n);
        for (size_t i = 0; i < n; i += TOKENS) {
            struct plane planes[PLANES_MAX];
            int64_t sums[PLANES_MAX][INT8_PANEL_ROWS];
            size_t tokens = n - i < TOKENS ? n - i : TOKENS;
            for (size_t j = 0; j < tokens; j++) {
                size_t at = (index ? index[i + j] : i + j) * x->k_pad;
                planes[2 * j] = (struct plane){ .q = x->hi + at, .flush = LANE_BLOCKS };
                planes[2 * j + 1] = (struct plane){ .q = x->lo + at, .flush = LANE_BLOCKS };
            }
            panel_sums(panel, blocks, planes, 2 * tokens, ahead, sums);
            ahead.at += blocks * ahead.lines * 64;
            for (size_t j = 0; j < tokens; j++) {
                size_t s = index ? index[i + j] : i + j;
                for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
                    sums[2 * j][r] = sums[2 * j][r] * 128 + sums[2 * j + 1][r];
                finish_rows(sums[2 * j], PANEL_OFFSET * x->sum[s], 1,
                            row_scale + p * INT8_PANEL_ROWS, x->scale[s], rows_in_panel(rows, p),
                            y + (i + j) * ldy + p * INT8_PANEL_ROWS);
            }
        }
    }
}

#endif
