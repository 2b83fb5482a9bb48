/* Dot products of matrix rows with vectors: several rows and vectors at once, so that the
 * 16 partial sums of each stay in registers. Included once per weight type, after a v16_*.h, with
 * WEIGHT, LOAD_WEIGHT, LOAD_WEIGHT_N, DOT_BLOCK and ROWS defined; they are undefined at the end. */

/* out[t * ldt + r] = dot(row r, x[t]); R and T are constants at every call. */
static inline __attribute__((always_inline)) void DOT_BLOCK(size_t R, size_t T, const WEIGHT *w,
                                                            size_t ldw, size_t k,
                                                            const float *const *x, float *out,
                                                            size_t ldt)
{
    v16 acc[4][4];
    UNROLL(4)
    for (size_t r = 0; r < R; r++)
        UNROLL(4)
        for (size_t t = 0; t < T; t++)
            acc[r][t] = v16_set1(0.0f);
    size_t i = 0;
    for (; i + 16 <= k; i += 16) {
        v16 xs[4];
        UNROLL(4)
        for (size_t t = 0; t < T; t++)
            xs[t] = v16_load(x[t] + i);
        UNROLL(4)
        for (size_t r = 0; r < R; r++) {
            v16 ws = LOAD_WEIGHT(w + r * ldw + i);
            UNROLL(4)
            for (size_t t = 0; t < T; t++)
                acc[r][t] = v16_fma(ws, xs[t], acc[r][t]);
        }
    }
    if (i < k)
        UNROLL(4)
        for (size_t r = 0; r < R; r++)
            UNROLL(4)
            for (size_t t = 0; t < T; t++)
                acc[r][t] = v16_fma(LOAD_WEIGHT_N(w + r * ldw + i, k - i),
                                    v16_load_n(x[t] + i, k - i), acc[r][t]);
    v16_reduce_rows(R, T, acc, out, ldt);
}

static void ROWS(const WEIGHT *w, size_t k, size_t r0, size_t r1, const float *x, size_t ldx,
                 const uint32_t *index, size_t n, float *y, size_t ldy)
{
    const size_t step = n == 1 ? ROWS_ONE : ROWS_MANY;
    for (size_t r = r0; r < r1;) {
        const WEIGHT *row = w + r * k;
        size_t count = r1 - r < step ? 1 : step;
        for (size_t t = 0; t < n;) {
            const float *xs[TOKENS_MANY];
            size_t tokens = n - t < TOKENS_MANY ? 1 : TOKENS_MANY;
            for (size_t j = 0; j < tokens; j++)
                xs[j] = x + (index ? index[t + j] : t + j) * ldx;
            float *out = y + t * ldy + r;
            if (count == 1)
                DOT_BLOCK(1, 1, row, k, k, xs, out, ldy), tokens = 1;
            else if (tokens == TOKENS_MANY)
                DOT_BLOCK(ROWS_MANY, TOKENS_MANY, row, k, k, xs, out, ldy);
            else if (n == 1)
                DOT_BLOCK(ROWS_ONE, 1, row, k, k, xs, out, ldy);
            else
                DOT_BLOCK(ROWS_MANY, 1, row, k, k, xs, out, ldy);
            t += tokens;
        }
        r += count;
    }
}

#undef WEIGHT
#undef LOAD_WEIGHT
#undef LOAD_WEIGHT_N
#undef DOT_BLOCK
#undef ROWS
