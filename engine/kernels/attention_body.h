/* Attention of several query heads over one block of keys. Included after vector_body.h.
 * A query's result does not depend on the queries beside it. */
#ifndef KERNELS_ATTENTION_BODY_H
#define KERNELS_ATTENTION_BODY_H

/* Queries that share the loads of keys and values, and vectors of 16 columns beside them. */
enum { QUERIES_MANY = TOKENS_MANY, COLUMNS_MANY = COLUMN_VECTORS / 2 };

static void score_queries(size_t count, const float *const *q, const float *k, size_t ldk,
                          size_t k_dim, size_t keys, float *p)
{
    size_t j = 0;
    if (count == QUERIES_MANY)
        for (; j + ROWS_MANY <= keys; j += ROWS_MANY)
            dot_block_f32(ROWS_MANY, QUERIES_MANY, k + j * ldk, ldk, k_dim, q, p + j, ATTN_BLOCK);
    for (size_t i = 0; i < count; i++) {
        size_t next = j;
        for (; next + ROWS_ONE <= keys; next += ROWS_ONE)
            dot_block_f32(ROWS_ONE, 1, k + next * ldk, ldk, k_dim, q + i, p + i * ATTN_BLOCK + next,
                          1);
        for (; next < keys; next++)
            p[i * ATTN_BLOCK + next] = vector_dot(k + next * ldk, q[i], k_dim);
    }
}

/* acc[i][c] = fma over the keys [from, to) of Q queries and C vectors of columns. Q and C are
 * constants at every call. */
static inline __attribute__((always_inline)) void
weigh(size_t Q, size_t C, const float *p, const float *v, size_t ldv, size_t from, size_t to,
      float *const *acc, size_t column)
{
    v16 sum[QUERIES_MANY][COLUMN_VECTORS];
    UNROLL(8)
    for (size_t i = 0; i < Q; i++)
        UNROLL(8)
        for (size_t c = 0; c < C; c++)
            sum[i][c] = from ? v16_load(acc[i] + column + 16 * c) : v16_set1(0.0f);
    for (size_t j = from; j < to; j++) {
        v16 values[COLUMN_VECTORS];
        UNROLL(8)
        for (size_t c = 0; c < C; c++)
            values[c] = v16_load(v + j * ldv + column + 16 * c);
        UNROLL(8)
        for (size_t i = 0; i < Q; i++) {
            v16 weight = v16_set1(p[i * ATTN_BLOCK + j]);
            UNROLL(8)
            for (size_t c = 0; c < C; c++)
                sum[i][c] = v16_fma(weight, values[c], sum[i][c]);
        }
    }
    UNROLL(8)
    for (size_t i = 0; i < Q; i++)
        UNROLL(8)
        for (size_t c = 0; c < C; c++)
            v16_store(acc[i] + column + 16 * c, sum[i][c]);
}

/* All columns of one query, keys [from, to). */
static void weigh_one(const float *p, const float *v, size_t ldv, size_t from, size_t to,
                      float *acc, size_t v_dim)
{
    size_t c = 0;
    for (; c + COLUMN_VECTORS * 16 <= v_dim; c += COLUMN_VECTORS * 16)
        weigh(1, COLUMN_VECTORS, p, v, ldv, from, to, &acc, c);
    for (; c + 16 <= v_dim; c += 16)
        weigh(1, 1, p, v, ldv, from, to, &acc, c);
    if (c == v_dim)
        return;
    v16 sum = from ? v16_load_n(acc + c, v_dim - c) : v16_set1(0.0f);
    for (size_t j = from; j < to; j++)
        sum = v16_fma(v16_set1(p[j]), v16_load_n(v + j * ldv + c, v_dim - c), sum);
    v16_store_n(acc + c, sum, v_dim - c);
}

/* The keys that all queries see together, then each query's own rest. */
static void weigh_queries(size_t count, const uint32_t *keys, const float *p, const float *v,
                          size_t ldv, float *const *acc, size_t v_dim)
{
    const size_t columns = v_dim / (COLUMNS_MANY * 16) * (COLUMNS_MANY * 16);
    size_t common = 0;
    if (count == QUERIES_MANY && columns == v_dim) {
        common = keys[0];
        for (size_t i = 1; i < count; i++)
            common = keys[i] < common ? keys[i] : common;
        for (size_t c = 0; c < columns; c += COLUMNS_MANY * 16)
            weigh(QUERIES_MANY, COLUMNS_MANY, p, v, ldv, 0, common, acc, c);
    }
    for (size_t i = 0; i < count; i++)
        if (keys[i] > common)
            weigh_one(p + i * ATTN_BLOCK, v, ldv, common, keys[i], acc[i], v_dim);
}

static void attn_block(struct attn_queries *a, const float *k, size_t ldk, const float *v,
                       size_t ldv, size_t k_dim, size_t v_dim, float scale)
{
    for (size_t i = 0; i < a->count; i += QUERIES_MANY) {
        const size_t count = a->count - i < QUERIES_MANY ? a->count - i : QUERIES_MANY;
        float *p = a->p + i * ATTN_BLOCK;
        uint32_t most = 0;
        for (size_t t = i; t < i + count; t++)
            most = a->keys[t] > most ? a->keys[t] : most;
        score_queries(count, a->q + i, k, ldk, k_dim, most, p);
        for (size_t t = 0; t < count; t++) {
            const size_t keys = a->keys[i + t];
            float *scores = p + t * ATTN_BLOCK;
            vector_scale(scores, scale, keys);
            a->m[i + t] = vector_max(scores, keys);
            a->l[i + t] = exp_below(scores, a->m[i + t], keys);
        }
        weigh_queries(count, a->keys + i, p, v, ldv, a->acc + i, v_dim);
    }
}

#endif
