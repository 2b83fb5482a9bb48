/* Products with 4-bit weights around what an ISA defines before:
 *
 *   NIBBLE_TOKENS: tokens that one call of group_dots takes at most, 2 or 4
 *   NIBBLE_ROWS(T, decoded): vectors of 16 rows that one call of group_dots takes: 1, 2 or 4
 *   NIBBLE_FUSED: tokens up to which decoding again is cheaper than keeping what was decoded
 *   struct nibble_operand, nibble_operand(table): the 16 weights as the ISA looks them up
 *   group_start(offset): dots of nothing, of an activation group with this offset
 *   group_decode(w, operand, tile): the NIBBLE_BYTES of a group as NIBBLE_TILE operand bytes
 *   group_dots(R, T, decoded, w, operand, q, at, dots) for up to NIBBLE_TOKENS, or 3 FINE_TOKENS
 *     (kernels/mxfp4_fine_body.h) vectors q
 *
 * The last adds the sum of weight(r, k) * q[t][at + k] over the 32 inputs of a group to dots[t], 16 R
 * rows from w on; w are its nibbles, or its tile when `decoded`. R, T and `decoded` are constants at
 * every call. */
#ifndef KERNELS_NIBBLE_BODY_H
#define KERNELS_NIBBLE_BODY_H

#include "kernels/nibble.h"
#include "kernels/panels_body.h"

/* Tokens that share one decoded slab of groups, so that weights and sums stay in the first cache. An
 * even number of groups: whole blocks of activations. */
enum { NIBBLE_CHUNK = 64, NIBBLE_SLAB = 4 };

/* The entries behind `count`, up to a multiple of NIBBLE_TOKENS, repeat the last. */
struct nibble_chunk {
    const int8_t *q[NIBBLE_CHUNK];
    const uint8_t *shift[NIBBLE_CHUNK];
    const int32_t *offset[NIBBLE_CHUNK];
    float scale[NIBBLE_CHUNK];
    size_t count;
};

static struct nibble_chunk take_chunk(const struct qbatch *x, const uint32_t *index, size_t first,
                                      size_t n)
{
    struct nibble_chunk c = { .count = n - first < NIBBLE_CHUNK ? n - first : NIBBLE_CHUNK };
    for (size_t i = 0; i < NIBBLE_CHUNK && i < c.count + NIBBLE_TOKENS - 1; i++) {
        size_t at = first + (i < c.count ? i : c.count - 1), slot = index ? index[at] : at;
        c.q[i] = x->q + slot * x->k_pad;
        c.shift[i] = x->shift + slot * (x->k_pad / ACT_BLOCK);
        c.offset[i] = x->offset + slot * (x->k_pad / NIBBLE_GROUP);
        c.scale[i] = x->scale[slot];
    }
    return c;
}

/* Consecutive groups of a panel. */
struct nibble_slab {
    const uint8_t *w;    /* nibbles, or tiles when decoded */
    const uint8_t *next; /* nibbles of the slab behind */
    const struct nibble_operand *operand;
    size_t first, groups;
    _Alignas(64) uint8_t tile[NIBBLE_SLAB * NIBBLE_TILE];
};

/* The slab from group `first` on of a panel whose nibbles are at w. Returns `decoded`. */
static inline bool take_slab(struct nibble_slab *s, const uint8_t *w, size_t first, size_t groups,
                             bool decoded)
{
    s->first = first;
    s->groups = groups - first < NIBBLE_SLAB ? groups - first : NIBBLE_SLAB;
    s->w = w + first * NIBBLE_BYTES;
    s->next = s->w + NIBBLE_SLAB * NIBBLE_BYTES;
    if (!decoded)
        return false;
    for (size_t g = 0; g < s->groups; g++)
        group_decode(s->w + g * NIBBLE_BYTES, s->operand, s->tile + g * NIBBLE_TILE);
    s->w = s->tile;
    return true;
}

static inline const uint8_t *slab_weights(const struct nibble_slab *s, bool decoded, size_t g,
                                          size_t v)
{
    return s->w + g * (decoded ? NIBBLE_TILE : NIBBLE_BYTES) + 64 * v;
}

/* The same rows of the slab behind. Who computes first does this for all; who walks through whole
 * groups without decoding them leaves it to the processor. */
static inline __attribute__((always_inline)) void prefetch_rows(size_t R, const struct nibble_slab *s,
                                                                size_t g, size_t v)
{
    UNROLL(4)
    for (size_t k = 0; k < NIBBLE_BYTES; k += NIBBLE_BYTES / 4)
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            __builtin_prefetch(s->next + g * NIBBLE_BYTES + k + 64 * (v + r));
}

