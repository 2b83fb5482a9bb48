#include "quant/int8.h"

#include <float.h>
#include <math.h>
#include <string.h>

static size_t panel_index(size_t cols_pad, size_t r, size_t c)
{
    return (r / INT8_ROWS * (cols_pad / 4) + c / 4) * (INT8_ROWS * 4) + r % INT8_ROWS * 4 + c % 4;
}

void int8_row(const float *scales, const uint8_t *panels, size_t cols_pad, size_t cols, size_t r,
              float *out)
{
    const float scale = scales[r];
    for (size_t c = 0; c < cols; c++)
        out[c] = scale * (float)((int)panels[panel_index(cols_pad, r, c)] - INT8_OFFSET);
}

static float row_scale(const float *w, size_t cols)
{
    float max = 0;
    for (size_t c = 0; c < cols; c++)
        if (fabsf(w[c]) > max)
            max = fabsf(w[c]);
    float scale = max / 127.0f;
    return scale < FLT_MIN ? 0 : scale;
}

static int quantized(float w, float scale)
{
    if (scale == 0)
        return 0;
    float q = rintf(w / scale);
    if (!(q >= -127)) /* also catches NaN, which becomes 0 */
        return q < -127 ? -127 : 0;
    return q > 127 ? 127 : (int)q;
}

void int8_encode(const float *w, size_t rows, size_t cols, void *blob)
{
    const size_t rows_pad = (rows + INT8_ROWS - 1) / INT8_ROWS * INT8_ROWS;
    const size_t cols_pad = (cols + INT8_COLS - 1) / INT8_COLS * INT8_COLS;
    float *scales = blob;
    uint8_t *panels = (uint8_t *)blob + rows_pad * sizeof(float);
    memset(scales, 0, rows_pad * sizeof *scales);
    memset(panels, INT8_OFFSET, rows_pad * cols_pad);
    for (size_t r = 0; r < rows; r++, w += cols) {
        scales[r] = row_scale(w, cols);
        for (size_t c = 0; c < cols; c++)
            panels[panel_index(cols_pad, r, c)] =
                (uint8_t)(quantized(w[c], scales[r]) + INT8_OFFSET);
    }
}
