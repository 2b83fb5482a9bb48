/* Products with 4-bit weights around what an ISA defines before:
 *
 *   NIBBLE_TOKENS: tokens that one call of group_dots takes, 2 or 4
 *   struct nibble_operand, nibble_operand(table): the 16 weights as the ISA looks them up
 *   group_decode(w, operand, tile): the NIBBLE_BYTES of a group as NIBBLE_TILE operand bytes
 *   group_dots(T, decoded, w, operand, q, at, dots)
 *
 * The last sets dots[t][r] = sum of weight(r, k) * q[t][at + k] over the 32 inputs of a group; w are
 * its nibbles, or its tile when `decoded`. T and `decoded` are constants at every call. */
#ifndef KERNELS_NIBBLE_BODY_H
#define KERNELS_NIBBLE_BODY_H

#include "kernels/nibble.h"
#include "kernels/panels_body.h"

/* Tokens that share one decoded group, so that their sums stay in the first cache. */
enum { NIBBLE_CHUNK = 32 };

/* A group's dot product is at most 32 * 12 * 127 = 48,768. One that is shifted by up to 7 + 7 bits
 * fits an int32 lane, and a lane takes dots while their factors sum up to 2^31 / 48,768. */
enum { LANE_SPREAD = 7, LANE_FACTORS = 44034 };

struct nibble_chunk {
    const int8_t *q[NIBBLE_CHUNK];
    const uint8_t *shift[NIBBLE_CHUNK];
    float scale[NIBBLE_CHUNK];
    size_t count;
};

static struct nibble_chunk take_chunk(const struct qbatch *x, const uint32_t *index, size_t first,
                                      size_t n)
{
    struct nibble_chunk c = { .count = n - first < NIBBLE_CHUNK ? n - first : NIBBLE_CHUNK };
    for (size_t i = 0; i < c.count; i++) {
        size_t slot = index ? index[first + i] : first + i;
        c.q[i] = x->q + slot * x->k_pad;
        c.shift[i] = x->shift + slot * (x->k_pad / ACT_BLOCK);
        c.scale[i] = x->scale[slot];
    }
    return c;
}

static inline __attribute__((always_inline)) void
some_dots(size_t n, bool decoded, const uint8_t *w, const struct nibble_operand *operand,
          const int8_t *const *q, size_t at, int32_t (*dots)[INT8_PANEL_ROWS])
{
    if (n == 1)
        group_dots(1, decoded, w, operand, q, at, dots);
#if NIBBLE_TOKENS > 2
    else if (n == 3)
        group_dots(3, decoded, w, operand, q, at, dots);
    else if (n == 4)
        group_dots(4, decoded, w, operand, q, at, dots);
#endif
    else
        group_dots(2, decoded, w, operand, q, at, dots);
}

static inline void chunk_dots(const struct nibble_chunk *c, const uint8_t *nibbles,
                              const struct nibble_operand *operand, size_t at,
                              int32_t (*dots)[INT8_PANEL_ROWS])
{
    if (c->count <= NIBBLE_TOKENS) {
        some_dots(c->count, false, nibbles, operand, c->q, at, dots);
        return;
    }
    _Alignas(64) uint8_t tile[NIBBLE_TILE];
    group_decode(nibbles, operand, tile);
    for (size_t i = 0; i < c->count; i += NIBBLE_TOKENS) {
        size_t n = c->count - i < NIBBLE_TOKENS ? c->count - i : NIBBLE_TOKENS;
        some_dots(n, true, tile, operand, c->q + i, at, dots + i);
    }
}

/* The sums are below 2^24: exact in float, also times 2^shift. */
static inline void add_scaled(float *total, const int32_t *dots, unsigned shift,
                              const uint16_t *scales)
{
    const v16 power = v16_set1((float)(1 << shift));
    UNROLL(4)
    for (size_t r = 0; r < INT8_PANEL_ROWS; r += 16) {
        v16 sum = v16_mul(v16_load_i32(dots + r), power);
        v16_store(total + r, v16_fma(sum, v16_load_bf16(scales + r), v16_load(total + r)));
    }
}

