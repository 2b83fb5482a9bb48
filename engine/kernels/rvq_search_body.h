/* The encoder's beam search over a v16: lanes are entries of a codebook. Included after
 * vector_body.h. Ties go to the earlier candidate: lower beam, then lower code. */
#ifndef KERNELS_RVQ_SEARCH_BODY_H
#define KERNELS_RVQ_SEARCH_BODY_H

#include "quant/rvq.h"

struct beam {
    uint32_t count;
    float key[RVQ_MAX_BEAM];
    uint8_t code[RVQ_MAX_BEAM][RVQ_MAX_STAGES];
};

struct best { /* the `room` smallest so far, ascending */
    uint32_t count, room;
    float key[RVQ_MAX_BEAM + 1];
    uint16_t from[RVQ_MAX_BEAM + 1]; /* beam * 256 + code */
};

/* base[c] = |c|^2 - 2 x c, weighted; fma in ascending dimension. */
static inline void rvq_search_base(const float *mix, const float *energy, size_t entries,
                                   const float *x, float *base)
{
    v16 xs[RVQ_DIM];
    UNROLL(8)
    for (size_t d = 0; d < RVQ_DIM; d++)
        xs[d] = v16_set1(x[d]);
    for (size_t c = 0; c < entries; c += 16) {
        v16 sum = v16_load(energy + c);
        UNROLL(8)
        for (size_t d = 0; d < RVQ_DIM; d++)
            sum = v16_fma(v16_load(mix + d * entries + c), xs[d], sum);
        v16_store(base + c, sum);
    }
}

static inline void rvq_insert(struct best *best, float key, uint16_t from)
{
    uint32_t i = best->count < best->room ? best->count++ : best->room - 1;
    for (; i > 0 && key < best->key[i - 1]; i--) {
        best->key[i] = best->key[i - 1];
        best->from[i] = best->from[i - 1];
    }
    best->key[i] = key;
    best->from[i] = from;
}

static inline float rvq_worst(const struct best *best)
{
    return best->count < best->room ? INFINITY : best->key[best->room - 1];
}

/* Extends one beam by every code of the stage. S, the stages chosen, is a constant at every call. */
static inline __attribute__((always_inline)) void
rvq_extend(size_t S, size_t entries, const float *base, const float *const *cross, float key,
           uint16_t from, struct best *best)
{
    const v16 so_far = v16_set1(key);
    float worst = rvq_worst(best);
    v16 limit = v16_set1(worst);
    for (size_t c = 0; c < entries; c += 16) {
        v16 sum = v16_add(v16_load(base + c), so_far);
        UNROLL(3)
        for (size_t t = 0; t < S; t++)
            sum = v16_add(sum, v16_load(cross[t] + c));
        uint32_t below = v16_less(sum, limit);
        if (!below)
            continue;
        float keys[16];
        v16_store(keys, sum);
        do {
            const unsigned lane = (unsigned)__builtin_ctz(below);
            below &= below - 1;
            if (keys[lane] < worst) {
                rvq_insert(best, keys[lane], (uint16_t)(from + c + lane));
                worst = rvq_worst(best);
            }
        } while (below);
        limit = v16_set1(worst);
    }
}

static inline __attribute__((always_inline)) void
rvq_search_stage(size_t S, const struct rvq_search *s, const float *cross, const float *base,
                 struct beam *beam)
{
    const size_t entries = s->entries;
    struct best best = { .room = S + 1 == s->stages ? 1 : s->beam };
    for (uint32_t b = 0; b < beam->count; b++) {
        const float *rows[RVQ_MAX_STAGES];
        for (size_t t = 0; t < S; t++)
            rows[t] = cross + (t * entries + beam->code[b][t]) * entries;
        rvq_extend(S, entries, base, rows, beam->key[b], (uint16_t)(b << 8), &best);
    }
    const struct beam before = *beam;
    beam->count = best.count;
    for (uint32_t b = 0; b < best.count; b++) {
        memcpy(beam->code[b], before.code[best.from[b] >> 8], RVQ_MAX_STAGES);
        beam->code[b][S] = (uint8_t)best.from[b];
        beam->key[b] = best.key[b];
    }
}

static void rvq_search(const struct rvq_search *s, const float *x, size_t n, uint8_t *codes)
{
    const size_t entries = s->entries, square = entries * entries;
    for (size_t i = 0; i < n; i++, x += RVQ_DIM, codes += s->stages) {
        struct beam beam = { .count = 1 };
        for (size_t stage = 0; stage < s->stages; stage++) {
            float base[RVQ_MAX_ENTRIES];
            /* the tables of stage t come behind those of the stages before: 0 + 1 + ... + (t - 1) */
            const float *cross = s->cross + stage * (stage - (stage > 0)) / 2 * square;
            rvq_search_base(s->mix + stage * RVQ_DIM * entries, s->energy + stage * entries, entries,
                            x, base);
            switch (stage) {
            case 0: rvq_search_stage(0, s, cross, base, &beam); break;
            case 1: rvq_search_stage(1, s, cross, base, &beam); break;
            case 2: rvq_search_stage(2, s, cross, base, &beam); break;
            default: rvq_search_stage(3, s, cross, base, &beam); break;
            }
        }
        memcpy(codes, beam.code[0], s->stages);
    }
}

#endif
