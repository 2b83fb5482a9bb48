/* Products of MXFP4 weights with 22-bit activations: three planes of digits, combined for every group,
 * whose dots still fit int32. Included after mxfp4_body.h. An ISA has defined
 *
 *   FINE_TOKENS: tokens of one pass at most, 1 or 2, each of them three planes for group_dots
 *   FINE_ROWS(T, decoded): as NIBBLE_ROWS
 *   FINE_FUSED: as NIBBLE_FUSED */
#ifndef KERNELS_MXFP4_FINE_BODY_H
#define KERNELS_MXFP4_FINE_BODY_H

#include "kernels/mxfp4_body.h"

enum { FINE_CHUNK = 32 };

struct fine_chunk {
    const int8_t *q[FINE_CHUNK][FINE_PLANES]; /* highest digits first */
    const int32_t *offset[FINE_CHUNK];
    float scale[FINE_CHUNK];
    size_t count;
};

static struct fine_chunk take_fine_chunk(const struct qbatch22 *x, const uint32_t *index,
                                         size_t first, size_t n)
{
    struct fine_chunk c = { .count = n - first < FINE_CHUNK ? n - first : FINE_CHUNK };
    for (size_t i = 0; i < c.count; i++) {
        size_t slot = index ? index[first + i] : first + i, at = slot * x->k_pad;
        c.q[i][0] = x->hi + at;
        c.q[i][1] = x->mid + at;
        c.q[i][2] = x->lo + at;
        c.offset[i] = x->offset + slot * (x->k_pad / NIBBLE_GROUP);
        c.scale[i] = x->scale[slot];
    }
    return c;
}

/* At most 32 * 12 * 127 * 2^14 < 2^29.6; what passes 2^31 on the way comes back. */
static inline v16i combine_digits(const v16i (*planes)[NIBBLE_VECTORS], size_t r)
{
    const v16i digit = v16i_set1(7);
    v16i upper = v16i_add(v16i_shl(planes[0][r], digit), planes[1][r]);
    return v16i_add(v16i_shl(upper, digit), planes[2][r]);
}

static inline __attribute__((always_inline)) void
fine_rows(size_t R, size_t T, bool decoded, size_t v, const struct nibble_slab *s,
          uint8_t (*counts)[INT8_PANEL_ROWS], const struct fine_chunk *c, size_t i,
          int64_t (*sums)[INT8_PANEL_ROWS])
{
    v16l sum[FINE_TOKENS][NIBBLE_VECTORS];
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            sum[t][r] = v16l_load(sums[i + t] + 16 * (v + r));
    for (size_t g = 0; g < s->groups; g++) {
        v16i dots[FINE_TOKENS * FINE_PLANES][NIBBLE_VECTORS];
        const size_t group = s->first + g;
        if (i == 0 && (decoded || R < NIBBLE_VECTORS))
            prefetch_rows(R, s, g, v);
        UNROLL(4)
        for (size_t t = 0; t < T; t++)
            UNROLL(4)
            for (size_t r = 0; r < R; r++) {
                dots[FINE_PLANES * t][r] = dots[FINE_PLANES * t + 1][r] = v16i_set1(0);
                dots[FINE_PLANES * t + 2][r] = group_start(c->offset[i + t] + group);
            }
        group_dots(R, FINE_PLANES * T, decoded, slab_weights(s, decoded, g, v), s->operand, c->q[i],
                   group * NIBBLE_GROUP, dots);
        UNROLL(4)
        for (size_t t = 0; t < T; t++)
            UNROLL(4)
            for (size_t r = 0; r < R; r++)
                sum[t][r] = v16l_add_shl(sum[t][r], combine_digits(dots + FINE_PLANES * t, r),
                                         counts[g] + 16 * (v + r));
    }
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            v16l_store(sums[i + t] + 16 * (v + r), sum[t][r]);
}

#define FINE_PASS(T, decoded)                                                                \
    for (size_t v = 0; v < NIBBLE_VECTORS; v += FINE_ROWS(T, decoded))                       \
        fine_rows(FINE_ROWS(T, decoded), T, decoded, v, slab, counts, c, i, sums)

static inline void fine_slab(bool decoded, const struct nibble_slab *slab,
                             uint8_t (*counts)[INT8_PANEL_ROWS], const struct fine_chunk *c,
                             int64_t (*sums)[INT8_PANEL_ROWS])
{
    size_t i = 0;
    for (; i + FINE_TOKENS <= c->count; i += FINE_TOKENS)
        if (decoded)
            FINE_PASS(FINE_TOKENS, true);
        else
            FINE_PASS(FINE_TOKENS, false);
    if (i == c->count)
        return;
    if (decoded)
        FINE_PASS(1, true);
    else
        FINE_PASS(1, false);
}

static void mxfp4_panels22(const uint8_t *panels, const int8_t *table, size_t rows, size_t p0,
                           size_t p1, const struct qbatch22 *x, const uint32_t *index, size_t n,
                           float *y, size_t ldy)
{
    const struct nibble_operand operand = nibble_operand(table);
    const size_t groups = x->k_pad / NIBBLE_GROUP;
    const size_t panel_bytes = groups * (INT8_PANEL_ROWS + NIBBLE_BYTES);
    struct nibble_slab slab;
    slab.operand = &operand;
    for (size_t first = 0; first < n; first += FINE_CHUNK) {
        const struct fine_chunk c = take_fine_chunk(x, index, first, n);
        for (size_t p = p0; p < p1 && p * INT8_PANEL_ROWS < rows; p++) {
            _Alignas(64) int64_t sums[FINE_CHUNK][INT8_PANEL_ROWS];
            const uint8_t *e = panels + p * panel_bytes;
            struct panel_exponents panel;
            read_exponents(e, groups, mxfp4_fine_spread(groups), &panel);
            memset(sums, 0, c.count * sizeof *sums);
            for (size_t g = 0; g < groups; g += NIBBLE_SLAB) {
                uint8_t counts[NIBBLE_SLAB][INT8_PANEL_ROWS];
                const bool decoded = take_slab(&slab, e + groups * INT8_PANEL_ROWS, g, groups,
                                               c.count > FINE_FUSED);
                row_counts(e + g * INT8_PANEL_ROWS, slab.groups, panel.base, counts);
                fine_slab(decoded, &slab, counts, &c, sums);
            }
            for (size_t i = 0; i < c.count; i++)
                finish_power(sums[i], panel.power, c.scale[i], rows_in_panel(rows, p),
                             y + (first + i) * ldy + p * INT8_PANEL_ROWS);
        }
    }
}

#endif
