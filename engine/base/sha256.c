#include "base/sha256.h"

#include <string.h>

#include "base/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && (defined(__ARM_FEATURE_SHA2) || !defined(__clang__))
#include <arm_neon.h>
#define HAVE_ARM_SHA2 1
#endif

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate_right(uint32_t x, unsigned n)
{
    return (x >> n) | (x << (32 - n));
}

static uint32_t load_be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* One round; the caller renames the registers instead of moving them. `kw`: constant plus word. */
static inline void one_round(uint32_t a, uint32_t b, uint32_t c, uint32_t *d, uint32_t e,
                             uint32_t f, uint32_t g, uint32_t *h, uint32_t kw)
{
    const uint32_t s1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
    const uint32_t t1 = *h + s1 + ((e & f) ^ (~e & g)) + kw;
    const uint32_t s0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
    *d += t1;
    *h = t1 + s0 + ((a & b) ^ (a & c) ^ (b & c));
}

void sha256_compress_portable(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    for (; blocks > 0; blocks--, data += 64) {
        uint32_t w[64];
        for (int i = 0; i < 16; i++) w[i] = load_be32(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            const uint32_t x = w[i - 15], y = w[i - 2];
            const uint32_t s0 = rotate_right(x, 7) ^ rotate_right(x, 18) ^ (x >> 3);
            const uint32_t s1 = rotate_right(y, 17) ^ rotate_right(y, 19) ^ (y >> 10);
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        for (int i = 0; i < 64; i++) w[i] += round_constants[i];
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 64; i += 8) {
            one_round(a, b, c, &d, e, f, g, &h, w[i]);
            one_round(h, a, b, &c, d, e, f, &g, w[i + 1]);
            one_round(g, h, a, &b, c, d, e, &f, w[i + 2]);
            one_round(f, g, h, &a, b, c, d, &e, w[i + 3]);
            one_round(e, f, g, &h, a, b, c, &d, w[i + 4]);
            one_round(d, e, f, &g, h, a, b, &c, w[i + 5]);
            one_round(c, d, e, &f, g, h, a, &b, w[i + 6]);
            one_round(b, c, d, &e, f, g, h, &a, w[i + 7]);
        }
        state[0] += a;
        state[1] += b;
        state[2] += c;
        state[3] += d;
        state[4] += e;
        state[5] += f;
        state[6] += g;
        state[7] += h;
    }
}

#if defined(__x86_64__)

/* Four rounds with the words in w0, which then becomes the words of the group four ahead (those
 * made by the last groups are not used). A macro, so that everything stays in registers. */
#define FOUR_ROUNDS(w0, w1, w2, w3, constants)                                                     \
    do {                                                                                           \
        const __m128i kw = _mm_add_epi32(                                                          \
            w0, _mm_loadu_si128((const __m128i *)(const void *)(constants)));                      \
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, kw);                                              \
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(kw, 0x0E));                     \
        w0 = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4));              \
        w0 = _mm_sha256msg2_epu32(w0, w3);                                                         \
    } while (0)

#define LOAD_WORDS(p) \
    _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)(p)), byte_order)

