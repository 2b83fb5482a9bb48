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

/* code[i]: the nearest weight of x when ceil(2x) = i - TABLE_REACH; ties go to the lower. The middles
 * between weights are multiples of one half, so ceil(2x) decides. */
enum { TABLE_REACH = 64 };
struct nearest {
    const int8_t *table;
    uint8_t code[2 * TABLE_REACH + 1];
};

static void nearest_init(struct nearest *n, const int8_t table[16])
{
    uint8_t code = 0;
    n->table = table;
    for (int i = 0; i <= 2 * TABLE_REACH; i++) {
        while (code < 15 && i - TABLE_REACH > table[code] + table[code + 1])
            code++;
        n->code[i] = code;
    }
}

static uint8_t nearest_code(const struct nearest *n, float x)
{
    const float twice = x + x;
    if (!(twice > -TABLE_REACH)) return n->code[0];
    return n->code[twice < TABLE_REACH ? (int)ceilf(twice) + TABLE_REACH : 2 * TABLE_REACH];
}

/* Nearest codes for a scale; returns their squared error, and the best scale for them. */
static double fit_codes(const struct nearest *near, const float *w, size_t n, float scale,
                        uint8_t *codes, float *better)
{
    const float inverse = 1.0f / scale;
    float dot = 0, norm = 0;
    double error = 0;
    for (size_t i = 0; i < n; i++) {
        codes[i] = nearest_code(near, w[i] * inverse);
        const float q = (float)near->table[codes[i]], miss = w[i] - scale * q;
        dot += w[i] * inverse * q;
        norm += q * q;
        error += (double)miss * (double)miss;
    }
    *better = norm > 0 ? scale * (dot / norm) : scale;
    return error;
}

/* Tries scales that put the largest weight near either end of the table. */
static uint16_t fit_group(const struct nearest *near, const float *w, size_t n, uint8_t *best)
{
    static const float reaches[] = { 0.84f, 0.92f, 1.0f, 1.08f, 1.16f, 1.24f };
    enum { REACHES = sizeof reaches / sizeof *reaches };
    float largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = fabsf(w[i]) > fabsf(largest) ? w[i] : largest;
    uint16_t chosen = 0;
    double least = INFINITY;
    for (size_t t = 0; t < 2 * REACHES; t++) {
        float scale = largest / ((float)near->table[t % 2 ? 15 : 0] * reaches[t / 2]);
        float better;
        uint8_t codes[GROUP];
        if (scale == 0 || !isfinite(1.0f / scale))
            continue;
        (void)fit_codes(near, w, n, scale, codes, &better);
        const uint16_t bits = bf16_encode(better);
        scale = bf16_decode(bits);
        if (scale == 0 || !isfinite(scale) || !isfinite(1.0f / scale))
            continue;
        const double error = fit_codes(near, w, n, scale, codes, &better);
        if (error < least) {
            least = error;
            chosen = bits;
            memcpy(best, codes, n);
        }
    }
    return chosen;
}

void nibble_encode(const int8_t table[16], const float *w, size_t rows, size_t cols, void *blob)
{
    const size_t rows_pad = (rows + NIBBLE_ROWS - 1) / NIBBLE_ROWS * NIBBLE_ROWS;
    const size_t cols_pad = (cols + NIBBLE_COLS - 1) / NIBBLE_COLS * NIBBLE_COLS;
    struct nearest near;
    nearest_init(&near, table);
    const unsigned zero = nearest_code(&near, 0);
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
            uint8_t codes[GROUP];
            memset(codes, (int)zero, sizeof codes);
            scales[c / GROUP * NIBBLE_ROWS + r % NIBBLE_ROWS] = fit_group(&near, w + c, n, codes);
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
