#include "nn/rope.h"

#include "kernels/kernels.h"

void rope_table(const double *frequency, uint32_t half, float scale, uint32_t position,
                float *cosine, float *sine)
{
    for (uint32_t i = 0; i < half; i++) {
        sincos_exact((double)position * frequency[i], &sine[i], &cosine[i]);
        sine[i] *= scale;
        cosine[i] *= scale;
    }
}

void rope_apply(float *x, uint32_t half, const float *cosine, const float *sine)
{
    /* Separate products and sums: no contraction, so every compiler gives these bits. */
    for (uint32_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        const float ac = a * cosine[i], bs = b * sine[i];
        const float bc = b * cosine[i], as = a * sine[i];
        x[i] = ac - bs;
        x[i + half] = bc + as;
    }
}
