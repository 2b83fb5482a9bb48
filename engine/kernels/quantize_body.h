/* Activation quantisers over a v16. Included after vector_body.h. */
#ifndef KERNELS_QUANTIZE_BODY_H
#define KERNELS_QUANTIZE_BODY_H

/* Below this a token counts as zero, so that no scale overflows. */
#define SMALLEST_TOKEN 0x1p-100f

/* A token that is not finite gets a NaN scale: its products are NaN and the layer is reported. */
static inline float degenerate_scale(float t)
{
    return t < SMALLEST_TOKEN ? 0.0f : NAN;
}

static inline bool degenerate(float t)
{
    return !(t >= SMALLEST_TOKEN && t < INFINITY);
}

#define ROUND_MAGIC_BITS 0x4b400000u

static inline v16 v16_clamp(v16 x, float limit)
{
    return v16_min(v16_max(x, v16_set1(-limit)), v16_set1(limit));
}

static void quantize(const float *x, struct qbatch *out, size_t t)
{
    size_t k = out->k, blocks = out->k_pad / ACT_BLOCK;
    int8_t *q = out->q + t * out->k_pad;
    uint8_t *shift = out->shift + t * blocks;
    int32_t *offset = out->offset + t * (2 * blocks);
    float max = magnitude(x, k);
    out->sum[t] = 0;
    if (degenerate(max)) {
        out->scale[t] = degenerate_scale(max);
        memset(q, 0, out->k_pad);
        memset(shift, 0, blocks);
        memset(offset, 0, 2 * blocks * sizeof *offset);
        return;
    }
    const v16 magic = v16_set1(ROUND_MAGIC);
    float unit = 127.0f / max;
    out->scale[t] = max / 127.0f * 0x1p-7f;
    for (size_t b = 0; b < blocks; b++, q += ACT_BLOCK) {
        size_t first = b * ACT_BLOCK < k ? b * ACT_BLOCK : k, left = k - first;
        if (left > ACT_BLOCK)
            left = ACT_BLOCK;
        float block_max = magnitude(x + first, left), power = 128.0f;
        unsigned s = 0;
        while (s < 7 && !(block_max * power <= max)) {
            power *= 0.5f;
            s++;
        }
        v16 multiplier = v16_set1(unit * power);
        int32_t sum[2];
        for (size_t half = 0; half < 2; half++) {
            v16 part = v16_set1(0.0f);
            for (size_t i = half * NIBBLE_GROUP; i < (half + 1) * NIBBLE_GROUP; i += 16) {
                v16 n = magic;
                if (i < left) {
                    v16 v = v16_mul(load_part(x + first + i, left - i < 16 ? left - i : 16), multiplier);
                    n = v16_add(v16_clamp(v, 127.0f), magic);
                }
                v16_store_i8(q + i, n);
                part = v16_add(part, v16_sub(n, magic));
            }
            sum[half] = (int32_t)v16_reduce_add(part);
            offset[2 * b + half] = -NIBBLE_LARGEST * sum[half];
        }
        shift[b] = (uint8_t)s;
        out->sum[t] += (int64_t)(sum[0] + sum[1]) * (1 << s);
    }
}

static void quantize15(const float *x, struct qbatch15 *out, size_t t)
{
    size_t k = out->k;
    int8_t *hi = out->hi + t * out->k_pad, *lo = out->lo + t * out->k_pad;
    float max = magnitude(x, k);
    out->sum[t] = 0;
    memset(hi, 0, out->k_pad);
    memset(lo, 0, out->k_pad);
    if (degenerate(max)) {
        out->scale[t] = degenerate_scale(max);
        return;
    }
    const v16 magic = v16_set1(ROUND_MAGIC), multiplier = v16_set1(16256.0f / max);
    out->scale[t] = max / 16256.0f;
    FOR_PARTS(i, part, k) {
        v16 v = v16_clamp(v16_mul(load_part(x + i, part), multiplier), 16256.0f);
        v16 n = v16_add(v, magic);
        /* In the bits: hi = (v + 64) >> 7, lo = ((v + 64) & 127) - 64. */
        v16 up = v16_bits_add(n, 64);
        v16_store_i8(hi + i, v16_bits_shr7(up));
        v16_store_i8(lo + i, v16_bits_add(v16_bits_and(up, 127), (uint32_t)-64));
        out->sum[t] += (int64_t)v16_reduce_add(v16_sub(n, magic));
    }
}

static void quantize22(const float *x, struct qbatch22 *out, size_t t)
{
    const float largest = 2080768.0f; /* 127 * 2^14 */
    size_t k = out->k, at = t * out->k_pad;
    int32_t *offset = out->offset + at / NIBBLE_GROUP;
    float max = magnitude(x, k);
    memset(out->hi + at, 0, out->k_pad);
    memset(out->mid + at, 0, out->k_pad);
    memset(out->lo + at, 0, out->k_pad);
    memset(offset, 0, out->k_pad / NIBBLE_GROUP * sizeof *offset);
    if (degenerate(max)) {
        out->scale[t] = degenerate_scale(max);
        return;
    }
    const v16 magic = v16_set1(ROUND_MAGIC), multiplier = v16_set1(largest / max);
    out->scale[t] = max / largest;
    FOR_PARTS(i, part, k) {
        v16 v = v16_clamp(v16_mul(load_part(x + i, part), multiplier), largest);
        v16 n = v16_add(v, magic);
        /* In the bits, from the low end: digit = ((v + 64) & 127) - 64, the rest is (v + 64) >> 7. */
        v16 up = v16_bits_add(n, 64), rest = v16_bits_shr7(up), up2 = v16_bits_add(rest, 64);
        v16_store_i8(out->lo + at + i, v16_bits_add(v16_bits_and(up, 127), (uint32_t)-64));
        v16_store_i8(out->mid + at + i, v16_bits_add(v16_bits_and(up2, 127), (uint32_t)-64));
        v16_store_i8(out->hi + at + i, v16_bits_shr7(up2));
        uint32_t lanes[16], sum = 0;
        float value[16];
        v16_store(value, v16_bits_add(n, (uint32_t)-ROUND_MAGIC_BITS));
        memcpy(lanes, value, sizeof lanes);
        for (size_t j = 0; j < 16; j++)
            sum += lanes[j];
        offset[i / NIBBLE_GROUP] = (int32_t)((uint32_t)offset[i / NIBBLE_GROUP] - NIBBLE_LARGEST * sum);
    }
}

#endif
