#include "quant/codec.h"

#include <string.h>

#include "quant/bf16.h"
#include "quant/int8.h"
#include "quant/nibble.h"
#include "quant/rvq.h"

static const char *const names[] = {
    [CODEC_NONE] = "none", [CODEC_F32] = "f32",   [CODEC_F64] = "f64",
    [CODEC_BF16] = "bf16", [CODEC_INT8] = "int8", [CODEC_MXFP4] = "mxfp4",
    [CODEC_INT4] = "int4", [CODEC_NL4] = "nl4",
    [CODEC_RVQ4X64] = "rvq4x64", [CODEC_RVQ3X256] = "rvq3x256", [CODEC_RVQ2X256] = "rvq2x256",
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

bool codec_is_4bit(enum codec c)
{
    return c == CODEC_MXFP4 || c == CODEC_INT4 || c == CODEC_NL4;
}

const struct rvq_shape *rvq_shape_of(enum codec c)
{
    /* limits: int6, int7 and int7 entries whose sums stay within +-127 */
    static const struct rvq_shape shapes[] = {
        { 4, 64, 3, 31, { 32, 32, 32, 32 } },
        { 3, 256, 3, 42, { 43, 43, 42 } },
        { 2, 256, 2, 63, { 64, 64 } },
    };
    return codec_is_rvq(c) ? &shapes[c - CODEC_RVQ4X64] : NULL;
}

bool codec_is_rvq(enum codec c)
{
    return c == CODEC_RVQ4X64 || c == CODEC_RVQ3X256 || c == CODEC_RVQ2X256;
}

bool codec_reads_quantized(enum codec c)
{
    return c == CODEC_INT8 || codec_is_4bit(c) || codec_is_rvq(c);
}

uint32_t codec_activations(enum codec c, bool fine)
{
    return !codec_reads_quantized(c) ? 0 : fine ? 22 : 8;
}

static uint64_t element_bits(enum codec c)
{
    switch (c) {
    case CODEC_F32: return 32;
    case CODEC_F64: return 64;
    case CODEC_BF16: return 16;
    case CODEC_INT8: return 8;
    case CODEC_MXFP4:
    case CODEC_INT4:
    case CODEC_NL4: return 4;
    case CODEC_RVQ4X64:
    case CODEC_RVQ3X256: return 3;
    case CODEC_RVQ2X256: return 2;
    case CODEC_NONE: break;
    }
    return 0;
}

bool codec_matrix_bytes(enum codec c, uint64_t rows, uint64_t cols, size_t *bytes)
{
    const uint64_t bits = element_bits(c);
    if (bits == 0 || rows == 0 || cols == 0 || rows > max_dimension || cols > max_dimension)
        return false;
    if (c == CODEC_MXFP4 && cols > MXFP4_COLS_MAX) return false;
    uint64_t scales = 0;
    if (codec_reads_quantized(c)) {
        rows = round_up(rows, INT8_ROWS);
        cols = round_up(cols, INT8_COLS);
        scales = c == CODEC_INT8      ? rows * sizeof(float)
                 : codec_is_rvq(c)    ? rows * sizeof(uint16_t)
                 : c == CODEC_MXFP4   ? rows * (cols / 32)
                                      : rows * (cols / 32) * 2;
    }
    size_t total;
    if (bits < 8)
        total = rows * cols / 8 * bits; /* padded: whole bytes */
    else if (__builtin_mul_overflow(rows * cols, bits / 8, &total))
        return false;
    if (__builtin_add_overflow(total, scales, &total)) return false;
    *bytes = total;
    return true;
}

static const int8_t *weight_table(enum codec c)
{
    return c == CODEC_MXFP4 ? nibble_table_mxfp4
         : c == CODEC_INT4  ? nibble_table_int4
         : c == CODEC_NL4   ? nibble_table_nl4
                            : NULL;
}

void matrix_bind(struct matrix *m, enum codec c, uint32_t rows, uint32_t cols, const void *blob)
{
    *m = (struct matrix){ .codec = c, .rows = rows, .cols = cols, .rows_pad = rows,
                          .cols_pad = cols, .table = weight_table(c), .data = blob };
    if (!codec_reads_quantized(c)) return;
    m->rows_pad = (uint32_t)round_up(rows, INT8_ROWS);
    m->cols_pad = (uint32_t)round_up(cols, INT8_COLS);
    if (c == CODEC_INT8) {
        m->scale = blob;
        m->data = (const uint8_t *)blob + (size_t)m->rows_pad * sizeof(float);
    } else if (codec_is_rvq(c)) {
        m->scale16 = blob;
        m->data = (const uint8_t *)blob + (size_t)m->rows_pad * sizeof(uint16_t);
    }
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
    case CODEC_MXFP4:
        mxfp4_row(m->data, m->cols_pad, cols, r, out);
        break;
    case CODEC_INT4:
    case CODEC_NL4:
        nibble_row(m->table, m->data, m->cols_pad, cols, r, out);
        break;
    case CODEC_RVQ4X64:
    case CODEC_RVQ3X256:
    case CODEC_RVQ2X256:
        rvq_row(m->books, m->data, m->cols_pad, cols, r, bf16_decode(m->scale16[r]), out);
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
    case CODEC_MXFP4:
        mxfp4_encode(w, rows, cols, blob);
        break;
    case CODEC_INT4:
    case CODEC_NL4:
        nibble_encode(weight_table(c), w, rows, cols, blob);
        break;
    case CODEC_RVQ4X64:
    case CODEC_RVQ3X256:
    case CODEC_RVQ2X256:
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
