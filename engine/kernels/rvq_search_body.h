/* The encoder's beam search over a v16: lanes are entries of a codebook. Included after
 * vector_body.h. Ties go to the earlier candidate: lower beam, then lower code. */
#ifndef KERNELS_RVQ_SEARCH_BODY_H
#define KERNELS_RVQ_SEARCH_BODY_H

#include "quant/rvq.h"

/* Candidates that pass the threshold and are ranked against each other; more only with many ties. */
enum { RVQ_SHORTLIST = 128, RVQ_LANES = 32 };

struct beam {
    uint32_t count;
    float key[RVQ_MAX_BEAM];
    uint8_t code[RVQ_MAX_BEAM][RVQ_MAX_STAGES];
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

/* Candidates of one beam. `low` keeps the least of every lane, even and odd vectors apart. S, the
 * stages chosen, is a constant at every call. */
static inline __attribute__((always_inline)) void
rvq_extend(size_t S, size_t entries, const float *base, const float *const *cross, float key,
           float *sums, v16 *low)
{
    const v16 so_far = v16_set1(key);
    for (size_t c = 0; c < entries; c += RVQ_LANES)
        UNROLL(2)
        for (size_t half = 0; half < 2; half++) {
            const size_t at = c + 16 * half;
            v16 sum = v16_add(v16_load(base + at), so_far);
            UNROLL(3)
            for (size_t t = 0; t < S; t++)
                sum = v16_add(sum, v16_load(cross[t] + at));
            v16_store(sums + at, sum);
            low[half] = v16_min(sum, low[half]);
        }
}

/* At least `room` candidates are at most this: the room-th of the least ones of 16 or 32 lanes. */
static inline float rvq_threshold(const v16 *low, uint32_t room)
{
    const v16 both = v16_min(low[0], low[1]);
    float least[RVQ_LANES], kept[RVQ_LANES];
    if (room == 1)
        return -v16_reduce_max(v16_sub(v16_set1(0.0f), both));
    if (room <= 10) {
        v16_store(least, both);
        for (size_t i = 0; i < 16; i++) {
            const uint32_t below = v16_less(both, v16_set1(least[i]));
            kept[i] = (uint32_t)__builtin_popcount(below) < room ? least[i] : -INFINITY;
        }
        return v16_reduce_max(v16_load(kept));
    }
    v16_store(least, low[0]);
    v16_store(least + 16, low[1]);
    for (size_t i = 0; i < RVQ_LANES; i++) {
        const v16 key = v16_set1(least[i]);
        const uint32_t below = v16_less(low[0], key) | v16_less(low[1], key) << 16;
        kept[i] = (uint32_t)__builtin_popcount(below) < room ? least[i] : -INFINITY;
    }
    return v16_reduce_max(v16_max(v16_load(kept), v16_load(kept + 16)));
}

/* Takes the last of the greatest out of a full shortlist, unless `sum` is not less. */
static bool rvq_make_room(float *key, uint16_t *from, uint32_t *count, float sum)
{
    uint32_t worst = 0;
    for (uint32_t k = 1; k < *count; k++)
        worst = key[k] >= key[worst] ? k : worst;
    if (!(sum < key[worst]))
        return false;
    *count -= 1;
    memmove(key + worst, key + worst + 1, (*count - worst) * sizeof *key);
    memmove(from + worst, from + worst + 1, (*count - worst) * sizeof *from);
    return true;
}

/* Positions of the `room` least sums in ascending order; equal ones in order of position. */
static inline uint32_t rvq_select(const float *sums, size_t n, float threshold, uint32_t room,
                                  uint16_t *chosen)
{
    float key[RVQ_SHORTLIST];
    uint16_t from[RVQ_SHORTLIST];
    uint32_t count = 0;
    const v16 most = v16_set1(threshold);
    for (size_t i = 0; i < n; i += 64) {
        uint64_t kept = 0;
        UNROLL(4)
        for (unsigned v = 0; v < 4; v++)
            kept |= (uint64_t)(~v16_less(most, v16_load(sums + i + 16 * v)) & 0xffff) << 16 * v;
        for (; kept; kept &= kept - 1) {
            const size_t at = i + (size_t)__builtin_ctzll(kept);
            if (count == RVQ_SHORTLIST && !rvq_make_room(key, from, &count, sums[at]))
                continue;
            key[count] = sums[at];
            from[count++] = (uint16_t)at;
        }
    }
    const uint32_t vectors = (count + 15) / 16;
    for (uint32_t i = count; i < 16 * vectors; i++)
        key[i] = INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        const v16 own = v16_set1(key[i]);
        uint32_t rank = 0;
        for (uint32_t v = 0; v < vectors; v++) {
            const v16 others = v16_load(key + 16 * v);
            uint32_t before = v16_less(others, own);
            if (v <= i / 16) { /* equal ones that come earlier */
                const uint32_t equal = ~(before | v16_less(own, others));
                before |= equal & (v < i / 16 ? 0xffff : (1u << i % 16) - 1);
            }
            rank += (uint32_t)__builtin_popcount(before);
        }
        if (rank < room)
            chosen[rank] = from[i];
    }
    return count < room ? count : room;
}

