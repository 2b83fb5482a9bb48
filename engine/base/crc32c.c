#include "base/crc32c.h"

#include <pthread.h>
#include <string.h>

#include "base/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_CRC_INSTRUCTION 1
#define CRC_TARGET __attribute__((target("sse4.2")))
#define CRC_STEP_8(crc, word) ((uint32_t)_mm_crc32_u64((crc), (word)))
#define CRC_STEP_1(crc, byte) _mm_crc32_u8((crc), (byte))
#elif defined(__aarch64__) && defined(__clang__)
#define HAVE_CRC_INSTRUCTION 1
#define CRC_TARGET __attribute__((target("crc")))
#define CRC_STEP_8(crc, word) __builtin_arm_crc32cd((crc), (word))
#define CRC_STEP_1(crc, byte) __builtin_arm_crc32cb((crc), (byte))
#elif defined(__aarch64__) && defined(__GNUC__)
#define HAVE_CRC_INSTRUCTION 1
#define CRC_TARGET __attribute__((target("+crc")))
#define CRC_STEP_8(crc, word) __builtin_aarch64_crc32cx((crc), (word))
#define CRC_STEP_1(crc, byte) __builtin_aarch64_crc32cb((crc), (byte))
#endif

#define POLYNOMIAL 0x82F63B78u /* Castagnoli, bits reversed */
#define LONG_CHAIN ((size_t)4096)
#define SHORT_CHAIN ((size_t)256)

/* table[k][b]: the register after byte b and k zero bytes. */
static uint32_t table[8][256];

static void build_table(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) ? POLYNOMIAL : 0);
        table[0][b] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++)
            table[k][b] = (table[k - 1][b] >> 8) ^ table[0][table[k - 1][b] & 255];
}

/* Works on the bare register: the callers invert before and after. */
static uint32_t update_by_table(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 8; n -= 8, p += 8) {
        crc ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        crc = table[7][crc & 255] ^ table[6][(crc >> 8) & 255] ^ table[5][(crc >> 16) & 255] ^
              table[4][crc >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^
              table[0][p[7]];
    }
    for (; n > 0; n--, p++) crc = (crc >> 8) ^ table[0][(crc ^ *p) & 255];
    return crc;
}

#if defined(HAVE_CRC_INSTRUCTION)

/* Advancing the register over a fixed number of zero bytes is linear: one table for each of its
 * four bytes. It joins chains that were computed side by side. */
struct zeros {
    uint32_t byte[4][256];
};
static struct zeros long_zeros, short_zeros;

static void build_zeros(struct zeros *z, size_t n)
{
    static const uint8_t zero_block[SHORT_CHAIN];
    for (unsigned bit = 0; bit < 32; bit++) {
        uint32_t crc = (uint32_t)1 << bit;
        for (size_t done = 0; done < n; done += SHORT_CHAIN)
            crc = update_by_table(crc, zero_block, SHORT_CHAIN);
        z->byte[bit / 8][1u << (bit % 8)] = crc;
    }
    for (int k = 0; k < 4; k++)
        for (unsigned b = 1; b < 256; b++)
            z->byte[k][b] = z->byte[k][b & (b - 1)] ^ z->byte[k][b & (0u - b)];
}

static uint32_t skip_zeros(const struct zeros *z, uint32_t crc)
{
    return z->byte[0][crc & 255] ^ z->byte[1][(crc >> 8) & 255] ^ z->byte[2][(crc >> 16) & 255] ^
           z->byte[3][crc >> 24];
}

static uint64_t load_64(const uint8_t *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

/* The instruction has a latency of three cycles and a throughput of one: three chains hide it. */
CRC_TARGET static uint32_t three_chains(uint32_t crc, const uint8_t **data, size_t *n, size_t chain,
                                        const struct zeros *z)
{
    const uint8_t *p = *data;
    size_t left = *n;
    for (; left >= 3 * chain; left -= 3 * chain, p += 3 * chain) {
        uint32_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < chain; i += 8) {
            a = CRC_STEP_8(a, load_64(p + i));
            b = CRC_STEP_8(b, load_64(p + chain + i));
            c = CRC_STEP_8(c, load_64(p + 2 * chain + i));
        }
        crc = skip_zeros(z, skip_zeros(z, a) ^ b) ^ c;
    }
    *data = p;
    *n = left;
    return crc;
}

CRC_TARGET static uint32_t update_by_instruction(uint32_t crc, const uint8_t *p, size_t n)
{
    crc = three_chains(crc, &p, &n, LONG_CHAIN, &long_zeros);
    crc = three_chains(crc, &p, &n, SHORT_CHAIN, &short_zeros);
    for (; n >= 8; n -= 8, p += 8) crc = CRC_STEP_8(crc, load_64(p));
    for (; n > 0; n--, p++) crc = CRC_STEP_1(crc, *p);
    return crc;
}

static int has_instruction(void)
{
#if defined(__x86_64__)
    return cpu_features()->sse42;
#else
    return cpu_features()->arm_crc32;
#endif
}

#endif

static void build_once(void)
{
    build_table();
#if defined(HAVE_CRC_INSTRUCTION)
    build_zeros(&long_zeros, LONG_CHAIN);
    build_zeros(&short_zeros, SHORT_CHAIN);
#endif
}

static void prepare(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, build_once);
}

uint32_t crc32c_table(uint32_t crc, const void *data, size_t n)
{
    prepare();
    return ~update_by_table(~crc, data, n);
}

uint32_t crc32c(uint32_t crc, const void *data, size_t n)
{
    prepare();
#if defined(HAVE_CRC_INSTRUCTION)
    if (has_instruction()) return ~update_by_instruction(~crc, data, n);
#endif
    return ~update_by_table(~crc, data, n);
}