__attribute__((target("sha,sse4.1,ssse3"))) static void compress_sha_ni(uint32_t state[8],
                                                                        const uint8_t *data,
                                                                        size_t blocks)
{
    const __m128i byte_order = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    /* The instruction wants the state as (a, b, e, f) and (c, d, g, h), highest lane first. */
    const __m128i badc =
        _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)state), 0xB1);
    const __m128i hgfe =
        _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
    __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);

    for (; blocks > 0; blocks--, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i a = LOAD_WORDS(data), b = LOAD_WORDS(data + 16);
        __m128i c = LOAD_WORDS(data + 32), d = LOAD_WORDS(data + 48);
        for (int i = 0; i < 64; i += 16) {
            FOUR_ROUNDS(a, b, c, d, round_constants + i);
            FOUR_ROUNDS(b, c, d, a, round_constants + i + 4);
            FOUR_ROUNDS(c, d, a, b, round_constants + i + 8);
            FOUR_ROUNDS(d, a, b, c, round_constants + i + 12);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }

    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#elif defined(HAVE_ARM_SHA2)

#if defined(__clang__)
#define SHA2_TARGET
#else
#define SHA2_TARGET __attribute__((target("+crypto")))
#endif

/* Four rounds with the words in w0, which then becomes the words of the group four ahead (those
 * made by the last groups are not used). A macro, so that everything stays in registers. */
#define FOUR_ROUNDS(w0, w1, w2, w3, constants)                  \
    do {                                                        \
        const uint32x4_t kw = vaddq_u32(w0, vld1q_u32(constants)); \
        const uint32x4_t abcd_now = abcd;                       \
        abcd = vsha256hq_u32(abcd, efgh, kw);                   \
        efgh = vsha256h2q_u32(efgh, abcd_now, kw);              \
        w0 = vsha256su1q_u32(vsha256su0q_u32(w0, w1), w2, w3);  \
    } while (0)

#define LOAD_WORDS(p) vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(p)))

SHA2_TARGET static void compress_arm(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
    for (; blocks > 0; blocks--, data += 64) {
        const uint32x4_t abcd_before = abcd, efgh_before = efgh;
        uint32x4_t a = LOAD_WORDS(data), b = LOAD_WORDS(data + 16);
        uint32x4_t c = LOAD_WORDS(data + 32), d = LOAD_WORDS(data + 48);
        for (int i = 0; i < 64; i += 16) {
            FOUR_ROUNDS(a, b, c, d, round_constants + i);
            FOUR_ROUNDS(b, c, d, a, round_constants + i + 4);
            FOUR_ROUNDS(c, d, a, b, round_constants + i + 8);
            FOUR_ROUNDS(d, a, b, c, round_constants + i + 12);
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

#endif

static void compress(uint32_t state[8], const uint8_t *data, size_t blocks)
{
#if defined(__x86_64__)
    if (cpu_features()->sha) {
        compress_sha_ni(state, data, blocks);
        return;
    }
#elif defined(HAVE_ARM_SHA2)
    if (cpu_features()->sha) {
        compress_arm(state, data, blocks);
        return;
    }
#endif
    sha256_compress_portable(state, data, blocks);
}

void hr_sha256_init(hr_sha256 *hash)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memset(hash, 0, sizeof *hash);
    memcpy(hash->state, start, sizeof start);
}

void hr_sha256_update(hr_sha256 *hash, const void *data, size_t n)
{
    if (n == 0) return;
    const uint8_t *p = data;
    const size_t held = (size_t)(hash->length % 64);
    hash->length += n;
    if (held > 0) {
        const size_t take = n < 64 - held ? n : 64 - held;
        memcpy(hash->block + held, p, take);
        p += take;
        n -= take;
        if (held + take < 64) return;
        compress(hash->state, hash->block, 1);
    }
    compress(hash->state, p, n / 64);
    memcpy(hash->block, p + n / 64 * 64, n % 64);
}

void hr_sha256_final(hr_sha256 *hash, uint8_t out[32])
{
    const uint64_t bits = hash->length * 8;
    size_t held = (size_t)(hash->length % 64);
    hash->block[held++] = 0x80;
    if (held > 56) {
        memset(hash->block + held, 0, 64 - held);
        compress(hash->state, hash->block, 1);
        held = 0;
    }
    memset(hash->block + held, 0, 56 - held);
    for (int i = 0; i < 8; i++) hash->block[56 + i] = (uint8_t)(bits >> (56 - 8 * i));
    compress(hash->state, hash->block, 1);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++) out[4 * i + j] = (uint8_t)(hash->state[i] >> (24 - 8 * j));
}

void sha256_hex(const uint8_t digest[32], char out[65])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 32; i++) {
        out[2 * i] = digits[digest[i] >> 4];
        out[2 * i + 1] = digits[digest[i] & 15];
    }
    out[64] = '\0';
}
