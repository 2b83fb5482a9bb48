/* Products with MXFP4 weights: exact integers of one row have one exponent, its base. Included after
 * nibble_body.h. */
#ifndef KERNELS_MXFP4_BODY_H
#define KERNELS_MXFP4_BODY_H

#include "kernels/nibble_body.h"

/* A group's dot product is at most 32 * 12 * 127 = 48,768; an int32 lane takes dots while their
 * powers of two sum up to 2^31 / 48,768. A count of MXFP4_NOTHING shifts everything out. */
enum { LANE_FACTORS = 44034, MXFP4_NOTHING = 64 };

/* The exponents of one panel: base is each row's smallest, but at most `spread` below its largest.
 * A row with an exponent of 255 is not valid. */
struct panel_exponents {
    uint8_t base[INT8_PANEL_ROWS];
    float power[INT8_PANEL_ROWS]; /* of an integer sum; NaN when the row is not valid */
};

/* 2^(e - 128): the exponent's scale times one half, because the table holds doubled values. */
static inline float half_power(uint8_t e)
{
    uint32_t bits = e > 1 ? (uint32_t)(e - 1) << 23 : UINT32_C(0x200000) << e;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static void read_exponents(const uint8_t *e, size_t groups, unsigned spread,
                           struct panel_exponents *out)
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
    for (size_t r = 0; r < INT8_PANEL_ROWS; r++) {
        if (top[r] - out->base[r] > (int)spread)
            out->base[r] = (uint8_t)(top[r] - spread);
        out->power[r] = top[r] != 255 ? half_power(out->base[r]) : NAN;
    }
}

/* What each row's dots are shifted by in a slab. Returns the largest, MXFP4_NOTHING left aside. */
static inline unsigned row_counts(const uint8_t *e, size_t groups, const uint8_t *base,
                                  uint8_t (*counts)[INT8_PANEL_ROWS])
{
    uint8_t most[INT8_PANEL_ROWS] = { 0 };
    for (size_t g = 0; g < groups; g++, e += INT8_PANEL_ROWS)
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++) {
            const uint8_t above = e[r] < base[r] ? 0 : (uint8_t)(e[r] - base[r]);
            most[r] = above > most[r] ? above : most[r];
            counts[g][r] = e[r] < base[r] ? MXFP4_NOTHING : above;
        }
    uint8_t all = 0;
    for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
        all = most[r] > all ? most[r] : all;
    return all;
}

/* y = (float)sum * power * token scale, in this order. */
static inline void finish_power(const int64_t *sum, const float *power, float token_scale,
                                size_t rows, float *y)
{
    if (rows == INT8_PANEL_ROWS) /* a constant count, for the vectoriser */
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
            y[r] = (float)sum[r] * power[r] * token_scale;
    else
        for (size_t r = 0; r < rows; r++)
            y[r] = (float)sum[r] * power[r] * token_scale;
}

/* Sums of a panel: int32 lanes that go to int64 before they can overflow. */
struct mxfp4_sums {
    _Alignas(64) int32_t lane[NIBBLE_CHUNK][INT8_PANEL_ROWS];
    _Alignas(64) int64_t sum[NIBBLE_CHUNK][INT8_PANEL_ROWS];
    uint64_t used[NIBBLE_CHUNK / NIBBLE_TOKENS]; /* factors in the lanes of NIBBLE_TOKENS tokens */
};

static inline void flush_lanes(struct mxfp4_sums *s, size_t i)
{
    for (size_t t = i; t < i + NIBBLE_TOKENS; t++)
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
            s->sum[t][r] += s->lane[t][r];
    memset(s->lane[i], 0, NIBBLE_TOKENS * sizeof s->lane[i]);
    s->used[i / NIBBLE_TOKENS] = 0;
}

/* What a slab can add to a lane in units of the largest dot. Or-ed shifts are at least the largest. */
static inline uint64_t slab_factors(const struct nibble_chunk *c, size_t i,
                                    const struct nibble_slab *s, unsigned most)
{
    uint64_t factors = 0;
    for (size_t g = 0; g < s->groups; g += 2) {
        unsigned shift = 0;
        for (size_t t = i; t < i + NIBBLE_TOKENS && t < c->count; t++)
            shift |= c->shift[t][(s->first + g) / 2];
        factors += 2u << shift;
    }
    return factors << most;
}

static inline __attribute__((always_inline)) void
lane_rows(size_t R, size_t T, bool decoded, size_t v, const struct nibble_slab *s,
          uint8_t (*counts)[INT8_PANEL_ROWS], const struct nibble_chunk *c, size_t i,
          int32_t (*lanes)[INT8_PANEL_ROWS])
{
    v16i sum[NIBBLE_TOKENS][NIBBLE_VECTORS];
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            sum[t][r] = v16i_load(lanes[i + t] + 16 * (v + r));
    for (size_t g = 0; g < s->groups; g++) {
        v16i dots[NIBBLE_TOKENS][NIBBLE_VECTORS], count[NIBBLE_VECTORS];
        slab_dots(R, T, decoded, s, g, c, i, v, dots);
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            count[r] = v16i_load_u8(counts[g] + 16 * (v + r));
        UNROLL(4)
        for (size_t t = 0; t < T; t++) {
            v16i shift = v16i_set1(c->shift[i + t][(s->first + g) / 2]);
            UNROLL(4)
            for (size_t r = 0; r < R; r++)
                sum[t][r] = v16i_add(sum[t][r], v16i_shl(dots[t][r], v16i_add(count[r], shift)));
        }
    }
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            v16i_store(lanes[i + t] + 16 * (v + r), sum[t][r]);
}

