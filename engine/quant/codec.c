#include "quant/codec.h"

#include <string.h>

#include "quant/int8.h"

static const char *const names[] = {
    [CODEC_NONE] = "none", [CODEC_F32] = "f32",   [CODEC_F64] = "f64",
    [CODEC_BF16] = "bf16", [CODEC_INT8] = "int8",
};

enum { CODEC_COUNT = sizeof names / sizeof names[0] };

static const uint64_t max_dimension = UINT64_C(1) << 31;

const char *codec_name(enum codec c)
{
    return (unsigned)c < CODEC_COUNT ? names[c] : names[CODEC_NONE];
}

enum codec codec_from_name(const char *name)
{
    for (unsigned c = CODEC_NONE + 1; name && c < CODEC_COUNT; c++)
        if (strcmp(name, names[c]) == 0)
            return (enum codec)c;
    return CODEC_NONE;
}

static uint64_t round_up(uint64_t n, uint64_t step)
{
    return (n + step - 1) / step * step;
}

static uint64_t element_bytes(enum codec c)
{
    switch (c) {
    case CODEC_F32: return 4;
    case CODEC_F64: return 8;
    case CODEC_BF16: return 2;
    case CODEC_INT8: return 1;
    case CODEC_NONE: break;
    }
    return 0;
}

bool codec_matrix_bytes(enum codec c, uint64_t rows, uint64_t cols, size_t *bytes)
{
    uint64_t per_element = element_bytes(c);
    if (per_element == 0 || rows == 0 || cols == 0 || rows > max_dimension || cols > max_dimension)
        return false;
    uint64_t scales = 0;
    if (c == CODEC_INT8) {
        rows = round_up(rows, INT8_ROWS);
        cols = round_up(cols, INT8_COLS);
        scales = rows * sizeof(float);
    }
    size_t total;
    if (__builtin_mul_overflow(rows * cols, per_element, &total) ||
        __builtin_add_overflow(total, scales, &total))
        return false;
    *bytes = total;
    return true;
}

void matrix_bind(struct matrix *m, enum codec c, uint32_t rows, uint32_t cols, const void *blob)
{
    *m = (struct matrix){ .codec = c, .rows = rows, .cols = cols, .rows_pad = rows,
                          .cols_pad = cols, .data = blob };
    if (c == CODEC_INT8) {
        m->rows_pad = (uint32_t)round_up(rows, INT8_ROWS);
        m->cols_pad = (uint32_t)round_up(cols, INT8_COLS);
        m->scale = blob;
        m->data = (const uint8_t *)blob + (size_t)m->rows_pad * sizeof(float);
    }
}

static float bf16_decode(uint16_t v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint16_t bf16_encode(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) /* rounding must not turn a NaN into infinity */
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void matrix_row(const struct matrix *m, uint32_t r, float *out)
{
    size_t cols = m->cols, first = (size_t)r * cols;
    switch (m->codec) {
    case CODEC_F32:
        memcpy(out, (const float *)m->data + first, cols * sizeof *out);
        break;
    case CODEC_F64:
        for (size_t c = 0; c < cols; c++)
            out[c] = (float)((const double *)m->data)[first + c];
        break;
    case CODEC_BF16:
        for (size_t c = 0; c < cols; c++)
            out[c] = bf16_decode(((const uint16_t *)m->data)[first + c]);
        break;
    case CODEC_INT8:
        int8_row(m->scale, m->data, m->cols_pad, cols, r, out);
        break;
    case CODEC_NONE:
        break;
    }
}

void matrix_encode(enum codec c, const float *w, uint32_t rows, uint32_t cols, void *blob)
{
    size_t count = (size_t)rows * cols;
    switch (c) {
    case CODEC_F32:
        memcpy(blob, w, count * sizeof *w);
        break;
    case CODEC_F64:
        for (size_t i = 0; i < count; i++)
            ((double *)blob)[i] = (double)w[i];
        break;
    case CODEC_BF16:
        for (size_t i = 0; i < count; i++)
            ((uint16_t *)blob)[i] = bf16_encode(w[i]);
        break;
    case CODEC_INT8:
        int8_encode(w, rows, cols, blob);
        break;
    case CODEC_NONE:
        break;
    }
}

bool record_layout(enum codec c, uint32_t hidden, uint32_t inner, bool biased,
                   struct record_layout *out)
{
    enum { HEADER = 64, BLOB_ALIGN = 64, RECORD_ALIGN = 4096 };
    size_t wide, narrow;
    if (!codec_matrix_bytes(c, inner, hidden, &wide) ||
        !codec_matrix_bytes(c, hidden, inner, &narrow))
        return false;
    /* Each blob is below SIZE_MAX, so one bound on the sum covers every rounding. */
    const size_t biases = biased ? 2 * (size_t)round_up((uint64_t)inner * 4, BLOB_ALIGN) +
                                       (size_t)round_up((uint64_t)hidden * 4, BLOB_ALIGN)
                                 : 0;
    size_t total = HEADER + 4 * BLOB_ALIGN + RECORD_ALIGN;
    if (__builtin_add_overflow(total, biases, &total)) return false;
    if (__builtin_add_overflow(total, wide, &total) || __builtin_add_overflow(total, wide, &total) ||
        __builtin_add_overflow(total, narrow, &total))
        return false;
    out->gate = HEADER;
    out->up = (size_t)round_up(out->gate + wide, BLOB_ALIGN);
    out->down = (size_t)round_up(out->up + wide, BLOB_ALIGN);
    const size_t end = (size_t)round_up(out->down + narrow, BLOB_ALIGN);
    out->bias = biased ? end : 0;
    out->bytes = (size_t)round_up(biased ? end + biases : out->down + narrow, RECORD_ALIGN);
    return true;
}
