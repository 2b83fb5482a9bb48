#include "quant/nibble.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "quant/bf16.h"

/* MXFP4_SPREAD_MAX is what the kernels can sum exactly. */
enum {
    GROUP = 32,
    GROUP_BYTES = GROUP / 2 * NIBBLE_ROWS,
    EXPONENT_BIAS = 127,
    EXPONENT_MAX = 254,
    MXFP4_SPREAD_MAX = 25,
};

const int8_t nibble_table_mxfp4[16] = { 0, 1,  2,  3,  4,  6,  8,  12,
                                        0, -1, -2, -3, -4, -6, -8, -12 };
const int8_t nibble_table_int4[16] = { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 };
const int8_t nibble_table_nl4[16] = { -30, -22, -17, -13, -9, -6, -3, 0,
                                      2,   5,   8,   11,  15, 19, 24, 30 };

static size_t panel_bytes(size_t cols_pad, size_t scale_bytes)
{
    return cols_pad / GROUP * (NIBBLE_ROWS * scale_bytes + GROUP_BYTES);
}

static const uint8_t *panel_of(const uint8_t *panels, size_t cols_pad, size_t scale_bytes, size_t r)
{
    return panels + r / NIBBLE_ROWS * panel_bytes(cols_pad, scale_bytes);
}

/* Byte of input k of a group and the bits it sits in: inputs 0..15 low, 16..31 high. */
static size_t nibble_byte(size_t r, size_t k, unsigned *bit)
{
    *bit = k < GROUP / 2 ? 0 : 4;
    k %= GROUP / 2;
    return k / 4 * NIBBLE_ROWS * 4 + r % NIBBLE_ROWS * 4 + k % 4;
}

static unsigned nibble_at(const uint8_t *nibbles, size_t r, size_t c)
{
    unsigned bit;
    size_t at = nibble_byte(r, c % GROUP, &bit);
    return nibbles[c / GROUP * GROUP_BYTES + at] >> bit & 15u;
}

static void set_nibble(uint8_t *nibbles, size_t r, size_t c, unsigned code)
{
    unsigned bit;
    uint8_t *byte = nibbles + c / GROUP * GROUP_BYTES + nibble_byte(r, c % GROUP, &bit);
    *byte = (uint8_t)((*byte & ~(15u << bit)) | code << bit);
}

void nibble_row(const int8_t table[16], const uint8_t *panels, size_t cols_pad, size_t cols,
                size_t r, float *out)
{
    const uint8_t *panel = panel_of(panels, cols_pad, sizeof(uint16_t), r);
    const uint16_t *scales = (const void *)panel;
    const uint8_t *nibbles = panel + cols_pad / GROUP * NIBBLE_ROWS * sizeof(uint16_t);
    for (size_t c = 0; c < cols; c++)
        out[c] = bf16_decode(scales[c / GROUP * NIBBLE_ROWS + r % NIBBLE_ROWS]) *
                 (float)table[nibble_at(nibbles, r, c)];
}

void mxfp4_row(const uint8_t *panels, size_t cols_pad, size_t cols, size_t r, float *out)
{
    const uint8_t *exponents = panel_of(panels, cols_pad, 1, r);
    const uint8_t *nibbles = exponents + cols_pad / GROUP * NIBBLE_ROWS;
    for (size_t c = 0; c < cols; c++) {
        const int e = exponents[c / GROUP * NIBBLE_ROWS + r % NIBBLE_ROWS];
        const int w = nibble_table_mxfp4[nibble_at(nibbles, r, c)];
        out[c] = e > EXPONENT_MAX ? NAN : ldexpf((float)w, e - EXPONENT_BIAS - 1);
    }
}

/* Vectors of the base instruction set: results are the same on every machine. */
typedef float lanes __attribute__((vector_size(16)));
typedef int32_t lane_bits __attribute__((vector_size(16)));
enum { LANES = 4, VECTORS = GROUP / LANES };

/* The nearest weight of x is the lowest plus every step whose middle x exceeds; ties go to the lower
 * one. */
enum { WEIGHT_REACH = 32 };
struct levels {
    float lowest;
    lanes middle[15], step[15];
    uint8_t code[2 * WEIGHT_REACH + 1]; /* of a weight + WEIGHT_REACH */
};

static lanes all(float x)
{
    return (lanes){ x, x, x, x };
}

static struct levels levels_of(const int8_t table[16])
{
    struct levels l = { .lowest = table[0] };
    for (size_t i = 0; i < 15; i++) {
        l.middle[i] = all((float)(table[i] + table[i + 1]) * 0.5f);
        l.step[i] = all((float)(table[i + 1] - table[i]));
    }
    for (uint8_t i = 0; i < 16; i++)
        l.code[table[i] + WEIGHT_REACH] = i;
    return l;
}