static inline __attribute__((always_inline)) void
rvq_search_stage(size_t S, const struct rvq_search *s, const float *cross, const float *base,
                 float *sums, const struct beam *before, struct beam *after)
{
    const size_t entries = s->entries;
    const uint32_t room = S + 1 == s->stages ? 1 : s->beam;
    v16 low[2] = { v16_set1(INFINITY), v16_set1(INFINITY) };
    uint16_t chosen[RVQ_MAX_BEAM];
    for (uint32_t b = 0; b < before->count; b++) {
        const float *rows[RVQ_MAX_STAGES];
        UNROLL(3)
        for (size_t t = 0; t < S; t++)
            rows[t] = cross + (t * entries + before->code[b][t]) * entries;
        rvq_extend(S, entries, base, rows, before->key[b], sums + b * entries, low);
    }
    after->count = rvq_select(sums, before->count * entries, rvq_threshold(low, room), room, chosen);
    for (uint32_t b = 0; b < after->count; b++) {
        memcpy(after->code[b], before->code[chosen[b] / entries], RVQ_MAX_STAGES);
        after->code[b][S] = (uint8_t)(chosen[b] % entries);
        after->key[b] = sums[chosen[b]];
    }
}

static inline __attribute__((always_inline)) void rvq_search_one(size_t stages, size_t entries,
                                                                 const struct rvq_search *given,
                                                                 const float *x, float *sums,
                                                                 uint8_t *codes)
{
    struct rvq_search s = *given; /* with the two sizes as constants */
    float base[RVQ_MAX_ENTRIES];
    struct beam beam[2];
    s.stages = (uint32_t)stages;
    s.entries = (uint32_t)entries;
    beam[0].count = 1;
    beam[0].key[0] = 0;
    memset(beam[0].code, 0, sizeof beam[0].code);
    UNROLL(4)
    for (size_t stage = 0; stage < stages; stage++) {
        /* the tables of a stage come behind those of the stages before: 0 + 1 + ... */
        const float *cross = s.cross + (stage ? stage * (stage - 1) / 2 : 0) * entries * entries;
        rvq_search_base(s.mix + stage * RVQ_DIM * entries, s.energy + stage * entries, entries, x,
                        base);
        rvq_search_stage(stage, &s, cross, base, sums, &beam[stage % 2], &beam[(stage + 1) % 2]);
    }
    memcpy(codes, beam[stages % 2].code[0], stages);
}

static void rvq_search(const struct rvq_search *s, const float *x, size_t n, uint8_t *codes)
{
    float sums[RVQ_MAX_BEAM * RVQ_MAX_ENTRIES];
    for (size_t i = 0; i < n; i++, x += RVQ_DIM, codes += s->stages) {
        if (s->stages == 4)
            rvq_search_one(4, 64, s, x, sums, codes);
        else if (s->stages == 3)
            rvq_search_one(3, 256, s, x, sums, codes);
        else if (s->stages == 2)
            rvq_search_one(2, 256, s, x, sums, codes);
        else if (s->entries == 64)
            rvq_search_one(1, 64, s, x, sums, codes);
        else
            rvq_search_one(1, 256, s, x, sums, codes);
    }
}

#endif
