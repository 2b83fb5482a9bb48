/* The parts a layer is made of, as the manifest describes them (formats/container.md), the
 * weights they bind and the state they keep. No model is named anywhere: an architecture is data. */
#ifndef NN_PARTS_H
#define NN_PARTS_H

#include <stdbool.h>
#include <stdint.h>

#include "quant/codec.h"

struct rope_part {
    uint32_t half;       /* pairs rotated; 0 = none */
    float scale;         /* on cosine and sine */
};

struct sparse_part { /* block-sparse selection; heads == 0: dense */
    uint32_t heads, dim, budget, block;
};

struct attention_part {
    uint32_t heads, kv_heads, head_dim;
    struct rope_part rope;
    struct sparse_part sparse;
    bool qk_norm, qk_norm_vector, output_gate, bias, output_bias, sinks;
    uint32_t window;     /* 0 = every position */
    float scale, norm_eps;
};

struct attention_weights {
    struct matrix q, k, v, o, gate;
    const float *q_norm, *k_norm;
    const float *q_bias, *k_bias, *v_bias, *o_bias, *sinks;
    const double *frequency; /* [rope.half] */
    struct matrix index_q, index_k;
    const float *index_q_norm, *index_k_norm;
};

struct attention_state { /* [kv_heads][ctx][head_dim] each */
    float *k, *v;
    float *index_raw;    /* [ctx][sparse.dim] keys of the indexer, as projected */
    float *index_block;  /* [ctx / sparse.block][sparse.dim] pooled, normed, rotated */
    uint32_t ctx;
};

struct mla_part {
    uint32_t heads, q_lora_rank, kv_lora_rank, nope_dim, rope_dim, v_dim;
    struct rope_part rope; /* half = rope_dim / 2, or 0: scored but not rotated */
    bool output_gate;
    float scale, inner_eps;
};

struct mla_weights {
    struct matrix q;           /* q_b when there is a q_a */
    struct matrix q_a, kv_a, gate, o;
    const struct matrix *k_b;  /* [heads]: kv_lora_rank x nope_dim */
    const struct matrix *v_b;  /* [heads]: v_dim x kv_lora_rank */
    const float *q_a_norm, *kv_a_norm;
    const double *frequency;
};

struct mla_state { /* [ctx][kv_lora_rank + rope_dim] */
    float *latent;
    uint32_t ctx;
};

struct delta_part {
    uint32_t key_heads, value_heads, key_dim, value_dim, conv_taps;
    uint32_t decay_rank, gate_rank; /* 0 = full rank */
    bool decay_channel;  /* one decay per key channel, not per head */
    bool decay_bounded;  /* decay_bound * sigmoid(...), not -exp(a_log) * softplus(...) */
    bool gate_sigmoid;   /* output gate sigmoid, not silu */
    float decay_bound, qk_norm_eps, norm_eps;
};

struct delta_weights {
    struct matrix qkv, z, a, b, out;  /* z, a: the `up` half when low rank */
    struct matrix z_down, a_down;
    const float *conv;                /* [taps][channels] */
    const float *a_log;               /* [value_heads] */
    const float *dt_bias, *norm;      /* [delta_decays], [value_dim] */
};

struct delta_state {
    float *S;    /* [value_heads][key_dim][value_dim] */
    float *conv; /* [taps - 1][channels]: the last raw inputs, oldest first */
};

enum { MAX_GROUP = 256, MAX_ROTARY_HALF = 2048, MAX_SNAPSHOTS = 64 };

enum activation_kind { ACT_SILU_GLU, ACT_SITU_GLU, ACT_CLAMPED_GLU };
struct activation {
    enum activation_kind kind;
    float a, b; /* situ: beta, linear_beta; clamped: alpha, limit */
};

enum router_kind { ROUTER_SOFTMAX, ROUTER_SOFTMAX_CHOSEN, ROUTER_SIGMOID };
struct moe_part {
    uint32_t experts, top_k, inner, shared_inner, groups, top_groups, latent;
    enum router_kind router;
    bool router_bias, select_bias, group_max, renormalize, shared_gate, expert_bias, latent_norm;
    float scaling, norm_eps;
    struct activation act;
};

struct moe_weights {
    struct matrix router, shared_gate, latent_down, latent_up;
    struct matrix gate, up, down; /* the shared expert */
    const float *router_bias, *select_bias, *latent_norm;
};

struct dense_part {
    uint32_t inner;
    struct activation act;
};

struct dense_weights {
    struct matrix gate, up, down;
};

enum { MAX_NGRAM_ORDER = 8, MAX_NGRAM_TABLES = 128, MAX_NGRAM_SITES = 4 };
struct ngram_site { /* the layer before which rows are added, and its hash */
    uint32_t layer;
    uint64_t multipliers[MAX_NGRAM_ORDER];
    uint64_t primes[MAX_NGRAM_TABLES], offsets[MAX_NGRAM_TABLES];
};

struct ngram_part { /* hashed n-gram embeddings added to a hyper residual; order == 0: none */
    uint32_t order, heads, dim, conv_taps, dilation;
    int32_t eos;
    uint64_t rows;
    uint32_t tables; /* (order - 1) * heads */
    enum codec codec;
    uint32_t site_count;
    struct ngram_site sites[MAX_NGRAM_SITES]; /* ascending layer */
};

struct ngram_weights {
    struct matrix key, value;
    const float *norm_key, *norm_query, *norm_conv, *conv;
};

struct ngram_state {
    float *history; /* [order - 1]: the last token ids, oldest first; -1 before the start */
    float *conv;    /* [(conv_taps - 1) * dilation][width]: the last normed rows, oldest first */
};

static inline uint32_t delta_channels(const struct delta_part *p)
{
    return 2 * p->key_heads * p->key_dim + p->value_heads * p->value_dim;
}

static inline uint32_t delta_decays(const struct delta_part *p)
{
    return p->decay_channel ? p->value_heads * p->key_dim : p->value_heads;
}

/* Width of what routed experts read and write. */
static inline uint32_t moe_width(const struct moe_part *p, uint32_t hidden)
{
    return p->latent ? p->latent : hidden;
}

#endif