/* Where lanes are too narrow: one group may reach 2^(15.6 + 7 + MXFP4_SPREAD). */
static void wide_rows(bool decoded, const struct nibble_slab *s,
                      uint8_t (*counts)[INT8_PANEL_ROWS], const struct nibble_chunk *c, size_t i,
                      int64_t *sum)
{
    for (size_t g = 0; g < s->groups; g++) {
        const uint8_t shift = c->shift[i][(s->first + g) / 2];
        uint8_t count[INT8_PANEL_ROWS];
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
            count[r] = (uint8_t)(counts[g][r] + shift);
        for (size_t v = 0; v < NIBBLE_VECTORS; v++) {
            v16i dots[1][NIBBLE_VECTORS];
            if (decoded)
                slab_dots(1, 1, true, s, g, c, i, v, dots);
            else
                slab_dots(1, 1, false, s, g, c, i, v, dots);
            v16l_store(sum + 16 * v, v16l_add_shl(v16l_load(sum + 16 * v), dots[0][0], count + 16 * v));
        }
    }
}

static inline void mxfp4_slab(bool decoded, const struct nibble_slab *slab,
                              uint8_t (*counts)[INT8_PANEL_ROWS], unsigned most,
                              const struct nibble_chunk *c, struct mxfp4_sums *s)
{
    for (size_t i = 0; i < c->count; i += NIBBLE_TOKENS) {
        const size_t left = c->count - i;
        const uint64_t factors = slab_factors(c, i, slab, most);
        if (factors > LANE_FACTORS) {
            for (size_t t = i; t < i + NIBBLE_TOKENS && t < c->count; t++)
                wide_rows(decoded, slab, counts, c, t, s->sum[t]);
            continue;
        }
        if (s->used[i / NIBBLE_TOKENS] + factors > LANE_FACTORS)
            flush_lanes(s, i);
        s->used[i / NIBBLE_TOKENS] += factors;
        if (decoded)
            NIBBLE_STEP(lane_rows, left, true, slab, counts, c, i, s->lane);
        else
            NIBBLE_STEP(lane_rows, left, false, slab, counts, c, i, s->lane);
    }
}

static void mxfp4_panels(const uint8_t *panels, const int8_t *table, size_t rows, size_t p0,
                         size_t p1, const struct qbatch *x, const uint32_t *index, size_t n,
                         float *y, size_t ldy)
{
    const struct nibble_operand operand = nibble_operand(table);
    const size_t groups = x->k_pad / NIBBLE_GROUP;
    const size_t panel_bytes = groups * (INT8_PANEL_ROWS + NIBBLE_BYTES);
    struct nibble_slab slab;
    slab.operand = &operand;
    for (size_t first = 0; first < n; first += NIBBLE_CHUNK) {
        const struct nibble_chunk c = take_chunk(x, index, first, n);
        const size_t whole = (c.count + NIBBLE_TOKENS - 1) / NIBBLE_TOKENS * NIBBLE_TOKENS;
        for (size_t p = p0; p < p1 && p * INT8_PANEL_ROWS < rows; p++) {
            const uint8_t *e = panels + p * panel_bytes;
            struct mxfp4_sums s;
            struct panel_exponents panel;
            read_exponents(e, groups, MXFP4_SPREAD, &panel);
            memset(s.lane, 0, whole * sizeof *s.lane);
            memset(s.sum, 0, whole * sizeof *s.sum);
            memset(s.used, 0, sizeof s.used);
            for (size_t g = 0; g < groups; g += NIBBLE_SLAB) {
                uint8_t counts[NIBBLE_SLAB][INT8_PANEL_ROWS];
                const bool decoded = take_slab(&slab, e + groups * INT8_PANEL_ROWS, g, groups,
                                               c.count > NIBBLE_FUSED);
                const unsigned most = row_counts(e + g * INT8_PANEL_ROWS, slab.groups, panel.base, counts);
                mxfp4_slab(decoded, &slab, counts, most, &c, &s);
            }
            for (size_t i = 0; i < c.count; i++) {
                if (i % NIBBLE_TOKENS == 0)
                    flush_lanes(&s, i);
                finish_power(s.sum[i], panel.power, c.scale[i], rows_in_panel(rows, p),
                             y + (first + i) * ldy + p * INT8_PANEL_ROWS);
            }
        }
    }
}

#endif