/* x = w / scale and q, the weights nearest to it. */
static void nearest_weights(const struct levels *l, const lanes w[VECTORS], float scale,
                            lanes x[VECTORS], lanes q[VECTORS])
{
    const lanes inverse = all(1.0f / scale), lowest = all(l->lowest);
    for (size_t v = 0; v < VECTORS; v += 4) { /* four sums hide each other's latency */
        const lanes x0 = w[v] * inverse, x1 = w[v + 1] * inverse, x2 = w[v + 2] * inverse,
                    x3 = w[v + 3] * inverse;
        lanes q0 = lowest, q1 = lowest, q2 = lowest, q3 = lowest;
        for (size_t j = 0; j < 15; j++) {
            const lanes middle = l->middle[j];
            const lane_bits step = (lane_bits)l->step[j];
            q0 += (lanes)((x0 > middle) & step);
            q1 += (lanes)((x1 > middle) & step);
            q2 += (lanes)((x2 > middle) & step);
            q3 += (lanes)((x3 > middle) & step);
        }
        x[v] = x0, x[v + 1] = x1, x[v + 2] = x2, x[v + 3] = x3;
        q[v] = q0, q[v + 1] = q1, q[v + 2] = q2, q[v + 3] = q3;
    }
}

static float fold(lanes a)
{
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* The scale with the least squared error for the weights nearest with `scale`. */
static float better_scale(const struct levels *l, const lanes w[VECTORS], float scale)
{
    lanes x[VECTORS], q[VECTORS], dot = all(0), norm = all(0);
    nearest_weights(l, w, scale, x, q);
    for (size_t v = 0; v < VECTORS; v++) {
        dot += x[v] * q[v];
        norm += q[v] * q[v];
    }
    const float square = fold(norm);
    return square > 0 ? scale * (fold(dot) / square) : scale;
}

/* The squared error in units of the square of the scale, which keeps it in range. */
static float group_error(const struct levels *l, const lanes w[VECTORS], float scale,
                         lanes q[VECTORS])
{
    lanes x[VECTORS], error = all(0);
    nearest_weights(l, w, scale, x, q);
    for (size_t v = 0; v < VECTORS; v++)
        error += (x[v] - q[v]) * (x[v] - q[v]);
    return fold(error);
}

/* Tries scales that put the largest weight near either end of the table. */
static uint16_t fit_group(const int8_t table[16], const struct levels *l, const float w[GROUP],
                          uint8_t codes[GROUP])
{
    static const float reaches[] = { 0.84f, 0.92f, 1.0f, 1.08f, 1.16f, 1.24f };
    enum { REACHES = sizeof reaches / sizeof *reaches };
    lanes group[VECTORS], best[VECTORS], q[VECTORS];
    float largest = 0, weight[GROUP] = { 0 };
    for (size_t i = 0; i < GROUP; i++)
        largest = fabsf(w[i]) > fabsf(largest) ? w[i] : largest;
    uint16_t chosen = 0;
    double least = INFINITY;
    memcpy(group, w, sizeof group);
    for (size_t t = 0; t < 2 * REACHES; t++) {
        float scale = largest / ((float)table[t % 2 ? 15 : 0] * reaches[t / 2]);
        if (scale == 0 || !isfinite(1.0f / scale))
            continue;
        const uint16_t bits = bf16_encode(better_scale(l, group, scale));
        scale = bf16_decode(bits);
        if (scale == 0 || !isfinite(scale) || !isfinite(1.0f / scale))
            continue;
        const double error = (double)group_error(l, group, scale, q) * (double)scale * (double)scale;
        if (error < least) {
            least = error;
            chosen = bits;
            memcpy(best, q, sizeof best);
        }
    }
    if (chosen)
        memcpy(weight, best, sizeof weight);
    for (size_t i = 0; i < GROUP; i++)
        codes[i] = l->code[(int)weight[i] + WEIGHT_REACH];
    return chosen;
}

void nibble_encode(const int8_t table[16], const float *w, size_t rows, size_t cols, void *blob)
{
    const size_t rows_pad = (rows + NIBBLE_ROWS - 1) / NIBBLE_ROWS * NIBBLE_ROWS;
    const size_t cols_pad = (cols + NIBBLE_COLS - 1) / NIBBLE_COLS * NIBBLE_COLS;
    const struct levels levels = levels_of(table);
    const unsigned zero = levels.code[WEIGHT_REACH];
    const size_t stride = panel_bytes(cols_pad, sizeof(uint16_t));
    const size_t scale_bytes = cols_pad / GROUP * NIBBLE_ROWS * sizeof(uint16_t);
    for (size_t p = 0; p < rows_pad / NIBBLE_ROWS; p++) {
        uint8_t *panel = (uint8_t *)blob + p * stride;
        memset(panel, 0, scale_bytes);
        memset(panel + scale_bytes, (int)(zero << 4 | zero), stride - scale_bytes);
    }
    for (size_t r = 0; r < rows; r++, w += cols) {
        uint8_t *panel = (uint8_t *)blob + r / NIBBLE_ROWS * stride;
        uint16_t *scales = (void *)panel;
        for (size_t c = 0; c < cols; c += GROUP) {
            const size_t n = cols - c < GROUP ? cols - c : GROUP;
            float group[GROUP] = { 0 };
            uint8_t codes[GROUP];
            memcpy(group, w + c, n * sizeof *group);
            scales[c / GROUP * NIBBLE_ROWS + r % NIBBLE_ROWS] =
                fit_group(table, &levels, group, codes);
            for (size_t i = 0; i < n; i++)
                set_nibble(panel + scale_bytes, r, c + i, codes[i]);
        }
    }
}

/* floor(log2(largest)) - 2, biased; 0 for a group of zeros. */
static int group_exponent(const float *w, size_t n)
{
    float largest = 0;
    int exponent;
    for (size_t i = 0; i < n; i++)
        largest = fabsf(w[i]) > largest ? fabsf(w[i]) : largest;
    if (largest == 0 || !isfinite(largest))
        return 0;
    (void)frexpf(largest, &exponent); /* largest = [0.5, 1) * 2^exponent */
    exponent += EXPONENT_BIAS - 3;
    return exponent < 0 ? 0 : exponent;
}

/* Nearest doubled E2M1 magnitude, ties to the even mantissa. */
static unsigned e2m1_code(float x)
{
    static const float above[7] = { 0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f };
    const float magnitude = fabsf(x);
    unsigned code = 0;
    while (code < 7 && (magnitude > above[code] || (magnitude == above[code] && code % 2)))
        code++;
    return x < 0 && code ? code | 8u : code;
}

/* Writes the nibbles of one group; false when all of them are zero. */
static bool encode_mx_group(const float *w, size_t n, int exponent, size_t r, size_t c,
                            uint8_t *nibbles)
{
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        const unsigned code = e2m1_code(ldexpf(w[i], 1 + EXPONENT_BIAS - exponent));
        any = any || code;
        set_nibble(nibbles, r, c + i, code);
    }
    return any;
}

