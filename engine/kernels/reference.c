#include "kernels/tables.h"
#include "kernels/v16_reference.h"
#include "kernels/vector_body.h"
#include "kernels/attention_body.h"

#include "kernels/nibble.h"
#include "kernels/quantize_body.h"
#include "kernels/read_body.h"

enum { PLANES_MAX = 4, PANEL_OFFSET = 0 };

#include "kernels/panels_body.h"
#include "quant/rvq.h"

static void panel_sums(const uint8_t *panel, size_t blocks, const struct plane *planes,
                       size_t count, struct panel_ahead ahead, int64_t (*sums)[INT8_PANEL_ROWS])
{
    (void)ahead;
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

static uint64_t dot_peak(uint64_t rounds)
{
    int32_t sums[INT8_PANEL_ROWS] = { 0 };
    uint8_t w[INT8_PANEL_ROWS * 4] = { 0 };
    int8_t q[4] = { 0 };
    for (uint64_t i = 0; i < rounds; i++) {
        __asm__ volatile("" : : "r"(w), "r"(q), "r"(sums) : "memory"); /* every round is computed */
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
            for (size_t j = 0; j < 4; j++)
                sums[r] += (w[4 * r + j] - 128) * q[j];
    }
    __asm__ volatile("" : : "r"(sums) : "memory");
    return rounds * INT8_PANEL_ROWS * 4;
}

#define NIBBLE_TOKENS 2
#define NIBBLE_ROWS(T, decoded) 1
enum { NIBBLE_FUSED = 0 };

struct nibble_operand {
    const int8_t *table;
};

static inline struct nibble_operand nibble_operand(const int8_t *table)
{
    return (struct nibble_operand){ table };
}

static inline v16i group_start(const int32_t *offset)
{
    (void)offset;
    return v16i_set1(0);
}

static inline void group_decode(const uint8_t *w, const struct nibble_operand *operand,
                                uint8_t *tile)
{
    for (size_t i = 0; i < NIBBLE_BYTES; i++) {
        tile[i] = (uint8_t)operand->table[w[i] & 15];
        tile[NIBBLE_BYTES + i] = (uint8_t)operand->table[w[i] >> 4];
    }
}

/* NIBBLE_FUSED is 0: always decoded. */
static inline void group_dots(size_t R, size_t T, bool decoded, const uint8_t *w,
                              const struct nibble_operand *operand, const int8_t *const *q,
                              size_t at, v16i (*dots)[NIBBLE_VECTORS])
{
    (void)decoded;
    (void)operand;
    for (size_t t = 0; t < T; t++)
        for (size_t k = 0; k < NIBBLE_GROUP; k++)
            for (size_t r = 0; r < 16 * R; r++)
                dots[t][r / 16].lane[r % 16] +=
                    (int8_t)w[k / 4 * INT8_PANEL_ROWS * 4 + 4 * r + k % 4] * q[t][at + k];
}

#include "kernels/mxfp4_body.h"

enum { FINE_TOKENS = 1, FINE_FUSED = 0 };
#define FINE_ROWS(T, decoded) 1

#include "kernels/mxfp4_fine_body.h"

#define RVQ_NATURAL(books) 1

static inline void rvq_reorder(const int8_t *q, int8_t *out)
{
    memcpy(out, q, ACT_BLOCK);
}

static void rvq_decode(const struct rvq_books *books, const uint8_t *codes, uint8_t *out)
{
    for (size_t r = 0; r < INT8_PANEL_ROWS; r++)
        for (size_t j = 0; j < ACT_BLOCK / RVQ_DIM; j++) {
            uint8_t code[RVQ_MAX_STAGES];
            rvq_codes_get(books, codes + rvq_code_at(books->planes, ACT_BLOCK, r, j), code);
            for (size_t d = 0; d < RVQ_DIM; d++) {
                unsigned sum = 0;
                for (size_t s = 0; s < books->stages; s++)
                    sum += books->word[(s * books->entries + code[s]) * RVQ_DIM + d];
                const size_t k = j * RVQ_DIM + d;
                out[k / 4 * (4 * INT8_PANEL_ROWS) + 4 * r + k % 4] = (uint8_t)sum;
            }
        }
}

static void rvq_panel_block(size_t count, const uint8_t *w, const struct plane *planes,
                            int32_t (*total)[INT8_PANEL_ROWS])
{
    for (size_t i = 0; i < count; i++)
        for (size_t r = 0; r < INT8_PANEL_ROWS; r++) {
            int32_t sum = 0;
            for (size_t k = 0; k < ACT_BLOCK; k++)
                sum += (w[k / 4 * (4 * INT8_PANEL_ROWS) + 4 * r + k % 4] - 128) * planes[i].q[k];
            total[i][r] += sum * (1 << (*planes[i].shift - planes[i].low));
        }
}

#include "kernels/rvq_body.h"
#include "kernels/rvq_search_body.h"

#define TABLE kernels_table_reference
#define ISA "reference"
#include "kernels/table_body.h"
