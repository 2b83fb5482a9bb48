#include "nn/attend.h"

#include <string.h>

static size_t padded(uint32_t v_dim)
{
    return ((size_t)v_dim + 15) & ~(size_t)15;
}

uint32_t attend_tile(uint32_t queries, uint32_t at_most, uint32_t threads)
{
    uint32_t tile = ATTN_QUERIES;
    while (tile > 1 && (tile > at_most || queries < tile * threads)) tile /= 2;
    return tile;
}

size_t attend_floats(uint32_t v_dim)
{
    return ATTN_QUERIES * (ATTN_BLOCK + 2 * padded(v_dim));
}

void attend_begin(struct attend_group *g, float *storage, uint32_t v_dim)
{
    g->count = 0;
    g->begun = false;
    g->scores = storage;
    float *acc = storage + (size_t)ATTN_QUERIES * ATTN_BLOCK;
    for (uint32_t i = 0; i < ATTN_QUERIES; i++, acc += 2 * padded(v_dim)) {
        g->acc[i] = acc;
        g->next[i] = acc + padded(v_dim);
    }
}

uint32_t attend_add(struct attend_group *g, const float *q, uint32_t end)
{
    g->q[g->count] = q;
    g->end[g->count] = end;
    return g->count++;
}

/* Keys [first, stop) for the queries that reach into them. */
static void attend_block(const struct kernels *kern, const struct attend_keys *keys,
                         struct attend_group *g, uint32_t first, uint32_t stop)
{
    uint32_t member[ATTN_QUERIES];
    struct attn_queries a = {.count = 0, .p = g->scores};
    for (uint32_t i = 0; i < g->count; i++) {
        if (g->end[i] <= first) continue;
        a.q[a.count] = g->q[i];
        a.keys[a.count] = (g->end[i] < stop ? g->end[i] : stop) - first;
        a.acc[a.count] = g->begun ? g->next[i] : g->acc[i];
        member[a.count++] = i;
    }
    kern->attn_block(&a, keys->k + (size_t)first * keys->ldk, keys->ldk,
                     keys->v + (size_t)first * keys->ldv, keys->ldv, keys->k_dim, keys->v_dim,
                     keys->scale);
    for (uint32_t j = 0; j < a.count; j++) {
        const uint32_t i = member[j];
        if (g->begun) {
            kern->attn_merge(&g->m[i], &g->l[i], g->acc[i], a.m[j], a.l[j], g->next[i],
                             keys->v_dim);
        } else {
            g->m[i] = a.m[j];
            g->l[i] = a.l[j];
        }
    }
    g->begun = true;
}

void attend_range(const struct kernels *kern, const struct attend_keys *keys,
                  struct attend_group *g, uint32_t first)
{
    uint32_t end = 0;
    for (uint32_t i = 0; i < g->count; i++) end = g->end[i] > end ? g->end[i] : end;
    while (first < end) {
        const uint32_t cut = (first / ATTN_BLOCK + 1) * ATTN_BLOCK;
        const uint32_t stop = cut < end ? cut : end;
        attend_block(kern, keys, g, first, stop);
        first = stop;
    }
}

void attend_sink(const struct kernels *kern, float logit, uint32_t v_dim, struct attend_group *g,
                 uint32_t i)
{
    memset(g->next[i], 0, v_dim * sizeof(float));
    kern->attn_merge(&g->m[i], &g->l[i], g->acc[i], logit, 1.0f, g->next[i], v_dim);
}

void attend_finish(const struct attend_group *g, uint32_t i, uint32_t v_dim, float *out)
{
    for (uint32_t c = 0; c < v_dim; c++) out[c] = g->acc[i][c] / g->l[i];
}
