#include "quant/finite.h"

#include <string.h>

/* A blob as periods that begin with `run` bytes of numbers, `width` bytes each. */
struct runs {
    uint64_t run, period;
    size_t width;
};

static uint64_t padded(uint64_t n)
{
    return (n + 63) / 64 * 64;
}

static struct runs runs_of(enum codec c, uint64_t rows, uint64_t cols, uint64_t bytes)
{
    const uint64_t groups = padded(cols) / 32;
    if (codec_is_4bit(c)) {
        const size_t width = c == CODEC_MXFP4 ? 1 : 2;
        return (struct runs){groups * 64 * width, groups * (64 * width + 1024), width};
    }
    if (c == CODEC_INT8) return (struct runs){padded(rows) * 4, bytes, 4};
    if (codec_is_rvq(c)) return (struct runs){padded(rows) * 2, bytes, 2};
    return (struct runs){bytes, bytes, c == CODEC_BF16 ? 2 : c == CODEC_F64 ? 8 : 4};
}

/* int8 and rvq: no sign either. */
static bool sign_is_unfit(enum codec c)
{
    return c == CODEC_INT8 || codec_is_rvq(c);
}

static bool unfit16(uint16_t v, bool sign)
{
    return (v & 0x7f80) == 0x7f80 || (sign && v >> 15);
}

static bool unfit32(uint32_t v, bool sign)
{
    return (v & 0x7f800000u) == 0x7f800000u || (sign && v >> 31);
}

static bool is_unfit(const uint8_t *p, size_t width, bool sign)
{
    uint64_t v64;
    uint32_t v32;
    uint16_t v16;
    switch (width) {
    case 1: return *p == 255;
    case 2: memcpy(&v16, p, sizeof v16); return unfit16(v16, sign);
    case 4: memcpy(&v32, p, sizeof v32); return unfit32(v32, sign);
    default: memcpy(&v64, p, sizeof v64);
    }
    return (v64 >> 52 & 0x7ff) == 0x7ff;
}

/* Whether there is any: loops over one width that compilers turn into vectors. */
static bool any_unfit(const uint8_t *p, size_t n, size_t width, bool sign)
{
    uint32_t found32 = 0, sign32 = 0;
    uint16_t found16 = 0, sign16 = 0;
    uint8_t found8 = 0;
    switch (width) {
    case 1:
        for (size_t i = 0; i < n; i++) found8 |= (uint8_t)(p[i] == 255 ? 255 : 0);
        return found8 != 0;
    case 2:
        for (size_t i = 0; i + 2 <= n; i += 2) {
            uint16_t v;
            memcpy(&v, p + i, sizeof v);
            found16 |= (uint16_t)((v & 0x7f80) == 0x7f80 ? 0xffff : 0);
            sign16 |= v;
        }
        return found16 || (sign && sign16 >> 15);
    case 4:
        for (size_t i = 0; i + 4 <= n; i += 4) {
            uint32_t v;
            memcpy(&v, p + i, sizeof v);
            found32 |= (v & 0x7f800000u) == 0x7f800000u ? 0xffffffffu : 0;
            sign32 |= v;
        }
        return found32 || (sign && sign32 >> 31);
    default:
        for (size_t i = 0; i + width <= n; i += width)
            if (is_unfit(p + i, width, sign)) return true;
    }
    return false;
}

const char *finite_noun(enum codec c)
{
    return codec_reads_quantized(c) ? "scale" : "weight";
}

void finite_scan(enum codec c, uint64_t rows, uint64_t cols, uint64_t at, const void *bytes, size_t n,
                 struct unfit *out)
{
    size_t whole;
    if (n == 0 || !codec_matrix_bytes(c, rows, cols, &whole)) return;
    const struct runs r = runs_of(c, rows, cols, whole);
    const bool sign = sign_is_unfit(c);
    const uint64_t end = at + n;
    for (uint64_t start = at / r.period * r.period; start < end; start += r.period) {
        const uint64_t from = start > at ? start : at, to = start + r.run < end ? start + r.run : end;
        if (from >= to) continue;
        const uint8_t *p = (const uint8_t *)bytes + (from - at);
        if (!any_unfit(p, (size_t)(to - from), r.width, sign)) continue;
        for (uint64_t i = from; i + r.width <= to; i += r.width)
            if (is_unfit(p + (i - from), r.width, sign) && out->count++ == 0) out->first = i;
    }
}