/* A group of zeros takes the row's smallest exponent, so that it widens no spread. */
static void encode_mx_row(const float *w, size_t cols, size_t cols_pad, size_t r,
                          uint8_t *exponents, uint8_t *nibbles)
{
    enum { ZERO_GROUP = 255 };
    int top = 0, bottom = EXPONENT_MAX + 1;
    for (size_t c = 0; c < cols; c += GROUP) {
        const int e = group_exponent(w + c, cols - c < GROUP ? cols - c : GROUP);
        top = e > top ? e : top;
    }
    const int least = top > MXFP4_SPREAD_MAX ? top - MXFP4_SPREAD_MAX : 0;
    exponents += r % NIBBLE_ROWS;
    for (size_t c = 0; c < cols_pad; c += GROUP) {
        const size_t n = c >= cols ? 0 : cols - c < GROUP ? cols - c : GROUP;
        int e = n ? group_exponent(w + c, n) : 0;
        e = e < least ? least : e;
        const bool any = n && encode_mx_group(w + c, n, e, r, c, nibbles);
        bottom = any && e < bottom ? e : bottom;
        exponents[c / GROUP * NIBBLE_ROWS] = (uint8_t)(any ? e : ZERO_GROUP);
    }
    for (size_t c = 0; c < cols_pad; c += GROUP)
        if (exponents[c / GROUP * NIBBLE_ROWS] == ZERO_GROUP)
            exponents[c / GROUP * NIBBLE_ROWS] = (uint8_t)(bottom > EXPONENT_MAX ? 0 : bottom);
}

void mxfp4_encode(const float *w, size_t rows, size_t cols, void *blob)
{
    const size_t rows_pad = (rows + NIBBLE_ROWS - 1) / NIBBLE_ROWS * NIBBLE_ROWS;
    const size_t cols_pad = (cols + NIBBLE_COLS - 1) / NIBBLE_COLS * NIBBLE_COLS;
    const size_t stride = panel_bytes(cols_pad, 1), scale_bytes = cols_pad / GROUP * NIBBLE_ROWS;
    memset(blob, 0, rows_pad / NIBBLE_ROWS * stride);
    for (size_t r = 0; r < rows; r++) {
        uint8_t *panel = (uint8_t *)blob + r / NIBBLE_ROWS * stride;
        encode_mx_row(w + r * cols, cols, cols_pad, r, panel, panel + scale_bytes);
    }
}
