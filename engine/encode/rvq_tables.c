#include "encode/rvq_tables.h"

static size_t cross_tables(uint32_t stages)
{
    return (size_t)stages * (stages - 1) / 2;
}

size_t rvq_tables_floats(uint32_t stages, uint32_t entries)
{
    const size_t codes = (size_t)stages * entries;
    return codes * RVQ_DIM + codes + cross_tables(stages) * entries * entries;
}

void rvq_tables_make(struct rvq_search *s, uint32_t stages, uint32_t entries, const float *books,
                     const float *weight, float *memory)
{
    const size_t n = entries, codes = stages * n;
    float *mix = memory, *energy = mix + codes * RVQ_DIM, *cross = energy + codes;
    s->stages = stages;
    s->entries = entries;
    s->mix = mix;
    s->energy = energy;
    s->cross = cross;
    for (size_t i = 0; i < codes; i++) {
        float sum = 0;
        for (size_t d = 0; d < RVQ_DIM; d++) {
            const float c = books[i * RVQ_DIM + d], m = weight ? weight[d] : 1.0f;
            mix[(i / n * RVQ_DIM + d) * n + i % n] = -2.0f * m * c;
            sum += m * c * c;
        }
        energy[i] = sum;
    }
    /* 2 m c c': mix of the later stage times the earlier entry, sign turned; rows are elementwise
     * in the later entry, so that any vector width gives the same bits. */
    for (size_t later = 1; later < stages; later++)
        for (size_t t = 0; t < later; t++)
            for (size_t e = 0; e < n; e++, cross += n) {
                const float *entry = books + (t * n + e) * RVQ_DIM;
                const float *rows = mix + later * RVQ_DIM * n;
                for (size_t c = 0; c < n; c++) cross[c] = 0;
                for (size_t d = 0; d < RVQ_DIM; d++)
                    for (size_t c = 0; c < n; c++) cross[c] -= entry[d] * rows[d * n + c];
            }
}
