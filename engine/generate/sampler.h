/* From logits to one token id: repetition penalty, temperature, top_k, top_p, min_p, draw. The same
 * logits, parameters, seed and index give the same id on every machine (docs/sampling.md). */
#ifndef GENERATE_SAMPLER_H
#define GENERATE_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

#include "base/carve.h"
#include "base/status.h"
#include "kernels/kernels.h"

struct sampler_params {
    float temperature; /* 0 = greedy */
    uint32_t top_k;    /* 0 = off */
    float top_p;       /* 1 = off */
    float min_p;       /* 0 = off */
    float repetition_penalty; /* 1 = off */
    uint64_t seed;
};

struct sampler {
    struct sampler_params params;
    const struct kernels *kernels;
    uint32_t vocab;
    float *work;      /* [vocab]: probabilities */
    uint32_t *order;  /* [vocab]: candidates */
    float *penalised; /* [vocab] */
    uint32_t *seen;   /* one bit for each id */
};

/* HR_ERR_USAGE names the parameter that is out of range. */
hr_status sampler_check(const struct sampler_params *p, hr_error *err);
/* The sampler's working memory, whatever the parameters are. */
void sampler_carve(struct carve *c, uint32_t vocab, struct sampler *s);
/* Checks the parameters; s has been carved for this vocabulary. */
hr_status sampler_open(struct sampler *s, const struct sampler_params *p, uint32_t vocab,
                       const struct kernels *kernels, hr_error *err);

/* Ids (all below vocab) that the repetition penalty applies to from now on. */
void sampler_see(struct sampler *s, const int32_t *ids, size_t n);
/* Chooses the token `index` of the generation. *logprob is the natural logarithm of its softmax
 * probability in `logits` as given. HR_ERR_NUMERIC when a logit is NaN or infinite. */
hr_status sampler_next(const struct sampler *s, const float *logits, uint64_t index, int32_t *id,
                       float *logprob, hr_error *err);

/* Natural logarithm of a positive finite x, from IEEE basic operations only: the same bits
 * everywhere, error below 1e-15 relative to max(1, |log x|). */
double log_exact(double x);

#endif
