/* Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), absorbed in prefill and decode
 * alike: scores and values are taken from the cached latent itself. */
#ifndef NN_MLA_H
#define NN_MLA_H

#include "nn/linear.h"
#include "nn/parts.h"

struct mla_scratch {
    float *q_a;          /* [n][q_lora_rank] */
    float *q;            /* [n][heads][nope_dim + rope_dim] */
    float *kv;           /* [n][kv_lora_rank + rope_dim] */
    float *query;        /* [n][heads][kv_lora_rank + rope_dim]: absorbed query, then the mean latent */
    float *out;          /* [n][heads][v_dim] */
    float *gate;         /* [n][heads * v_dim] */
    float *cosine, *sine; /* [n][rope.half] */
    float *work;         /* per worker */
    struct linear_input in, per_head, out_in; /* per_head: heads * n rows */
};

void mla_carve(struct carve *c, const struct mla_part *p, uint32_t n, uint32_t workers,
               struct mla_scratch *s);
void mla_forward(const struct nn *nn, const struct mla_part *p, const struct mla_weights *w,
                 struct mla_state *state, struct mla_scratch *s, struct linear_input *in,
                 uint32_t position, float *y, size_t ldy);

#endif