static void nibble_panels(const uint8_t *panels, const int8_t *table, size_t rows, size_t p0,
                          size_t p1, const struct qbatch *x, const uint32_t *index, size_t n,
                          float *y, size_t ldy)
{
    const struct nibble_operand operand = nibble_operand(table);
    const size_t groups = x->k_pad / NIBBLE_GROUP, scale_row = INT8_PANEL_ROWS * sizeof(uint16_t);
    const size_t panel_bytes = groups * (scale_row + NIBBLE_BYTES);
    for (size_t first = 0; first < n; first += NIBBLE_CHUNK) {
        const struct nibble_chunk c = take_chunk(x, index, first, n);
        for (size_t p = p0; p < p1 && p * INT8_PANEL_ROWS < rows; p++) {
            _Alignas(64) float total[NIBBLE_CHUNK][INT8_PANEL_ROWS];
            _Alignas(64) int32_t dots[NIBBLE_CHUNK][INT8_PANEL_ROWS];
            const uint8_t *scales = panels + p * panel_bytes, *w = scales + groups * scale_row;
            memset(total, 0, c.count * sizeof *total);
            for (size_t g = 0; g < groups; g++, scales += scale_row, w += NIBBLE_BYTES) {
                chunk_dots(&c, w, &operand, g * NIBBLE_GROUP, dots);
                for (size_t i = 0; i < c.count; i++)
                    add_scaled(total[i], dots[i], c.shift[i][g / 2], (const void *)scales);
            }
            for (size_t i = 0; i < c.count; i++)
                for (size_t r = 0; r < rows_in_panel(rows, p); r++)
                    y[(first + i) * ldy + p * INT8_PANEL_ROWS + r] = total[i][r] * c.scale[i];
        }
    }
}

/* The exponents of one panel: base is each row's smallest, but at most MXFP4_SPREAD below its
 * largest. A row with an exponent of 255 is not valid. */
struct panel_exponents {
    uint8_t base[INT8_PANEL_ROWS];
    uint8_t valid[INT8_PANEL_ROWS];
    unsigned spread; /* of the widest row */
};

static void read_exponents(const uint8_t *e, size_t groups, struct panel_exponents *out)
{
    uint8_t top[INT8_PANEL_ROWS];
    memcpy(out->base, e, sizeof out->base);
    memcpy(top, e, sizeof top);
    for (size_t g = 1; g < groups; g++) {
        e += INT8_PANEL_ROWS;
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++) {
            out->base[r] = e[r] < out->base[r] ? e[r] : out->base[r];
            top[r] = e[r] > top[r] ? e[r] : top[r];
        }
    }
    out->spread = 0;
    for (size_t r = 0; r < INT8_PANEL_ROWS; r++) {
        if (top[r] - out->base[r] > MXFP4_SPREAD)
            out->base[r] = (uint8_t)(top[r] - MXFP4_SPREAD);
        unsigned spread = (unsigned)(top[r] - out->base[r]);
        out->valid[r] = top[r] != 255;
        out->spread = spread > out->spread ? spread : out->spread;
    }
}

/* What each row's dot is shifted by; a dot whose exponent lies below the base becomes 0. */
static inline void row_shifts(const uint8_t *e, const struct panel_exponents *panel,
                              uint32_t *shifts, int32_t *keep)
{
    for (size_t r = 0; r < INT8_PANEL_ROWS; r++) {
        int32_t s = e[r] - panel->base[r];
        shifts[r] = (uint32_t)(s < 0 ? 0 : s);
        keep[r] = s < 0 ? 0 : -1;
    }
}

static inline void add_lanes(int32_t *total, const int32_t *dots, const uint32_t *shifts,
                             const int32_t *keep, unsigned shift)
{
    for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
        total[r] += (int32_t)((uint32_t)(dots[r] & keep[r]) << (shifts[r] + shift));
}

static inline void add_wide(int64_t *sum, const int32_t *dots, const uint32_t *shifts,
                            const int32_t *keep, unsigned shift)
{
    for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
        sum[r] += (int64_t)((uint64_t)(int64_t)(dots[r] & keep[r]) << (shifts[r] + shift));
}