/* The dots of group g of the slab with T tokens from `i` on, rows 16 v and the following. */
static inline __attribute__((always_inline)) void
slab_dots(size_t R, size_t T, bool decoded, const struct nibble_slab *s, size_t g,
          const struct nibble_chunk *c, size_t i, size_t v, v16i (*dots)[NIBBLE_VECTORS])
{
    const size_t group = s->first + g;
    if (i == 0 && (decoded || R < NIBBLE_VECTORS))
        prefetch_rows(R, s, g, v);
    UNROLL(4)
    for (size_t t = 0; t < T; t++) {
        v16i start = group_start(c->offset[i + t] + group);
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            dots[t][r] = start;
    }
    group_dots(R, T, decoded, slab_weights(s, decoded, g, v), s->operand, c->q + i,
               group * NIBBLE_GROUP, dots);
}

/* Calls of function(R, T, decoded, v, ...) for `left` tokens, or the first NIBBLE_TOKENS of them, and
 * all rows of a panel. Three tokens take the place of four. */
#define NIBBLE_PASS(function, T, decoded, ...)                                          \
    for (size_t v = 0; v < NIBBLE_VECTORS; v += NIBBLE_ROWS(T, decoded))                \
    function(NIBBLE_ROWS(T, decoded), T, decoded, v, __VA_ARGS__)
#define NIBBLE_STEP(function, left, decoded, ...)                                       \
    do {                                                                                \
        if (left == 1)                                                                  \
            NIBBLE_PASS(function, 1, decoded, __VA_ARGS__);                             \
        else if (NIBBLE_TOKENS == 2 || left == 2)                                       \
            NIBBLE_PASS(function, 2, decoded, __VA_ARGS__);                             \
        else                                                                            \
            NIBBLE_PASS(function, NIBBLE_TOKENS, decoded, __VA_ARGS__);                 \
    } while (0)

/* The sums are below 2^24: exact in float, also times 2^shift. */
static inline __attribute__((always_inline)) void
scaled_rows(size_t R, size_t T, bool decoded, size_t v, const struct nibble_slab *s,
            const uint16_t *scales, const struct nibble_chunk *c, size_t i,
            float (*total)[INT8_PANEL_ROWS])
{
    v16 sum[NIBBLE_TOKENS][NIBBLE_VECTORS];
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            sum[t][r] = v16_load(total[i + t] + 16 * (v + r));
    for (size_t g = 0; g < s->groups; g++) {
        v16i dots[NIBBLE_TOKENS][NIBBLE_VECTORS];
        slab_dots(R, T, decoded, s, g, c, i, v, dots);
        v16 scale[NIBBLE_VECTORS];
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            scale[r] = v16_load_bf16(scales + g * INT8_PANEL_ROWS + 16 * (v + r));
        UNROLL(4)
        for (size_t t = 0; t < T; t++) {
            v16i shift = v16i_set1(c->shift[i + t][(s->first + g) / 2]);
            UNROLL(4)
            for (size_t r = 0; r < R; r++)
                sum[t][r] = v16_fma(v16_from_i32(v16i_shl(dots[t][r], shift)), scale[r], sum[t][r]);
        }
    }
    UNROLL(4)
    for (size_t t = 0; t < T; t++)
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            v16_store(total[i + t] + 16 * (v + r), sum[t][r]);
}

static void nibble_panels(const uint8_t *panels, const int8_t *table, size_t rows, size_t p0,
                          size_t p1, const struct qbatch *x, const uint32_t *index, size_t n,
                          float *y, size_t ldy)
{
    const struct nibble_operand operand = nibble_operand(table);
    const size_t groups = x->k_pad / NIBBLE_GROUP;
    const size_t scale_bytes = groups * INT8_PANEL_ROWS * sizeof(uint16_t);
    const size_t panel_bytes = scale_bytes + groups * NIBBLE_BYTES;
    struct nibble_slab slab;
    slab.operand = &operand;
    for (size_t first = 0; first < n; first += NIBBLE_CHUNK) {
        const struct nibble_chunk c = take_chunk(x, index, first, n);
        for (size_t p = p0; p < p1 && p * INT8_PANEL_ROWS < rows; p++) {
            _Alignas(64) float total[NIBBLE_CHUNK][INT8_PANEL_ROWS];
            const uint8_t *panel = panels + p * panel_bytes;
            memset(total, 0, sizeof total);
            for (size_t g = 0; g < groups; g += NIBBLE_SLAB) {
                const uint16_t *scales = (const uint16_t *)(const void *)panel + g * INT8_PANEL_ROWS;
                const bool decoded = take_slab(&slab, panel + scale_bytes, g, groups, c.count > NIBBLE_FUSED);
                for (size_t i = 0; i < c.count; i += NIBBLE_TOKENS) {
                    const size_t left = c.count - i;
                    if (decoded)
                        NIBBLE_STEP(scaled_rows, left, true, &slab, scales, &c, i, total);
                    else
                        NIBBLE_STEP(scaled_rows, left, false, &slab, scales, &c, i, total);
                }
            }
            for (size_t i = 0; i < c.count; i++)
                for (size_t r = 0; r < rows_in_panel(rows, p); r++)
                    y[(first + i) * ldy + p * INT8_PANEL_ROWS + r] = total[i][r] * c.scale[i];
        }
    }
}

#endif
