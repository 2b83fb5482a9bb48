/* panel_sums for vector ISAs around one function that the ISA defines before:
 *
 *   panel_block(T, w, planes, b, total)
 *
 * adds 2^(shift - low) * (block b of the panel at w, times block b of each plane) to the int32
 * totals of T planes. T is a constant at every call. */
#ifndef KERNELS_PANEL_SUMS_BODY_H
#define KERNELS_PANEL_SUMS_BODY_H

#include "kernels/panels_body.h"

static inline void flush_totals(size_t count, int32_t (*total)[INT8_PANEL_ROWS],
                                int64_t (*sums)[INT8_PANEL_ROWS])
{
    for (size_t i = 0; i < count; i++)
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
            sums[i][r] += total[i][r];
}

static inline __attribute__((always_inline)) void
panel_sums_of(size_t T, const uint8_t *panel, size_t blocks, const struct plane *planes,
              struct panel_ahead ahead, int64_t (*sums)[INT8_PANEL_ROWS])
{
    _Alignas(64) int32_t total[PLANES_MAX][INT8_PANEL_ROWS];
    size_t flush = planes[0].flush;
    for (size_t i = 1; i < T; i++)
        flush = planes[i].flush < flush ? planes[i].flush : flush;
    memset(sums, 0, T * sizeof *sums);
    for (size_t b = 0; b < blocks;) {
        size_t end = blocks - b < flush ? blocks : b + flush;
        memset(total, 0, T * sizeof *total);
        for (; b < end; b++) {
            for (size_t i = 0; i < ahead.lines; i++, ahead.at += 64)
                __builtin_prefetch(ahead.at, 0, 2);
            panel_block(T, panel + b * ACT_BLOCK * INT8_PANEL_ROWS, planes, b, total);
        }
        flush_totals(T, total, sums);
    }
}

static void panel_sums(const uint8_t *panel, size_t blocks, const struct plane *planes,
                       size_t count, struct panel_ahead ahead, int64_t (*sums)[INT8_PANEL_ROWS])
{
    if (count == 1)
        panel_sums_of(1, panel, blocks, planes, ahead, sums);
    else if (count == 2)
        panel_sums_of(2, panel, blocks, planes, ahead, sums);
#if PANEL_PLANES > 2
    else if (count == 3)
        panel_sums_of(3, panel, blocks, planes, ahead, sums);
    else
        panel_sums_of(4, panel, blocks, planes, ahead, sums);
#endif
}

#endif
