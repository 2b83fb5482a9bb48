/* What all threads together do with one token's weights: the products of a model's own shapes, by
 * the code that decodes with them, from memory rather than caches. */
#ifndef BENCH_THROUGHPUT_H
#define BENCH_THROUGHPUT_H

#include "base/mem.h"
#include "base/status.h"
#include "kernels/kernels.h"
#include "quant/codec.h"

enum { THROUGHPUT_POOL_LEAST = 1 << 20, THROUGHPUT_EXPERTS_MOST = 32 };

struct throughput_setup {
    const struct kernels *k;
    uint32_t threads;
    double seconds; /* of measuring; filling the pool takes its own time */
    uint64_t pool;  /* bytes of weights that are walked through */
    enum codec expert_codec;     /* CODEC_NONE: no experts */
    bool fine;                   /* they are mxfp4 and meet 22-bit activations */
    uint32_t width, inner;       /* of an expert: down [width, inner] */
    uint32_t experts;            /* computed together, at most THROUGHPUT_EXPERTS_MOST */
    enum codec trunk_codec;      /* CODEC_NONE: no trunk */
    uint32_t rows, cols;         /* of its matrices */
};

/* Per second of wall-clock time, when other programs leave the cores alone. */
struct throughput {
    double memory;   /* bytes of a plain read */
    double experts;  /* stored bytes of expert weights; 0 when not measured */
    double trunk;    /* stored bytes of trunk weights */
    double dispatch; /* seconds that a parallel region costs with nothing in it */
    uint64_t allocated;
};

/* HR_ERR_MEMORY when the budget or the system refuses the pool. */
hr_status throughput_measure(const struct throughput_setup *s, struct mem_budget *b,
                             struct throughput *out, hr_error *err);

#endif