static inline void flush_lanes(size_t count, int32_t (*total)[INT8_PANEL_ROWS],
                               int64_t (*sums)[INT8_PANEL_ROWS])
{
    for (size_t i = 0; i < count; i++)
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
            sums[i][r] += total[i][r];
    memset(total, 0, count * sizeof *total);
}

/* 2^(e - 128): the exponent's scale times one half, because the table holds doubled values. */
static inline float half_power(uint8_t e)
{
    uint32_t bits = e > 1 ? (uint32_t)(e - 1) << 23 : UINT32_C(0x200000) << e;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline unsigned highest_shift(const struct nibble_chunk *c, size_t block)
{
    unsigned high = 0;
    for (size_t i = 0; i < c->count; i++)
        high = c->shift[i][block] > high ? c->shift[i][block] : high;
    return high;
}

static void mxfp4_sums(const struct nibble_chunk *c, const uint8_t *e, const uint8_t *w,
                       size_t groups, const struct nibble_operand *operand,
                       const struct panel_exponents *panel, int64_t (*sums)[INT8_PANEL_ROWS])
{
    _Alignas(64) int32_t total[NIBBLE_CHUNK][INT8_PANEL_ROWS];
    _Alignas(64) int32_t dots[NIBBLE_CHUNK][INT8_PANEL_ROWS];
    _Alignas(64) uint32_t shifts[INT8_PANEL_ROWS];
    _Alignas(64) int32_t keep[INT8_PANEL_ROWS];
    const bool lanes = panel->spread <= LANE_SPREAD;
    unsigned used = 0;
    memset(total, 0, c->count * sizeof *total);
    memset(sums, 0, c->count * sizeof *sums);
    for (size_t g = 0; g < groups; g++, e += INT8_PANEL_ROWS, w += NIBBLE_BYTES) {
        chunk_dots(c, w, operand, g * NIBBLE_GROUP, dots);
        row_shifts(e, panel, shifts, keep);
        if (!lanes) {
            for (size_t i = 0; i < c->count; i++)
                add_wide(sums[i], dots[i], shifts, keep, c->shift[i][g / 2]);
            continue;
        }
        unsigned factor = 1u << (highest_shift(c, g / 2) + panel->spread);
        if (used + factor > LANE_FACTORS) {
            flush_lanes(c->count, total, sums);
            used = 0;
        }
        used += factor;
        for (size_t i = 0; i < c->count; i++)
            add_lanes(total[i], dots[i], shifts, keep, c->shift[i][g / 2]);
    }
    flush_lanes(c->count, total, sums);
}

static void mxfp4_panels(const uint8_t *panels, const int8_t *table, size_t rows, size_t p0,
                         size_t p1, const struct qbatch *x, const uint32_t *index, size_t n,
                         float *y, size_t ldy)
{
    const struct nibble_operand operand = nibble_operand(table);
    const size_t groups = x->k_pad / NIBBLE_GROUP;
    const size_t panel_bytes = groups * (INT8_PANEL_ROWS + NIBBLE_BYTES);
    for (size_t first = 0; first < n; first += NIBBLE_CHUNK) {
        const struct nibble_chunk c = take_chunk(x, index, first, n);
        for (size_t p = p0; p < p1 && p * INT8_PANEL_ROWS < rows; p++) {
            _Alignas(64) int64_t sums[NIBBLE_CHUNK][INT8_PANEL_ROWS];
            const uint8_t *e = panels + p * panel_bytes;
            struct panel_exponents panel;
            read_exponents(e, groups, &panel);
            mxfp4_sums(&c, e, e + groups * INT8_PANEL_ROWS, groups, &operand, &panel, sums);
            for (size_t r = 0; r < rows_in_panel(rows, p); r++) {
                const float power = panel.valid[r] ? half_power(panel.base[r]) : NAN;
                for (size_t i = 0; i < c.count; i++)
                    y[(first + i) * ldy + p * INT8_PANEL_ROWS + r] =
                        (float)sums[i][r] * power * c.scale[i];
            }
        }
    }
}

#endif
