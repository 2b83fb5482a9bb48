#include "kernels/tables.h"
#include "kernels/v16_reference.h"
#include "kernels/vector_body.h"

#include "kernels/quantize_body.h"

enum { PLANES_MAX = 4, PANEL_OFFSET = 0 };

#include "kernels/panels_body.h"

static void panel_sums(const uint8_t *panel, size_t blocks, const struct plane *planes,
                       size_t count, int64_t (*sums)[INT8_PANEL_ROWS])
{
    for (size_t i = 0; i < count; i++) {
        const struct plane *plane = planes + i;
        const uint8_t *w = panel;
        memset(sums[i], 0, sizeof sums[i]);
        for (size_t b = 0; b < blocks; b++) {
            int32_t block[INT8_PANEL_ROWS] = { 0 };
            for (size_t k = b * ACT_BLOCK; k < (b + 1) * ACT_BLOCK; k += 4, w += INT8_PANEL_ROWS * 4)
                for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
                    for (size_t j = 0; j < 4; j++)
                        block[r] += (w[4 * r + j] - 128) * plane->q[k + j];
            unsigned shift = plane->shift ? plane->shift[b] - plane->low : 0;
            for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
                sums[i][r] += (int64_t)block[r] * (1 << shift);
        }
    }
}

#define TABLE kernels_table_reference
#define ISA "reference"
#include "kernels/table_body.h"
