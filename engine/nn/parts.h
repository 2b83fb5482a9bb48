/* The parts a layer is made of, as the manifest describes them (formats/container.md), the
 * weights they bind and the state they keep. No model is named anywhere: an architecture is data. */
#ifndef NN_PARTS_H
#define NN_PARTS_H

#include <stdbool.h>
#include <stdint.h>

#include "quant/codec.h"

struct attention_part {
    uint32_t heads, kv_heads, head_dim, rotary_dim;
    bool qk_norm, output_gate;
    float norm_eps;
};

struct attention_weights {
    struct matrix q, k, v, o, gate; /* gate unused without output_gate */
    const float *q_norm, *k_norm;   /* [head_dim] */
    const double *frequency;        /* [rotary_dim / 2] */
};

struct attention_state { /* [kv_heads][ctx][head_dim] each */
    float *k, *v;
    uint32_t ctx;
};

struct delta_part {
    uint32_t key_heads, value_heads, key_dim, value_dim, conv_taps;
    float qk_norm_eps, norm_eps;
};

struct delta_weights {
    struct matrix qkv, z, a, b, out;
    const float *conv;          /* [taps][channels] */
    const float *a_log;         /* [value_heads] */
    const float *dt_bias, *norm; /* [value_heads], [value_dim] */
};

struct delta_state {
    float *S;    /* [value_heads][key_dim][value_dim] */
    float *conv; /* [taps - 1][channels]: the last raw inputs, oldest first */
};

struct moe_part {
    uint32_t experts, top_k, inner, shared_inner;
    bool renormalize, shared_gate;
    float scaling;
};

struct moe_weights {
    struct matrix router, shared_gate;
    struct matrix gate, up, down; /* the shared expert */
};

struct dense_part {
    uint32_t inner;
};

struct dense_weights {
    struct matrix gate, up, down;
};

static inline uint32_t delta_channels(const struct delta_part *p)
{
    return 2 * p->key_heads * p->key_dim + p->value_heads * p->value_dim;
}

#endif
